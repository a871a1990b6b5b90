"""The system calls a submission may not make (syscalls.toml), as a classic BPF program.

The program is bytes for bwrap's --seccomp or for prctl.
Denied calls fail with EPERM (clone3 with ENOSYS, so that libc falls back to clone, whose flags can be read). A call
of another architecture ends the process.
"""

from __future__ import annotations

import platform
import struct
import tomllib
from pathlib import Path

_MACHINES = tomllib.loads((Path(__file__).parent / "syscalls.toml").read_text(encoding="utf-8"))
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_THREAD = 0x00010000
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | 1, 0x00050000 | 38
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06


def supported() -> bool:
    """Whether this machine's system calls are known."""
    return platform.machine() in _MACHINES


def program(alone: bool = False) -> bytes:
    """The filter as struct sock_filter[]. alone: there is no namespace, so new processes and signals are denied too."""
    machine = platform.machine()
    calls = _MACHINES[machine]
    numbers = [int(word) for word in (calls["denied"] + (calls["denied_alone"] if alone else "")).split()[1::2]]
    code: list[tuple[int, int, int, int]] = []

    def add(op: int, value: int, yes: int = 0, no: int = 0) -> None:
        code.append((op, yes, no, value))

    add(_LOAD, 4)  # architecture
    add(_JEQ, calls["audit_arch"], 1, 0)
    add(_RET, _KILL)
    add(_LOAD, 0)  # number of the call
    if machine == "x86_64":
        add(_JGE, 0x40000000, 0, 1)  # x32
        add(_RET, _KILL)
    add(_JEQ, calls["clone3"], 0, 1)
    add(_RET, _ENOSYS)
    for number in numbers:
        add(_JEQ, number, 0, 1)
        add(_RET, _EPERM)
    add(_JEQ, calls["clone"], 1, 0)
    add(_RET, _ALLOW)
    add(_LOAD, 16)  # flags of clone
    if alone:
        add(_JSET, _THREAD, 1, 0)
        add(_RET, _EPERM)
    add(_JSET, _NEW_NAMESPACES, 0, 1)
    add(_RET, _EPERM)
    add(_RET, _ALLOW)
    return b"".join(struct.pack("=HBBI", op, yes, no, value) for op, yes, no, value in code)
