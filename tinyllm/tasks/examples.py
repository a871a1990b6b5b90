"""Rows with completions in them, for SFT and DPO: rows -> checked -> split -> rendered -> groups.

A completion is what the engine would have sampled: its tokens follow the prompt's, and the token that ends an answer is
one of them. Each assistant turn of a chat that is trained on is a prompt of its own; what turns share is computed once
when they are packed, so this costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.errors import DataError, ModelError, RunError, nearest
from tinyllm.model.models import apply_template, load_config, render, stop_token_ids, tokenizer_hash
from tinyllm.record.hashing import hash_json
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Verdict
from tinyllm.tasks.files import COLUMNS, Row, check_prompt, check_text, read_dataset, read_file
from tinyllm.tasks.load import BadRows, disjoint, prompt_key, split, usable

GIVEN = Revision(0, "given")
"""The revision of completions that no policy of ours sampled."""
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class ExampleData:
    """The rows of a run: a prompt for each row, which stands in the run's order, and the groups to train on for it."""

    name: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    groups: Mapping[str, tuple[Group, ...]]
    """By prompt id: one group for each assistant turn, or a pair."""
    hash: str
    """Hash of every row's tokens and its side of the split, in order."""
    skipped: tuple[str, ...] = ()

    def of(self, prompts: Sequence[Prompt]) -> list[Group]:
        """The groups of these prompts, in order; a prompt's draw becomes that of its groups."""
        return [_drawn(group, prompt.draw) for prompt in prompts for group in self.groups[prompt.id]]

    @property
    def longest(self) -> int:
        """Tokens of the longest completion with its prompt."""
        return max(
            len(g.prompt.token_ids) + len(r.completion.token_ids)
            for groups in self.groups.values()
            for g in groups
            for r in g.rollouts
        )


def load_examples(config: SFTConfig | DPOConfig, tokenizer: Any) -> ExampleData:
    """The rows of a run as groups of token ids.

    Raises DataError naming file, row and column: no source, missing file, a row without prompt or completion, one over
    data.max_tokens, a chat that does not end with an answer, a pair of equal completions, rows on both sides.
    """
    data, bad = config.data, BadRows(config.data.on_bad_row)
    key = _first_prompt_key if getattr(data, "turns", "last") == "all" else prompt_key
    writer = _Writer(tokenizer, config)
    check: Callable[[Row, str], None] = _check_pair if config.kind == "dpo" else _check_example
    make: Callable[[Row], list[Group]] = writer.pair if config.kind == "dpo" else writer.turns
    if isinstance(config, DPOConfig) and config.data.from_run:
        if data.file or data.dataset or isinstance(data.held_out, str):
            raise DataError("data.from_run is given beside a file or data set; give one of them")
        name = config.data.from_run
        rows, make = _recorded(config, tokenizer)
    elif data.file or data.dataset:
        name = Path(data.file).name if data.file else data.dataset or ""
        source = read_file(data.file) if data.file else read_dataset(data.dataset or "")
        rows = list(usable(source, data.columns, bad, check))
    else:
        raise DataError("no rows to train on; give --data FILE.jsonl" + _or_run(config))
    if isinstance(data.held_out, str):
        held_out = list(usable(read_file(data.held_out), data.columns, bad, check))
        train = disjoint(rows, held_out, bad, key)
    else:
        train, held_out = split(rows, data.held_out, key)
    positions = getattr(load_config(config.model.name).get_text_config(), "max_position_embeddings", None)
    groups: dict[str, tuple[Group, ...]] = {}
    sides = []
    for part in (train, held_out):
        prompts = []
        for place, row in part:
            try:
                made = make(row)
                _check_length(made, data.max_tokens, positions)
            except DataError as error:
                bad.keep(f"{place}: {error}")
                continue
            prompt = _named(made[0].prompt, row, groups)
            groups[prompt.id] = tuple(_renamed(g, f"{prompt.id}/{i}" if i else prompt.id) for i, g in enumerate(made))
            prompts.append(prompt)
        sides.append(tuple(prompts))
    bad.refuse()
    if not sides[0]:
        why = f"; skipped {len(bad.reasons)}, first: {bad.reasons[0]}" if bad.reasons else ""
        raise DataError(f"{name} has no rows to train on{why}; check it and --data.held_out")
    return ExampleData(name, sides[0], sides[1], groups, _content(sides, groups), tuple(bad.reasons))


def _first_prompt_key(row: Row) -> str:
    """Hash of the first prompt of a chat whose every answer is trained on: this prompt must be on one side too."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt_key(row)
    end = next((i for i, m in enumerate(prompt[:-1]) if i and m["role"] == "assistant"), None)
    return prompt_key({"prompt": prompt[:end]})


def _or_run(config: Any) -> str:
    return ", or --from-run RUN for pairs of its rollouts" if config.kind == "dpo" else ""


def _content(sides: Sequence[Sequence[Prompt]], groups: Mapping[str, tuple[Group, ...]]) -> str:
    def tokens(prompt: Prompt) -> list[Any]:
        return [
            [g.prompt.token_ids, *([r.completion.token_ids, r.verdict.value] for r in g.rollouts)]
            for g in groups[prompt.id]
        ]

    return hash_json([[[prompt.id, tokens(prompt)] for prompt in side] for side in sides])


def _named(prompt: Prompt, row: Row, taken: Mapping[str, Any]) -> Prompt:
    key = hash_json(row)[:16]
    number = 1
    while (name := key if number == 1 else f"{key}-{number}") in taken:  # the same row twice
        number += 1
    return replace(prompt, id=name)


def _renamed(group: Group, name: str) -> Group:
    return Group(
        replace(group.prompt, id=name, draw=0),
        tuple(
            replace(r, completion=replace(r.completion, prompt_id=name, draw=0, sample=i))
            for i, r in enumerate(group.rollouts)
        ),
    )


def _drawn(group: Group, draw: int) -> Group:
    if not draw:
        return group
    rollouts = tuple(replace(r, completion=replace(r.completion, draw=draw)) for r in group.rollouts)
    return Group(replace(group.prompt, draw=draw), rollouts)


def _check_length(groups: Sequence[Group], limit: int, positions: int | None) -> None:
    longest = max(len(g.prompt.token_ids) + len(r.completion.token_ids) for g in groups for r in g.rollouts)
    if longest > limit:
        raise DataError(f"it has {longest} tokens, over data.max_tokens = {limit}; raise the limit or shorten it")
    if positions is not None and longest > positions:
        raise DataError(f"it has {longest} tokens, more than the model's {positions} positions; shorten it")


# Rows of a file


def _check_example(row: Row, place: str) -> None:
    """Raises DataError unless the row is {prompt, completion} or {messages}; messages become prompt and completion."""
    if "messages" in row:
        if "completion" in row or "prompt" in row:
            raise DataError(f"{place} has 'messages' beside 'prompt' or 'completion'; keep one form")
        messages = row["messages"]
        check_prompt({"prompt": messages if isinstance(messages, list) else None}, f"{place}, column 'messages'")
        if messages[-1]["role"] != "assistant":
            raise DataError(
                f"{place}: its last message is from {messages[-1]['role']!r}; a chat to train on ends with assistant"
            )
        if len(messages) < 2:
            raise DataError(f"{place}: its only message is the answer; put a user's message before it")
        _check_turns(messages, place)
        row["prompt"] = messages[:-1]
        row["completion"] = messages.pop()["content"]
        del row["messages"]
    check_prompt(row, place)
    if not isinstance(row["prompt"], str):
        _check_turns(row["prompt"], place)
    _check_completion(row, place, "completion")


def _check_turns(messages: Messages, place: str) -> None:
    for number in range(1, len(messages)):
        if messages[number - 1]["role"] == messages[number]["role"] == "assistant":
            raise DataError(f"{place}: messages {number} and {number + 1} are both from assistant; join them")


def _check_pair(row: Row, place: str) -> None:
    """Raises DataError unless the row is {prompt, chosen, rejected}, or two chats with all but the answer in common."""
    if "prompt" not in row and all(isinstance(row.get(name), list) for name in ("chosen", "rejected")):
        chosen, rejected = row["chosen"], row["rejected"]
        if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
            raise DataError(
                f"{place}: 'chosen' and 'rejected' must be one chat but for its end, or come with a 'prompt'"
            )
        row["prompt"], row["chosen"], row["rejected"] = chosen[:-1], chosen[-1:], rejected[-1:]
    check_prompt(row, place)
    for name in ("chosen", "rejected"):
        _check_completion(row, place, name)
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{place}: 'chosen' and 'rejected' are the same, so there is nothing to prefer; remove the row")


def _check_completion(row: Row, place: str, name: str) -> None:
    """The column as text; a list with one assistant message is its content. Raises DataError."""
    if name not in row:
        raise DataError(f"{place} has no column {name!r}; {nearest(name, row, COLUMNS)}; map one with --data.columns")
    value = row[name]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        if value[0].get("role") != "assistant":
            raise DataError(f"{place}: the message in {name!r} is from {value[0].get('role')!r}, not from assistant")
        value = value[0].get("content")
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: {name!r} is not a text with something in it (nor one assistant message)")
    check_text(value, place, repr(name))
    row[name] = value


class _Writer:
    """Rows as groups of token ids."""

    def __init__(self, tokenizer: Any, config: SFTConfig | DPOConfig) -> None:
        self.tokenizer, self.data = tokenizer, config.data
        data = config.data
        self.chat = data.prompt_rule == "chat" or (data.prompt_rule == "auto" and bool(tokenizer.chat_template))
        self.stops = frozenset(stop_token_ids(tokenizer, load_config(config.model.name)))

    def turns(self, row: Row) -> list[Group]:
        """One group of one rollout for the completion, and with turns = "all" for every assistant turn before it."""
        prompt, answers = row["prompt"], [(row["prompt"], row["completion"])]
        if getattr(self.data, "turns", "last") == "all" and not isinstance(prompt, str):
            earlier = [i for i, m in enumerate(prompt[:-1]) if m["role"] == "assistant" and i]
            if empty := [i for i in earlier if not prompt[i]["content"].strip()]:
                raise DataError(f"message {empty[0] + 1} is an empty answer, which data.turns = all would train on")
            answers = [(prompt[:i], prompt[i]["content"]) for i in earlier] + answers
        return [Group(self.prompt(before, row), (self.rollout(before, text, 1.0),)) for before, text in answers]

    def pair(self, row: Row) -> list[Group]:
        """One group: the chosen and the rejected completion, with rewards 1 and 0."""
        prompt = self.prompt(row["prompt"], row)
        sides = (self.rollout(row["prompt"], row["chosen"], 1.0), self.rollout(row["prompt"], row["rejected"], 0.0))
        if sides[0].completion.token_ids == sides[1].completion.token_ids:
            raise DataError("'chosen' and 'rejected' have the same tokens; remove the row")
        return [Group(prompt, sides)]

    def prompt(self, before: str | Messages, row: Row) -> Prompt:
        text, ids = render(self.tokenizer, before, self.data.prompt_rule, self.data.system_prompt)
        return Prompt("", ids, text, row, tuple(self.messages(before)) if self.chat else None)

    def messages(self, before: str | Messages) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": before}] if isinstance(before, str) else [dict(m) for m in before]
        system = self.data.system_prompt
        return [{"role": "system", "content": system}, *messages] if system else messages

    def rollout(self, before: str | Messages, text: str, value: float) -> Rollout:
        ids = self.completion_ids(before, text)
        return Rollout(Completion("", 0, 0, ids, (), "stop", 0, GIVEN, text), Verdict(value))

    def completion_ids(self, before: str | Messages, text: str) -> tuple[int, ...]:
        """The completion as it would be sampled: its own tokens, then the one that ends it."""
        if self.stops & set(self.encode(text)):
            raise DataError("a completion has the text of a stop token in it; remove it, the token is added at the end")
        if not self.chat:
            return self.ended(self.encode(text))
        messages = self.messages(before)
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None  # the prompt begins it
        answered = [*messages, {"role": "assistant", "content": (begun or "") + text}]
        if begun is None:
            head = apply_template(self.tokenizer, messages, "asked")
        else:
            head = apply_template(self.tokenizer, [*messages, {"role": "assistant", "content": begun}], "open")
        whole = apply_template(self.tokenizer, answered, "closed")
        if not whole.startswith(head):
            raise DataError(
                "the model's chat template writes an answer other than it asks for one, so there is no prompt to train "
                "it after; give prompt and completion with --data.prompt_rule raw"
            )
        written = whole[len(head) :]
        if "".join(text.split()) not in "".join(written.split()):
            raise DataError(
                "the model's chat template leaves out a part of the answer, so it would not be trained on; give prompt "
                "and completion with --data.prompt_rule raw"
            )
        ids = self.encode(written)
        end = next((i for i, token in enumerate(ids) if token in self.stops), None)
        return tuple(ids[: end + 1]) if end is not None else self.ended(ids)

    def ended(self, ids: Sequence[int]) -> tuple[int, ...]:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ModelError(
                "the model's tokenizer names no end-of-text token, so a completion would have no end; set eos_token in "
                "its tokenizer_config.json"
            )
        return (*ids, end)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


# Pairs of a run's rollouts


def _recorded(config: DPOConfig, tokenizer: Any) -> tuple[list[tuple[str, Row]], Callable[[Row], list[Group]]]:
    """(rows, what makes a group of one): pairs of recorded rollouts of one group, the better rewarded one chosen.

    Of each group the best is paired with the worst, the second best with the second worst, and so on, as long as their
    rewards differ. Only scored completions that came to their end count, and their tokens are those of the record.
    """
    assert config.data.from_run is not None
    run = RunDir.read(config.data.from_run)
    if run.manifest["kind"] != "grpo":
        raise RunError(f"{run.path}: a run of {run.manifest['kind']}, which sampled nothing; give a run of grpo")
    if run.manifest["hashes"].get("tokenizer") != tokenizer_hash(tokenizer):
        raise RunError(f"{run.path}: sampled with another tokenizer than {config.model.name} has; use its model")
    rows: list[tuple[str, Row]] = []
    made: dict[str, Group] = {}
    for step in run.steps():
        for group in run.read_groups(step):
            for number, pair in enumerate(pairs(group, config.data.pairs_per_group)):
                name = f"step {step}, group {group.id}, pair {number}"
                made[name] = Group(group.prompt, pair)
                row = dict(group.prompt.row)
                rows.append((name, {"prompt": row.get("prompt", group.prompt.text), "pair": name, "row": row}))
    if not rows:
        raise DataError(f"{run.path}: no group has finished completions with different rewards, so there are no pairs")
    return rows, lambda row: [made[row["pair"]]]


def pairs(group: Group, count: int) -> Iterator[tuple[Rollout, Rollout]]:
    """Up to `count` (chosen, rejected) of a group: best and worst, second best and second worst, while they differ."""
    usable = [r for r in group.rollouts if r.verdict.value is not None and r.completion.finish_reason == "stop"]
    ranked = sorted(usable, key=lambda r: -r.reward)
    for number in range(min(count, len(ranked) // 2)):
        chosen, rejected = ranked[number], ranked[-1 - number]
        if chosen.reward == rejected.reward:
            return
        if chosen.completion.token_ids != rejected.completion.token_ids:  # else the judge gave one text two rewards
            yield chosen, rejected
