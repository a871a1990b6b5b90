"""Our own reader of numbers: a written grammar, exact rationals, and limits checked before any work.

    number   := [sign] [currency] unsigned [percent]
    sign     := '+' | '-' | U+2212
    unsigned := mixed | fraction | decimal
    mixed    := digits space fraction                  proper: 7 5/6, not 6 14/5
    fraction := digits '/' digits                      denominator not 0; spaces around '/' allowed
    decimal  := (grouped | digits) ['.' digits] [exp] | '.' digits [exp]
    grouped  := 1-3 digits, then groups of exactly 3 after ',' or one thin space (U+2009, U+202F)
    exp      := ('e' | 'E') [sign] digits
    percent  := '%' | 'percent'                        7% is 7/100; TeX's \\$ and \\% are $ and %

Digits are ASCII. The whole text must match, not a part of it. Python's `int`, `float` and `isdigit` accept other texts
and are not used as the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 10_000
"""A longer text is not a number."""
MAX_EXPONENT = 1_000
"""Largest absolute decimal exponent: 1e999999999 is not read as a number, and not computed."""

_SIGN = "[+\\-\u2212]"
_GROUPED = "[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:[\u2009\u202f][0-9]{3})+)"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?[ ]?(?P<currency>\\?[$€£])?[ ]?(?P<sign2>{_SIGN})?"
    rf"(?:(?P<whole>[0-9]+)[ ]+(?P<num>[0-9]+)[ ]?/[ ]?(?P<den>[0-9]+)"
    rf"|(?P<num2>[0-9]+)[ ]?/[ ]?(?P<den2>[0-9]+)"
    rf"|(?:(?P<int>{_GROUPED}|[0-9]+)(?:\.(?P<frac>[0-9]+))?|\.(?P<frac2>[0-9]+))(?:[eE](?P<exp>{_SIGN}?[0-9]+))?)"
    r"(?P<percent>[ ]?\\?%|[ ]percent)?"
)
_NOT_DIGITS = str.maketrans("", "", ",\u2009\u202f")
_SMALL = re.compile(r"-?[0-9]{1,15}")


@dataclass(slots=True)
class Number:
    """A number that was read: its exact value, and whether a percent or currency sign was with it."""

    value: Fraction | int
    """A percent sign is already applied: 7% has the value 7/100."""
    percent: bool = False
    currency: str | None = None


def read_number(text: str) -> Number | None:
    """The number that the whole text is, apart from white space around it and one full stop; else None."""
    text = text.strip()
    if _SMALL.fullmatch(text):  # the common case, 10 times faster
        return Number(int(text))
    if not text or len(text) > MAX_CHARS:
        return None
    match = _NUMBER.fullmatch(text) or (_NUMBER.fullmatch(text[:-1]) if text[-1] == "." else None)
    if match is None or (match["sign"] and match["sign2"]) or (match["sign2"] and not match["currency"]):
        return None
    value = _value(match)
    if value is None:
        return None
    if (match["sign"] or match["sign2"] or "+") != "+":
        value = -value
    return Number(
        value / 100 if match["percent"] else value, bool(match["percent"]), (match["currency"] or "")[-1:] or None
    )


def _value(match: re.Match[str]) -> Fraction | None:
    num, den = match["num"] or match["num2"], match["den"] or match["den2"]
    if num is not None:
        below = digits_to_int(den)
        above = digits_to_int(num)
        if below == 0 or (match["whole"] and above >= below):
            return None
        return Fraction(above, below) + (digits_to_int(match["whole"]) if match["whole"] else 0)
    whole = (match["int"] or "").translate(_NOT_DIGITS)
    part = match["frac"] or match["frac2"] or ""
    return decimal_value(f"{whole}.{part}", (match["exp"] or "").replace("\u2212", "-"))


def decimal_value(mantissa: str, exponent: str = "") -> Fraction | None:
    """The exact value of a decimal of any length; None where the exponent exceeds MAX_EXPONENT."""
    digits = exponent.lstrip("+-").lstrip("0")
    if len(digits) > 4 or int(digits or 0) > MAX_EXPONENT:
        return None
    return Fraction(Decimal(f"{mantissa}e{exponent}" if exponent else mantissa))


def digits_to_int(digits: str) -> int:
    """The value of any number of ASCII digits; Python's own conversion stops at 4,300."""
    return int(digits) if len(digits) <= 4_000 else int(Decimal(digits))


_QUOTES = "\"'`\u2018\u2019\u201c\u201d\u00ab\u00bb"
_TOKEN = re.compile(f"[^\\s=()\\[\\]{{}}<>|{_QUOTES}*~;!?&#\\\\\u2026\u3001\u3002\uff0c]+(?:[\u2009\u202f][0-9]{{3}})*")
_COLON = re.compile(r"(?<![0-9]):|:(?![0-9])")
_NUMERIC = re.compile("[\\d\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209c\u2150-\u2189\u2460-\u249b\uff10-\uff19]")
_TRAILING = ".,:_$"


def _numbers(text: str) -> Iterator[str | None]:
    """Every token with a digit, from the last to the first: its text, or None where the whole token is not a number."""
    tokens = _TOKEN.findall(text)
    if ":" in text:
        tokens = [piece for token in tokens for piece in _COLON.split(token)]
    part = -1
    for index in range(len(tokens) - 1, -1, -1):
        token = tokens[index].strip("_").rstrip(_TRAILING)
        if index == part or not token or token[0].isalpha() or not _NUMERIC.search(token):
            continue
        if "/" in token and index and tokens[index - 1].isdecimal() and f"{tokens[index - 1]} {token}" in text:
            token, part = f"{tokens[index - 1]} {token}", index - 1
        elif index + 1 < len(tokens) and tokens[index + 1].rstrip(_TRAILING) in ("%", "percent"):
            token += " percent"
        yield token if read_number(token) else None


def last_number(text: str) -> str | None:
    """The text of the last number; None when there is none, or when the last token with a digit is not a number.

    "17:30", "12cm" and "3-8" are not numbers, and no part of them is taken; a token that starts with a letter ("x2") is
    a name and is skipped. A sign directly before the digits belongs to the number.
    """
    return next(_numbers(text), None)


_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|either|alternatively|possibly)\b", re.IGNORECASE)
_LIST = re.compile(
    r"[0-9][.]?[\s*$]*(?:,|;|\s/\s|&|\||\s|\band\b)[\s*$]*(?:and\b)?[\s*$]*[-+\u2212]?[0-9.]*[0-9][.\s*$]*$",
    re.IGNORECASE,
)
_PART = "[+/\u00d7\u00f7^<>\u2260\u2264\u2265]"
_DENIED = re.compile(
    r"(?:\b(?:not|never|nor|neither|minus|negative|anything but|other than|except|cannot be|at least|at most)|n't"
    r"|\b(?:more|less|fewer|greater) than)(?: be| equal(?: to)?| exactly)?[\s*_$:]*$"
    rf"|(?:{_PART}|\u221a|(?:[0-9)]|\b[a-z])\s[*-]\s)[\s$]*$",
    re.IGNORECASE,
)
"""Words before a number that deny it, or make it part of something else."""
_WITHDRAWN = re.compile(
    rf"[\s*_$]*(?:\?|{_PART}|\u00b1|\s[*-]\s(?:[0-9(]|[a-z]\b))"
    r"|[^.!?]*\b(?:is|was|be|seems)(?:n't)? (?:wrong|incorrect|false|not (?:right|correct|it|the answer))\b",
    re.IGNORECASE,
)
"""Words after a number that deny it, or make it part of something else."""


def taken_back(before: str, after: str) -> bool:
    """Whether the words around a value deny it ("not 72") or make it part of something else ("more than 6")."""
    return _DENIED.search(before[-40:]) is not None or _WITHDRAWN.match(after[:100]) is not None


def stated_number(text: str) -> str | None:
    """The text of a statement's last number; None if the statement hedges, lists or denies it ("5 or 6", "not 5")."""
    found = list(_numbers(text))
    if not found or found[0] is None:
        return None
    if len(set(found)) > 1 and (_HEDGE.search(text) or _LIST.search(text[-200:])):
        return None
    before, number, after = text.rpartition(found[0].removesuffix(" percent"))
    if taken_back(before, after):
        return None
    marked = number[0] == "$" == after[:1]  # $72$: marks of mathematics, not of money
    return found[0][1:] if marked else found[0]
