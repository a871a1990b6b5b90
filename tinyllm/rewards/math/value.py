"""Whether two expressions (trees of reader.py) are equal: by structure, as exact rationals, or by an identity test.

- Rational expressions are computed exactly. The sizes of powers, factorials and binomials are checked before they are
  computed.
- Other expressions are compared as numbers of 100 digits and, if those agree, of at least 500 (more when numbers within
  the expressions are very large or small), at fixed values of every symbol: positive, negative and complex. They must
  agree at all points, so |x| is not x. Different expressions do not agree to so many digits by chance.
- Where no point can be computed the result is None; the math verifier then asks math-verify, and only about answers
  that our reader has read completely.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath

from tinyllm.rewards.math.reader import Tree

MAX_BITS = 200_000
"""Largest number of bits of an exact number's numerator or denominator."""
MAX_FACTORIAL = 3_000
MAX_MAGNITUDE = 1_000_000
"""Largest absolute decimal exponent of a number."""
MAX_ARGUMENT = 10**400
"""Largest absolute argument of a function: the cost of reducing an angle grows with its digits."""
DIGITS = (100, 500)
POINTS = 7
"""Number of points of an identity test: four positive, two negative, one complex."""
SPAN = "span"
"""Key in a point's values for a one-element list: the largest absolute decimal exponent met within an expression. No
symbol has this name."""
MAX_DIGITS = 20_000
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}


class TooLarge(ValueError):
    """An operation would exceed a limit; it was not computed."""


class Undefined(ValueError):
    """An expression has no finite value (division by zero, infinity)."""


# Exact values


def exact(tree: Tree) -> Fraction | None:
    """The rational value of an expression; None where exact arithmetic cannot give one. Raises TooLarge, Undefined."""
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind in ("neg", "add", "mul", "div", "binom", "fact", "pow", "func"):
        parts = [exact(part) if isinstance(part, tuple) else part for part in tree[1:]]
        if any(part is None for part in parts):
            return None
        return _EXACT[kind](*parts)
    return None


def _exact_div(above: Fraction, below: Fraction) -> Fraction:
    if not below:
        raise Undefined("division by zero")
    return _small(above / below)


def _exact_pow(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator)
        return None if root is None else _exact_pow(root, Fraction(exponent.numerator))
    power = int(exponent)
    if not base and power <= 0:
        raise Undefined("zero to a power that is not positive")
    if _bits(base) * abs(power) > MAX_BITS and abs(base) != 1:
        raise TooLarge("a power is too large")
    if abs(base) == 1 or not base:
        return base if power % 2 or not base else Fraction(1)
    return base**power


def _root(base: Fraction, degree: int) -> Fraction | None:
    """The exact root of a rational that is not negative; None when the root is irrational."""
    if base < 0 or degree > 1000:
        return None
    parts = []
    for whole in (base.numerator, base.denominator):
        with mpmath.workprec(whole.bit_length() // degree + 30):
            guess = int(mpmath.nint(mpmath.root(whole, degree))) if whole else 0
        if guess**degree != whole:
            return None
        parts.append(guess)
    return Fraction(parts[0], parts[1])


def _exact_fact(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise Undefined("a factorial of what is no whole number")
    if value > MAX_FACTORIAL:
        raise TooLarge("a factorial is too large")
    return Fraction(math.factorial(int(value)))


def _exact_binom(above: Fraction, below: Fraction) -> Fraction:
    if above.denominator != 1 or below.denominator != 1 or above < 0:
        raise Undefined("a binomial of what is no whole number")
    if above > MAX_FACTORIAL:
        raise TooLarge("a binomial is too large")
    return Fraction(math.comb(int(above), int(below))) if below >= 0 else Fraction(0)


def _exact_func(name: str, *values: Fraction) -> Fraction | None:
    if name == "abs":
        return abs(values[0])
    if name in ("floor", "ceil"):
        return Fraction(math.floor(values[0]) if name == "floor" else math.ceil(values[0]))
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if name in ("gcd", "lcm"):
        if any(value.denominator != 1 for value in values):
            raise Undefined(f"{name} of what is no whole number")
        whole = [int(value) for value in values]
        return Fraction(math.gcd(*whole)) if name == "gcd" else _small(Fraction(math.lcm(*whole)))
    if name == "sqrt":
        return _exact_pow(values[0], Fraction(1, 2))
    return None


_EXACT: Mapping[str, Any] = {
    "neg": lambda value: -value,
    "add": lambda *parts: _small(sum(parts, Fraction(0))),
    "mul": lambda left, right: _small(left * right),
    "div": _exact_div,
    "pow": _exact_pow,
    "fact": _exact_fact,
    "binom": _exact_binom,
    "func": _exact_func,
}


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _small(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise TooLarge("a number is too large")
    return value


# Numbers of many digits

CONSTANTS = {"pi": lambda: mpmath.pi(), "e": lambda: mpmath.e(), "i": lambda: mpmath.mpc(0, 1)}
NUMERIC = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "sinh": mpmath.sinh, "cosh": mpmath.cosh,
    "tanh": mpmath.tanh, "ln": mpmath.log, "exp": mpmath.exp, "sqrt": mpmath.sqrt, "abs": abs,
}  # fmt: skip


def numeric(tree: Tree, values: Mapping[str, Any]) -> Any:
    """The value at a point (symbol -> number), at mpmath's working precision. Raises TooLarge, Undefined."""
    value = _numeric(tree, values)
    if not mpmath.isfinite(value):  # log(0)
        raise Undefined("infinity")
    if SPAN in values and value:
        values[SPAN][0] = max(values[SPAN][0], abs(mpmath.mag(value)) * 0.302)
    return value


def _numeric(tree: Tree, values: Mapping[str, Any]) -> Any:
    kind = tree[0]
    if kind == "num":
        return mpmath.mpf(tree[1].numerator) / tree[1].denominator
    if kind == "const":
        if tree[1] == "infty":
            raise Undefined("infinity")
        return CONSTANTS[tree[1]]()
    if kind == "sym":
        return values[tree[1]]
    if kind == "func":
        return _numeric_func(tree, values)
    if kind == "unit" and tree[2] in ("\u00b0", "%"):  # within an expression: the tangent of 30 degrees
        return numeric(tree[1], values) * (mpmath.pi() / 180 if tree[2] == "\u00b0" else mpmath.mpf(1) / 100)
    if kind not in ("neg", "add", "mul", "div", "pow", "fact", "binom"):
        raise Undefined(f"a {kind} within an expression")
    parts = [numeric(part, values) for part in tree[1:]]
    if kind == "neg":
        return -parts[0]
    if kind == "add":
        return mpmath.fsum(parts)
    if kind == "mul":
        return parts[0] * parts[1]
    if kind == "div":
        if not parts[1]:
            raise Undefined("division by zero")
        return parts[0] / parts[1]
    if kind == "pow":
        return _numeric_pow(*parts)
    if abs(parts[0]) > MAX_FACTORIAL:
        raise TooLarge(f"a {kind} is too large")
    return mpmath.factorial(parts[0]) if kind == "fact" else mpmath.binomial(*parts)


def _numeric_pow(base: Any, exponent: Any) -> Any:
    if not base:
        if mpmath.re(exponent) <= 0:
            raise Undefined("zero to a power that is not positive")
        return mpmath.mpf(0)
    with mpmath.workprec(53):  # a logarithm to all digits would take seconds
        magnitude = abs(exponent) * (abs(mpmath.log(abs(base), 10)) + 1)
    if magnitude > MAX_MAGNITUDE:
        raise TooLarge("a power is too large")
    return mpmath.power(base, exponent)


def _numeric_func(tree: Tree, values: Mapping[str, Any]) -> Any:
    name = tree[1]
    parts = [numeric(part, values) for part in tree[2:]]
    if name == "log":
        if len(parts) == 2:
            return mpmath.log(parts[0]) / mpmath.log(parts[1])
        return mpmath.log10(parts[0])
    if name in NUMERIC:
        if name in ("exp", "sinh", "cosh", "tanh") and abs(parts[0]) > 2 * MAX_MAGNITUDE:
            raise TooLarge("an exponential is too large")
        if name in ("sinh", "cosh", "tanh") and SPAN in values:  # e to twice the argument is within them
            values[SPAN][0] = max(values[SPAN][0], float(abs(parts[0])))
        if abs(parts[0]) > MAX_ARGUMENT:
            raise TooLarge(f"the argument of {name} is too large")
        return NUMERIC[name](parts[0])
    if any(mpmath.im(part) for part in parts):
        raise Undefined(f"{name} of a complex number")
    if name in ("floor", "ceil"):
        return (mpmath.floor if name == "floor" else mpmath.ceil)(parts[0])
    if name in ("max", "min"):
        return max(parts) if name == "max" else min(parts)
    raise Undefined(name)


@lru_cache(maxsize=4096)
def _rational(name: str, number: int) -> Fraction:
    digest = hashlib.sha256(f"{name}/{number}".encode()).digest()
    return Fraction(int.from_bytes(digest[:6], "big") | 1, 1 << 47) + Fraction(1, 3)  # between 1/3 and 7/3


def point(name: str, number: int) -> Any:
    """The value of a symbol at point `number`, at mpmath's working precision; the same on every machine."""
    value = _rational(name, number)
    real = mpmath.mpf(value.numerator) / value.denominator
    if number < 4:
        return real
    if number < 6:
        return -real
    other = _rational(name + "i", number)
    return mpmath.mpc(real, mpmath.mpf(other.numerator) / other.denominator)


def symbols(tree: Tree) -> set[str]:
    """Names of the symbols of a tree."""
    if tree[0] == "sym":
        return {tree[1]}
    found: set[str] = set()
    for part in tree[1:]:
        if isinstance(part, tuple):
            found |= symbols(part)
    return found


def samples(trees: Sequence[Tree], digits: int, span: list[float] | None = None) -> Iterator[list[Any]]:
    """The trees' values at each point where all have one; span[0] becomes the largest absolute decimal exponent met.

    Raises TooLarge.
    """
    span = [0.0] if span is None else span
    names = sorted(set().union(*map(symbols, trees)))
    for number in range(POINTS if names else 1):
        with mpmath.workdps(digits + 10):
            try:
                values = {name: point(name, number) for name in names} | {SPAN: span}
                yield [numeric(tree, values) for tree in trees]
            except TooLarge:
                raise
            except (Undefined, ArithmeticError, ValueError):
                continue


def same_value(left: Tree, right: Tree, tolerance: Fraction | None = None) -> bool | None:
    """Whether two expressions are equal; None when no point can be computed. tolerance: largest absolute error.

    Raises TooLarge, Undefined.
    """
    if left == right:
        return True
    if _infinite(left) or _infinite(right):
        return False
    values = exact(left), exact(right)
    if None not in values:
        a, b = values
        return a == b or (tolerance is not None and abs(a - b) <= tolerance)  # type: ignore[operator]
    if tolerance is not None and not symbols(left) | symbols(right):
        with mpmath.workdps(DIGITS[0]):
            a, b = next(samples([left, right], DIGITS[0]), (None, None))  # type: ignore[assignment]
            return a is not None and bool(abs(a - b) <= mpmath.mpf(tolerance.numerator) / tolerance.denominator)
    span = [0.0]
    found = _agree(left, right, DIGITS[0], span)
    if found and span[0] > 40:  # too large or small for those digits to tell
        found = _agree(left, right, min(MAX_DIGITS, DIGITS[0] + int(span[0]) + 20), span)
    if not found:
        return found
    digits = DIGITS[1] + 2 * max(_digits(left), _digits(right)) + 4 * int(span[0])
    if digits > MAX_DIGITS:
        raise TooLarge("a difference may lie below all digits")
    return _agree(left, right, digits, span)


def _infinite(tree: Tree) -> bool:
    """Whether an expression contains infinity: it equals only an expression that is written the same."""
    return tree == ("const", "infty") or any(_infinite(part) for part in tree[1:] if isinstance(part, tuple) and part)


def _agree(left: Tree, right: Tree, digits: int, span: list[float]) -> bool | None:
    """Whether two expressions agree to `digits` digits at every point; None when no point can be computed.

    Rounding errors are relative to the largest number met within the expressions, given by span.
    """
    found, bound = None, span[0]
    for a, b in samples([left, right], digits, span):
        with mpmath.workprec(53):
            least = mpmath.mpf(10) ** ((bound or span[0]) - digits + 20)
        with mpmath.workdps(digits + 10):
            if abs(a - b) > least:
                return False
        found = True
    return found


def _digits(tree: Tree) -> int:
    """Decimal digits of the largest exact number within an expression: a difference may need that many digits."""
    value = None
    if tree[0] in _EXACT or tree[0] == "num":
        value = exact(tree)
    inner = max((_digits(part) for part in tree[1:] if isinstance(part, tuple)), default=0)
    return max(inner, _bits(value) * 3 // 10 if value is not None else 0)


def proportional(left: Tree, right: Tree, positive: bool = False) -> bool:
    """Whether left is a constant multiple of right, not 0: then left = 0 and right = 0 are the same equation.

    positive: the constant must be above 0, as for inequalities.
    """
    if symbols(left) != symbols(right) or not symbols(left):
        return False
    digits = DIGITS[0]
    ratio, count = None, 0
    with mpmath.workdps(digits):
        for a, b in samples([left, right], digits):
            if not a and not b:
                continue
            if not a or not b:
                return False
            if ratio is None:
                ratio = a / b
            elif abs(a / b - ratio) > abs(ratio) * mpmath.mpf(10) ** (-digits + 20):
                return False
            count += 1
    return count >= 3 and not (positive and (mpmath.im(ratio) or mpmath.re(ratio) <= 0))
