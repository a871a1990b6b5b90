"""From a configuration to the `verify` that the loop calls: parts, weights, one verdict per completion.

    value = sum of weight x part      (combine = "sum")
          | product of the parts      ("product")
          | first part x sum of the others      ("gate": for example the format gates correctness)

Each part is logged by name in Verdict.parts; accuracy is counted from the part "correct".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.config import RewardConfig
from tinyllm.errors import RewardError
from tinyllm.records import Completion, Prompt, Verdict
from tinyllm.rewards import functions
from tinyllm.rewards.base import Verifier, build, is_family, verify
from tinyllm.rewards.extract import RULES, Region
from tinyllm.rewards.format import FormatVerifier

FINISHED_RULES = ("last_number", "final")
"""Rules that read the end of the text: a completion cut by the length limit has no answer under them, so it scores 0."""
SPARE_PARTS = ("correct", "format")


@dataclass(frozen=True)
class Part:
    """One term of the reward."""

    name: str
    weight: float
    judge: Verifier | Callable[..., Any]


def make_parts(reward: RewardConfig, task_verifier: str | None) -> list[Part]:
    """The terms of the reward, in order. Raises RewardError naming the field, the value and the remedy."""
    specs: list[Any] = list(reward.functions)
    weights = list(reward.weights) or [1.0] * max(1, len(specs))
    if not specs:
        specs = [_ruled(task_verifier, reward.rule)]
    elif reward.rule:
        raise RewardError(
            f"reward.rule = {reward.rule!r} is for the task's own verifier; remove it or reward.functions"
        )
    if len(weights) != len(specs):
        raise RewardError(f"reward.weights has {len(weights)} numbers for {len(specs)} functions; give one each")
    if not all(map(math.isfinite, weights)):
        raise RewardError(f"reward.weights = {weights}; give finite numbers")
    parts: list[Part] = []
    for spec, weight in zip(specs, weights, strict=True):
        judge = _judge(spec)
        name = getattr(judge, "__name__", type(judge).__name__)
        if isinstance(judge, Verifier):
            name = "correct" if not any(part.name == "correct" for part in parts) else judge.family
        taken = [part.name for part in parts]
        parts.append(Part(next(unique for unique in _names(name) if unique not in taken), weight, judge))
    main = parts[0].judge
    text = isinstance(main, Region)
    if reward.format_weight or (text and not reward.functions):
        tags = main.tags if isinstance(main, Region) and main.rule == "exact_format" else ("answer",)
        parts.append(Part("format", reward.format_weight, FormatVerifier(rule="exact_format", tags=tags, gold=None)))
    return parts


def _ruled(task_verifier: str | None, rule: str | None) -> Verifier:
    if rule is not None and rule not in RULES:
        raise RewardError(f"reward.rule = {rule!r}; choose one of: {', '.join(RULES)}")
    if task_verifier is None and rule is None:
        raise RewardError(
            "these rows have no verifier of their own; give --reward module:function, a verifier such as "
            "--reward math:rule=boxed, or --reward.rule last_number for numeric answers"
        )
    verifier = build(task_verifier or "arithmetic")
    if rule is None:
        return verifier
    if not isinstance(verifier, Region):
        raise RewardError(f"reward.rule = {rule!r}: the task's verifier {verifier.family!r} reads no answer; remove it")
    return dataclasses.replace(verifier, rule=rule, tags=("answer",))  # type: ignore[type-var,return-value]


def _judge(spec: Any) -> Verifier | Callable[..., Any]:
    if isinstance(spec, Verifier) or (callable(spec) and not isinstance(spec, str)):
        return spec
    return build(spec) if is_family(spec) else functions.load_function(spec)


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


class Verify:
    """verify(prompts, completions, step) -> one verdict per completion, in order; each is judged exactly once per part."""

    def __init__(self, parts: Sequence[Part], combine: str = "sum") -> None:
        self.parts = tuple(parts)
        self.combine = combine
        self.logged = functions.Logged()
        """What reward functions logged in the last call: metrics by "function/name", extras by column."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> list[Verdict]:
        self.logged = functions.Logged()
        by_key = {(prompt.id, prompt.draw): prompt for prompt in prompts}
        pairs = [(by_key[completion.prompt_id, completion.draw], completion) for completion in completions]
        sampled = [pair for pair in pairs if pair[1].finish_reason != "error"]
        columns = [self._column(part, sampled, step) for part in self.parts]
        rows = iter(list(zip(*columns, strict=True)))
        return [
            Verdict(None, f"sampling failed: {completion.error or 'no reason given'}")
            if completion.finish_reason == "error"
            else self._combined(next(rows))
            for _, completion in pairs
        ]

    def close(self) -> None:
        """End worker processes, if there are any."""

    def _column(self, part: Part, pairs: Sequence[tuple[Prompt, Completion]], step: int) -> list[Verdict]:
        if isinstance(part.judge, Verifier):
            return [self._judge(part.judge, prompt, completion) for prompt, completion in pairs]
        return functions.call(part.judge, part.name, _batch(pairs, step), self.logged)

    @staticmethod
    def _judge(verifier: Verifier, prompt: Prompt, completion: Completion) -> Verdict:
        if completion.finish_reason == "length" and getattr(verifier, "rule", None) in FINISHED_RULES:
            return Verdict(0.0)
        return verify(verifier, prompt.row, completion.text)

    def _combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        """One verdict from the parts' own. A part that is None for this row (a function for other tasks) leaves the sum."""
        answer = next((verdict.answer for verdict in verdicts if verdict.answer is not None), None)
        named = list(zip(self.parts, verdicts, strict=True))
        failed = [verdict.reason for _, verdict in named if verdict.value is None]
        left_out = [reason for reason in failed if reason and reason.endswith("returned None")]
        scored = [(part, verdict.value) for part, verdict in named if verdict.value is not None]
        parts = tuple((part.name, value) for part, value in scored)
        main = [part for part, _ in scored if part.name != "format"]
        if len(failed) > len(left_out) or not main or (failed and self.combine != "sum"):
            others = [reason for reason in failed if reason not in left_out]
            return Verdict(None, (others or left_out)[0], answer, parts)
        if self.combine == "product":
            value = math.prod(value for part, value in scored if part.weight)
        elif self.combine == "gate":
            value = scored[0][1] * sum(part.weight * value for part, value in scored[1:])
        else:
            value = sum(part.weight * value for part, value in scored)
        if not math.isfinite(value):
            return Verdict(None, f"the combined reward is {value}", answer)
        return Verdict(value, None, answer, parts)


def _batch(pairs: Sequence[tuple[Prompt, Completion]], step: int) -> functions.Batch:
    chats = [isinstance(prompt.row.get("prompt"), (list, tuple)) for prompt, _ in pairs]
    return functions.Batch(
        ids=[prompt.id for prompt, _ in pairs],
        prompts=[prompt.row.get("prompt", prompt.text) for prompt, _ in pairs],
        completions=[
            [{"role": "assistant", "content": completion.text}] if chat else completion.text
            for chat, (_, completion) in zip(chats, pairs, strict=True)
        ],
        completion_ids=[list(completion.token_ids) for _, completion in pairs],
        rows=[prompt.row for prompt, _ in pairs],
        step=step,
    )


def make_verify(reward: RewardConfig, data: Any, tokenizer: Any = None) -> Verify:
    """What the loop calls to judge completions of `data` (a TaskData: its verifier spec and its rows are read).

    Raises RewardError for a function or verifier that cannot be built, or that needs a column the data does not have.
    """
    parts = make_parts(reward, data.verifier)
    columns: Mapping[str, None] = {
        column: None for prompt in data.train[:1] for column in prompt.row if column != "prompt"
    }
    for part in parts:
        if not isinstance(part.judge, Verifier):
            functions.check_columns(part.judge, part.name, list(columns))
    return Verify(parts)
