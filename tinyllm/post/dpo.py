"""Direct Preference Optimization: raises the likelihood of a chosen completion relative to a rejected one.

Legend: P pairs, T tokens (padded).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.config.sections import DPOConfig
from tinyllm.errors import ConfigError
from tinyllm.post.batch import Batch, flatten_groups, sampled_mask, split_microbatches
from tinyllm.records import Group, Revision


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, DPOStats]:
    """(loss, statistics) of P pairs.

        h    = (chosen - ref_chosen) - (rejected - ref_rejected)
        loss = -1/N sum [ (1 - s) log sigma(beta h) + s log sigma(-beta h) ]

    chosen, rejected, ref_chosen, ref_rejected: [P], log-probability of a whole completion (the sum over its tokens)
    under policy and reference. s: label_smoothing, the probability that a label is wrong, in [0, 1/2). lengths: tokens
    of each chosen and each rejected completion, [P] each; every log-ratio is then divided by its completion's length.
    N: denominator, the number of pairs of the whole step; None: P. Raises ConfigError for beta or s out of range.
    Sources: Rafailov et al., arXiv:2305.18290, eq. 7; smoothing: Mitchell, "A note on DPO with noisy preferences"
    (2023), eq. 3; length-normalised: Lambert et al., arXiv:2411.15124, section 5.
    """
    if not beta > 0:
        raise ConfigError(f"beta = {beta}: must be more than 0; set it to 0.1, the default")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing = {label_smoothing}: must be at least 0 and less than 0.5")
    gain_chosen, gain_rejected = chosen - ref_chosen, rejected - ref_rejected
    if lengths is not None:
        gain_chosen, gain_rejected = gain_chosen / lengths[0], gain_rejected / lengths[1]
    margin = beta * (gain_chosen - gain_rejected)
    each = -(1 - label_smoothing) * F.logsigmoid(margin)
    if label_smoothing:
        each = each - label_smoothing * F.logsigmoid(-margin)
    loss = each.sum() / (len(margin) if denominator is None else denominator)
    with torch.no_grad():
        wins = (margin > 0).sum() + 0.5 * (margin == 0).sum()
        sums = (wins, margin.sum(), beta * gain_chosen.sum(), beta * gain_rejected.sum())
        stats = DPOStats(float(len(margin)), *(float(x) for x in sums))
    return loss, stats


@dataclass(frozen=True)
class DPOStats:
    """Statistics of DPO: sums over pairs; `a + b` merges micro-batches."""

    pairs: float = 0.0
    wins: float = 0.0
    """Pairs with a margin above 0, that is a larger implicit reward of the chosen completion; a tie counts 1/2."""
    margin_sum: float = 0.0
    """Implicit reward of the chosen completion less that of the rejected one."""
    chosen_sum: float = 0.0
    """Implicit rewards, beta times the log-ratio to the reference, of chosen completions."""
    rejected_sum: float = 0.0
    """Implicit rewards of rejected completions."""
    tokens: float = 0.0
    """Trained tokens."""

    def __add__(self, other: DPOStats) -> DPOStats:
        """Statistics of both parts together."""
        return DPOStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class DPOObjective:
    """The objective of DPO; every group holds two rollouts, the chosen one first."""

    needs_reference = True
    temperature = 1.0
    updates_per_batch = 1
    empty = DPOStats()

    def __init__(self, config: DPOConfig) -> None:
        self.budget = config.train.tokens_per_microbatch
        self.chosen = config.objective

    def batch(self, groups: Sequence[Group], revision: Revision | None = None) -> Batch:
        """The batch of these pairs, in order; micro-batches hold whole pairs, the denominator is their number."""
        assert all(len(g.rollouts) == 2 for g in groups), "a group of DPO is a pair"
        prompts, rollouts = flatten_groups(groups)
        sides = torch.tensor([1.0, -1.0] * len(groups), dtype=torch.float64)
        return Batch(
            groups=tuple(groups),
            prompts=prompts,
            rollouts=rollouts,
            rewards=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
            advantages=sides,
            mask=sampled_mask(rollouts),
            denominator=float(len(groups)),
            microbatches=split_microbatches(
                prompts, rollouts, [(2 * i, 2 * i + 1) for i in range(len(groups))], self.budget
            ),
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
    ) -> tuple[Tensor, DPOStats]:
        """This micro-batch's share of the step's loss, and its statistics; logp and reference as in Objective.loss."""
        assert reference is not None
        policy, other = (torch.stack([x.sum() for x in side]) for side in (logp, reference))
        counts = torch.tensor([len(x) for x in logp], dtype=policy.dtype, device=policy.device)
        loss, stats = dpo_loss(
            policy[0::2],
            policy[1::2],
            other[0::2],
            other[1::2],
            beta=self.chosen.beta,
            label_smoothing=self.chosen.label_smoothing,
            lengths=(counts[0::2], counts[1::2]) if self.chosen.length_normalized else None,
            denominator=batch.denominator,
        )
        return loss, stats + DPOStats(tokens=float(counts.sum()))

    def stop_reason(self, stats: DPOStats) -> None:
        """None: nothing was sampled, so no sampler can differ from the trainer."""

    def metrics(
        self, groups: Sequence[Group], batch: Batch, stats: DPOStats, logged: Mapping[str, float]
    ) -> dict[str, Any]:
        """Keys of metrics.jsonl that only this objective has: means over pairs; None without any pair."""
        pairs = stats.pairs
        names = {"preference_accuracy": stats.wins, "margin": stats.margin_sum, "chosen_reward": stats.chosen_sum}
        names |= {"rejected_reward": stats.rejected_sum}
        return {name: total / pairs if pairs else None for name, total in names.items()}
