"""Family "math": LaTeX and plain mathematics.

Our reader (reader.py) takes the whole answer or none of it. Equality is by kind (compare.py) and value (value.py);
math-verify is asked, in this worker process, about what those cannot tell.

Equal are: equal values in any form, sets and lists in any order, scaled equations, x = 5 and 5. Not equal are: other
brackets, bases, units, a percent sign, one of several values, several values where one is asked, decimals of an
irrational gold (unless the task states `places`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

from tinyllm.errors import DataError, RewardError, require_extra
from tinyllm.records import Verdict
from tinyllm.rewards.base import Row, SelfTest, Verifier, correct, gold_text
from tinyllm.rewards.math.compare import EXPRESSIONS, CompareRules, check_value, same
from tinyllm.rewards.math.reader import Tree, read
from tinyllm.rewards.math.tokens import Unreadable
from tinyllm.rewards.math.value import TooLarge, Undefined
from tinyllm.rewards.text.extract import Region, math_spans
from tinyllm.rewards.text.numbers import read_number, stated_number, taken_back

try:
    import math_verify
except ImportError:
    require_extra("math", "verifier 'math'")
    raise


@dataclass(frozen=True)
class MathVerifier(Verifier):
    """Settings: those of the region, and the five below."""

    family: ClassVar[str] = "math"
    in_process: ClassVar[bool] = False
    region: Region = Region(rule="boxed")
    gold: str = "answer"
    """Column of the gold; a worked solution is read by the task's rule."""
    kind: Literal["auto", "interval", "angle", "equation", "solutions", "functions"] = "auto"
    """interval: 3 < x < 8 and (3,8) are the same; angle: degrees and radians are."""
    places: int | None = None
    """Decimal answers to this many places are accepted; not set = exact answers only."""
    percent: Literal["value", "asked"] = "value"
    units: Literal["compare", "waive"] = "compare"

    def __post_init__(self) -> None:
        if self.places is not None and not 1 <= self.places <= 100:
            raise RewardError(f"math.places = {self.places}; give 1 to 100")

    @property
    def rules(self) -> CompareRules:
        """The settings as comparison takes them."""
        tolerance = None if self.places is None else Fraction(1, 10**self.places)
        return CompareRules(self.kind, self.percent == "asked", self.units == "waive", tolerance)

    def warm_up(self) -> None:
        read(r"\frac{1}{2}")

    def check(self, row: Row) -> tuple[Tree, str]:
        """(tree, source) of the gold."""
        text = gold_text(row, self.gold)
        found = _read_gold(self, text)
        if isinstance(found, str):
            raise DataError(f"gold {text[-60:]!r} in column {self.gold!r} does not read as mathematics: {found}")
        return found

    def judge(self, row: Row, text: str) -> Verdict:
        gold, source = self.check(row)
        found, _ = self._region(text)
        if found is None:
            return correct(False, None)
        try:
            answer = read(found)
            equal = same(gold, answer, self.rules)
        except (Unreadable, TooLarge, Undefined):
            return correct(self._plain(gold, found), found)
        if equal is None:
            equal = is_plain(gold) and is_plain(answer) and _ask_library(source, found)
        return correct(equal, found)

    def explain(self, row: Row, text: str) -> str:
        gold, _ = self.check(row)
        found, why = self._region(text)
        if found is None:
            return why
        try:
            same(gold, read(found), self.rules)
        except (Unreadable, TooLarge, Undefined) as error:
            return f"the answer is not used: {error}"
        return ""

    def probes(self, row: Row) -> list[SelfTest]:
        gold, source = self.check(row)
        wrong = f"{source}+1" if gold[0] in EXPRESSIONS else "\\text{none of these words}"
        return [SelfTest("gold", self.region.write(source), 1), SelfTest("another value", self.region.write(wrong), 0)]

    def _region(self, text: str) -> tuple[str | None, str]:
        found, why = self.region.find(text)
        if found is None:
            return None, why
        if self.region.rule == "final":
            spans = math_spans(found)
            if spans and spans[-1] and taken_back(*found.rpartition(spans[-1])[::2]):
                return None, "the last formula is denied"
            found = spans[-1] if spans else found
        return found.strip().strip("*"), ""

    def _plain(self, gold: Tree, found: str) -> bool:
        """Free text without marked mathematics: the one number it states, where the gold is a number."""
        stated = (
            stated_number(found)
            if self.region.rule == "final" and gold[0] == "num" and not set(found) & set("\\^_${}")
            else None
        )
        number = read_number(stated) if stated else None
        return number is not None and number.value == gold[1]


@lru_cache(maxsize=4096)
def _read_gold(verifier: MathVerifier, text: str) -> tuple[Tree, str] | str:
    """(tree, source) of a gold, or why it has none."""
    found, _ = verifier._region(text) if verifier.region.rule in ("boxed", "hash", "tag", "marker") else (None, "")
    source = (found if found is not None else text).strip().strip("$").strip()
    try:
        tree = read(source)
        check_value(tree)
    except (Unreadable, TooLarge, Undefined) as error:
        return str(error)
    return tree, source


def is_plain(tree: Tree) -> bool:
    """Whether a tree is small and free of what the library might compute at length: it has no bound of its own."""
    kinds, count, waiting = set("num const sym neg add mul div func seq list rel".split()), 0, [tree]
    while waiting:
        part = waiting.pop()
        count += 1
        if count > 60 or part[0] not in kinds or (part[0] == "num" and abs(part[1]) > 10**6):
            return False
        waiting += [item for item in part[1:] if isinstance(item, tuple)]
    return True


def _ask_library(gold: str, answer: str) -> bool:
    """math-verify's verdict on two texts that our reader has read completely and within its limits."""
    settings = [math_verify.LatexExtractionConfig()]
    parsed = [math_verify.parse(f"${text}$", settings, parsing_timeout=None) for text in (gold, answer)]
    return all(parsed) and bool(math_verify.verify(*parsed, timeout_seconds=None))
