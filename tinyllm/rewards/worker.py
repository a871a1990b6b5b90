"""A verifier worker: reads tasks from its standard input, writes results to what was its standard output, one by one.

Messages are JSON with an 8-byte length before them; results are plain numbers and texts, never pickles. The parent
(pool.py) keeps the clock and kills. This module only ends a worker whose parent is gone: by a thread that looks for the
parent, and, where a call keeps even that thread from running, by a limit on CPU time.
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
from tinyllm.rewards.base import Verifier, build, row_fault, verify

HEADER = struct.Struct(">Q")
SPARE_CPU_S = 60
"""CPU seconds, over twice the time limit of a task, after which the kernel ends a worker."""


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
    while (task := read_message(sys.stdin.buffer)) is not None:
        _limit_cpu(task.get("timeout_s", 60.0))
        try:
            result = _result(task, built)
        except TinyLLMError as error:
            result = {"error": str(error)}
        out.write(pack(result))
        out.flush()


def _end_with(parent: int) -> None:
    """Wait until the parent is gone, then kill this process and its children: a hung call reads no end of input."""
    while os.getppid() == parent:
        time.sleep(1.0)
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _limit_cpu(timeout_s: float) -> None:
    soft = int(time.process_time() + 2 * timeout_s) + SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _result(task: dict[str, Any], built: dict[str, Any]) -> dict[str, Any]:
    key = task["key"]
    if task["kind"] == "prepare":
        spec = task["spec"]
        if isinstance(spec, str) and not spec.startswith("{"):
            built[key] = functions.load_function(spec)
            functions.check_columns(built[key], spec, task["columns"])
        else:
            built[key] = build(spec)
            built[key].warm_up()
        return {}
    if task["kind"] == "verify":
        return {"verdicts": [to_json(verify(built[key], task["row"], task["text"]))]}
    if task["kind"] == "fault":
        return {"fault": _fault(built[key], task["row"])}
    return _call(built[key], task)


def _fault(verifier: Verifier, row: dict[str, Any]) -> str | None:
    try:
        return row_fault(verifier, row)
    except (MemoryError, RecursionError) as error:
        return f"the self-test failed: {type(error).__name__}"


def _call(function: Callable[..., Any], task: dict[str, Any]) -> dict[str, Any]:
    judged = functions.call(function, task["name"], functions.RewardBatch(**task["batch"]))
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
