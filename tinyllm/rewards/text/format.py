"""Family "format": the answer is in the region that the task names and, if the row has a gold, equals the gold text.

The whole region is compared, not a substring or prefix of it: as a number when the gold is one (numbers.py), else as
text after NFC normalization, with runs of white space as one space and markup around the whole removed (`unwrap`).
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import ClassVar

from tinyllm.errors import DataError, RewardError
from tinyllm.records import Verdict
from tinyllm.rewards.base import Row, SelfTest, Verifier, correct, gold_text
from tinyllm.rewards.text.extract import Region, unwrap
from tinyllm.rewards.text.numbers import read_number, stated_number


@dataclass(frozen=True)
class FormatVerifier(Verifier):
    """Settings of the family: those of the region, and the fields below."""

    family: ClassVar[str] = "format"
    region: Region = Region()
    gold: str | None = "answer"
    """Column of the gold text; None (written as an empty setting): judge the format alone."""
    choices: tuple[str, ...] = ()
    """The only valid answers, for example A|B|C|D; an answer may be in parentheses."""
    ignore_case: bool = False

    def __post_init__(self) -> None:
        if self.gold is None and self.region.rule in ("whole", "final"):
            raise RewardError(f"format.rule = {self.region.rule!r} without a gold pays for any text; give format.gold")

    def check(self, row: Row) -> str:
        """The normalized gold text; "" where only the format is judged. Raises DataError for an unusable gold."""
        if self.gold is None:
            return ""
        gold = gold_text(row, self.gold)
        text = self._text(gold)
        if not text:
            raise DataError(f"gold {gold!r} is empty without its markup")
        if self.choices and text not in map(self._text, self.choices):
            raise DataError(f"gold {text!r} is none of the choices {', '.join(self.choices)}")
        return text

    def judge(self, row: Row, text: str) -> Verdict:
        gold = self.check(row)
        found, _ = self.region.find(text)
        if found is None or not gold:
            return correct(found is not None, found)
        number = read_number(gold)
        if number is not None:
            stated = stated_number(found) if self.region.rule == "final" else unwrap(found)
            answer = None if stated is None else read_number(stated)
            same = answer is not None and answer.value == number.value and answer.currency == number.currency
            return correct(same, found.strip())
        return correct(self._text(found) == gold, found.strip())

    def explain(self, row: Row, text: str) -> str:
        return self.region.find(text)[1]

    def probes(self, row: Row) -> list[SelfTest]:
        if self.gold is None:
            return [SelfTest("format alone", self.region.write("x"), 1)]
        gold = self.check(row)
        number = read_number(gold)
        others = [choice for choice in self.choices if choice != gold]
        wrong = str(number.value + 1) if number else others[0] if others else gold[::-1] + "x"
        return [SelfTest("gold", self.region.write(gold), 1), SelfTest("another value", self.region.write(wrong), 0)]

    def _text(self, text: str) -> str:
        text = " ".join(unicodedata.normalize("NFC", unwrap(text)).split())
        if self.choices and len(text) > 2 and text[0] == "(" and text[-1] == ")" and text[1:-1] in self.choices:
            text = text[1:-1]
        return text.casefold() if self.ignore_case else text
