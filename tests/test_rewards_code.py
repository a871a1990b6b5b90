"""Family code: the cases, and attacks on the sandbox on every backend that works here; after each, host and next verdict are right."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tinyllm.errors import DataError, RewardError
from tinyllm.rewards import build, verify
from tinyllm.rewards.base import row_fault
from tinyllm.rewards.code.sandbox_limits import LimitGroup
from tinyllm.rewards.code.verifier import fenced_blocks, find_code, same, same_output, sandbox

ADD = {
    "prompt": "Write add(a, b).",
    "calls": [[[2, 3], 5], [[-4, 1], -3]],
    "solution": "def add(a, b):\n    return a + b",
}
BACKENDS = ("bubblewrap", "landlock")
SHORT = sandbox.Limits(cpu_s=1.0, wall_s=2.0)


def test_bubblewrap_is_there_and_named_for_the_manifest():
    found = sandbox.describe()
    assert found["level"] == "bubblewrap" and found["version"].startswith("bubblewrap")


def test_without_a_sandbox_code_is_refused_with_the_install_command(monkeypatch):
    sandbox.choose.cache_clear()
    monkeypatch.setattr(sandbox, "_backends", list)
    with pytest.raises(RewardError, match="apt-get install bubblewrap"):
        sandbox.choose("auto")
    assert sandbox.choose("unsafe-no-sandbox").level == "unsafe-no-sandbox"  # only by name
    sandbox.choose.cache_clear()


def attack(source, level, limits=SHORT, stdin=b""):
    """Run an attack as a program; afterwards the next verdict must be right and nothing may be left."""
    before = {process.pid for process in psutil.process_iter()}
    outcome = sandbox.run({"kind": "program", "source": source}, stdin, limits, level)
    verifier = build({"family": "code", "sandbox": level})
    assert verify(verifier, ADD, "```python\ndef add(a, b):\n    return a + b\n```").value == 1
    assert verify(verifier, ADD, "```python\ndef add(a, b):\n    return a - b\n```").value == 0
    left = [p for p in psutil.process_iter(["name", "cmdline"]) if p.pid not in before and _is_ours(p)]
    psutil.wait_procs(left, timeout=5)
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return outcome


def _is_ours(process):
    try:
        return "bwrap" in process.name() or "_landlock" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(params=BACKENDS)
def level(request):
    return request.param


def test_a_fork_bomb_ends(level):
    outcome = attack("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", level)
    assert outcome.stopped or outcome.exit_code


def test_daemons_that_leave_their_session_die_with_the_sandbox(level):
    attack(
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(300)\n        os._exit(0)\n",
        level,
    )


def test_memory_is_bounded_over_all_processes(level):
    one = attack("x = bytearray(2 << 30)\nx[:] = b'1' * len(x)\nprint('full')", level)
    assert b"full" not in one.output
    many = attack(
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(200 << 20)\n"
        "        for i in range(0, len(x), 4096): x[i] = 1\n        time.sleep(60)\n        os._exit(0)\ntime.sleep(60)\nprint('full')",
        level,
        sandbox.Limits(cpu_s=5, wall_s=6, memory_mb=300),
    )
    assert b"full" not in many.output and (many.stopped or many.exit_code)


def test_the_disk_cannot_be_filled(level):
    free = psutil.disk_usage("/").free
    outcome = attack(
        "n = 0\nfor k in range(50):\n    try:\n        with open(f'/tmp/f{k}', 'wb') as f:\n            for _ in range(8): n += f.write(b'x' * (1 << 20))\n"
        "    except OSError: pass\nprint(n)\n"
        "for place in ('/', '/dev', '/usr', '/var/tmp', '/dev/shm', '/python'):\n    try: open(place + '/x', 'w').write('x'); print('wrote', place)\n"
        "    except OSError: pass\n",
        level,
    )
    assert b"wrote" not in outcome.output and int(outcome.output.split()[0] or 0) <= 20 << 20
    assert psutil.disk_usage("/").free > free - (100 << 20)


def test_endless_output_is_cut(level):
    assert attack("while True: print('x' * 10000)", level).stopped == "output"


def test_time_is_kept_outside(level):
    source = "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    start = time.monotonic()
    assert attack(source + "time.sleep(600)", level).stopped == "time"
    spinning = attack(source + "time.time = time.monotonic = lambda: 0\nwhile True: pass", level)
    assert spinning.stopped in ("CPU time", "time") or spinning.exit_code
    assert time.monotonic() - start < 30


NETWORK = """
import _socket, os
def tried(name, make):
    try: made = make()
    except OSError: return
    print('made', name)
tried('tcp', lambda: _socket.socket(2, 1))
tried('tcp6', lambda: _socket.socket(10, 1))
tried('udp', lambda: _socket.socket(2, 2))
tried('unix', lambda: _socket.socket(1, 1))
tried('raw', lambda: _socket.socket(2, 3))
tried('netlink', lambda: _socket.socket(16, 3))
tried('vsock', lambda: _socket.socket(40, 1))
print('end')
"""


def test_no_network_of_any_kind(level):
    assert attack(NETWORK, level).output == b"end\n"


FILES = """
import os, glob
for path in ('/etc/passwd', '/etc/hostname', '/root', '/home', '/proc/self/environ', '/proc/1/environ', '/proc/self/maps', '/sys/kernel', '/dev/mem',
             '/dev/sda', WHERE, '/var/log', '/tmp/secret-of-the-host', '/proc/self/fd'):
    try: os.listdir(path); print('listed', path)
    except OSError: pass
    try: open(path).read(); print('read', path)
    except OSError: pass
for link in ('/etc/passwd', '/proc/1/root/etc/passwd', WHERE):
    try:
        os.symlink(link, '/tmp/link'); open('/tmp/link').read(); print('followed', link)
    except OSError: pass
    try: os.unlink('/tmp/link')
    except OSError: pass
print('environment', sorted(set(os.environ) - {'HOME', 'LANG', 'PATH', 'PWD', 'LD_LIBRARY_PATH', 'LC_CTYPE', 'SHLVL', '_', 'OLDPWD'}))
print('end')
"""


def test_no_files_of_the_host_no_tests_no_environment(level, tmp_path):
    secret = Path("/tmp/secret-of-the-host")
    secret.write_text("expected values")
    os.environ["SECRET_OF_THE_HOST"] = "x"
    try:
        output = attack(FILES.replace("WHERE", repr(os.path.dirname(__file__))), level).output
        assert output == b"environment []\nend\n"
        assert secret.read_text() == "expected values"
    finally:
        secret.unlink()
        del os.environ["SECRET_OF_THE_HOST"]


KILLS = """
import os, signal, ctypes
for pid in {1, os.getppid(), PARENT, -1}:
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
libc = ctypes.CDLL(None, use_errno=True)
for request in (0, 16, 0x4206):
    if libc.ptrace(request, PARENT, 0, 0) == 0: print('traced', request)
for call in (272, 308, 165, 161, 155, 425, 323, 321, 298, 250, 319):
    if libc.syscall(call, 0x10000000, 0, 0, 0, 0) >= 0: print('called', call)
try: os.setpriority(0, PARENT, 19); print('priority')
except OSError: pass
try:
    import resource; resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1)); print('limited')
except (OSError, ValueError): pass
print('end', flush=True)
"""


def test_the_parent_cannot_be_killed_traced_or_limited(level):
    outcome = attack(KILLS.replace("PARENT", str(os.getpid())), level)
    assert outcome.output in (b"end\n", b"")  # it may have killed its own first process
    assert psutil.Process().is_running()


def test_threads_and_the_standard_library_work(level):
    source = (
        "import threading, math, json, re, collections, itertools, random, decimal, datetime, heapq, functools, asyncio, sys\n"
        "out = []\nts = [threading.Thread(target=out.append, args=(n,)) for n in range(4)]\n[t.start() for t in ts]\n[t.join() for t in ts]\n"
        "print(sorted(out), sys.stdin.read())\n"
    )
    assert attack(source, level, stdin=b"input").output == b"[0, 1, 2, 3] input\n"


def test_large_input_and_output_pass(level):
    outcome = attack("import sys\nprint(len(sys.stdin.read()), 'x' * 500000)", level, stdin=b"a" * 3_000_000)
    assert outcome.output.startswith(b"3000000 xxx") and len(outcome.output) == 500009


def test_no_group_of_limits_is_left_behind():
    """Of this process, or of one that has ended; others may be running sandboxes at this moment."""
    # os.walk passes over folders that vanish meanwhile
    names = [name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders if name.startswith("tinyllm-")]
    owners = [int(name.removeprefix("tinyllm-").removeprefix("trial-").split("-")[0]) for name in names]
    assert not [owner for owner in owners if owner == os.getpid() or not psutil.pid_exists(owner)]
    assert LimitGroup.kind()


# judging


@pytest.mark.parametrize(
    ("expected", "value", "tolerance", "right"),
    [
        (1, True, 0, 0), (True, 1, 0, 0), (True, True, 0, 1), (5, 5.0, 0, 1), (5, "5", 0, 0), ([1, 2], [1, 2], 0, 1), ([1], [1, 2], 0, 0), (None, None, 0, 1),
        (None, 0, 0, 0), ({"a": [1]}, {"a": [1]}, 0, 1), ({"a": 1}, {"a": True}, 0, 0), (0.5, 0.5000001, 1e-6, 1), (0.5, 0.51, 1e-6, 0), (0.5, float("nan"), 1e-6, 0),
        (1e9, 1e9 + 100, 1e-6, 1), (0.5, float("inf"), 1e-6, 0), (10**400, 10**400, 0, 1), (10**400, 1.0, 1e-6, 0), ([1], frozenset([1]), 0, 0), ("a", "a", 0, 1),
    ],
)  # fmt: skip
def test_plain_data_is_compared_with_its_types(expected, value, tolerance, right):
    assert same(expected, value, tolerance) == bool(right)


def test_program_output():
    assert same_output("1 2\n3\n", "1 2  \n3\n\n", 0)
    assert not same_output("1 2\n3\n", "1 2 3\n", 0)
    assert same_output("0.3333333", "0.33333329", 1e-6)
    assert not same_output("0.3", "nan", 1e-6)
    assert not same_output("7", "", 1e-6)


def test_the_block_that_defines_the_function_is_judged():
    text = "```python\ndef add(a, b): return 1\n```\nor\n```py\ndef add(a, b): return 2\n```\ntest\n```\nprint(add(1, 2))\n```\n```text\ndef add\n```"
    assert find_code(text, "add") == "def add(a, b): return 2"
    assert len(fenced_blocks(text)) == 3
    assert find_code("def add(a, b):\n    return 3", "add") == "def add(a, b):\n    return 3"
    assert find_code("I would add them.", "add") is None
    assert find_code("```python\nx = 1", "add") is None
    assert find_code("```python\nprint(1)", "") == "print(1)"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "add(a, b)"}, {"prompt": "add(a, b)", "calls": []}, {"prompt": "add(a, b)", "calls": [[1, 2]]}, {"prompt": "add(a, b)", "calls": [[[1]]]},
        {"prompt": "nothing named", "calls": [[[1], 2]]}, {"prompt": "p", "stdio": [["a"]]}, {"prompt": "p", "stdio": [["a", 1]]}, {"prompt": "p", "stdio": "["},
        {"prompt": "f(x)", "calls": [[[1], 2]], "tol": -1}, {"prompt": "f(x)", "calls": [[[1], 2]], "tol": float("inf")}, {"prompt": "f(x)", "calls": [[[1], {1, 2}]]}, {"prompt": "f(x)", "calls": [[[1], [float("nan")]]]},
        {"prompt": "f(x)", "inputs": [1], "residual": "__import__('os')"}, {"prompt": "f(x)", "inputs": [1], "residual": "x"}, {"prompt": "f(x)", "inputs": [1], "residual": "y.z < 1"},
        {"prompt": "f(x)", "inputs": [1], "residual": "open(y) < x"}, {"prompt": "f(x)", "inputs": [1], "residual": "x < 1"},
    ],
)  # fmt: skip
def test_rows_without_usable_tests_are_refused(row):
    with pytest.raises(DataError):
        build("code").check(row)


def test_reference_solutions_are_run_at_load():
    assert row_fault(build("code"), ADD) is None
    assert "reference solution" in row_fault(build("code"), {**ADD, "solution": "def add(a, b): return a * b"})
    wrong = {"prompt": "f(x)", "calls": [[[1], None]]}
    assert "a stub" in row_fault(build("code"), wrong)


def test_a_broken_sandbox_is_no_verdict(monkeypatch):
    def broken(*_):
        raise sandbox.SandboxError("it broke")

    monkeypatch.setattr(sandbox, "run", broken)
    verdict = verify(build("code"), ADD, "```python\ndef add(a, b): return 5\n```")
    assert verdict.value is None and verdict.reason == "sandbox failed: it broke"
