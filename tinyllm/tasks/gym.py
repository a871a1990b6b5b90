"""Tasks from reasoning-gym's generators: data.task = "gym:NAME". reasoning-gym makes prompts, golds and
metadata; verdicts are by checks of our own."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tinyllm.errors import DataError, nearest, require_extra
from tinyllm.rewards.gym.checks import CHECKS
from tinyllm.rewards.gym.verifier import GymVerifier

TRAIN, HELD_OUT = 1_000, 200
"""Rows generated for each side, before equal prompts are taken out."""
SYSTEM_PROMPT = "Think, then give the final answer in <answer></answer>."


def generate(name: str, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, held_out) rows {"prompt", "dataset", "answer", "metadata"} of a reasoning-gym data set.

    Deterministic in the seed; held-out prompts are not among those trained on. Rows that cannot be judged are left out:
    the generator makes some, such as premises that contradict each other and integrals that are not evaluated.
    Raises DataError for a data set without a check of ours, and without the [gym] extra.
    """
    if name not in CHECKS:
        raise DataError(f"data.task = 'gym:{name}' has no verifier of ours; {nearest(name, sorted(CHECKS))}")
    require_extra("gym", f"data.task = 'gym:{name}'")
    import reasoning_gym

    sides, verifier = [], GymVerifier()
    seen: set[str] = set()
    for size, offset in ((HELD_OUT, 1_000_003), (TRAIN, 0)):
        rows = []
        for item in reasoning_gym.create_dataset(name, size=size, seed=seed + offset):
            if item["question"] not in seen:
                seen.add(item["question"])
                metadata = json.loads(json.dumps(item["metadata"], default=str))
                answer = str(item["answer"])
                row = {"prompt": item["question"], "dataset": name, "answer": answer, "metadata": metadata}
                with contextlib.suppress(DataError):
                    verifier.check(row)
                    rows.append(row)
        sides.append(rows)
    return sides[1], sides[0]
