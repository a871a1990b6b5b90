"""From judged groups to a batch: shaped rewards, advantages, the mask of trained tokens, micro-batches.

A batch is derived from recorded groups alone, so training and replay compute the same batch.
Legend: B rollouts (rows, group after group), T completion tokens (padded), n trained tokens of one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyllm.axes import PRESETS, ObjectiveAxes
from tinyllm.config.sections import GRPOConfig
from tinyllm.engine.head import Scored
from tinyllm.engine.trie import Trie
from tinyllm.post.grpo import group_advantages, step_denominator
from tinyllm.records import Group, Revision, Rollout

_V = TypeVar("_V")


@dataclass(frozen=True)
class BatchRules:
    """The settings that make_batch needs, with all defaults of the configuration resolved."""

    axes: ObjectiveAxes
    """Axes of the objective; constant_length is always set."""
    mask_truncated: bool
    overlong_buffer: float
    max_new_tokens: int
    dynamic_sampling: bool
    prompts_per_step: int
    tokens_per_microbatch: int

    @classmethod
    def of(cls, config: GRPOConfig) -> BatchRules:
        """The rules of a configuration, with the preset's values where an option is not set."""
        preset, train = PRESETS[config.objective.name], config.train
        return cls(
            axes=objective_axes(config),
            mask_truncated=train.mask_truncated,
            overlong_buffer=_pick(train.overlong_buffer, preset.overlong_buffer),
            max_new_tokens=config.sampling.max_new_tokens,
            dynamic_sampling=_pick(train.dynamic_sampling, preset.dynamic_sampling),
            prompts_per_step=train.prompts_per_step,
            tokens_per_microbatch=train.tokens_per_microbatch,
        )

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows with advantage 0 have a gradient too, from the KL term."""
        return self.axes.beta > 0


def _pick(value: _V | None, default: _V) -> _V:
    return default if value is None else value


def objective_axes(config: GRPOConfig) -> ObjectiveAxes:
    """The objective's resolved axes; constant_length is max_new_tokens where it is not set."""
    axes = config.objective.axes
    return replace(axes, constant_length=_pick(axes.constant_length, config.sampling.max_new_tokens))


@dataclass(frozen=True)
class Batch:
    """One step's rollouts, ready for the objective. Tensors are [B] unless stated, rows in the order of `rollouts`."""

    groups: tuple[Group, ...]
    """The groups to train on; with dynamic sampling only groups with signal."""
    prompts: tuple[tuple[int, ...], ...]
    """Prompt token ids of each row."""
    rollouts: tuple[Rollout, ...]
    rewards: Tensor
    """fp64, after the overlong penalty; NaN for a row that is unscored or left out."""
    advantages: Tensor
    """fp64."""
    mask: Tensor
    """bool [B, T]: the trained tokens, which alone count in losses and denominators. False for padding, for tokens that
    the environment inserted, and for every token of a row that is unscored or left out."""
    denominator: float
    """Denominator of the whole step's loss, see step_denominator."""
    microbatches: tuple[tuple[int, ...], ...]
    """Row numbers of each forward and backward pass; rows without a gradient are in none."""
    revision: Revision | None = None
    """Revision of the weights before this step's update; None: all rows count as sampled from those weights."""

    @property
    def has_signal(self) -> bool:
        """Whether any row has a gradient."""
        return bool(self.microbatches)

    @property
    def trained(self) -> Tensor:
        """bool [B]: whether the row has a trained token."""
        return self.mask.any(-1)

    def positions(self, row: int) -> tuple[int, ...]:
        """Indices of a row's trained tokens in its completion, ascending."""
        return tuple(self.mask[row].nonzero()[:, 0].tolist())

    def scored(self, row: int) -> Scored:
        """A row as input of a forward pass: prompt, completion, and the indices of the tokens to score."""
        return Scored(self.prompts[row], self.rollouts[row].completion.token_ids, self.positions(row))

    def recorded(self, row: int) -> Tensor:
        """The sampler's log-probabilities of a row's trained tokens, [n] fp32, with the bits that it computed."""
        logprobs = self.rollouts[row].completion.logprobs
        return torch.tensor([logprobs[position] for position in self.positions(row)], dtype=torch.float32)

    def spread(self, row: int, values: Sequence[float]) -> list[float | None]:
        """`values` (one per trained token of a row) laid out as one per completion token; None at untrained tokens."""
        given = dict(zip(self.positions(row), values, strict=True))
        return [given.get(position) for position in range(len(self.rollouts[row].completion.token_ids))]

    def is_current(self, row: int) -> bool:
        """Whether every sampled token of a row comes from the weights that this step updates (`revision`).

        After a weight update in the middle of a completion, the new weights read keys and values of the old ones, so
        even the tokens after it have other log-probabilities than a forward pass of the new weights gives.
        """
        spans = self.rollouts[row].completion.all_spans
        return self.revision is None or all(span.revision in (None, self.revision) for span in spans)


def has_signal(group: Group, rules: BatchRules) -> bool:
    """Whether the counted rollouts of a group have different rewards; otherwise all its advantages are 0."""
    values = {r.reward for r in group.rollouts if _counted(r, rules)}
    return len(values) > 1


def flatten_groups(groups: Sequence[Group]) -> tuple[tuple[tuple[int, ...], ...], tuple[Rollout, ...]]:
    """(prompt token ids of each row, rollout of each row), group after group."""
    prompts = tuple(g.prompt.token_ids for g in groups for _ in g.rollouts)
    return prompts, tuple(r for g in groups for r in g.rollouts)


def sampled_mask(rollouts: Sequence[Rollout]) -> Tensor:
    """bool [B, T]: the tokens that the policy sampled; False for padding and for tokens of the environment."""
    if not rollouts:
        return torch.zeros(0, 0, dtype=torch.bool)
    flags = [torch.tensor(r.completion.sampled, dtype=torch.bool) for r in rollouts]
    return pad_sequence(flags, batch_first=True)


def make_batch(groups: Sequence[Group], rules: BatchRules, revision: Revision | None = None) -> Batch:
    """The batch of a step's groups; revision: of the weights before this step's update, see Batch.revision.

    With dynamic sampling the first prompts_per_step groups with signal are kept.
    """
    if rules.dynamic_sampling:
        groups = [g for g in groups if has_signal(g, rules)][: rules.prompts_per_step]
    prompts, rollouts = flatten_groups(groups)
    sampled = sampled_mask(rollouts)
    rewards = torch.tensor(shaped_rewards(groups, sampled.sum(-1).tolist(), rules), dtype=torch.float64)
    ids = torch.tensor([i for i, g in enumerate(groups) for _ in g.rollouts], dtype=torch.long)
    advantages = group_advantages(rewards, ids, **rules.axes.arguments("advantages"))
    mask = sampled & rewards.isfinite()[:, None]
    live = mask.any(-1) if rules.needs_all_rows else mask.any(-1) & (advantages != 0)
    return Batch(
        groups=tuple(groups),
        prompts=prompts,
        rollouts=rollouts,
        rewards=rewards,
        advantages=advantages,
        mask=mask,
        denominator=step_denominator(mask, rules.axes.aggregate, rules.axes.constant_length),
        microbatches=split_microbatches(
            prompts, rollouts, [(row,) for row in live.nonzero()[:, 0].tolist()], rules.tokens_per_microbatch
        ),
        revision=revision,
    )


def shaped_rewards(groups: Sequence[Group], lengths: Sequence[int], rules: BatchRules) -> list[float]:
    """Rewards of all rows after the overlong penalty; NaN for rows left out.

        reward - max(0, (length - (L - buffer)) / buffer)     L: max_new_tokens, buffer: overlong_buffer x L

    lengths: sampled tokens of each row. A group whose rewards are all equal gets no penalty, so that length alone never
    gives a group signal. Source: soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13.
    """
    buffer = rules.overlong_buffer * rules.max_new_tokens
    start = rules.max_new_tokens - buffer
    length = iter(lengths)
    rewards: list[float] = []
    for group in groups:
        punished = buffer > 0 and has_signal(group, rules)
        for rollout, tokens in zip(group.rollouts, length, strict=False):
            reward = rollout.reward if _counted(rollout, rules) else math.nan
            rewards.append(reward - max(0.0, (tokens - start) / buffer) if punished else reward)
    return rewards


def _counted(rollout: Rollout, rules: BatchRules) -> bool:
    """Whether a rollout's reward counts in its group: it is scored, and not truncated while mask_truncated is set."""
    if math.isnan(rollout.reward):
        return False
    return not (rules.mask_truncated and rollout.completion.finish_reason == "length")


def split_microbatches(
    prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], units: Sequence[tuple[int, ...]], budget: int
) -> tuple[tuple[int, ...], ...]:
    """Split rows, in order, into micro-batches of at most `budget` tokens; a prefix that rows share counts once.

    units: rows that stay in one micro-batch, even when they exceed the budget. Returns the row numbers of each
    micro-batch.
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
    """The micro-batches of each rank: equally many for every rank, padded with (), of similar size at equal index.

    While there are fewer micro-batches than ranks, the one with the most groups is split between two groups.
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
    """Pad one tensor per row, [n_b] each, to (values [B, T], mask [B, T]), T being the longest n_b."""
    lengths = torch.tensor([len(part) for part in parts], device=parts[0].device)
    values = pad_sequence(list(parts), batch_first=True)
    return values, torch.arange(values.shape[1], device=values.device) < lengths[:, None]
