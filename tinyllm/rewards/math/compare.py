"""Equality of two answers, as trees of reader.py: lists, sets, intervals, equations, inequalities, units, texts,
expressions. gold: the row's answer; answer: the completion's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tinyllm.rewards.math.reader import Tree
from tinyllm.rewards.math.value import FLIPPED, Undefined, exact, proportional, same_value, samples, symbols
from tinyllm.rewards.text.arithmetic import ALIASES

EXPRESSIONS = frozenset("num const sym neg add mul div pow fact binom func".split())
MAX_ITEMS = 200


@dataclass(frozen=True)
class CompareRules:
    """Differences between gold and answer that a task allows."""

    kind: str = "auto"
    """interval: an inequality may state an interval; equation: a bare value does not equal the gold's equation; angle:
    degrees may state radians."""
    percent_asked: bool = False
    """Whether 7% equals 7 instead of 0.07."""
    waive_units: bool = False
    """Whether units are ignored."""
    tolerance: Fraction | None = None
    """Largest absolute error of an answer written as a decimal number; None: none."""


def same(gold: Tree, answer: Tree, rules: CompareRules) -> bool | None:
    """Whether two answers are equal; None when that cannot be decided. Raises TooLarge."""
    if gold == answer:
        return True
    gold_items, answer_items = items(gold), items(answer)
    if gold_items is not None or answer_items is not None:
        if gold_items is None or answer_items is None:
            return False
        return _same_items(gold_items, answer_items, rules)
    gold, answer = _unwrapped(gold, rules), _unwrapped(answer, rules)
    if gold[0] == "unit" or answer[0] == "unit":
        return _same_unit(gold, answer, rules)
    if gold[0] == "rel" or answer[0] == "rel":
        return _same_relation(gold, answer, rules)
    if gold[0] in EXPRESSIONS and answer[0] in EXPRESSIONS:
        return same_value(gold, answer, rules.tolerance if _is_decimal(answer) else None)
    if gold[0] != answer[0] or gold[0] in ("text", "base"):
        return gold == answer
    if gold[0] == "union":
        return _same_items(list(gold[1:]), list(answer[1:]), rules)
    if gold[0] == "matrix":
        shapes = [[len(row) for row in tree[1:]] for tree in (gold, answer)]
        cells = [[cell for row in tree[1:] for cell in row] for tree in (gold, answer)]
        return shapes[0] == shapes[1] and _all(cells[0], cells[1], rules)
    if gold[0] == "ratio":
        if any(all(exact(part) == 0 for part in tree[1:]) for tree in (gold, answer)):
            return False  # 0 : 0 is no ratio
        cross = [(("mul", g, answer[1]), ("mul", a, gold[1])) for g, a in zip(gold[2:], answer[2:], strict=False)]
        return len(gold) == len(answer) and all(same_value(left, right) for left, right in cross)
    return gold[1:3] == answer[1:3] and _all(gold[3:], answer[3:], rules)


def _is_decimal(tree: Tree) -> bool:
    """Whether an answer is written as a decimal or whole number: the tolerance holds only for these."""
    return tree[0] == "num" or (tree[0] == "neg" and tree[1][0] == "num")


def items(tree: Tree) -> list[Tree] | None:
    """The values of an answer with several (a list, a set, plus-minus); None for an answer with one value."""
    if tree[0] == "list":
        flat = [item for part in tree[1:] for item in (items(part) or [part])]
        return flat[: MAX_ITEMS + 1]
    if tree[0] == "seq" and tree[1] == "\\{":
        return list(tree[3:])
    if _has_sign(tree):
        return [signed(tree, 1), signed(tree, -1)]
    return None


def _has_sign(tree: Tree) -> bool:
    return tree[0] in ("pm", "mp") or any(isinstance(part, tuple) and part and _has_sign(part) for part in tree[1:])


def signed(tree: Tree, sign: int) -> Tree:
    """The tree with `sign` (1 or -1) in place of every plus-minus, and the opposite sign for minus-plus."""
    if tree[0] in ("pm", "mp"):
        inner = signed(tree[1], sign)
        return inner if (sign > 0) == (tree[0] == "pm") else ("neg", inner)
    return tuple(signed(part, sign) if isinstance(part, tuple) and part else part for part in tree)


def _same_items(gold: Sequence[Tree], answer: Sequence[Tree], rules: CompareRules) -> bool:
    if max(len(gold), len(answer)) > MAX_ITEMS:
        return False
    gold, answer = _distinct(gold, rules), _distinct(answer, rules)
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in gold:
        match = next((other for other in left if same(item, other, rules)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _distinct(values: Sequence[Tree], rules: CompareRules) -> list[Tree]:
    found: list[Tree] = []
    for value in values:
        if not any(same(value, other, rules) for other in found):
            found.append(value)
    return found


def _all(gold: Sequence[Tree], answer: Sequence[Tree], rules: CompareRules) -> bool:
    return len(gold) == len(answer) and all(same(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _unwrapped(tree: Tree, rules: CompareRules) -> Tree:
    """The tree without its unit, where that is a percent sign, an angle's degrees or radians, or waived."""
    if tree[0] != "unit":
        return tree
    name = ALIASES.get(tree[2], tree[2])
    if name == "%":
        return tree[1] if rules.percent_asked else ("div", tree[1], ("num", Fraction(100)))
    if rules.waive_units:
        return tree[1]
    if rules.kind == "angle" and name in ("rad", "radians"):
        return tree[1]
    if rules.kind == "angle" and name == "\u00b0":
        return ("div", ("mul", tree[1], ("const", "pi")), ("num", Fraction(180)))
    return tree


def _same_unit(gold: Tree, answer: Tree, rules: CompareRules) -> bool | None:
    if gold[0] != answer[0]:
        return False
    left, right = (ALIASES.get(tree[2], tree[2]) for tree in (gold, answer))
    return left == right and same(gold[1], answer[1], rules)


# Equations and inequalities


def _same_relation(gold: Tree, answer: Tree, rules: CompareRules) -> bool | None:
    if gold[0] == answer[0] == "rel":
        if set(gold[2::2]) == set(answer[2::2]) == {"="} and len(gold) == len(answer) == 4:
            left, right = _assigned(gold), _assigned(answer)
            if left and right and left[0] == right[0]:
                return same(left[1], right[1], rules)
            return proportional(_difference(gold), _difference(answer))
        return _same_inequality(gold, answer, rules)
    if rules.kind == "interval":
        spans = [interval(tree) if tree[0] == "rel" else tree for tree in (gold, answer)]
        return None not in spans and same(spans[0], spans[1], rules)  # type: ignore[arg-type]
    relation, value = (gold, answer) if gold[0] == "rel" else (answer, gold)
    if rules.kind == "equation" and relation is gold:
        return False
    if set(relation[2::2]) != {"="}:
        return False
    assigned = _assigned(relation)
    if assigned:
        return same(assigned[1], value, rules)
    if relation is answer and not symbols(relation):  # 2 + 3 = 5 says 5, when it is true
        sides = relation[1::2]
        return all(same_value(side, sides[-1]) for side in sides) and same(value, sides[-1], rules)
    return False


def _assigned(relation: Tree) -> tuple[str, Tree] | None:
    """(name, value) of "x = value" or "value = x" where the value does not contain x; else None."""
    if len(relation) != 4 or relation[2] != "=":
        return None
    left, right = relation[1], relation[3]
    if left[0] == "seq" == right[0] and all(part[0] == "sym" for part in left[3:]) and len(left) == len(right):
        return str(left[3:]), right  # (x, y) = (1, 2)
    for name, value in ((left, right), (right, left)):
        if name[0] == "sym" and name[1] not in symbols(value):
            return name[1], value
    return None


def _difference(relation: Tree) -> Tree:
    return ("add", relation[1], ("neg", relation[3]))


def _same_inequality(gold: Tree, answer: Tree, rules: CompareRules) -> bool:
    spans = interval(gold), interval(answer)
    if None not in spans:
        return symbols(gold) == symbols(answer) and bool(same(spans[0], spans[1], rules))  # type: ignore[arg-type]
    if len(gold) != 4 or len(answer) != 4:
        return False
    for turned in (answer, ("rel", answer[3], FLIPPED[answer[2]], answer[1])):
        if turned[2] == gold[2] and proportional(_difference(gold), _difference(turned), positive=gold[2] not in "!="):
            return True
    return False


def interval(relation: Tree) -> Tree | None:
    """The interval of x that an inequality states (x < b, a <= x, a < x <= b); None for other relations."""
    low: tuple[str, Tree] = ("(", ("neg", ("const", "infty")))
    high: tuple[str, Tree] = (")", ("const", "infty"))
    sides, signs = relation[1::2], relation[2::2]
    for left, sign, right in zip(sides, signs, sides[1:], strict=False):
        if right[0] == "sym":
            left, sign, right = right, FLIPPED[sign], left
        if left[0] != "sym" or symbols(right) or sign in ("=", "!="):
            return None
        if sign[0] == "<":
            high = ("]" if sign == "<=" else ")", right)
        else:
            low = ("[" if sign == ">=" else "(", right)
    return ("seq", low[0], high[0], low[1], high[1]) if len(symbols(relation)) == 1 else None


def check_value(tree: Tree) -> None:
    """Check that every expression of a gold's tree has a value. Raises TooLarge or Undefined."""
    if tree[0] in EXPRESSIONS:
        if _has_sign(tree) or tree[0] == "const" or (tree[0] == "neg" and tree[1] == ("const", "infty")):
            return
        if exact(tree) is None and next(samples([tree], 30), None) is None:
            raise Undefined("it has no value")
        return
    for part in tree[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            check_value(part)
