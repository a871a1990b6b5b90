"""What a run minimizes, as the loop sees it: how groups become a batch, and a micro-batch a loss.

GRPO, SFT and DPO are rows of one table; trainer, updater and replay do not know which they run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tinyllm.config.sections import Config, GRPOConfig
from tinyllm.post.batch import Batch, BatchRules, make_batch, objective_axes, padded
from tinyllm.post.dpo import DPOObjective
from tinyllm.post.grpo import ObjectiveStats, clipped_objective
from tinyllm.post.sft import SFTObjective
from tinyllm.records import Completion, Group, Revision


class Objective(Protocol):
    """A loss over recorded groups. Statistics are frozen sums that add up over micro-batches, `tokens` among them."""

    needs_reference: bool
    """Whether the loss reads the reference policy's log-probabilities."""
    temperature: float
    """Of the log-probabilities."""
    updates_per_batch: int
    max_gap: float
    """Training stops when sampler and trainer differ by more nats per token; 0 = never."""
    empty: Any
    """Statistics of nothing."""

    def batch(self, groups: Sequence[Group], revision: Revision | None = None) -> Batch:
        """Rows, advantages, denominator, micro-batches."""
        ...

    def old(self, batch: Batch, row: int, first: Tensor) -> Tensor:
        """Log-probabilities of a row under the policy that drew it; first: the trainer's, of the batch's first pass."""
        ...

    def loss(
        self,
        batch: Batch,
        rows: Sequence[int],
        logp: Sequence[Tensor],
        old: Sequence[Tensor],
        reference: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Any]:
        """(share of the step's loss, statistics) of a micro-batch: one tensor per row, [completion length] each.

        logp is differentiable; old is what `old` gave, reference that of the reference policy.
        """
        ...

    def metrics(self, groups: Sequence[Group], batch: Batch, stats: Any, logged: Mapping[str, float]) -> dict[str, Any]:
        """Keys of metrics.jsonl that this objective adds; logged: what reward functions logged."""
        ...


def objective_of(config: Config) -> Objective:
    """The objective of a configuration, by its kind."""
    kinds: Mapping[str, Any] = {"grpo": GRPOObjective, "sft": SFTObjective, "dpo": DPOObjective}
    return kinds[config.kind](config)


class GRPOObjective:
    """Grouped advantages and the clipped objective of grpo.py."""

    empty = ObjectiveStats()

    def __init__(self, config: GRPOConfig) -> None:
        self.axes, self.rules = objective_axes(config), BatchRules.of(config)
        self.temperature = config.sampling.temperature
        self.updates_per_batch = config.train.updates_per_batch
        self.needs_reference = self.axes["beta"] > 0
        self.max_gap = config.engine.max_gap if config.engine.urls else 0.0
        chosen = config.objective
        if chosen.sampler_correction == "none" or chosen.sampler_cap >= 1:
            self._weight_of_one = 1.0
        else:
            self._weight_of_one = chosen.sampler_cap if chosen.sampler_mode == "truncate" else 0.0

    def batch(self, groups: Sequence[Group], revision: Revision | None = None) -> Batch:
        return replace(make_batch(groups, self.rules), revision=revision)

    def old(self, batch: Batch, row: int, first: Tensor) -> Tensor:
        """The first pass's for a row that the trained weights drew; where older ones had a part, what was recorded."""
        return first if batch.is_current(row) else _recorded(batch.rollouts[row].completion, first.device)

    def loss(
        self,
        batch: Batch,
        rows: Sequence[int],
        logp: Sequence[Tensor],
        old: Sequence[Tensor],
        reference: Sequence[Tensor] | None,
    ) -> tuple[Tensor, ObjectiveStats]:
        values, mask = padded(logp)
        device = values.device
        sampler = [_recorded(batch.rollouts[row].completion, device) for row in rows]
        loss, stats = clipped_objective(
            values,
            padded(old)[0],
            batch.advantages[list(rows)].to(device, torch.float32),
            mask,
            logp_ref=padded(reference)[0] if reference is not None else None,
            logp_sampler=padded(sampler)[0],
            denominator=batch.denominator,
            **self.axes,
        )
        older = sum(len(batch.rollouts[row].completion.token_ids) for row in rows if not batch.is_current(row))
        return loss, _without_older(stats, older, self._weight_of_one)

    def metrics(
        self, groups: Sequence[Group], batch: Batch, stats: ObjectiveStats, logged: Mapping[str, float]
    ) -> dict[str, Any]:
        live = stats.tokens > 0
        return {
            **_reward_metrics(groups, batch, logged),
            **_lag_metrics(batch),
            "kl": stats.kl,
            "clip_fraction_low": stats.clip_fraction_low if live else None,
            "clip_fraction_high": stats.clip_fraction_high if live else None,
            "ratio_mean": stats.ratio_mean if live else None,
            "ratio_max": stats.ratio_max if live else None,
            "sampler_equal": stats.sampler_equal_share,
            "sampler_gap": stats.sampler_gap,
            "sampler_gap_max": stats.gap_max if stats.gap_tokens else None,
            "sampler_kl": stats.sampler_kl,
        }


def _recorded(completion: Completion, device: torch.device) -> Tensor:
    """What the sampler recorded, [T] fp32: the same bits that it computed."""
    return torch.tensor(completion.logprobs, dtype=torch.float32, device=device)


def _without_older(stats: ObjectiveStats, older: int, weight: float) -> ObjectiveStats:
    """The sampler gap is that of the weights which are trained: for older tokens both sides are the record, gap 0.

    weight: what the correction gives a token without a gap.
    """
    if not older:
        return stats
    return replace(
        stats,
        gap_tokens=stats.gap_tokens - older,
        gap_equal=stats.gap_equal - older,
        weight_sum=stats.weight_sum - older * weight,
    )


def _lag_metrics(batch: Batch) -> dict[str, Any]:
    """How many optimizer steps older than the trained weights those were that drew the tokens: mean and largest."""
    spans = [span for r in batch.rollouts for span in r.completion.all_spans if span.end > span.start]
    if batch.revision is None or not spans:
        return {"lag_mean": None, "lag_max": None}
    lags = [batch.revision.step - span.revision.step for span in spans]
    sizes = [span.end - span.start for span in spans]
    total = sum(lag * size for lag, size in zip(lags, sizes, strict=True))
    return {"lag_mean": total / sum(sizes), "lag_max": max(lags)}


def _reward_metrics(groups: Sequence[Group], batch: Batch, logged: Mapping[str, float]) -> dict[str, Any]:
    """What verifiers said of the sampled rollouts, and how many groups had something to learn from."""
    rollouts = [r for g in groups for r in g.rollouts]
    values = [r.verdict.value for r in rollouts if r.verdict.value is not None]
    judged = [r.verdict for r in rollouts if "correct" in dict(r.verdict.parts)]
    done = [r.completion for r in rollouts if r.completion.finish_reason != "error"]
    zero = [i for i, g in enumerate(batch.groups) if not _any_signal(batch, i, len(g.rollouts))]
    unscored: dict[str, int] = {}
    for r in rollouts:
        if r.verdict.value is None:
            unscored[r.verdict.reason or "?"] = unscored.get(r.verdict.reason or "?", 0) + 1
    parts: dict[str, list[float]] = {}
    for r in rollouts:
        for name, value in r.verdict.parts:
            parts.setdefault(name, []).append(value)
    return {
        "reward_mean": mean(values),
        "reward_std": statistics.pstdev(values) if values else None,
        "reward_parts": {name: mean(x) for name, x in parts.items()},
        "reward_logged": dict(logged),
        "accuracy": mean([dict(v.parts)["correct"] for v in judged]),
        "unreadable": mean([v.answer is None for v in judged]),
        "truncated": mean([c.finish_reason == "length" for c in done]),
        "zero_advantage": len(zero) / len(batch.groups) if batch.groups else None,
        "groups_drawn": len(groups),
        "groups_trained": len(batch.groups) - len(zero),
        "unscored": sum(unscored.values()),
        "unscored_reasons": unscored,
    }


def _any_signal(batch: Batch, group: int, size: int) -> bool:
    start = sum(len(g.rollouts) for g in batch.groups[:group])
    return bool((batch.advantages[start : start + size] != 0).any())


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
