"""Family "arithmetic": the answer is a number, a tuple of numbers or a clock time, by our own grammar (numbers.py).

Values are compared exactly, as rationals, unless the task sets a tolerance. The whole region must match the grammar.
Units, currency signs and percent signs are compared, unless the task waives them (`units`, `percent`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar, Literal

from tinyllm.errors import DataError, RewardError
from tinyllm.records import Verdict
from tinyllm.rewards.base import Row, SelfTest, Verifier, correct, gold_text
from tinyllm.rewards.text.extract import Region, unwrap
from tinyllm.rewards.text.numbers import Number, read_number, stated_number

MAX_GOLD_CHARS = 20_000
_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9])(?::([0-5][0-9]))?(?:[ ]?([aApP])\.?[mM]\.?)?")
_WORD = "[A-Za-z\u00b0\u00b5\u03bc\u03a9]+[\u00b2\u00b3]?(?:\\^-?[0-9])?"
_UNIT = re.compile(rf"[ ]?({_WORD}(?:[ /\u00b7]{_WORD}){{0,4}}|[$€£])$")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_UNITS = """
$ dollar dollars usd
€ euro euros eur
£ pound pounds gbp
cent cents
% percent
m meter meters metre metres
km kilometer kilometers kilometre kilometres
cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres
mile miles mi
ft foot feet
inch inches in
g gram grams
kg kilogram kilograms
s sec second seconds
min minute minutes
h hr hour hours
day days
l L liter liters litre litres
ml mL milliliter milliliters millilitre millilitres
\u00b0 degree degrees
"""
ALIASES = {alias: names.split()[0] for names in _UNITS.strip().split("\n") for alias in names.split()}
"""Spelling of a unit -> the unit's name. Units are not converted: 1 km does not equal 1000 m."""


@dataclass(frozen=True)
class Value:
    """The value of an answer: its kind, its exact numbers, its unit and its bracket. A time is in seconds."""

    kind: Literal["number", "tuple", "time"]
    numbers: tuple[Fraction | int, ...]
    unit: str | None = None
    bracket: str = ""
    """Opening bracket of a tuple; "" for "(" too: 2,5 and (2,5) are the same pair, [2,5] and {2,5} are others."""


@dataclass(frozen=True)
class ArithmeticVerifier(Verifier):
    """Settings of the family: those of the region, and the fields below."""

    family: ClassVar[str] = "arithmetic"
    region: Region = Region()
    gold: str = "answer"
    """Column of the gold; the region's rule finds the answer in a worked solution ("30*3=90\\n#### 90")."""
    kind: Literal["auto", "number", "tuple", "time"] = "auto"
    """Kind of the answer; auto: the kind of the gold."""
    units: tuple[str, ...] = ()
    """Units the answer may carry or leave out; any other unit must be the gold's own."""
    percent: Literal["value", "asked"] = "value"
    """value: 7% is 0.07; asked: the task asks for a percentage, so 7% and 7 are the same."""
    abs_tol: str | None = None
    """Largest absolute error, as a number; an answer is right within either abs_tol or rel_tol."""
    rel_tol: str | None = None
    """Largest error relative to the gold."""

    def __post_init__(self) -> None:
        for name in ("abs_tol", "rel_tol"):
            text = getattr(self, name)
            number = None if text is None else read_number(str(text))
            if text is not None and (number is None or number.value < 0):
                raise RewardError(f"arithmetic.{name} = {text!r}; give a number not below 0, like 1e-6")

    @cached_property
    def _tolerances(self) -> tuple[Fraction | int, Fraction | int] | None:
        values = [read_number(str(text)) if text is not None else None for text in (self.abs_tol, self.rel_tol)]
        if values == [None, None]:
            return None
        return tuple(number.value if number else 0 for number in values)  # type: ignore[return-value]

    @cached_property
    def _units(self) -> frozenset[str]:
        return frozenset(ALIASES.get(unit, unit) for unit in self.units)

    def check(self, row: Row) -> Value:
        """The value of the row's gold. Raises DataError when it is not a number, tuple or time of the task's kind."""
        text = gold_text(row, self.gold)
        value = _read_gold(self, text)
        if value is None:
            what = "number, tuple or time" if self.kind == "auto" else self.kind
            raise DataError(f"gold {text[-60:]!r} in column {self.gold!r} does not read as a {what}")
        return value

    def judge(self, row: Row, text: str) -> Verdict:
        gold = self.check(row)
        found, _ = self.region.find(text)
        if found is None:
            return correct(False, None)
        answer = self._answer(found, gold.kind)
        if self.region.rule == "final" and gold.unit is None and answer is not None and answer.unit is not None:
            stated = stated_number(found)  # "72 apples" as a statement gives 72, as "she has 72 apples" does
            answer = self.read(stated, gold.kind) if stated else answer
        if answer is None:
            return correct(False, found.strip())
        return correct(self.same(gold, answer), found.strip())

    def explain(self, row: Row, text: str) -> str:
        found, why = self.region.find(text)
        unread = found is not None and self._answer(found, self.check(row).kind) is None
        return why or ("the answer does not read completely" if unread else "")

    def same(self, gold: Value, answer: Value) -> bool:
        """Whether two values are equal in kind, bracket, unit and count, and each number within the tolerance."""
        if (answer.kind, answer.bracket, len(answer.numbers)) != (gold.kind, gold.bracket, len(gold.numbers)):
            return False
        if answer.unit != gold.unit and not (
            None in (answer.unit, gold.unit) and (answer.unit or gold.unit) in self._units
        ):
            return False
        if self._tolerances is None:
            return answer.numbers == gold.numbers
        absolute, relative = map(Fraction, self._tolerances)
        pairs = [(Fraction(a), Fraction(g)) for a, g in zip(answer.numbers, gold.numbers, strict=True)]
        return all(abs(a - g) <= max(absolute, relative * abs(g)) for a, g in pairs)

    def probes(self, row: Row) -> list[SelfTest]:
        gold = self.check(row)
        wrong = Value(gold.kind, tuple(number + 1 for number in gold.numbers), gold.unit, gold.bracket)
        if self._tolerances is not None:
            absolute, relative = map(Fraction, self._tolerances)
            shift = 1 + 2 * max(absolute, relative * max(abs(Fraction(number)) for number in gold.numbers))
            wrong = Value(gold.kind, tuple(number + shift for number in gold.numbers), gold.unit, gold.bracket)
        return [
            SelfTest("gold", self.region.write(show(gold)), 1),
            SelfTest("another value", self.region.write(show(wrong)), 0),
        ]

    def _answer(self, found: str, kind: str) -> Value | None:
        if self.region.rule == "final":
            whole = self.read(found, kind)
            stated = None if whole or kind != "number" else stated_number(found)
            return whole or (self.read(stated, kind) if stated else None)
        return self.read(found, kind)

    def read(self, text: str, kind: str) -> Value | None:
        """The value of the whole text, of the given kind ("auto": number, else tuple, else time), or None."""
        text = unwrap(text)
        if kind in ("auto", "number"):
            value = self._quantity(text)
            if value is not None or kind == "number":
                return value
        if kind in ("auto", "tuple"):
            value = self._tuple(text)
            if value is not None or kind == "tuple":
                return value
        time = _TIME.fullmatch(text)
        return _clock(time) if time else None

    def _quantity(self, text: str) -> Value | None:
        number, unit = read_number(text), None
        if number is None and 1 < len(text) <= 200:
            match = _UNIT.search(text)
            number = read_number(text[: match.start()]) if match else None
            if number is None or match is None or number.percent:
                return None
            unit = ALIASES.get(match[1], match[1])
        if number is None or (number.currency and unit):
            return None
        return Value("number", (self._value(number),), unit or number.currency)

    def _value(self, number: Number) -> Fraction | int:
        return number.value * 100 if number.percent and self.percent == "asked" else number.value

    def _tuple(self, text: str) -> Value | None:
        bracket = ""
        if text and text[0] in _BRACKETS:
            if text[-1] != _BRACKETS[text[0]]:
                return None
            bracket, text = text[0].replace("(", ""), text[1:-1]
        parts = text.split(";") if ";" in text else text.split(",")
        if not 2 <= len(parts) <= 1000:
            return None
        numbers = [read_number(part) for part in parts]
        if any(number is None or number.currency for number in numbers):
            return None
        return Value("tuple", tuple(self._value(number) for number in numbers if number), None, bracket)


@lru_cache(maxsize=4096)
def _read_gold(verifier: ArithmeticVerifier, text: str) -> Value | None:
    value = verifier.read(text, verifier.kind)
    if value is None and verifier.region.rule != "last_number" and len(text) <= MAX_GOLD_CHARS:
        found, _ = verifier.region.find(text)
        value = verifier._answer(found, verifier.kind) if found else None
    return value


def _clock(time: re.Match[str]) -> Value | None:
    hour = int(time[1])
    if time[4]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if time[4] in "pP" else 0)
    if hour > 24:
        return None
    return Value("time", (hour * 3600 + int(time[2]) * 60 + int(time[3] or 0),))


def show(value: Value) -> str:
    """An answer text from which the same value is read."""
    if value.kind == "time":
        seconds = int(value.numbers[0]) % 86400
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}" + (f":{seconds % 60:02}" if seconds % 60 else "")
    texts = [_digits(number) for number in value.numbers]
    if value.kind == "tuple":
        return (value.bracket or "(") + ", ".join(texts) + _BRACKETS[value.bracket or "("]
    unit = value.unit or ""
    return f"{unit}{texts[0]}" if unit in ("$", "€", "£") else f"{texts[0]} {unit}".strip()


def _digits(number: Fraction | int) -> str:
    """The number as text; by Decimal, because Python's own conversion of integers stops at 4,300 digits."""
    above, below = map(Decimal, Fraction(number).as_integer_ratio())
    return str(above) if below == 1 else f"{above}/{below}"
