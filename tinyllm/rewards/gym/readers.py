"""Readers of two small languages of reasoning-gym answers: arithmetic on whole numbers, and propositional logic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_FORMULA_DEPTH = 60

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """(exact value, whole numbers used) of + - * / and brackets over ASCII digits; None for anything else.

    Python's parser makes the tree, after a check of the characters; only the tree's forms named here are computed.
    """
    text = text.strip().replace("\u2212", "-").replace("\u00d7", "*").replace("\u00f7", "/").replace("\u22c5", "*")
    if len(text) > 500 or not re.fullmatch(r"[0-9+\-*/() ]+", text) or re.search(r"\*\*|//|[0-9]{20}", text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            inner = value(node.operand)
            return -inner if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("not arithmetic")

    try:
        return value(tree), used
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


# Propositional logic

_SIGNS = str.maketrans("\u2227\u2228\u00ac\u2192\u2194~", "&|!>=!")
_WORDS = {"<->": "=", "->": ">", "&&": "&", "||": "|"}
"""Other ways to write the signs; a longer one comes first."""
Formula = tuple[Any, ...]


class FormulaReader:
    """Recursive descent over ! & | > = and brackets, loosest last."""

    def __init__(self, text: str) -> None:
        for word, sign in _WORDS.items():
            text = text.replace(word, sign)
        self.text = "".join(text.translate(_SIGNS).split())
        self.at = 0
        self.depth = 0

    def read(self) -> Formula | None:
        """The formula of the whole text; None when it does not read."""
        if not 0 < len(self.text) <= 2_000:
            return None
        try:
            formula = self._level(0)
        except ValueError:
            return None
        return formula if self.at == len(self.text) else None

    def _level(self, level: int) -> Formula:
        if level == 4:
            return self._atom()
        formula = self._level(level + 1)
        sign = "=>|&"[level]
        while self.at < len(self.text) and self.text[self.at] == sign:
            self.at += 1
            formula = (sign, formula, self._level(level if sign == ">" else level + 1))
        return formula

    def _atom(self) -> Formula:
        self.depth += 1
        if self.depth > MAX_FORMULA_DEPTH or self.at >= len(self.text):
            raise ValueError("not a formula")
        char = self.text[self.at]
        self.at += 1
        if char == "!":
            formula: Formula = ("!", self._atom())
        elif char == "(":
            formula = self._level(0)
            if self.text[self.at : self.at + 1] != ")":
                raise ValueError("a bracket is not closed")
            self.at += 1
        elif "A" <= char <= "Z":
            formula = (char,)
        else:
            raise ValueError("not a formula")
        self.depth -= 1
        return formula


def letters(formula: Formula) -> set[str]:
    """The variables of a formula."""
    if len(formula) == 1:
        return {formula[0]}
    return set().union(*(letters(part) for part in formula[1:]))


def truth(formula: Formula, row: Mapping[str, bool]) -> bool:
    """Whether a formula is true where its variables have these values."""
    if len(formula) == 1:
        return row.get(formula[0], False)
    if formula[0] == "!":
        return not truth(formula[1], row)
    left, right = truth(formula[1], row), truth(formula[2], row)
    return {"&": left and right, "|": left or right, ">": not left or right, "=": left == right}[formula[0]]
