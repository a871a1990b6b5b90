"""From verified groups to a batch: shaped rewards, advantages, which rows are trained, micro-batches.

Everything here is derived from the frozen record, so replay and audit compute the same batch.
Legend: B rollouts (rows, group after group), T completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyllm.config.sections import GRPOConfig
from tinyllm.engine.trie import Trie
from tinyllm.post.grpo import PRESETS, group_advantages, step_denominator
from tinyllm.records import Group, Revision, Rollout

_V = TypeVar("_V")


@dataclass(frozen=True)
class BatchRules:
    """How rollouts become a batch: the resolved part of the configuration."""

    baseline: str
    scale: str
    aggregate: str
    constant_length: int | None
    mask_truncated: bool
    overlong_buffer: float
    max_new_tokens: int
    dynamic_sampling: bool
    prompts_per_step: int
    tokens_per_microbatch: int
    needs_all_rows: bool
    """Whether rows of advantage 0 have a gradient too (a KL term)."""

    @classmethod
    def of(cls, config: GRPOConfig) -> BatchRules:
        preset, chosen, train = PRESETS[config.objective.preset], config.objective, config.train
        return cls(
            baseline=pick(chosen.baseline, preset.baseline),
            scale=pick(chosen.scale, preset.scale),
            aggregate=pick(chosen.aggregate, preset.aggregate),
            constant_length=pick(chosen.constant_length, config.sampling.max_new_tokens),
            mask_truncated=train.mask_truncated,
            overlong_buffer=pick(train.overlong_buffer, preset.overlong_buffer),
            max_new_tokens=config.sampling.max_new_tokens,
            dynamic_sampling=pick(train.dynamic_sampling, preset.dynamic_sampling),
            prompts_per_step=train.prompts_per_step,
            tokens_per_microbatch=train.tokens_per_microbatch,
            needs_all_rows=chosen.beta > 0,
        )


def pick(value: _V | None, default: _V) -> _V:
    return default if value is None else value


def objective_axes(config: GRPOConfig) -> dict[str, Any]:
    """Keyword arguments of clipped_objective: the preset's row with the configuration's own choices over it."""
    preset, chosen = PRESETS[config.objective.preset], config.objective
    axes = {
        name: pick(getattr(chosen, name), getattr(preset, name))
        for name in ("ratio", "clip", "clip_low", "clip_high", "dual_clip", "kl", "aggregate")
    }
    axes |= {name: getattr(chosen, name) for name in ("beta", "sampler_correction", "sampler_mode", "sampler_cap")}
    axes["constant_length"] = pick(chosen.constant_length, config.sampling.max_new_tokens)
    return axes


@dataclass(frozen=True)
class Batch:
    """One step's rollouts, ready for the objective. Tensors are [B], rows in the order of `rollouts`."""

    groups: tuple[Group, ...]
    """The groups that are trained; with dynamic sampling those with signal only."""
    prompts: tuple[tuple[int, ...], ...]
    """Prompt ids of each row."""
    rollouts: tuple[Rollout, ...]
    rewards: Tensor
    """fp64, after the overlong penalty; NaN for a row that is unscored or left out."""
    advantages: Tensor
    """fp64."""
    trained: Tensor
    """bool: rows that count in the denominator."""
    denominator: float
    microbatches: tuple[tuple[int, ...], ...]
    """Row numbers of each forward and backward pass; rows without a gradient are in none."""
    revision: Revision | None = None
    """Of the weights that are trained on it; None: those that drew it, whichever they are."""

    @property
    def has_signal(self) -> bool:
        return bool(self.microbatches)

    def is_current(self, row: int) -> bool:
        """Whether all of a row was drawn from the weights that are trained on it.

        Not so where an update came in between: the tokens after it were drawn on what older weights left in the cache.
        """
        spans = self.rollouts[row].completion.all_spans
        return self.revision is None or all(span.revision == self.revision for span in spans)


def has_signal(group: Group, rules: BatchRules) -> bool:
    """Whether the members of a group were judged differently: only then its advantages are not all 0."""
    values = {r.reward for r in group.rollouts if _counted(r, rules)}
    return len(values) > 1


def make_batch(groups: Sequence[Group], rules: BatchRules) -> Batch:
    """Advantages and micro-batches of a step's groups."""
    if rules.dynamic_sampling:
        groups = [g for g in groups if has_signal(g, rules)][: rules.prompts_per_step]
    rollouts = [r for g in groups for r in g.rollouts]
    prompts = [g.prompt.token_ids for g in groups for _ in g.rollouts]
    rewards = torch.tensor([x for g in groups for x in shaped_rewards(g, rules)], dtype=torch.float64)
    ids = torch.tensor([i for i, g in enumerate(groups) for _ in g.rollouts], dtype=torch.long)
    advantages = group_advantages(rewards, ids, baseline=rules.baseline, scale=rules.scale)  # type: ignore[arg-type]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    trained = rewards.isfinite() & torch.tensor([n > 0 for n in lengths], dtype=torch.bool)
    mask = trained[:, None] & (torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.long)[:, None])
    live = trained if rules.needs_all_rows else trained & (advantages != 0)
    return Batch(
        groups=tuple(groups),
        prompts=tuple(prompts),
        rollouts=tuple(rollouts),
        rewards=rewards,
        advantages=advantages,
        trained=trained,
        denominator=step_denominator(mask, rules.aggregate, rules.constant_length),  # type: ignore[arg-type]
        microbatches=split_microbatches(
            prompts, rollouts, [(row,) for row in live.nonzero()[:, 0].tolist()], rules.tokens_per_microbatch
        ),
    )


def shaped_rewards(group: Group, rules: BatchRules) -> list[float]:
    """A group's rewards: NaN for rows left out, less the overlong penalty where the verdicts differ.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to L - buffer tokens, then falling to -1 at L.
    A group whose verdicts are all equal is left as it is, so that length alone never makes it useful.
    """
    rewards = [r.reward if _counted(r, rules) else math.nan for r in group.rollouts]
    buffer = rules.overlong_buffer * rules.max_new_tokens
    if buffer <= 0 or not has_signal(group, rules):
        return rewards
    start = rules.max_new_tokens - buffer
    lengths = [len(r.completion.token_ids) for r in group.rollouts]
    return [r - max(0.0, (n - start) / buffer) for r, n in zip(rewards, lengths, strict=True)]


def _counted(rollout: Rollout, rules: BatchRules) -> bool:
    """Whether a rollout takes part in its group: scored, and not truncated when truncated ones are masked."""
    if math.isnan(rollout.reward):
        return False
    return not (rules.mask_truncated and rollout.completion.finish_reason == "length")


def split_microbatches(
    prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], units: Sequence[tuple[int, ...]], budget: int
) -> tuple[tuple[int, ...], ...]:
    """Cuts rows, in order, into micro-batches of at most `budget` distinct prefixes (what a pass really computes).

    The rows of a unit stay together, whatever it takes.
    """
    parts: list[tuple[int, ...]] = []
    part: list[int] = []
    trie = Trie()
    for unit in units:
        sequences = [[*prompts[row], *rollouts[row].completion.token_ids[:-1]] for row in unit]
        before = len(trie)
        for ids in sequences:
            trie.add(ids)
        if part and len(trie) > budget and len(trie) > before:
            parts.append(tuple(part))
            part, trie = [], Trie()
            for ids in sequences:
                trie.add(ids)
        part.extend(unit)
    if part:
        parts.append(tuple(part))
    return tuple(parts)


def assign_to_ranks(batch: Batch, ranks: int) -> list[list[tuple[int, ...]]]:
    """The micro-batches of each rank: as many for all, () where there is none left; passes side by side are alike.

    Where there are fewer than ranks, the largest are cut between groups.
    """
    if ranks == 1:
        return [list(batch.microbatches)]
    owner = [number for number, group in enumerate(batch.groups) for _ in group.rollouts]
    size = [len(p) + len(r.completion.token_ids) for p, r in zip(batch.prompts, batch.rollouts, strict=True)]
    parts = list(batch.microbatches)
    while parts and len(parts) < ranks:
        part = max(parts, key=lambda rows: len({owner[row] for row in rows}))
        groups = sorted({owner[row] for row in part})
        if len(groups) == 1:
            break
        first = tuple(row for row in part if owner[row] < groups[len(groups) // 2])
        place = parts.index(part)
        parts[place : place + 1] = [first, part[len(first) :]]
    parts.sort(key=lambda rows: -sum(size[row] for row in rows))
    parts += [()] * (-len(parts) % ranks)
    return [parts[rank::ranks] for rank in range(ranks)]


def padded(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One tensor per row, [T_b] each -> (values [B, T], mask [B, T])."""
    lengths = torch.tensor([len(part) for part in parts], device=parts[0].device)
    values = pad_sequence(list(parts), batch_first=True)
    return values, torch.arange(values.shape[1], device=values.device) < lengths[:, None]
