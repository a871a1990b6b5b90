"""A pool of worker processes that verify, with limits from outside: a hung or dead worker is killed and replaced.

One thread (the caller's) feeds the workers and watches the clock; no signals, so it works from any thread and beside
any event loop. A task's clock starts when an idle, prepared worker gets it, never while it waits. A task that times out
or kills its worker is tried once more alone, and only then marked; the tasks of other samples are not affected.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tinyllm.errors import RewardError
from tinyllm.records import Unscored
from tinyllm.rewards.worker import HEADER, pack

START_S = 120.0
"""Longest time a worker may take to start, and to import what a verifier needs."""
MAX_MESSAGE = 1 << 28
"""A longer result is a broken worker."""


@dataclass(frozen=True)
class VerifyTask:
    """One call of a verifier or reward function, for one worker."""

    spec: Any
    """The verifier (a mapping) or the reward function ("module:function"), which the worker prepares once."""
    message: dict[str, Any]
    timeout_s: float
    columns: tuple[str, ...] = ()
    retry: bool = True
    """Whether to try once more, alone, when it times out or its worker dies."""
    pin: int | None = None
    """Number of the worker that gets the task, for functions that keep state; None: any."""

    @property
    def key(self) -> str:
        return self.spec if isinstance(self.spec, str) else repr(sorted(self.spec.items(), key=str))


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    task: int | None = None
    preparing: bool = False
    prepared: set[str] = field(default_factory=set)
    buffer: bytearray = field(default_factory=bytearray)


class VerifierPool:
    """`workers` processes. This process enforces their limits on time and on private memory (bytes of each worker)."""

    def __init__(self, workers: int) -> None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._memory = max(4 << 30, total // 2 // workers)
        self._workers: list[_Worker | None] = [None] * workers
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def run(self, tasks: Sequence[VerifyTask]) -> list[dict[str, Any]]:
        """The result of each task, in order: what the worker returned, or {"failed": why, "cause": Unscored}.

        Raises RewardError when a task breaks its contract (its function or verifier cannot be built, a wrong count),
        and when the pool is closed.
        """
        with self._lock:
            results: list[dict[str, Any] | None] = [None] * len(tasks)
            again = self._round(tasks, range(len(tasks)), results)
            for index in again:
                left = self._round(tasks, [index], results, last=True)
                assert not left, left
        errors = [result["error"] for result in results if result and "error" in result]
        if errors:
            raise RewardError(errors[0])
        return [result or {"failed": "no result", "cause": Unscored.DIED} for result in results]

    def close(self) -> None:
        """End all workers, for good. A call that another thread has under way fails, and so does any later one."""
        self._closed = True
        for worker in filter(None, list(self._workers)):
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        with self._lock:
            _kill_all(self._workers)

    def _round(
        self,
        tasks: Sequence[VerifyTask],
        indices: Sequence[int],
        results: list[dict[str, Any] | None],
        last: bool = False,
    ) -> list[int]:
        """Run these tasks; returns the indices of those to be tried again."""
        waiting = deque(indices)
        again: list[int] = []
        unfinished = len(waiting)

        def finish(index: int, result: dict[str, Any]) -> None:
            nonlocal unfinished
            unfinished -= 1
            if "failed" in result and tasks[index].retry and not last:
                again.append(index)
            else:
                results[index] = result

        while unfinished:
            if self._closed:
                raise RewardError("verifying was ended")
            self._dispatch(tasks, waiting)
            with selectors.DefaultSelector() as selector:
                busy = [worker for worker in self._workers if worker and (worker.task is not None or not worker.ready)]
                for worker in busy:
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
                pause = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                for key, _ in selector.select(pause):
                    for index, result in self._receive(key.data, tasks):
                        finish(index, result)
            now = time.monotonic()
            for worker in busy:
                if worker in self._workers and worker.deadline <= now:
                    task = worker.task
                    late = "starting" if not worker.ready else "loading its verifier" if worker.preparing else ""
                    self._drop(worker)
                    if task is None:
                        raise RewardError(f"a verifier worker did not start within {START_S:g} s; see its output above")
                    seconds = tasks[task].timeout_s
                    why = f"timed out {late}" if late else f"timed out after {seconds:g} s"
                    finish(task, {"failed": why, "cause": Unscored.TIMED_OUT})
        return again

    def _dispatch(self, tasks: Sequence[VerifyTask], waiting: deque[int]) -> None:
        for slot, worker in enumerate(self._workers):
            pins = {index: tasks[index].pin for index in waiting}
            mine = [index for index, pin in pins.items() if pin is None or pin % len(self._workers) == slot]
            if not mine:
                continue
            if worker is None:
                self._workers[slot] = self._start()
            elif worker.ready and worker.task is None:
                worker.task = mine[0]
                waiting.remove(mine[0])
                self._send(worker, tasks[mine[0]])

    def _start(self) -> _Worker:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", "from tinyllm.rewards.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        return _Worker(process, time.monotonic() + START_S)

    def _send(self, worker: _Worker, task: VerifyTask) -> None:
        worker.preparing = task.key not in worker.prepared
        message: dict[str, Any] = (
            {"kind": "prepare", "spec": task.spec, "columns": task.columns} if worker.preparing else task.message
        )
        seconds = START_S if worker.preparing else task.timeout_s
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):  # the end of the worker is seen where its output is read
            worker.process.stdin.write(pack({**message, "key": task.key, "timeout_s": seconds}))
            worker.process.stdin.flush()
        worker.deadline = time.monotonic() + seconds

    def _receive(self, worker: _Worker, tasks: Sequence[VerifyTask]) -> list[tuple[int, dict[str, Any]]]:
        """Read what a worker wrote; returns [(index of its task, result)] when the worker finished the task or died."""
        assert worker.process.stdout is not None
        chunk = os.read(worker.process.stdout.fileno(), 1 << 16)
        worker.buffer += chunk
        size = HEADER.unpack(worker.buffer[: HEADER.size])[0] if len(worker.buffer) >= HEADER.size else 0
        if not chunk or size > MAX_MESSAGE:
            task, code = worker.task, self._drop(worker)
            if task is None:
                raise RewardError(f"a verifier worker could not start (exit code {code}); see its output above")
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return [(task, {"failed": f"its worker died ({name})", "cause": Unscored.DIED})]
        if len(worker.buffer) < HEADER.size + size or len(worker.buffer) < HEADER.size:
            return []
        result = json.loads(bytes(worker.buffer[HEADER.size : HEADER.size + size]))
        worker.buffer.clear()
        if not worker.ready:
            worker.ready = True
            if sys.platform == "linux":  # elsewhere only the clock is kept
                limit = _private_bytes(worker.process.pid) + self._memory
                resource.prlimit(worker.process.pid, resource.RLIMIT_DATA, (limit, limit))
            return []
        assert worker.task is not None
        index = worker.task
        if worker.preparing and "error" not in result:
            worker.prepared.add(tasks[index].key)
            self._send(worker, tasks[index])
            return []
        worker.task = None
        return [(index, result)]

    def _drop(self, worker: _Worker) -> int:
        self._workers[self._workers.index(worker)] = None
        return _kill(worker)


def _private_bytes(pid: int) -> int:
    """VmData of a process."""
    with open(f"/proc/{pid}/status") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmData")), 0)


def _kill(worker: _Worker) -> int:
    """End a worker and everything it started; returns its exit code."""
    code = worker.process.poll()
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for stream in (worker.process.stdin, worker.process.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):
            assert stream is not None
            stream.close()
    return worker.process.returncode if code is None else code


def _kill_all(workers: list[_Worker | None]) -> None:
    for slot, worker in enumerate(workers):
        if worker is not None:
            workers[slot] = None
            _kill(worker)
