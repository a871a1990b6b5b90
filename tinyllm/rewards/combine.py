"""The parts of a reward, from the configuration, and one verdict from the verdicts of the parts.

    value = sum of weight x part      (combine = "sum")
          | product of the parts      ("product")
          | first part x sum of the others      ("gate": for example the format gates correctness)

Each part is logged by name in Verdict.parts; accuracy is counted from the part "correct".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.config.sections import RewardConfig
from tinyllm.errors import RewardError
from tinyllm.records import Unscored, Verdict
from tinyllm.rewards import functions
from tinyllm.rewards.base import Verifier, build, is_family
from tinyllm.rewards.text.extract import Region
from tinyllm.rewards.text.format import FormatVerifier

FORMAT = "format"
"""Name of the part that judges the form of a text. Where no other part has a value, this part gives no reward."""


@dataclass(frozen=True)
class RewardPart:
    """One part of the reward: a name, a weight, and the verifier or function that judges."""

    name: str
    weight: float
    judge: Verifier | Callable[..., Any] | str
    """A verifier; a function of this process; or "module:function", which runs in a worker process."""

    @property
    def in_worker(self) -> bool:
        """Whether it runs in a worker process, since nothing else bounds its time and memory."""
        return isinstance(self.judge, str) or (isinstance(self.judge, Verifier) and not self.judge.in_process)


def make_parts(reward: RewardConfig, task_verifier: str | None) -> list[RewardPart]:
    """The parts of the reward, in order. Raises RewardError naming the field, the value and the remedy."""
    specs: list[Any] = list(reward.functions)
    weights = list(reward.weights) or [1.0] * max(1, len(specs))
    if not specs:
        specs = [_own(task_verifier)]
    if reward.combine == "gate" and len(specs) < 2:
        raise RewardError("reward.combine = 'gate' needs two functions or more: the first opens the gate")
    if len(weights) != len(specs):
        raise RewardError(f"reward.weights has {len(weights)} numbers for {len(specs)} functions; give one each")
    if not all(map(math.isfinite, weights)):
        raise RewardError(f"reward.weights = {weights}; give finite numbers")
    parts: list[RewardPart] = []
    for spec, weight in zip(specs, weights, strict=True):
        judge = _judge(spec)
        name = judge.rpartition(":")[2] if isinstance(judge, str) else getattr(judge, "__name__", type(judge).__name__)
        if isinstance(judge, Verifier):
            name = "correct" if not any(part.name == "correct" for part in parts) else judge.family
        taken = [part.name for part in parts]
        parts.append(RewardPart(next(unique for unique in _names(name) if unique not in taken), weight, judge))
    main = parts[0].judge
    region = main.region if isinstance(main, Verifier) else None
    if region is not None and not reward.functions:  # logged beside correctness
        tags = region.tags if region.rule == "exact_format" else ("answer",)
        parts.append(RewardPart(FORMAT, 0.0, FormatVerifier(Region("exact_format", tags=tags), gold=None)))
    return parts


def _own(task_verifier: str | None) -> Verifier:
    if task_verifier is None:
        raise RewardError(
            "these rows have no verifier of their own; give --reward module:function, or a verifier such as "
            "--reward math:rule=boxed, or arithmetic:rule=last_number for numeric answers"
        )
    return build(task_verifier)


def _judge(spec: Any) -> Verifier | Callable[..., Any] | str:
    if isinstance(spec, Verifier) or (callable(spec) and not isinstance(spec, str)):
        return spec
    return build(spec) if is_family(spec) else functions.check_spec(spec)


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


def combined(parts: Sequence[RewardPart], verdicts: Sequence[Verdict], combine: str) -> Verdict:
    """One verdict from the verdicts of the parts. A part that does not apply to this row (a function for other tasks)
    is left out of the sum; any other part without a value leaves the completion unscored, with the part's reason."""
    named = list(zip(parts, verdicts, strict=True))
    answer = next((verdict.answer for verdict in verdicts if verdict.answer is not None), None)
    left_out = [verdict for verdict in verdicts if verdict.cause is Unscored.NOT_APPLICABLE]
    failed = [verdict for verdict in verdicts if verdict.value is None and verdict.cause is not Unscored.NOT_APPLICABLE]
    scored = [(part, verdict.value) for part, verdict in named if verdict.value is not None]
    values = tuple((part.name, value) for part, value in scored)
    if failed or (left_out and (combine != "sum" or all(part.name == FORMAT for part, _ in scored))):
        why = (failed or left_out)[0]
        return Verdict(None, why.reason, answer, values, why.cause)
    if combine == "product":
        value = math.prod(value for part, value in scored if part.weight)
    elif combine == "gate":
        value = scored[0][1] * sum(part.weight * value for part, value in scored[1:])
    else:
        value = sum(part.weight * value for part, value in scored)
    if not math.isfinite(value):
        return Verdict(None, f"the combined reward is {value}", answer, cause=Unscored.NOT_FINITE)
    return Verdict(value, None, answer, values)
