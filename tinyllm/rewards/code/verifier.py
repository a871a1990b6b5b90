"""Family "code": Python functions and programs, run in a fresh sandbox (sandbox.py) and judged outside it.

Columns of a row: `entry` (name of the function) and `calls` (a list of [[arguments], value]); or `stdio` (a list of
[input, output]); or `entry`, `inputs` and `residual`, a condition on the result x and the function's parameters. `tol`:
largest absolute or relative error. `entry` may be left out when the prompt names the function, as in "add(a, b)".
`solution`: reference code, run when the rows are loaded.

Every call must report its value, in order, marked with the run's secret. A value is right when it is the expected plain
data: true is not 1, an instance of a subclass of a number is not a number, a tuple is a list, 5.0 is 5. For functions,
exit status, printed verdicts and files have no effect.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tinyllm.errors import DataError, RewardError
from tinyllm.records import Unscored, Verdict
from tinyllm.rewards.base import Row, SelfTest, Verifier, correct, prompt_text
from tinyllm.rewards.code import sandbox
from tinyllm.rewards.code.condition import Condition, ConditionError
from tinyllm.rewards.code.sandbox import Limits, Outcome
from tinyllm.rewards.text.extract import after_think, cut
from tinyllm.rewards.text.numbers import digits_to_int

MAX_SOURCE_CHARS = 100_000
MAX_TESTS = 1_000
MAX_DIGITS = 100_000
_SIGNATURE = re.compile(r"\b([A-Za-z_]\w*)\(([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)?\)")


@dataclass(frozen=True)
class Tests:
    """The checked tests of a row."""

    kind: Literal["calls", "stdio", "residual"]
    entry: str
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]
    tolerance: float
    condition: Condition | None = None


@dataclass(frozen=True)
class CodeVerifier(Verifier):
    """Settings of the family."""

    family: ClassVar[str] = "code"
    in_process: ClassVar[bool] = False
    sandbox: Literal["auto", "bubblewrap", "landlock", "unsafe-no-sandbox"] = "auto"
    """auto: the strongest sandbox that works on this machine; unsafe-no-sandbox: a bare process, for trusted code."""
    cpu_s: float = 4.0
    """Limit of CPU seconds for one run: all calls of a function, or one input of a program."""
    wall_s: float = 8.0
    memory_mb: int = 512
    think_prefilled: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("cpu_s", 0.1, 600), ("wall_s", 0.1, 600), ("memory_mb", 64, 65536)):
            if not low <= getattr(self, name) <= high:
                raise RewardError(f"code.{name} = {getattr(self, name)}; give {low} to {high}")

    def describe(self) -> dict[str, Any]:
        return sandbox.describe(self.sandbox)

    def warm_up(self) -> None:
        sandbox.choose(self.sandbox)

    def time_limit(self, row: Row) -> float:
        runs = len(row.get("stdio") or [None])
        return runs * (self.wall_s + 1) + sandbox.START_S

    def check(self, row: Row) -> Tests:
        tests = read_tests(row)
        for value in (*tests.inputs, *tests.expected):
            if not _is_plain(value):
                what = tests.entry or "the program"
                raise DataError(f"a test of {what} holds {value!r:.60}, which is NaN or not plain data")
        return tests

    def judge(self, row: Row, text: str) -> Verdict:
        tests = self.check(row)
        source = find_code(after_think(cut(text), self.think_prefilled), tests.entry)
        if source is None:
            return correct(False, None)
        try:
            return correct(self._passes(tests, source), source)
        except sandbox.SandboxError as error:
            return Verdict(None, f"sandbox failed: {error}", source[:200], cause=Unscored.DIED)

    def explain(self, row: Row, text: str) -> str:
        tests = read_tests(row)
        source = find_code(after_think(cut(text), self.think_prefilled), tests.entry)
        if source is None:
            return "no code that can be used"
        if tests.kind == "stdio":
            return ""
        outcome = self._run(_request(tests, source))
        return f"stopped by its limit of {outcome.stopped}" if outcome.stopped else "; ".join(outcome.reports[1:])[:300]

    def probes(self, row: Row) -> list[SelfTest]:
        tests = read_tests(row)
        stub = f"def {tests.entry}(*_):\n    return None" if tests.entry else "print('none of it')"
        found = [SelfTest("a stub", f"```python\n{stub}\n```", 0)]
        if row.get("solution"):
            found.insert(0, SelfTest("reference solution", f"```python\n{row['solution']}\n```", 1))
        return found

    def _run(self, request: dict[str, Any], stdin: bytes = b"") -> Outcome:
        return sandbox.run(request, stdin, Limits(self.cpu_s, self.wall_s, self.memory_mb), self.sandbox)

    def _passes(self, tests: Tests, source: str) -> bool:
        if tests.kind == "stdio":
            return all(
                self._prints(source, given, expected, tests.tolerance)
                for given, expected in zip(tests.inputs, tests.expected, strict=True)
            )
        outcome = self._run(_request(tests, source))
        values = _values(outcome, len(tests.inputs))
        if values is None:
            return False
        if tests.condition is not None:
            return all(tests.condition.holds(given, value) for given, value in zip(tests.inputs, values, strict=True))
        return all(same(want, value, tests.tolerance) for want, value in zip(tests.expected, values, strict=True))

    def _prints(self, source: str, given: str, expected: str, tolerance: float) -> bool:
        outcome = self._run({"kind": "program", "source": source}, given.encode())
        if outcome.stopped or outcome.exit_code:
            return False
        return same_output(expected, outcome.output.decode("utf-8", "replace"), tolerance)


def _request(tests: Tests, source: str) -> dict[str, Any]:
    return {"kind": "calls", "source": source, "entry": tests.entry, "calls": [list(given) for given in tests.inputs]}


# Tests of a row


def read_tests(row: Row) -> Tests:
    """The row's tests. Raises DataError when the row has none, or none in the form of the module's docstring."""
    tolerance = row.get("tol") or 0.0
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise DataError(f"tol = {tolerance!r}; give a number not below 0")
    if row.get("stdio"):
        pairs = _pairs(row["stdio"], "stdio")
        if not all(isinstance(side, str) for pair in pairs for side in pair):
            raise DataError("stdio holds what is no text; give [input, output] texts")
        return Tests("stdio", "", tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), tolerance)
    entry, parameters = _signature(row)
    if row.get("calls"):
        pairs = _pairs(row["calls"], "calls")
        if not all(isinstance(pair[0], (list, tuple)) for pair in pairs):
            raise DataError("calls holds arguments that are no list; give [[arguments], value]")
        inputs = tuple(tuple(pair[0]) for pair in pairs)
        return Tests("calls", entry, inputs, tuple(pair[1] for pair in pairs), tolerance)
    if row.get("residual") and row.get("inputs"):
        inputs = tuple((given,) if len(parameters) == 1 else tuple(given) for given in _sized(row["inputs"], "inputs"))
        try:
            condition = Condition(str(row["residual"]), parameters)
        except ConditionError as error:
            raise DataError(f"residual {row['residual']!r}: {error}") from None
        return Tests("residual", entry, inputs, (), tolerance, condition)
    raise DataError("the row has no tests; give calls, stdio, or residual with inputs")


def _sized(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise DataError(f"{name} is a text that is not JSON") from None
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_TESTS:
        raise DataError(f"{name} is no list of 1 to {MAX_TESTS} tests")
    return value


def _pairs(value: Any, name: str) -> list[tuple[Any, Any]]:
    pairs = _sized(value, name)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{name} holds what is no pair")
    return [(pair[0], pair[1]) for pair in pairs]


def _signature(row: Row) -> tuple[str, tuple[str, ...]]:
    """(name of the function, names of its parameters), from the row's columns or else the prompt's text."""
    found = {match[1]: match[2] for match in reversed(list(_SIGNATURE.finditer(prompt_text(row))))}
    entry = row.get("entry") or next(reversed(found), None)
    if not isinstance(entry, str) or not entry.isidentifier():
        raise DataError("the row has no entry (name of the function), and the prompt names none")
    written = row.get("parameters") or [name for name in re.split(r"\s*,\s*", found.get(entry) or "") if name]
    return entry, tuple(written)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or (isinstance(value, (bool, int, float, str)) and value == value)  # NaN equals nothing


# The submission's code


def find_code(text: str, entry: str) -> str | None:
    """The code to judge or None: the last fenced block that defines `entry`; the last block if entry is "" (a program).

    A text without a fenced block is the code itself if it defines `entry` or, for a program, parses as Python.
    """
    blocks = fenced_blocks(text)
    if not blocks:
        blocks = [text] if text.strip() and (_defines(text, entry) if entry else _parses(text)) else []
    wanted = [block for block in blocks if _defines(block, entry)] if entry else blocks
    source = wanted[-1] if wanted else None
    return source if source and source.strip() and len(source) <= MAX_SOURCE_CHARS else None


def fenced_blocks(text: str) -> list[str]:
    """Contents of ``` blocks marked as Python or without a language; an unclosed last block runs to the end."""
    blocks: list[list[str]] = []
    inside: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if inside is None and mark.startswith("```"):
            language = mark[3:].strip().lower()
            inside = []
            if language in ("", "python", "py", "python3"):
                blocks.append(inside)
        elif inside is not None and mark == "```":
            inside = None
        elif inside is not None:
            inside.append(line)
    return ["\n".join(block) for block in blocks]


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # of the submission's own style
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _defines(source: str, entry: str) -> bool:
    """Whether a top-level line defines `entry`; without parsing, so that code with errors is judged, and fails."""
    name = re.escape(entry)
    return (
        re.search(rf"^(?:(?:async[ \t]+)?def[ \t]+{name}\b|class[ \t]+{name}\b|{name}[ \t]*[:=])", source, re.MULTILINE)
        is not None
    )


# Values that came out


def _values(outcome: sandbox.Outcome, count: int) -> list[Any] | None:
    """The reported values; None unless there is exactly one report per test, in order."""
    if outcome.stopped:
        return None
    reports = [report.partition(" ") for report in outcome.reports]
    if [number for number, _, _ in reports] != ["hello", *map(str, range(count)), "done"]:
        return None
    values = []
    for _, _, text in reports[1:-1]:
        try:
            tagged = json.loads(text, parse_int=_whole)
            values.append(_untagged(tagged, 0))
        except (ValueError, TypeError, RecursionError):
            return None
    return values


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("too many digits")
    value = digits_to_int(digits.lstrip("-"))
    return -value if digits[0] == "-" else value


def _untagged(tagged: Any, depth: int) -> Any:
    if depth > 64 or not isinstance(tagged, list) or not tagged:
        raise ValueError("not a reported value")
    if len(tagged) == 1:
        if isinstance(tagged[0], (list, dict)):
            raise ValueError("not a reported value")
        return tagged[0]
    kind, items = tagged
    if kind == "dict":
        pairs = [(_untagged(key, depth + 1), _untagged(item, depth + 1)) for key, item in items]
        found = {key if isinstance(key, str) else json.dumps(key): item for key, item in pairs}
        if len(found) < len(pairs):
            raise ValueError("two keys of one text")
        return found
    if kind in ("set", "frozenset"):
        return frozenset(_untagged(item, depth + 1) for item in items)
    return [_untagged(item, depth + 1) for item in items]


def same(expected: Any, value: Any, tolerance: float) -> bool:
    """Whether plain data equals the expected data; numbers at any depth may differ by the tolerance, absolute or
    relative."""
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None or value is None:
        return type(expected) is type(value) and expected == value
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return _close(expected, value, tolerance)
    if isinstance(expected, (list, tuple)):
        items = isinstance(value, list) and len(value) == len(expected)
        return items and all(same(e, v, tolerance) for e, v in zip(expected, value, strict=True))
    if isinstance(expected, Mapping):
        return (
            isinstance(value, dict)
            and expected.keys() == value.keys()
            and all(same(expected[key], value[key], tolerance) for key in expected)
        )
    return type(expected) is type(value) and expected == value


def _close(expected: float, value: float, tolerance: float) -> bool:
    if expected == value:
        return True
    try:
        gap = abs(value - expected)
        return tolerance > 0 and math.isfinite(gap) and gap <= max(tolerance, tolerance * abs(expected))
    except OverflowError:
        return False


def same_output(expected: str, output: str, tolerance: float) -> bool:
    """Whether a program's output is as expected: equal lines, ignoring white space at their ends and blank last lines.

    With a tolerance, words are compared instead, and numbers among them by value.
    """
    lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, output)]
    if lines[0] == lines[1] or not tolerance:
        return lines[0] == lines[1]
    words = [text.split() for text in (expected, output)]
    return len(words[0]) == len(words[1]) and all(
        e == o or _close_words(e, o, tolerance) for e, o in zip(words[0], words[1], strict=True)
    )


def _close_words(expected: str, output: str, tolerance: float) -> bool:
    number = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
    if not number.fullmatch(expected) or not number.fullmatch(output) or max(len(expected), len(output)) > 300:
        return False
    return _close(float(expected), float(output), tolerance)
