"""Checks of answers to reasoning-gym tasks: functions (gold, metadata) -> (answer text -> right or wrong).

Rows come from reasoning-gym's generators. Its scoring functions are not used: some evaluate model text as code, or
accept nan, prefixes and wrong answers close to the gold.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from tinyllm.errors import require_extra
from tinyllm.rewards.gym.readers import FormulaReader, arithmetic, letters, truth
from tinyllm.rewards.math.compare import CompareRules
from tinyllm.rewards.math.compare import same as same_answer
from tinyllm.rewards.math.reader import Tree, read
from tinyllm.rewards.math.tokens import Unreadable
from tinyllm.rewards.math.value import TooLarge, Undefined, numeric, symbols
from tinyllm.rewards.text.numbers import read_number

Check = Callable[[str], bool]
Metadata = Mapping[str, Any]
MAX_CHARS = 20_000
MAX_VARIABLES = 12


class BadGold(ValueError):
    """The row cannot be judged; the message says why."""


def same_by(reader: Callable[[str], Any], what: str) -> Callable[[str, Metadata], Check]:
    """A check that `reader` reads the same value from the answer as from the gold.

    reader: text -> value, None for a text that is not a `what`.
    """

    def make(gold: str, metadata: Metadata) -> Check:
        want = reader(gold)
        if want is None:
            raise BadGold(f"gold {gold!r} is no {what}")
        return lambda answer: reader(answer) == want

    return make


def factors_check(gold: str, metadata: Metadata) -> Check:
    """The answer has the gold's prime factors, in any order."""
    check = same_by(_factors, "product of whole numbers")(gold, metadata)
    if not all(_is_prime(factor) for factor in _factors(gold) or ()):
        raise BadGold(f"gold {gold!r} has a factor that is not prime")
    return check


def math_check(gold: str, metadata: Metadata) -> Check:
    """The answer is an expression equal to the gold."""
    want = _read(gold)
    if want is None:
        raise BadGold(f"gold {gold!r} does not read as mathematics")

    def check(answer: str) -> bool:
        found = _read(answer)
        try:
            return found is not None and same_answer(want, found, CompareRules()) is True
        except (TooLarge, Undefined):
            return False

    return check


def choice_check(gold: str, metadata: Metadata) -> Check:
    """The answer is one of the metadata's valid_answers, or the gold when they are missing."""
    given = metadata.get("valid_answers")
    if not given and gold.strip().lower() in ("", "none"):
        raise BadGold("it has neither a gold nor valid_answers")
    valid = [_lines(str(text)) for text in given or [gold]]
    return lambda answer: _lines(answer) in valid


def countdown_check(gold: str, metadata: Metadata) -> Check:
    """The answer is an expression of exactly the given numbers with the target's value; "= target" may follow it."""
    numbers, target = metadata.get("numbers"), metadata.get("target")
    if not numbers or not isinstance(target, int):
        raise BadGold("metadata lacks numbers or target")
    want = sorted(int(number) for number in numbers)

    def check(answer: str) -> bool:
        expression, equals, right = answer.partition("=")
        if equals and ((stated := read_number(right)) is None or stated.value != target):
            return False
        found = arithmetic(expression)
        return found is not None and found[0] == target and sorted(found[1]) == want

    return check


def puzzle24_check(gold: str, metadata: Metadata) -> Check:
    """As countdown_check, with target 24."""
    return countdown_check(gold, {"numbers": metadata.get("numbers"), "target": 24})


def integral_check(gold: str, metadata: Metadata) -> Check:
    """The answer is an antiderivative, with at most one constant: its slope equals the integrand at fixed points."""
    variable = str(metadata.get("variable", "x"))
    integrand = _read(str(metadata.get("integrand", "")))
    if integrand is None or symbols(integrand) - {variable}:
        raise BadGold("metadata lacks an integrand that reads as mathematics in its variable")

    def check(answer: str) -> bool:
        tree = _read(answer)
        if tree is None or symbols(tree) - {variable, "C", "c", "K", "k"} or len(symbols(tree) - {variable}) > 1:
            return False
        others = {name: mpmath.mpf(1) for name in symbols(tree) - {variable}}
        agreed = 0
        with mpmath.workdps(60):
            for point in (mpmath.mpf(7) / 11, mpmath.mpf(13) / 9, mpmath.mpf(29) / 13, mpmath.mpf(5) / 3):
                try:
                    slope = mpmath.diff(lambda value: numeric(tree, {variable: value, **others}), point)
                    want = numeric(integrand, {variable: point})
                except (Undefined, TooLarge, ArithmeticError, ValueError):
                    continue
                if abs(slope - want) > mpmath.mpf(10) ** -20 * max(1, abs(want)):
                    return False
                agreed += 1
        return agreed >= 3

    if gold.strip().lower() not in ("", "none") and not check(gold):
        raise BadGold(f"gold {gold[:60]!r} is no antiderivative of the integrand that reads as mathematics")
    return check


def moves_check(gold: str, metadata: Metadata) -> Check:
    """The answer is a list of turns, and nothing else, that solves the scrambled cube. Needs the package magiccube."""
    size, scramble = metadata.get("cube_size"), metadata.get("scramble_moves")
    if not isinstance(size, int) or not isinstance(scramble, str):
        raise BadGold("metadata lacks cube_size or scramble_moves")
    if not 2 <= size <= 20 or not all(re.fullmatch(r"[UDLRFB][2']?", turn) for turn in scramble.split()):
        raise BadGold("cube_size is not 2 to 20, or scramble_moves are not turns")

    def check(answer: str) -> bool:
        require_extra("gym", "a gym task about cubes")
        from magiccube.cube import Cube

        turns = answer.split()
        if not turns or len(turns) > 500 or not all(re.fullmatch(r"[UDLRFB][2']?", turn) for turn in turns):
            return False
        cube = Cube(size)
        cube.rotate(scramble)
        cube.rotate(" ".join(f"{turn[0]} {turn[0]}" if turn.endswith("2") else turn for turn in turns))
        return bool(cube.is_done())

    return check


def entailed_check(gold: str, metadata: Metadata) -> Check:
    """The answer is a formula that follows from the premises, and is neither a tautology nor one of the premises."""
    names = [str(name) for name in metadata.get("variables") or ()]
    premises = [FormulaReader(str(text)).read() for text in metadata.get("premises") or ()]
    known = [premise for premise in premises if premise is not None]
    if not names or not known or len(known) < len(premises) or len(names) > MAX_VARIABLES:
        raise BadGold("metadata lacks variables or premises that can be read")
    rows = [dict(zip(names, row, strict=True)) for row in itertools.product((False, True), repeat=len(names))]
    worlds = [row for row in rows if all(truth(premise, row) for premise in known)]
    if not worlds:
        raise BadGold("the premises contradict each other, so anything follows")

    def check(answer: str) -> bool:
        formula = FormulaReader(answer).read()
        if formula is None or formula in known or letters(formula) - set(names):
            return False
        return all(truth(formula, row) for row in worlds) and not all(truth(formula, row) for row in rows)

    return check


# Readers


def _lines(text: str) -> list[str]:
    """Lines of a text; runs of white space become one space, and none is left at the ends of a line."""
    return [" ".join(line.split()) for line in text.strip().split("\n")]


def _number(text: str) -> Fraction | int | None:
    """The value of a number in the grammar of text/numbers.py."""
    number = read_number(text)
    return number.value if number else None


def _words(text: str) -> list[str]:
    """Words separated by commas, brackets around the whole removed."""
    return [word.strip() for word in text.strip("[] ").split(",")]


def _truth(text: str) -> str | None:
    word = text.strip().lower()
    return word if word in ("true", "false") else None


def _numbers(text: str) -> list[Fraction | int] | None:
    """Numbers in order, written as [1, '2'], as 1 2 or as 1, 2; None for other texts."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    if text.startswith("[") != text.endswith("]"):
        return None
    inside = text[1:-1] if text.startswith("[") else text
    parts = [part.strip() for part in (inside.split(",") if "," in inside else inside.split())]
    found = [
        read_number(part[1:-1] if len(part) > 1 and part[0] == part[-1] and part[0] in "'\"" else part)
        for part in parts
    ]
    return None if None in found or not found else [number.value for number in found if number]


def _grid(text: str) -> list[list[str]] | None:
    """Rows of cells, from a list of lists or lines of words; None when the rows differ in length."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    if text.startswith("["):
        if not re.fullmatch(r"\[\s*(?:\[[^\[\]]*\]\s*,?\s*)*\]", text):
            return None
        rows = [[cell.strip().strip("'\"") for cell in row.split(",")] for row in re.findall(r"\[([^\[\]]*)\]", text)]
    else:
        rows = [line.split() for line in text.split("\n")]
    return rows if rows and all(rows) and len({len(row) for row in rows}) == 1 else None


def _factors(text: str) -> list[int] | None:
    parts = re.split(r"\s*[\u00d7*x]\s*", text.strip())
    if not all(re.fullmatch(r"[0-9]{1,40}", part) for part in parts):
        return None
    return sorted(int(part) for part in parts)


def _is_prime(number: int) -> bool:
    """Whether a number has no divisor from 2 to a million (or its square root): exact up to 10^12."""
    return number > 1 and all(number % divisor for divisor in range(2, min(math.isqrt(number), 10**6) + 1))


def _read(text: str) -> Tree | None:
    try:
        return read(re.sub(r"\bE\b", "e", text))
    except Unreadable:
        return None


_BY_CHECK: dict[Callable[[str, Metadata], Check], str] = {
    same_by(_lines, "text"): """
        ab acre aiw base_conversion bf binary_alternation caesar_cipher circuit_logic color_cube_rotation
        course_schedule dice emoji_mystery futoshiki family_relationships fraction_simplification isomorphic_strings
        letter_jumble mahjong_puzzle maze needle_haystack ransom_note sentence_reordering spell_backward
        string_insertion string_manipulation string_splitting string_synthesis syllogism time_intervals
        word_sequence_reversal zebra_puzzles""",
    same_by(_number, "number"): """
        basic_arithmetic chain_sum coin_flip count_bits count_primes decimal_arithmetic decimal_chain_sum gcd
        gsm_symbolic largest_island lcm leg_counting letter_counting number_sequence products rectangle_count
        rotten_oranges simple_equations""",
    same_by(_numbers, "list of numbers"): "number_filtering number_sorting spiral_matrix",
    same_by(_words, "list of words"): "word_sorting",
    same_by(_grid, "grid"): "binary_matrix game_of_life manipulate_matrix mini_sudoku pool_matrix rotate_matrix sudoku",
    same_by(_truth, "truth value"): "game_of_life_halting",
    math_check: "complex_arithmetic polynomial_multiplication",
    integral_check: "intermediate_integration simple_integration",
    factors_check: "prime_factorization",
    choice_check: "n_queens",
    countdown_check: "countdown",
    puzzle24_check: "puzzle24",
    moves_check: "rubiks_cube",
    entailed_check: "propositional_logic",
}
CHECKS = {name: check for check, names in _BY_CHECK.items() for name in names.split()}
"""Data set -> its check; a data set without an entry is refused when the rows are loaded."""


_SOLVERS: dict[str, Callable[[Metadata], str]] = {
    "gcd": lambda data: str(math.gcd(*map(int, data["numbers"]))),
    "lcm": lambda data: str(math.lcm(*map(int, data["numbers"]))),
    "count_bits": lambda data: str(int(data["number"]).bit_count()),
    "spell_backward": lambda data: str(data["word"])[::-1],
    "word_sequence_reversal": lambda data: ", ".join(reversed(data["words"])),
    "word_sorting": lambda data: ", ".join(sorted(data["transformed_words"], reverse=data["direction"] != "ascending")),
    "number_sorting": lambda data: str(
        sorted(data["original_numbers"], key=Fraction, reverse=data["direction"] != "ascending")
    ),
    "spiral_matrix": lambda data: " ".join(map(str, data["solution"])),
    "letter_counting": lambda data: str(sum(word.lower().count(data["target_letter"]) for word in data["span"])),
    "chain_sum": lambda data: str(_arithmetic_value(data["expression"])),
    "products": lambda data: str(_arithmetic_value(data["expression"])),
    "game_of_life_halting": lambda data: str(not data["should_oscillate"]),
}
"""Data set -> function that computes the answer from the metadata; a row whose gold differs from it is refused."""


def _arithmetic_value(text: str) -> Fraction:
    found = arithmetic(text)
    if found is None:
        raise ValueError(text)
    return found[0]


def wrong_gold(name: str, gold: str, metadata: Metadata) -> str:
    """The answer that the metadata imply where the gold is not it; "" when they agree or imply none."""
    try:
        solved = _SOLVERS[name](metadata) if name in _SOLVERS else ""
        number = metadata.get("number") if name == "prime_factorization" else None
        if number is not None and math.prod(_factors(gold) or [0]) != int(number):
            return f"a product of {number}"
        return "" if not solved or CHECKS[name](solved, metadata)(gold) else solved
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return ""


OPEN_GOLDS = frozenset("countdown puzzle24 propositional_logic n_queens rubiks_cube".split())
"""Data sets whose check needs only the metadata, so that a row's gold may be missing or "none"."""
