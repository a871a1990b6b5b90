"""Completions drawn again as they were recorded, also those during which the weights changed.

Samples with equal spans are drawn together: the weights of the first span draw its tokens, then the weights of the next
span are put in place while the cached keys and values stay, as when the run sampled.
Completions with tokens that the environment gave are left out: the record does not say which requests sampled the
tokens between the environment's.
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
        """Copies the present weights, which are those after this step."""
        self.kept[step] = {name: p.detach().clone() for name, p in self.parameters.items()}
        for old in sorted(self.kept)[: -self.count]:
            del self.kept[old]

    @torch.no_grad()
    def load(self, step: int) -> None:
        """Puts the weights of a step in place. Raises RunError for one that is not kept."""
        if step not in self.kept:
            raise RunError(
                f"the record has completions from the weights after step {step}, which are not at hand; replay from "
                "an earlier step"
            )
        for name, tensor in self.kept[step].items():
            self.parameters[name].copy_(tensor)


def resample(
    engine: EmbeddedEngine, versions: Versions, groups: Sequence[Group], params: SamplingParams
) -> dict[tuple[str, int, int], Completion]:
    """The completions of these groups, drawn again: (prompt id, draw, sample) -> completion.

    Left out are those that failed and those with tokens from the environment. Afterwards the model has the weights of
    the newest version.
    """
    wanted: dict[Pattern, list[tuple[Prompt, int]]] = {}
    for group in groups:
        for rollout in group.rollouts:
            pattern = _pattern(rollout.completion)
            if pattern:
                wanted.setdefault(pattern, []).append((group.prompt, rollout.completion.sample))
    drawn: list[Completion] = []
    for pattern, samples in wanted.items():
        for start in range(0, len(samples), engine.max_batch):
            drawn += _draw(engine, versions, pattern, samples[start : start + engine.max_batch], params)
    versions.load(max(versions.kept))
    return {(completion.prompt_id, completion.draw, completion.sample): completion for completion in drawn}


def _pattern(done: Completion) -> Pattern | None:
    """The pattern of a completion; None for one without tokens or with tokens that were not sampled."""
    revisions = [span.revision for span in done.all_spans]
    if not done.token_ids or None in revisions:
        return None
    return tuple((r.step, span.start) for r, span in zip(revisions, done.all_spans, strict=True) if r is not None)


def _draw(
    engine: EmbeddedEngine,
    versions: Versions,
    pattern: Pattern,
    samples: Sequence[tuple[Prompt, int]],
    params: SamplingParams,
) -> list[Completion]:
    """Draws samples of one pattern together: at every step all unfinished ones have equally many tokens."""
    versions.load(pattern[0][0])
    scheduler = make_scheduler(engine.policy, engine.tokenizer, max_batch=len(samples), revision=engine.revision)
    drawn: list[Completion] = []
    for number, (prompt, sample) in enumerate(samples):
        scheduler.submit(sample_request(str(number), prompt, params, [sample], drawn.append))
    tokens, busy = 0, True
    for step, start in pattern[1:]:
        while busy and tokens < start:
            busy = scheduler.step()
            tokens = tokens + 1 if tokens else 2  # the first step draws from the prompt and then decodes once
        versions.load(step)
    while busy:
        busy = scheduler.step()
    return drawn
