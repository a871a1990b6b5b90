"""The arithmetic task: "What is a op b?", generated from ranges, split once into training and held-out prompts.

With the defaults: 400 sums and 200 differences of 1..20 (no negative results), 81 products of 2..10; 519 to train on,
162 held out.
- a+b and b+a (and a*b, b*a) are on one side of the split, so a held-out answer cannot be looked up.
- A prompt whose answer equals its last operand is left out, so echoing the prompt never pays.
- `*` is printed as `x`, the way school books and the bundled model's training text write it: "What is 3 x 4?".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinyllm.config.options import read_settings, split_spec
from tinyllm.config.sections import opt
from tinyllm.errors import ConfigError

PRINTED = {"+": "+", "-": "-", "*": "x"}
"""How each operator stands in the prompt."""
MIN_HELD_OUT = 150
"""Fewer held-out prompts than this leave accuracy with an interval too wide to say anything (0.85 +- 0.06 at 150)."""
MAX_PAIRS = 1_000_000
"""Ranges that make more prompts than this are refused before they are generated."""


@dataclass(frozen=True)
class ArithmeticConfig:
    """The settings of the task: data.task = "arithmetic:operators=+|-,held_out=200"."""

    operators: tuple[str, ...] = opt(("+", "-", "*"), "operators to ask about: + - *")
    operands: tuple[int, int] = opt((1, 20), "smallest and largest operand of + and -", ge=0)
    factors: tuple[int, int] = opt((2, 10), "smallest and largest operand of *", ge=0)
    held_out: int = opt(162, "how many prompts are kept for evaluation", ge=1)
    seed: int = opt(0, "which prompts are kept; independent of the run's seed, so runs are comparable", ge=0)


def read_spec(spec: str) -> ArithmeticConfig:
    """The settings of a spec, "arithmetic" or "arithmetic:key=value,key=value". Raises ConfigError."""
    name, given = split_spec(spec)
    return read_settings(ArithmeticConfig, given, name)


def pairs(config: ArithmeticConfig) -> Iterator[tuple[str, int, int, int]]:
    """All (operator, a, b, answer) of the configured ranges, in a fixed order."""
    for operator in config.operators:
        low, high = config.factors if operator == "*" else config.operands
        for a in range(low, high + 1):
            for b in range(low, high + 1):
                answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
                if answer >= 0 and answer != b:
                    yield operator, a, b, answer


def generate(config: ArithmeticConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows held out: (train, held_out), each row {"prompt": str, "answer": str}.

    Deterministic in the configuration (config.seed picks the held-out rows). Whole classes of commuted pairs move,
    so held_out may be exceeded by one when no class of one is left.
    Raises ConfigError for unknown operators, empty ranges, and too few rows.
    """
    check(config)
    classes: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for operator, a, b, answer in pairs(config):
        key = (operator, a, b) if operator == "-" else (operator, min(a, b), max(a, b))
        row = {"prompt": f"What is {a} {PRINTED[operator]} {b}?", "answer": str(answer)}
        classes.setdefault(key, []).append(row)
    total = sum(map(len, classes.values()))
    if total <= config.held_out:
        raise ConfigError(
            f"arithmetic: the ranges give {total} prompts, not more than held_out = {config.held_out}; "
            "widen operands or factors"
        )
    order = list(classes)
    random.Random(config.seed).shuffle(order)
    kept: set[tuple[str, int, int]] = set()
    count = 0
    for exact in (True, False):
        for key in order:
            fits = count + len(classes[key]) <= config.held_out if exact else count < config.held_out
            if key not in kept and fits:
                kept.add(key)
                count += len(classes[key])
    train = [row for key, rows in classes.items() if key not in kept for row in rows]
    held_out = [row for key, rows in classes.items() if key in kept for row in rows]
    if not train:
        raise ConfigError(f"arithmetic.held_out = {config.held_out} leaves nothing to train on; widen the ranges")
    return train, held_out


def check(config: ArithmeticConfig) -> None:
    """Raises ConfigError naming the field, the value and the remedy."""
    if not config.operators:
        raise ConfigError("arithmetic.operators is empty; choose from + - *")
    for operator in config.operators:
        if operator not in PRINTED:
            raise ConfigError(f"arithmetic.operators has {operator!r}; choose from + - *")
    if len(set(config.operators)) < len(config.operators):
        raise ConfigError(f"arithmetic.operators names one twice: {' '.join(config.operators)}")
    for name, (low, high) in (("operands", config.operands), ("factors", config.factors)):
        if low > high:
            raise ConfigError(f"arithmetic.{name} = {low},{high}: the first number is the smallest, so swap them")
        if (high - low + 1) ** 2 > MAX_PAIRS:
            raise ConfigError(f"arithmetic.{name} = {low},{high} gives over {MAX_PAIRS} pairs; narrow the range")
    if config.held_out < MIN_HELD_OUT:
        raise ConfigError(
            f"arithmetic.held_out = {config.held_out} is too few to measure accuracy; keep at least {MIN_HELD_OUT}"
        )
