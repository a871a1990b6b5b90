"""The rows of the capstone: sums and differences of two-digit numbers, answered in an exact format.

No stage trains on a prompt of the held-out suite, nor on such a prompt with its two numbers exchanged.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.record.files import write_atomic
from tinyllm.tasks import arithmetic

SYSTEM_PROMPT = "Think, then give the result as <answer>number</answer>."
VERIFIER = "arithmetic:rule=exact_format"
"""The whole completion is <think>..</think><answer>..</answer>, and the answer is right."""
HELD_OUT = 500
SHIFTED_WORDS = {"+": "How much is {a} plus {b}?", "-": "Take {b} away from {a}. What is left?"}
"""Other words than those of training."""


@dataclass(frozen=True)
class CapstoneRows:
    """Files of rows, in one folder."""

    examples: Path
    """Worked examples for SFT."""
    prompts: Path
    """Prompts for DPO and GRPO."""
    held_out: Path
    shifted: Path
    """Three-digit numbers, in other words than those of training."""


def write_rows(folder: Path, seed: int, examples: int, prompts: int, shifted: int) -> CapstoneRows:
    """Write the four files. The suites are the same for every seed; the training rows, half of them sums, are not."""
    two_digits = arithmetic.ArithmeticConfig(operators=("+", "-"), operands=(10, 99), held_out=HELD_OUT)
    train, held_out = arithmetic.generate(two_digits)
    random.Random("held out").shuffle(held_out)  # its first rows are watched in training
    random.Random(seed).shuffle(train)
    sums, differences = ([row for row in train if f" {operator} " in row["prompt"]] for operator in "+-")
    train = [row for pair in zip(sums, differences, strict=False) for row in pair]  # differences are rarer and harder
    rows = CapstoneRows(*(folder / f"{name}.jsonl" for name in ("examples", "prompts", "held_out", "shifted")))
    _write(rows.examples, [{**row, "completion": worked(row["prompt"])} for row in train[:examples]])
    _write(rows.prompts, train[examples : examples + prompts])
    _write(rows.held_out, held_out)
    _write(rows.shifted, shifted_rows(shifted))
    return rows


def worked(prompt: str) -> str:
    """The worked answer to "What is 47 + 36?": tens added (77+6), then the ones, which give 83."""
    a, operator, b = prompt.removeprefix("What is ").removesuffix("?").split()
    tens, ones = int(b) // 10 * 10, int(b) % 10
    sign = 1 if operator == "+" else -1
    middle = int(a) + sign * tens
    return f"<think>{middle}{operator}{ones}</think><answer>{middle + sign * ones}</answer>"


def shifted_rows(count: int) -> list[dict[str, Any]]:
    """Questions on three-digit numbers in other words than those of training; every call returns the same rows."""
    generator = random.Random("shifted")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        a, b = generator.randint(100, 999), generator.randint(100, 999)
        operator = generator.choice("+-")
        if operator == "-" and a - b < 0:
            a, b = b, a
        answer = a + b if operator == "+" else a - b
        prompt = SHIFTED_WORDS[operator].format(a=a, b=b)
        if answer != b:
            rows[prompt] = {"prompt": prompt, "answer": str(answer)}
    return list(rows.values())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
