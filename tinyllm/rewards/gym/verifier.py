"""Family "gym": answers to reasoning-gym tasks, in one <answer></answer> block, by our own checks (checks.py).

Row columns, as tasks/gym.py makes them: `dataset` (name), `answer` (gold), `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tinyllm.errors import DataError
from tinyllm.records import Verdict
from tinyllm.rewards.base import Row, SelfTest, Verifier, correct
from tinyllm.rewards.gym.checks import CHECKS, OPEN_GOLDS, BadGold, Check, wrong_gold
from tinyllm.rewards.text.extract import Region


@dataclass(frozen=True)
class GymVerifier(Verifier):
    """Settings: those of the region."""

    family: ClassVar[str] = "gym"
    in_process: ClassVar[bool] = False
    region: Region = Region()

    def check(self, row: Row) -> Check:
        name = row.get("dataset")
        if name not in CHECKS:
            raise DataError(
                f"reasoning-gym data set {name!r} has no check of ours; there are: {', '.join(sorted(CHECKS))}"
            )
        gold, metadata = row.get("answer"), _metadata(row)
        if gold is None and name in OPEN_GOLDS:
            gold = "none"
        if not isinstance(gold, str) or (not gold.strip() and name not in OPEN_GOLDS):
            raise DataError(f"gold of a {name} row is {gold!r}, not a text")
        try:
            check = CHECKS[str(name)](gold, metadata)
            other = wrong_gold(str(name), gold, metadata)
            if other:
                raise BadGold(f"gold is {gold[:60]!r}, but its metadata say {other[:60]!r}")
            return check
        except BadGold as error:
            raise DataError(f"a {name} row cannot be judged: {error}") from None
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(f"a {name} row has metadata that do not read: {error}") from None

    def judge(self, row: Row, text: str) -> Verdict:
        check = self.check(row)
        found, _ = self.region.find(text)
        return correct(found is not None and check(found.strip()), found)

    def explain(self, row: Row, text: str) -> str:
        return self.region.find(text)[1]

    def probes(self, row: Row) -> list[SelfTest]:
        wrong = SelfTest("another value", self.region.write("banana 3 of them"), 0)
        return [wrong] if self._is_open(row) else [SelfTest("gold", self.region.write(str(row["answer"])), 1), wrong]

    @staticmethod
    def _is_open(row: Row) -> bool:
        return row.get("dataset") in OPEN_GOLDS and str(row.get("answer")).strip().lower() in (
            "none",
            "",
            "see metadata",
        )


def _metadata(row: Row) -> Mapping[str, Any]:
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            raise DataError("metadata is a text that is not JSON") from None
    if not isinstance(metadata, Mapping):
        raise DataError(f"metadata is {type(metadata).__name__}, not an object")
    return metadata
