"""Self-tests of all rows of a task at load, in worker processes for a verifier that runs in worker processes.

Rows that passed are remembered in the user's cache folder until the row, the verifier's settings or its code change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyllm.config.sections import RewardConfig
from tinyllm.model.bundled import cache_folder
from tinyllm.record.hashing import hash_json
from tinyllm.rewards.base import Row, Verifier, row_fault
from tinyllm.rewards.combine import make_parts
from tinyllm.rewards.identity import code_hash
from tinyllm.rewards.pool import VerifierPool, VerifyTask

PROBES = 6
"""Self-tests of a row, at most: the time limit of a row is this many verdicts."""


def self_test(
    reward: RewardConfig, task_verifier: str | None, rows: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str | None]:
    """For each (place, row) why it cannot be used, or None.

    Reward functions have no self-tests: what they accept is the user's choice.
    """
    faults: list[str | None] = [None] * len(rows)
    for part in make_parts(reward, task_verifier):
        if not isinstance(part.judge, Verifier):
            continue
        for index, fault in enumerate(_row_faults(part.judge, [row for _, row in rows], reward)):
            if fault and not faults[index]:
                faults[index] = f"{rows[index][0]}: {fault}"
    return faults


def _row_faults(verifier: Verifier, rows: Sequence[Mapping[str, Any]], reward: RewardConfig) -> list[str | None]:
    if verifier.in_process:
        return [row_fault(verifier, row) for row in rows]
    passed = _Passed(verifier)
    faults: list[str | None] = [None] * len(rows)
    new = [index for index, row in enumerate(rows) if row not in passed]
    if not new:
        return faults
    pool = VerifierPool(reward.workers)
    try:
        limits = [PROBES * max(reward.timeout_s, verifier.time_limit(rows[index])) for index in new]
        messages = [{"kind": "fault", "row": dict(rows[index])} for index in new]
        jobs = [VerifyTask(verifier.spec, message, limit) for message, limit in zip(messages, limits, strict=True)]
        results = pool.run(jobs)
    finally:
        pool.close()
    for index, result in zip(new, results, strict=True):
        faults[index] = f"the self-test {result['failed']}" if "failed" in result else result["fault"]
    passed.add([rows[index] for index in new if faults[index] is None])
    return faults


class _Passed:
    """Rows that passed under a verifier before, by hash, in the user's cache folder."""

    def __init__(self, verifier: Verifier) -> None:
        self._file = cache_folder() / "selftest" / hash_json([verifier.hash, code_hash()])
        try:
            self._hashes = set(self._file.read_text().split())
        except OSError:
            self._hashes = set()

    def __contains__(self, row: Row) -> bool:
        return hash_json(row) in self._hashes

    def add(self, rows: Sequence[Row]) -> None:
        """Remember rows; a cache that cannot be written is only slower."""
        lines = "".join(f"{hash_json(row)}\n" for row in rows)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "ab", buffering=0) as file:  # one write: runs may append at the same time
                file.write(lines.encode())
        except OSError:
            return
