"""Held-out accuracy during training, and the KL to the start policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.post.grpo import RolloutClient, collect_groups, kl_estimate
from tinyllm.post.update import Scorer
from tinyllm.records import Group, Judged, Prompt, SamplingParams
from tinyllm.stats import mean_per_token


def evaluator(
    engine: RolloutClient,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    verify: Callable[..., Judged],
    reference: Callable[[], Scorer | None],
    ranks: Ranks = SOLO,
) -> Callable[[int, Sequence[Group]], dict[str, Any] | None]:
    """Returns evaluate(step, groups): one completion per held-out prompt under `params`, judged.

    reference gives the start policy's scorer, or None when the KL is not measured: the k3 estimate per token on the
    step's own rollouts, so it is that of the policy which sampled them. Ranks share both kinds of work.
    """

    def evaluate(step: int, groups: Sequence[Group]) -> dict[str, Any] | None:
        if not prompts:
            return None
        row: dict[str, Any] = {"kind": "eval", "step": step}
        row |= start_kl(groups, shared(ranks, reference())) if step else dict.fromkeys(("kl", "kl_low", "kl_high"), 0.0)
        judged = ranks.share(
            prompts, lambda s: collect_groups(engine, s, params, lambda p, c: list(verify(p, c, step).verdicts))
        )
        rollouts = [r for g in judged for r in g.rollouts]
        scored = [r.verdict for r in rollouts if r.verdict.value is not None]
        correct = [dict(v.parts).get("correct") for v in scored]
        lengths = [len(r.completion.token_ids) for r in rollouts]
        row |= {
            "prompts": len(scored),
            "correct": None if not scored or None in correct else int(sum(c == 1.0 for c in correct)),
            "reward_mean": sum(v.value or 0.0 for v in scored) / len(scored) if scored else None,
            "unscored": len(rollouts) - len(scored),
            "truncated": sum(r.completion.finish_reason == "length" for r in rollouts),
            "completion_length": sum(lengths) / len(lengths),
        }
        return row

    return evaluate


def shared(ranks: Ranks, scorer: Scorer | None) -> Scorer | None:
    """A scorer whose sequences the ranks divide among themselves; all have all results."""
    if ranks.count == 1 or scorer is None:
        return scorer
    return lambda sequences: ranks.share(sequences, lambda share: [x.cpu() for x in scorer(share)])


def start_kl(groups: Sequence[Group], reference: Scorer | None) -> dict[str, float | None]:
    """Mean k3 estimate of KL(sampling policy || start policy) per token of `groups`, with its 95% interval by group."""
    sequences, sampled, owners = [], [], []
    for owner, group in enumerate(groups):
        for rollout in group.rollouts:
            if rollout.completion.token_ids:
                sequences.append((group.prompt.token_ids, rollout.completion.token_ids))
                sampled.append(torch.tensor(rollout.completion.logprobs, dtype=torch.float64))
                owners.append(owner)
    if reference is None or not sequences:
        return {"kl": None, "kl_low": None, "kl_high": None}
    sums, sizes = [0.0] * len(groups), [0] * len(groups)
    for owner, policy, start in zip(owners, sampled, reference(sequences), strict=True):
        sums[owner] += kl_estimate(policy, start.cpu().double()).sum().item()
        sizes[owner] += len(policy)
    rows = [owner for owner, size in enumerate(sizes) if size]
    kl = mean_per_token([sums[row] for row in rows], [sizes[row] for row in rows])
    return {"kl": kl.value, "kl_low": kl.low, "kl_high": kl.high}
