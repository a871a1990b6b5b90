"""A row's condition on a result ("abs(xs[0] + xs[1]*x) < 1e-4"), by an evaluator of a closed set of forms."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Sequence
from typing import Any

_BINARY: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Any] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: dict[str, Any] = {"abs": abs, "len": len, "sum": sum, "min": min, "max": max, "sorted": sorted}
_FORMS = ast.Compare | ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.Name | ast.Constant | ast.Subscript | ast.Call
_FORMS |= ast.operator | ast.cmpop | ast.boolop | ast.unaryop | ast.expr_context
MAX_POWER = 64
MAX_BITS = 100_000


class ConditionError(ValueError):
    """The condition is not of the closed forms; the message says which part."""


class Condition:
    """A comparison in the function's parameters and its result; the one other name is the result."""

    def __init__(self, text: str, parameters: Sequence[str]) -> None:
        try:
            self._tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ConditionError(f"not an expression ({error})") from None
        names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)} - set(_CALLS)
        results = names - set(parameters)
        if len(results) != 1:
            raise ConditionError(
                f"names {', '.join(sorted(results)) or 'nothing'} beside the parameters; name the result once"
            )
        if not isinstance(self._tree, (ast.Compare, ast.BoolOp)):
            raise ConditionError("not a comparison")
        self._parameters, self._result = tuple(parameters), results.pop()
        self._check(self._tree)

    def holds(self, arguments: Sequence[Any], result: Any) -> bool:
        """Whether it is true; a result of another type, or not a finite number, makes it false."""
        values = dict(zip(self._parameters, arguments, strict=False)) | {self._result: result}
        if not _finite(result):
            return False
        try:
            return self._value(self._tree, values) is True
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
            return False

    def _check(self, node: ast.AST) -> None:
        for part in ast.walk(node):
            if not isinstance(part, _FORMS) or isinstance(part, (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
                raise ConditionError(f"{type(part).__name__} is not allowed")
            if isinstance(part, ast.Call) and (
                not isinstance(part.func, ast.Name) or part.func.id not in _CALLS or part.keywords
            ):
                raise ConditionError(f"only {', '.join(_CALLS)} may be called")
            if isinstance(part, ast.BinOp) and type(part.op) not in _BINARY and not isinstance(part.op, ast.Pow):
                raise ConditionError(f"{type(part.op).__name__} is not allowed")

    def _value(self, node: ast.AST, values: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.Subscript):
            return self._value(node.value, values)[self._value(node.slice, values)]
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            return _CALLS[node.func.id](*(self._value(part, values) for part in node.args))
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, values)
            return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else +value
        if isinstance(node, ast.BoolOp):
            parts = (self._value(part, values) is True for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.Compare):
            sides = [self._value(part, values) for part in (node.left, *node.comparators)]
            return all(
                _COMPARE[type(op)](*pair)
                for op, pair in zip(node.ops, zip(sides, sides[1:], strict=False), strict=True)
            )
        assert isinstance(node, ast.BinOp)
        left, right = self._value(node.left, values), self._value(node.right, values)
        if isinstance(left, (str, list)) or isinstance(right, (str, list)):
            raise TypeError("arithmetic on what is no number")
        if isinstance(node.op, ast.Pow):
            if abs(right) > MAX_POWER:
                raise ValueError("a power is too large")
            return left**right
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise ValueError("a number is too large")
        return result


def _finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_finite, value))
    return isinstance(value, str) or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
