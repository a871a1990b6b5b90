"""A verifier worker: reads jobs from its standard input, writes results to what was its standard output, one at a time.

Messages are JSON with an 8-byte length before them; results are plain numbers and texts, never pickles. The parent
(pool.py) keeps the clock and kills; here stands only what ends a worker whose parent is gone: a thread that looks after
it, and, where a call keeps even that from running, a limit on CPU time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from tinyllm.errors import TinyLLMError
from tinyllm.records import Unscored, Verdict
from tinyllm.rewards import functions
from tinyllm.rewards.base import Verifier, build, verify
from tinyllm.rewards.selftest import row_fault

HEADER = struct.Struct(">Q")
SPARE_CPU_S = 60
"""CPU seconds over twice a job's limit after which the kernel ends a worker that nobody waits for."""


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    return json.loads(stream.read(HEADER.unpack(head)[0]))


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what user code prints goes to the terminal, not between results
    built: dict[str, Any] = {}
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    out.write(pack({"ready": True}))
    out.flush()
    while (job := read_message(sys.stdin.buffer)) is not None:
        _limit_cpu(job.get("timeout_s", 60.0))
        try:
            answer = _answer(job, built)
        except TinyLLMError as error:
            answer = {"error": str(error)}
        out.write(pack(answer))
        out.flush()


def _end_with(parent: int) -> None:
    """Ends this process and its children when the parent is gone: a call that hangs never reads the end of input."""
    while os.getppid() == parent:
        time.sleep(1.0)
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _limit_cpu(timeout_s: float) -> None:
    soft = int(time.process_time() + 2 * timeout_s) + SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer(job: dict[str, Any], built: dict[str, Any]) -> dict[str, Any]:
    key = job["key"]
    if job["kind"] == "prepare":
        spec = job["spec"]
        if isinstance(spec, str) and not spec.startswith("{"):
            built[key] = functions.load_function(spec)
            functions.check_columns(built[key], spec, job["columns"])
        else:
            built[key] = build(spec)
            built[key].warm_up()
        return {}
    if job["kind"] == "verify":
        return {"verdicts": [to_json(verify(built[key], job["row"], job["text"]))]}
    if job["kind"] == "fault":
        return {"fault": _fault(built[key], job["row"])}
    return _call(built[key], job)


def _fault(verifier: Verifier, row: dict[str, Any]) -> str | None:
    try:
        return row_fault(verifier, row)
    except (MemoryError, RecursionError) as error:
        return f"the self-test failed: {type(error).__name__}"


def _call(function: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    judged = functions.call(function, job["name"], functions.RewardBatch(**job["batch"]))
    extras = {name: [_plain(value) for value in values] for name, values in judged.logged.extras.items()}
    verdicts = [to_json(verdict) for verdict in judged.verdicts]
    return {"verdicts": verdicts, "metrics": dict(judged.logged.metrics), "extras": extras}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def to_json(verdict: Verdict) -> list[Any]:
    """A verdict as JSON holds it; floats come back bit for bit."""
    return [verdict.value, verdict.reason, verdict.answer, verdict.parts, verdict.cause]


def from_json(fields: list[Any]) -> Verdict:
    """The verdict of to_json's fields."""
    value, reason, answer, parts, cause = fields
    named = tuple((name, number) for name, number in parts)
    return Verdict(value, reason, answer, named, None if cause is None else Unscored(cause))
