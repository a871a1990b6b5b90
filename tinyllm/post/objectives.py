"""The protocol `Objective`: how groups become a batch, and a micro-batch a loss; and the objective of GRPO.

Trainer, updater and replay use this protocol alone and do not know whether a run is GRPO, SFT or DPO.
Legend: B rollouts, n trained tokens of one row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tinyllm.config.sections import Config, DPOConfig, GRPOConfig
from tinyllm.post.batch import Batch, BatchRules, make_batch, padded
from tinyllm.post.dpo import DPOObjective
from tinyllm.post.grpo import ObjectiveStats, clipped_objective
from tinyllm.post.sft import SFTObjective
from tinyllm.records import Group, Revision

S = TypeVar("S")
"""Statistics of an objective: a frozen record of sums, `tokens` among them; `a + b` merges micro-batches and ranks."""


class Objective(Protocol[S]):
    """A loss over groups, with statistics of type S."""

    needs_reference: bool
    """Whether the loss reads the reference policy's log-probabilities."""
    temperature: float
    """Temperature of the softmax under which log-probabilities are taken."""
    updates_per_batch: int
    """Number of optimizer steps on each batch."""
    empty: S
    """Statistics of no tokens: the neutral element of `+`."""

    def batch(self, groups: Sequence[Group], revision: Revision | None = None) -> Batch:
        """The batch of these groups; revision: of the weights before this step's update, see Batch.revision."""
        ...

    def old(self, batch: Batch, row: int, first: Tensor) -> Tensor:
        """logp_old: log-probabilities of a row's trained tokens under the policy that sampled them, [n].

        first: log-probabilities that the trainer computed in its first pass over the batch, [n].
        """
        ...

    def loss(
        self,
        batch: Batch,
        rows: Sequence[int],
        logp: Sequence[Tensor],
        old: Sequence[Tensor],
        reference: Sequence[Tensor] | None,
    ) -> tuple[Tensor, S]:
        """(share of the step's loss, statistics) of a micro-batch.

        rows: row numbers of the batch. logp, old, reference: one tensor [n] per row, with the log-probabilities under
        the trained policy (differentiable), from the method `old`, and under the reference policy.
        """
        ...

    def stop_reason(self, stats: S) -> str | None:
        """Why training must stop before the first pass over a batch changes any weight, or None."""
        ...

    def metrics(self, groups: Sequence[Group], batch: Batch, stats: S, logged: Mapping[str, float]) -> dict[str, Any]:
        """Keys of metrics.jsonl that only this objective has; logged: numbers that reward functions logged."""
        ...


def objective_of(config: Config) -> Objective[Any]:
    """The objective for the configuration's kind (GRPO, SFT or DPO)."""
    if isinstance(config, GRPOConfig):
        return GRPOObjective(config)
    return DPOObjective(config) if isinstance(config, DPOConfig) else SFTObjective(config)


class GRPOObjective:
    """The objective of GRPO: grouped advantages and the clipped objective of grpo.py."""

    empty = ObjectiveStats()

    def __init__(self, config: GRPOConfig) -> None:
        self.rules = BatchRules.of(config)
        self.axes = self.rules.axes
        self.temperature = config.sampling.temperature
        self.updates_per_batch = config.train.updates_per_batch
        self.needs_reference = self.axes.beta > 0
        self.max_gap = config.engine.max_gap if config.engine.urls else 0.0

    def batch(self, groups: Sequence[Group], revision: Revision | None = None) -> Batch:
        """The batch with its advantages, see make_batch."""
        return make_batch(groups, self.rules, revision)

    def old(self, batch: Batch, row: int, first: Tensor) -> Tensor:
        """`first` for a row that the current weights sampled; the recorded log-probabilities for any other row."""
        return first if batch.is_current(row) else batch.recorded(row).to(first.device)

    def loss(
        self,
        batch: Batch,
        rows: Sequence[int],
        logp: Sequence[Tensor],
        old: Sequence[Tensor],
        reference: Sequence[Tensor] | None,
    ) -> tuple[Tensor, ObjectiveStats]:
        """clipped_objective of the micro-batch, with the denominator of the whole step.

        The sampler gap is measured only on rows that the current weights sampled: elsewhere `old` is the record itself.
        """
        values, mask = padded(logp)
        device = values.device
        return clipped_objective(
            values,
            padded(old)[0],
            batch.advantages[list(rows)].to(device, torch.float32),
            mask,
            logp_ref=padded(reference)[0] if reference is not None else None,
            logp_sampler=padded([batch.recorded(row).to(device) for row in rows])[0],
            gap_mask=torch.tensor([batch.is_current(row) for row in rows]),
            denominator=batch.denominator,
            **self.axes.arguments("loss"),
        )

    def stop_reason(self, stats: ObjectiveStats) -> str | None:
        """The reason, where servers' log-probabilities differ from the trainer's by more than engine.max_gap."""
        gap = stats.sampler_gap
        if not self.max_gap or gap is None or gap <= self.max_gap:
            return None
        return (
            f"sampler and trainer log-probabilities differ by {gap:.3g} nats per token (at most {stats.gap_max:.3g}), "
            f"more than engine.max_gap = {self.max_gap:g}; the weights are those before this step. "
            "Check that the servers run this model, in this precision, with log-probabilities after temperature"
        )

    def metrics(
        self, groups: Sequence[Group], batch: Batch, stats: ObjectiveStats, logged: Mapping[str, float]
    ) -> dict[str, Any]:
        """Rewards, lag, KL, clipping, ratios and sampler gap; None where nothing was measured."""
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


def _lag_metrics(batch: Batch) -> dict[str, Any]:
    """Mean and largest lag of sampled tokens, in steps: the current weights' step less the sampling weights' step."""
    spans = [s for r in batch.rollouts for s in r.completion.all_spans if s.revision is not None and s.end > s.start]
    if batch.revision is None or not spans:
        return {"lag_mean": None, "lag_max": None}
    lags = [batch.revision.step - span.revision.step for span in spans if span.revision is not None]
    sizes = [span.end - span.start for span in spans]
    total = sum(lag * size for lag, size in zip(lags, sizes, strict=True))
    return {"lag_mean": total / sum(sizes), "lag_max": max(lags)}


def _reward_metrics(groups: Sequence[Group], batch: Batch, logged: Mapping[str, float]) -> dict[str, Any]:
    """Statistics of the verdicts of all sampled rollouts, and the number of groups with signal."""
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
    """Whether any of a group's `size` rows has an advantage other than 0."""
    start = sum(len(g.rollouts) for g in batch.groups[:group])
    return bool((batch.advantages[start : start + size] != 0).any())


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None for an empty sequence."""
    return sum(values) / len(values) if values else None
