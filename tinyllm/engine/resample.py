"""Completions drawn again as they were recorded, also those during which the weights changed.

Samples whose spans are alike are drawn together: up to the first boundary with the weights of the first span, then the
next weights are put in place under the keys and values that are there, as it was when they were sampled.
Completions with tokens that the environment gave are left out: the record does not say with which requests the tokens
between them were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tinyllm.engine.build import make_scheduler
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.scheduler import sample_request
from tinyllm.errors import RunError
from tinyllm.records import Completion, Group, Prompt, SamplingParams

Pattern = tuple[tuple[int, int], ...]
"""(optimizer step of the weights, first token that they drew) of each span."""


class Versions:
    """Copies of the trained weights at the last `count` revisions."""

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self.parameters, self.count = parameters, count
        self.kept: dict[int, dict[str, Tensor]] = {}

    def keep(self, step: int) -> None:
        """Copies the weights as they are now, which are those after this step."""
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
    engine: EmbeddedEngine, versions: Versions, groups: Sequence[Group], params: SamplingParams
) -> dict[tuple[str, int], Completion]:
    """The completions of these groups, drawn again: (group id, sample) -> completion.

    Left out are those that failed and those with tokens from the environment. Afterwards the model has the weights of
    the newest version.
    """
    wanted: dict[Pattern, list[tuple[Group, int]]] = {}
    for group in groups:
        for rollout in group.rollouts:
            done = rollout.completion
            pattern = _pattern(done)
            if pattern:
                wanted.setdefault(pattern, []).append((group, done.sample))
    drawn: dict[tuple[str, int], Completion] = {}
    for pattern, samples in wanted.items():
        for start in range(0, len(samples), engine.max_batch):
            _draw(engine, versions, pattern, samples[start : start + engine.max_batch], params, drawn)
    versions.load(max(versions.kept))
    return drawn


def _pattern(done: Completion) -> Pattern | None:
    """None for a completion without tokens or with tokens that were not sampled."""
    revisions = [span.revision for span in done.all_spans]
    if not done.token_ids or None in revisions:
        return None
    return tuple((r.step, span.start) for r, span in zip(revisions, done.all_spans, strict=True) if r is not None)


def _draw(
    engine: EmbeddedEngine,
    versions: Versions,
    pattern: Pattern,
    samples: Sequence[tuple[Group, int]],
    params: SamplingParams,
    drawn: dict[tuple[str, int], Completion],
) -> None:
    """Draws samples of one pattern together: at every step all unfinished ones have equally many tokens."""
    versions.load(pattern[0][0])
    scheduler = make_scheduler(engine.policy, engine.tokenizer, max_batch=len(samples), revision=engine.revision)
    of_group: dict[str, tuple[Prompt, list[int]]] = {}
    for group, sample in samples:
        of_group.setdefault(group.id, (group.prompt, []))[1].append(sample)
    for name, (prompt, numbers) in of_group.items():

        def finish(completion: Completion, name: str = name) -> None:
            drawn[name, completion.sample] = completion

        scheduler.submit(sample_request(name, prompt, params, numbers, finish))
    tokens, busy = 0, True
    for step, start in pattern[1:]:
        while busy and tokens < start:
            busy = scheduler.step()
            tokens = tokens + 1 if tokens else 2  # the first step draws from the prompt, then goes on at once
        versions.load(step)
    while busy:
        busy = scheduler.step()
