"""From a configuration to the frozen prompts of a run: rows -> checked -> split -> rendered -> Prompt."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.config import DataConfig, GRPOConfig
from tinyllm.errors import DataError
from tinyllm.hashing import hash_json
from tinyllm.records import Prompt
from tinyllm.rewards import self_test
from tinyllm.tasks import arithmetic
from tinyllm.tasks.files import Row, check_prompt, nearest, read_dataset, read_file, rename
from tinyllm.tasks.recipes import RECIPES

ARITHMETIC_VERIFIER = "arithmetic:rule=last_number"
MAX_LISTED = 3
"""Bad rows named in an error; the rest are counted."""


@dataclass(frozen=True)
class TaskData:
    """The prompts of a run. Ids are of the rows' content: stable over runs, machines, shuffles and row order."""

    name: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    verifier: str | None
    """Spec of the task's own verifier (see rewards.build); None when a reward function must be given."""
    hash: str
    """Of every row and which side of the split it is on, in order."""
    skipped: tuple[str, ...] = ()
    """Why each unusable row was left out (data.on_bad_row = "skip")."""


@dataclass(frozen=True)
class _Source:
    name: str
    train: Iterable[tuple[str, Row]]
    held_out: Iterable[tuple[str, Row]] | None
    columns: Mapping[str, str]
    verifier: str | None
    system_prompt: str | None


def list_tasks() -> list[tuple[str, str]]:
    """(name, description) of every registered task, for `tinyllm tasks`."""
    built_in = "generated: 'What is a op b?', 519 prompts to train on and 162 held out; the answer is the last number"
    recipes = [(name, f"recipe for --data FILE: {recipe.about}") for name, recipe in RECIPES.items()]
    return [("arithmetic", built_in), *recipes]


def load(config: GRPOConfig, tokenizer: Any) -> TaskData:
    """The prompts of a run, rendered to token ids, each row self-tested against the verifier that will judge it.

    Raises DataError naming file, row and column: missing file, no rows, a row without a prompt, a prompt over
    data.max_prompt_tokens, a gold answer its verifier cannot read, rows on both sides of the split.
    """
    data = config.data
    source = _source(data)
    bad = _BadRows(data.on_bad_row)
    train = list(_usable(source.train, source.columns, bad))
    if source.held_out is None:
        train, held_out = _split(train, data.held_out_fraction)
    else:
        held_out = list(_usable(source.held_out, source.columns, bad))
        train = _disjoint(train, held_out, bad)
    if config.reward.functions or config.reward.rule or source.verifier:
        faults = self_test(config.reward, source.verifier, [*train, *held_out])
        train, held_out = (
            [row for row, fault in zip(rows, part, strict=True) if bad.keep(fault)]
            for rows, part in ((train, faults[: len(train)]), (held_out, faults[len(train) :]))
        )
    ids: dict[str, int] = {}
    sides = []
    for rows in (train, held_out):
        prompts = (_prompt(row, place, ids, data, source.system_prompt, tokenizer, bad) for place, row in rows)
        sides.append(tuple(prompt for prompt in prompts if prompt is not None))
    bad.refuse()
    if not sides[0]:
        why = f"; skipped {len(bad.reasons)}, first: {bad.reasons[0]}" if bad.reasons else ""
        raise DataError(f"{source.name} has no rows to train on{why}; check the file and --data.held_out_fraction")
    content = hash_json([[prompt.id for prompt in side] for side in sides])
    return TaskData(source.name, sides[0], sides[1], source.verifier, content, tuple(bad.reasons))


class _BadRows:
    """Collects rows that cannot be used: named together in one error, or skipped and counted."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.reasons: list[str] = []

    def keep(self, reason: str | None) -> bool:
        if reason is not None:
            self.reasons.append(reason)
        return reason is None

    def refuse(self) -> None:
        if self.reasons and self.policy == "refuse":
            shown = "; ".join(self.reasons[:MAX_LISTED])
            more = f"; and {len(self.reasons) - MAX_LISTED} more rows" if len(self.reasons) > MAX_LISTED else ""
            skip = "" if "on_bad_row" in shown else " (or leave them out with --data.on_bad_row skip)"
            raise DataError(shown + more + skip)


def _source(data: DataConfig) -> _Source:
    if data.file and data.dataset:
        raise DataError(f"data.file = {data.file!r} and data.dataset = {data.dataset!r} are both given; give one")
    if not (data.file or data.dataset):
        return _task(data)
    recipe = RECIPES.get(data.task)
    columns = {**(recipe.columns if recipe else {}), **data.columns}
    rows = read_file(data.file) if data.file else read_dataset(data.dataset or "")
    held_out = read_file(data.held_out) if data.held_out else None
    system_prompt = data.system_prompt if data.system_prompt is not None else recipe.system_prompt if recipe else None
    return _Source(
        name=Path(data.file).name if data.file else data.dataset or "",
        train=rows,
        held_out=held_out,
        columns=columns,
        verifier=recipe.verifier if recipe else None,
        system_prompt=system_prompt,
    )


def _task(data: DataConfig) -> _Source:
    if data.task in RECIPES:
        raise DataError(f"data.task = {data.task!r} is a recipe for a file; give one with --data FILE.jsonl")
    if data.task != "arithmetic":
        names = [name for name, _ in list_tasks()]
        raise DataError(f"data.task = {data.task!r} is not a task; {nearest(data.task, names)}; see: tinyllm tasks")
    for field in ("columns", "held_out"):
        if getattr(data, field):
            raise DataError(f"data.{field} is for your own rows, and task 'arithmetic' is generated; remove it")
    train, held_out = ([(repr(row["prompt"]), row) for row in rows] for rows in arithmetic.generate(data.arithmetic))
    return _Source("arithmetic", train, held_out, {}, ARITHMETIC_VERIFIER, data.system_prompt)


def _usable(rows: Iterable[tuple[str, Row]], columns: Mapping[str, str], bad: _BadRows) -> Iterator[tuple[str, Row]]:
    for place, raw in rows:
        try:
            row = rename(raw, columns, place)
            check_prompt(row, place)
            yield place, {name: _plain(value, place, name) for name, value in row.items()}
        except DataError as error:
            bad.keep(str(error))


def _plain(value: Any, place: str, column: str) -> Any:
    """The value as JSON can hold it: rows are hashed and recorded."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item, place, column) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, place, column) for item in value]
    raise DataError(f"{place}: column {column!r} holds {type(value).__name__}, which cannot be recorded; remove it")


def _split(rows: list[tuple[str, Row]], fraction: float) -> tuple[list[tuple[str, Row]], list[tuple[str, Row]]]:
    """By the hash of the prompt: rows with one prompt stay together, and adding rows moves no other row by more than rank."""
    if not fraction:
        return rows, []
    keys = sorted({hash_json(row["prompt"]) for _, row in rows})
    count = max(1, round(fraction * len(keys)))
    kept = set(keys[:count])
    sides: tuple[list[tuple[str, Row]], list[tuple[str, Row]]] = ([], [])
    for place, row in rows:
        sides[hash_json(row["prompt"]) in kept].append((place, row))
    return sides


def _disjoint(train: list[tuple[str, Row]], held_out: list[tuple[str, Row]], bad: _BadRows) -> list[tuple[str, Row]]:
    kept = {hash_json(row["prompt"]): place for place, row in held_out}
    usable = []
    for place, row in train:
        twin = kept.get(hash_json(row["prompt"]))
        if bad.keep(twin and f"{place} has the same prompt as held-out {twin}; remove one"):
            usable.append((place, row))
    return usable


def _prompt(
    row: Row,
    place: str,
    ids: dict[str, int],
    data: DataConfig,
    system_prompt: str | None,
    tokenizer: Any,
    bad: _BadRows,
) -> Prompt | None:
    from tinyllm.models import render

    try:
        text, token_ids = render(tokenizer, row["prompt"], data.prompt_rule, system_prompt)
    except DataError as error:
        bad.keep(f"{place}: {error}")
        return None
    if len(token_ids) > data.max_prompt_tokens:
        bad.keep(
            f"{place}: its prompt has {len(token_ids)} tokens, over data.max_prompt_tokens = {data.max_prompt_tokens}; "
            "raise the limit or shorten it"
        )
        return None
    key = hash_json(row)[:16]
    ids[key] = ids.get(key, 0) + 1
    name = key if ids[key] == 1 else f"{key}-{ids[key]}"  # the same row twice
    chat = data.prompt_rule == "chat" or (
        data.prompt_rule == "auto" and bool(getattr(tokenizer, "chat_template", None))
    )
    return Prompt(name, tuple(token_ids), text, row, _messages(row["prompt"], system_prompt) if chat else None)


def _messages(prompt: str | list[dict[str, str]], system_prompt: str | None) -> tuple[dict[str, str], ...]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return tuple(messages)
