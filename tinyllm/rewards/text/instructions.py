"""Family "instructions": the answer must follow all of a row's constraints, which are in the style of IFEval.

A row with an unknown constraint, argument or value is refused when it is loaded, as is an argument that contradicts the
prompt's own text. No argument is drawn at random. The answer must not be empty; the think block is not part of it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tinyllm.errors import DataError
from tinyllm.records import Verdict
from tinyllm.rewards.base import Row, Verifier, correct, prompt_text
from tinyllm.rewards.text.constraints import REGISTRY, Constraint
from tinyllm.rewards.text.extract import after_think, cut

COUNTED = {
    "num_words": r"words?",
    "min_words": r"words?",
    "max_words": r"words?",
    "num_sentences": r"sentences?",
    "num_paragraphs": r"paragraphs?",
    "num_bullets": r"(?:bullet points?|bullets?)",
    "num_sections": r"sections?",
    "num_placeholders": r"placeholders?",
    "num_highlights": r"(?:highlighted sections?|highlights?|sections?)",
}
"""Argument -> its noun in prompts: where a prompt has numbers of that noun, the argument must be one of them."""
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_NUMBER_WORDS = {word: number for number, word in enumerate(_WORDS)}
_NUMBER_WORDS |= {"fifteen": 15, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "hundred": 100}
_COUNT = rf"([0-9]+|{'|'.join(_NUMBER_WORDS)})"
_RELATIONS = {
    "at least": (r"(?:at least|no fewer than|no less than|(?:a )?minimum of)", r"(?:\+|or more)", r"or more|minimum"),
    "less than": (
        r"(?:less than|fewer than|at most|no more than|up to|under)",
        r"or (?:less|fewer)",
        r"or less|maximum",
    ),
}
"""Relation -> how prompts write it: before the number, after the number, after the noun."""


@dataclass(frozen=True)
class InstructionVerifier(Verifier):
    """Settings of the family."""

    family: ClassVar[str] = "instructions"
    prompt_fails: ClassVar[bool] = False
    """False: a prompt may follow its own constraints ("use no commas"), so the prompt as an answer need not fail."""
    constraints: str = "constraints"
    """Column with a list of {"id": ..., "kwargs": {...}}; without it, IFEval's instruction_id_list and kwargs."""
    think_prefilled: bool = False

    def judge(self, row: Row, text: str) -> Verdict:
        checks = self.check(row)
        answer = after_think(cut(text), self.think_prefilled).strip()
        return correct(bool(answer) and all(check(answer) for _, check in checks), answer)

    def explain(self, row: Row, text: str) -> str:
        answer = after_think(cut(text), self.think_prefilled).strip()
        broken = [name for name, check in self.check(row) if not check(answer)]
        return f"not followed: {', '.join(broken)}" if broken else "" if answer else "the answer is empty"

    def check(self, row: Row) -> list[tuple[str, Callable[[str], bool]]]:
        """(name, test of a text) of each constraint. Raises DataError for unusable or contradicting constraints."""
        found = []
        for entry in self._entries(row):
            name, arguments = entry.get("id"), entry.get("kwargs") or {}
            if not isinstance(arguments, Mapping):
                raise DataError(f"constraint {name!r} has kwargs {arguments!r:.60}, not an object")
            if not isinstance(name, str) or name not in REGISTRY:
                raise DataError(f"constraint {name!r} is unknown; known are {', '.join(sorted(REGISTRY))}")
            constraint = REGISTRY[name]
            values = _arguments(name, constraint, arguments)
            _agree(name, values, prompt_text(row))
            found.append((name, values, functools.partial(constraint.follows, **values)))
        if not found:
            raise DataError(f"the row has no constraints in column {self.constraints!r}")
        for (name, values, _), (other, more, _) in itertools.combinations(found, 2):
            if _exclude(name, values, other, more) or _exclude(other, more, name, values):
                raise DataError(f"constraints {name!r} and {other!r} contradict each other")
        return [(name, check) for name, _, check in found]

    def _entries(self, row: Row) -> list[Mapping[str, Any]]:
        entries = row.get(self.constraints)
        if entries is None and "instruction_id_list" in row:
            names, arguments = row["instruction_id_list"], row.get("kwargs") or []
            if len(names) != len(arguments):
                raise DataError(f"the row has {len(names)} instruction ids and {len(arguments)} kwargs")
            entries = [{"id": name, "kwargs": kwargs} for name, kwargs in zip(names, arguments, strict=True)]
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise DataError(f"the row has no list of constraints in column {self.constraints!r}")
        return entries


def _arguments(name: str, constraint: Constraint, given: Mapping[str, Any]) -> dict[str, Any]:
    """The checked arguments; null counts as not given. Raises DataError, also when one without a default is missing."""
    values = {key: value for key, value in given.items() if value is not None}
    for key in values:
        if key not in constraint.arguments:
            raise DataError(
                f"constraint {name!r} has no argument {key!r}; it takes {', '.join(constraint.arguments) or 'none'}"
            )
    for key, check in constraint.arguments.items():
        if key not in values:
            if key in constraint.defaults:
                values[key] = constraint.defaults[key]
                continue
            raise DataError(f"constraint {name!r} lacks its argument {key!r}; nothing is made up at scoring time")
        problem = check(values[key])
        if problem:
            raise DataError(f"constraint {name!r}: {key} = {values[key]!r}, {problem}")
    problem = constraint.consistent(values)
    if problem:
        raise DataError(f"constraint {name!r}: {problem}")
    return values


def _exclude(name: str, values: Mapping[str, Any], other: str, more: Mapping[str, Any]) -> bool:
    """Whether no text can follow both constraints."""
    if (name, other) == ("change_case:english_lowercase", "change_case:english_capital"):
        return True
    if (name, other) == ("keywords:existence", "keywords:forbidden_words"):
        banned = {word.casefold() for word in more["forbidden_words"]}
        return any(word.casefold() in banned for word in values["keywords"])
    if name != other:
        return False
    relation = next((key for key in values if key.endswith("relation")), "")
    count = next((key for key in values if key.endswith("frequency") or key.startswith("num_")), "")
    if not relation or any(values[key] != more[key] for key in values.keys() - {relation, count}):
        return False
    opposite = (values[relation], more[relation]) == ("at least", "less than")
    return bool(opposite and values[count] >= more[count])


def _agree(name: str, values: Mapping[str, Any], prompt: str) -> None:
    """Raises DataError when the prompt states another number or relation for an argument of COUNTED."""
    for key, value in values.items():
        if key not in COUNTED or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        relation = values.get("relation", "")
        numbers = _stated(prompt, relation, COUNTED[key])
        opposite = {"at least": "less than", "less than": "at least"}.get(relation, "")
        if opposite and not numbers and value in _stated(prompt, opposite, COUNTED[key]):
            raise DataError(f"constraint {name!r} says {relation} {value}, but the prompt says {opposite} {value}")
        bounds = {number + 1 for number in numbers} if relation == "less than" else set()  # "at most 9" is less than 10
        if numbers and value not in numbers | bounds:
            raise DataError(
                f"constraint {name!r} has {key} = {value}, but the prompt says {relation} {sorted(numbers)}".replace(
                    "  ", " "
                )
            )


def _stated(prompt: str, relation: str, noun: str) -> set[int]:
    """The numbers that a prompt states for a noun, with this relation ("at least", "less than"), or with none ("")."""
    if relation:
        before, after, behind = _RELATIONS[relation]
        pattern = (
            rf"\b{before}\s+{_COUNT}\s+{noun}\b|\b{_COUNT}\s*{after}\s+{noun}\b|\b{_COUNT}\s+{noun}\s+(?:{behind})\b"
        )
    else:
        pattern = rf"\b{_COUNT}\s+{noun}\b"
    words = [word for match in re.finditer(pattern, prompt, re.IGNORECASE) for word in match.groups() if word]
    return {int(word) if word.isdigit() else _NUMBER_WORDS[word.lower()] for word in words}
