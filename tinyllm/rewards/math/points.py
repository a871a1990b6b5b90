"""Fixed points for identity tests: the same symbol has the same values in every process, on every machine."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath

POINTS = 7
"""Four positive, two negative, one complex."""


@lru_cache(maxsize=4096)
def _rational(name: str, number: int) -> Fraction:
    digest = hashlib.sha256(f"{name}/{number}".encode()).digest()
    return Fraction(int.from_bytes(digest[:6], "big") | 1, 1 << 47) + Fraction(1, 3)  # between 1/3 and 7/3


def point(name: str, number: int) -> Any:
    """The value of a symbol at a point, in mpmath's working precision."""
    value = _rational(name, number)
    real = mpmath.mpf(value.numerator) / value.denominator
    if number < 4:
        return real
    if number < 6:
        return -real
    other = _rational(name + "i", number)
    return mpmath.mpc(real, mpmath.mpf(other.numerator) / other.denominator)
