"""The reward functions that docs/verifiers.md shows for TRL and verl, called as those trainers call them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinyllm.rewards.base import FAMILIES

PAGE = (Path(__file__).parent.parent / "docs" / "verifiers.md").read_text(encoding="utf-8")
SNIPPETS = {
    re.match(r"# (\w+)", block)[1]: block
    for block in re.findall(r"```python\n(.*?)```", PAGE.partition("## In TRL and verl")[2], flags=re.S)
}
SCHEMA = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
COUNTDOWN = {"numbers": [2, 3], "target": 5}
CONSTRAINTS = [
    {"id": "punctuation:no_comma", "kwargs": {}},
    {"id": "language:response_language", "kwargs": {"language": "en"}},
]
CASES = {
    "math": ({"answer": r"\frac{1}{2}"}, r"So \boxed{0.5}.", r"So \boxed{2}.", {}),
    "arithmetic": ({"answer": "12"}, "It costs\n#### $12", "It costs\n#### $13", {}),
    "format": ({"answer": "B"}, "<answer>(B)</answer>", "<answer>C</answer>", {}),
    "json": ({"schema": SCHEMA}, '```json\n{"x": 1}\n```', '{"x": true}', {}),
    "code": (
        {"entry": "add", "calls": [[[2, 3], 5], [[0, 1], 1]]},
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a - b\n```",
        {"entry": "add"},
    ),
    "gym": (
        {"dataset": "countdown", "answer": "2 + 3", "metadata": COUNTDOWN},
        "<answer>3 + 2</answer>",
        "<answer>3 * 2</answer>",
        {"metadata": COUNTDOWN},
    ),
    "instructions": (
        {"constraints": CONSTRAINTS},
        "The river runs through the old town and past the mill.",
        "The river runs through the town, past the mill.",
        {},
    ),
}
"""Family -> (columns of a row, a right completion, a wrong one, verl's extra_info)."""
GOLD = {"code": "calls", "json": "schema", "instructions": "constraints"}
"""The column that is verl's ground_truth, where it is not the answer."""


def as_trl_calls(function, prompts, completions, **columns):
    """What TRL's GRPOTrainer passes: lists by keyword, the data's columns, and arguments of its own."""
    return function(
        prompts=prompts,
        completions=completions,
        completion_ids=[[1, 2]] * len(completions),
        trainer_state=SimpleNamespace(global_step=1),
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
        **columns,
    )


def test_every_family_is_shown():
    assert SNIPPETS.keys() == CASES.keys() == FAMILIES.keys()
    for block in SNIPPETS.values():
        head, trl, verl = re.split(r"^(?=def )", block, flags=re.M)
        for function in (trl, verl):
            lines = [line for line in (head + function).splitlines() if line.strip() and not line.startswith("#")]
            assert len(lines) <= 5, lines


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("chat", [False, True])
def test_trl(family, chat):
    row, right, wrong, _ = CASES[family]
    names: dict = {}
    exec(SNIPPETS[family], names)
    texts = [right, wrong, ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    columns = {name: [value] * 3 for name, value in row.items()}
    assert as_trl_calls(names["reward"], ["a prompt"] * 3, completions, **columns) == [1.0, 0.0, 0.0]
    broken = {name: ["?" if name != "answer" else ""] for name in row}
    assert as_trl_calls(names["reward"], ["a prompt"], [right], **broken) == [None]


@pytest.mark.parametrize("family", CASES)
def test_verl(family):
    row, right, wrong, extra = CASES[family]
    names: dict = {}
    exec(SNIPPETS[family], names)
    gold = row[GOLD.get(family, "answer")]
    for text, expected in ((right, 1.0), (wrong, 0.0)):
        score = names["compute_score"](
            data_source=row.get("dataset", "mine"), solution_str=text, ground_truth=gold, extra_info=extra
        )
        assert score == expected and isinstance(score, float)
