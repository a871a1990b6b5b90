"""Recipes: how well-known kinds of files are read. A recipe is a column map, a verifier and what to ask of the model.

Use one with `--data.task gsm8k --data file.jsonl`; your own --data.columns, --reward or --data.system_prompt come
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How one kind of file is read and judged."""

    columns: Mapping[str, str]
    """Our column = theirs."""
    verifier: str
    """Verifier spec (see rewards.build)."""
    system_prompt: str
    """Tells the model where its answer is looked for."""
    about: str


RECIPES = {
    "gsm8k": Recipe(
        {"prompt": "question", "answer": "answer"},
        "arithmetic:rule=hash,units=$",
        "Solve the problem step by step. End with a line '#### N', where N is the answer as a plain number.",
        "rows {question, answer}; the answer is a worked solution that ends in '#### N'",
    ),
    "math": Recipe(
        {"prompt": "problem", "answer": "solution"},
        "math:rule=boxed,units=waive",
        "Solve the problem step by step. Put the final answer in \\boxed{}.",
        "rows {problem, solution}; the solution holds the answer in \\boxed{} (needs the [math] extra)",
    ),
}
