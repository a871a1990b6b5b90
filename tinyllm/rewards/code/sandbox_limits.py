"""Limits over a whole sandbox: a cgroup where one can be made (v1 or v2), and sums over the process tree."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from pathlib import Path
from types import TracebackType

_COUNT = itertools.count()
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


@functools.cache
def _parents() -> dict[str, Path]:
    """Where this process may make cgroups: controller -> folder; {"v2": folder} for the unified hierarchy."""
    found: dict[str, Path] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in ("memory", "pids"):
                found[name] = Path("/sys/fs/cgroup") / name / path.lstrip("/")
    unified = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), None)
    if not found and unified is not None:
        found["v2"] = Path("/sys/fs/cgroup") / unified.lstrip("/")
    return {name: folder for name, folder in found.items() if _usable(name, folder)}


def _usable(name: str, folder: Path) -> bool:
    """Whether a cgroup can be made there, with the files that set its limits."""
    trial = folder / f"tinyllm-trial-{os.getpid()}"
    wanted = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "v2": "memory.max"}[name]
    try:
        trial.mkdir()
    except OSError:
        return False
    usable = (trial / wanted).exists() and os.access(trial / "cgroup.procs", os.W_OK)
    with contextlib.suppress(OSError):
        trial.rmdir()
    return usable


class LimitGroup:
    """A cgroup for one run: memory in bytes, processes counted. Where none can be made it does nothing."""

    def __init__(self, memory: int, processes: int) -> None:
        name = f"tinyllm-{os.getpid()}-{next(_COUNT)}"
        self._folders = {kind: folder / name for kind, folder in _parents().items()}
        self._memory, self._processes = memory, processes

    @staticmethod
    def kind() -> str:
        """Which limits a cgroup enforces here."""
        return "+".join(sorted(_parents())) or "none"

    @property
    def join_files(self) -> list[str]:
        """Files a process writes its id to, to join."""
        return [str(folder / "cgroup.procs") for folder in self._folders.values()]

    def __enter__(self) -> LimitGroup:
        values = {
            "memory": [("memory.limit_in_bytes", self._memory), ("memory.swappiness", 0)],
            "pids": [("pids.max", self._processes)],
            "v2": [("memory.max", self._memory), ("memory.swap.max", 0), ("pids.max", self._processes)],
        }
        for kind, folder in list(self._folders.items()):
            try:
                folder.mkdir()
                for file, value in values[kind]:
                    if (folder / file).exists():
                        (folder / file).write_text(str(value))
            except OSError:
                del self._folders[kind]
        return self

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process of the group for its memory."""
        for kind, file in (("memory", "memory.oom_control"), ("v2", "memory.events")):
            if kind in self._folders:
                with contextlib.suppress(OSError):
                    words = (self._folders[kind] / file).read_text().split()
                    counts = dict(zip(words[::2], words[1::2], strict=False))
                    return int(counts.get("oom_kill", 0)) > 0
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left in the group and remove it."""
        end = time.monotonic() + 5
        for folder in self._folders.values():
            while folder.exists():
                with contextlib.suppress(OSError):
                    for line in (folder / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(int(line), signal.SIGKILL)
                    folder.rmdir()
                    break
                if time.monotonic() > end:
                    break
                time.sleep(0.002)


def tree_usage(root: int) -> tuple[int, int, float]:
    """(processes, resident bytes, CPU seconds) of a process and all its descendants, the reaped ones' time included."""
    processes, memory, ticks = 0, 0, 0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
                waiting += [int(child) for child in file.read().split()]
        except (OSError, ValueError):
            continue
        processes += 1
        ticks += sum(int(value) for value in fields[11:15])
        memory += int(fields[21]) * _PAGE
    return processes, memory, ticks / _TICK
