"""Every case of tests/data/verifiers.jsonl: its verdict, within its time, and the row's self-test."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from test_rewards import completion
from verifier_cases import CASES, case_ids, row_of, spec_of

from tinyllm.errors import DataError
from tinyllm.records import Prompt
from tinyllm.rewards import RewardJudge, build, verify
from tinyllm.rewards.base import row_fault
from tinyllm.rewards.combine import RewardPart

WITNESS = Path("/tmp/verifier_was_here")
WRONG_GOLDS = {"gym-01"}
"""Cases whose own gold breaks the task's rule (it uses a number too often): the self-test refuses their rows, rightly."""
SHORT = {"code": {"cpu_s": 2.0, "wall_s": 4.0}}
"""Settings that end hanging submissions sooner than the default; no case's verdict depends on them."""


@pytest.mark.parametrize("case", case_ids("format", "arithmetic", "math", "json", "if", "gym", "code"))
def test_case(case):
    verifier, row = build({**spec_of(case), **SHORT.get(case["family"], {})}), row_of(case)
    start = time.monotonic()
    verdict = verify(verifier, row, case["completion"])
    assert time.monotonic() - start < case["max_s"]
    assert not WITNESS.exists()
    if case["expect"] == "error":
        assert verdict.value is None and verdict.reason.startswith("bad task: ")
        with pytest.raises(DataError):
            verifier.check(row)
        return
    assert verdict.value == case["expect"]
    if case["family"] != "code":  # their rows have no reference solution, and each run costs a sandbox
        assert (row_fault(verifier, row) is None) == (case["id"] not in WRONG_GOLDS)


def test_there_are_no_other_families():
    assert len(CASES) == 179 == len(case_ids("format", "arithmetic", "math", "json", "if", "gym", "code"))


def by_id(name):
    return next(case for case in CASES if case["id"] == name)


def test_a_batch_keeps_its_length_and_order():
    case = by_id("ari-37")
    texts = ["<answer>137</answer>", case["completion"], "<answer>137</answer>", "", "<answer>1</answer>"]
    verifier = build(spec_of(case))
    assert [verify(verifier, row_of(case), text).value for text in texts] == [1, 0, 1, 0, 0]


def test_eight_hangs_and_then_a_normal_sample_in_the_pool():
    case = by_id("mat-62")
    judge = RewardJudge([RewardPart("correct", 1.0, build(spec_of(case)))], timeout_s=20.0, workers=2)
    try:
        texts = [case["completion"]] * 8 + ["\\boxed{5}"]
        prompt = Prompt("p", (), "", row_of(case))
        judged = judge([prompt], [completion(text, sample=number) for number, text in enumerate(texts)])
    finally:
        judge.close()
    assert [verdict.value for verdict in judged.verdicts] == [0.0] * 8 + [1.0]


@pytest.mark.parametrize("name", ["mat-60", "mat-63", "jsn-16", "fmt-30"])
def test_from_a_thread_and_inside_an_event_loop(name):
    case = by_id(name)
    verifier, found = build(spec_of(case)), []
    thread = threading.Thread(target=lambda: found.append(verify(verifier, row_of(case), case["completion"]).value))
    thread.start()
    thread.join()

    async def serve():
        return verify(verifier, row_of(case), case["completion"]).value

    assert [*found, asyncio.run(serve())] == [1.0, 1.0]
