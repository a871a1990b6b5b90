"""Completions drawn again as they were recorded, also those during which the weights changed.

Samples whose spans are alike are drawn together: up to the first boundary with the weights of the first span, then the
next weights are put in place under the keys and values that are there, as it was when they were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tinyllm.engine.engine import Engine, job_of
from tinyllm.engine.scheduler import Scheduler
from tinyllm.errors import RunError
from tinyllm.records import Completion, Group, Prompt, SamplingParams

Pattern = tuple[tuple[int, int], ...]
"""(optimizer step of the weights, first token that they drew) of each span."""


class Versions:
    """The trained weights of the last revisions."""

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self.parameters, self.count = parameters, count
        self.kept: dict[int, dict[str, Tensor]] = {}

    def keep(self, step: int) -> None:
        """The weights now are those after this step."""
        self.kept[step] = {name: p.detach().clone() for name, p in self.parameters.items()}
        for old in sorted(self.kept)[: -self.count]:
            del self.kept[old]

    @torch.no_grad()
    def load(self, step: int) -> None:
        """Puts the weights of a step in place. Raises RunError for one that is not kept."""
        if step not in self.kept:
            raise RunError(
                f"completions of weights after step {step} are recorded, and those are not at hand; replay from an "
                "earlier step"
            )
        for name, tensor in self.kept[step].items():
            self.parameters[name].copy_(tensor)


def resample(
    engine: Engine, versions: Versions, groups: Sequence[Group], params: SamplingParams
) -> dict[tuple[str, int], Completion]:
    """Every completion of these groups that did not fail, drawn again: (group id, sample) -> completion.

    The weights are those of the newest version when it returns.
    """
    wanted: dict[Pattern, list[tuple[Group, int]]] = {}
    for group in groups:
        for rollout in group.rollouts:
            done = rollout.completion
            if done.token_ids:
                pattern = tuple((span.revision.step, span.start) for span in done.all_spans)
                wanted.setdefault(pattern, []).append((group, done.sample))
    drawn: dict[tuple[str, int], Completion] = {}
    capacity = engine.slots([group.prompt for group in groups], params)[0]
    for pattern, samples in wanted.items():
        for start in range(0, len(samples), capacity):
            _draw(engine, versions, pattern, samples[start : start + capacity], params, drawn)
    versions.load(max(versions.kept))
    return drawn


def _draw(
    engine: Engine,
    versions: Versions,
    pattern: Pattern,
    samples: Sequence[tuple[Group, int]],
    params: SamplingParams,
    drawn: dict[tuple[str, int], Completion],
) -> None:
    """Samples of one pattern, in step with each other: all have as many tokens, until they end."""
    versions.load(pattern[0][0])
    scheduler = Scheduler(engine.policy, engine.tokenizer, max_batch=len(samples), revision=engine.revision)
    of_group: dict[str, tuple[Prompt, list[int]]] = {}
    for group, sample in samples:
        of_group.setdefault(group.id, (group.prompt, []))[1].append(sample)
    for name, (prompt, numbers) in of_group.items():

        def finish(completion: Completion, name: str = name) -> None:
            drawn[name, completion.sample] = completion

        scheduler.submit(job_of(name, prompt, params, numbers, finish))
    tokens, busy = 0, True
    for step, start in pattern[1:]:
        while busy and tokens < start:
            busy = scheduler.step()
            tokens = tokens + 1 if tokens else 2  # the first step draws from the prompt, then goes on at once
        versions.load(step)
    while busy:
        busy = scheduler.step()
