"""Supervised fine-tuning: maximizes the likelihood of the completions in the data.

Legend: B completions, T tokens (padded), N trained tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyllm.config.sections import SFTConfig
from tinyllm.post.batch import Batch, flatten_groups, padded, sampled_mask, split_microbatches
from tinyllm.records import Group, Revision


def sft_loss(logp: Tensor, mask: Tensor | None = None, denominator: float | None = None) -> Tensor:
    """Mean negative log-likelihood per token, in nats; 0-d.

        loss = -1/N sum_b sum_t mask_bt log p(y_bt | x_b, y_b<t)

    logp [B, T] or [T]: log-probabilities; mask: same shape, true where a token is trained (elsewhere logp may be NaN);
    None: everywhere. denominator: N, the trained tokens of the whole step; None: those of this call.
    Source: Ouyang et al., arXiv:2203.02155, section 3.5 (its step 1).
    """
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask.bool()
    total = float(mask.sum()) if denominator is None else denominator
    return -torch.where(mask, logp, 0.0).sum() / max(total, 1.0)


@dataclass(frozen=True)
class SFTStats:
    """Statistics of SFT; `a + b` merges micro-batches."""

    tokens: float = 0.0
    """Trained tokens."""

    def __add__(self, other: SFTStats) -> SFTStats:
        """Statistics of both parts together."""
        return SFTStats(self.tokens + other.tokens)


class SFTObjective:
    """The objective of SFT: every token of the step has the same weight, however the step is split."""

    needs_reference = False
    temperature = 1.0
    updates_per_batch = 1
    empty = SFTStats()

    def __init__(self, config: SFTConfig) -> None:
        self.budget = config.train.tokens_per_microbatch

    def batch(self, groups: Sequence[Group], revision: Revision | None = None) -> Batch:
        """The batch of all rows, in order; the denominator is the number of their trained tokens."""
        prompts, rollouts = flatten_groups(groups)
        ones, mask = torch.ones(len(rollouts), dtype=torch.float64), sampled_mask(rollouts)
        return Batch(
            groups=tuple(groups),
            prompts=prompts,
            rollouts=rollouts,
            rewards=ones,
            advantages=ones,
            mask=mask,
            denominator=float(mask.sum()),
            microbatches=split_microbatches(prompts, rollouts, [(row,) for row in range(len(rollouts))], self.budget),
            revision=revision,
        )

    def old(self, batch: Batch, row: int, first: Tensor) -> Tensor:
        """The first pass's own log-probabilities; the loss does not read them."""
        return first

    def loss(
        self,
        batch: Batch,
        rows: Sequence[int],
        logp: Sequence[Tensor],
        old: Sequence[Tensor],
        reference: Sequence[Tensor] | None,
    ) -> tuple[Tensor, SFTStats]:
        """This micro-batch's share of the step's loss, and its statistics; logp as in Objective.loss."""
        values, mask = padded(logp)
        return sft_loss(values, mask, batch.denominator), SFTStats(float(mask.sum()))

    def stop_reason(self, stats: SFTStats) -> None:
        """None: nothing was sampled, so no sampler can differ from the trainer."""

    def metrics(
        self, groups: Sequence[Group], batch: Batch, stats: SFTStats, logged: Mapping[str, float]
    ) -> dict[str, Any]:
        """Empty: SFT adds no keys to metrics.jsonl."""
        return {}
