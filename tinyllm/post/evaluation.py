"""Evaluation of GRPO during training: reward on held-out prompts, and the KL to the start policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.engine.head import Scored
from tinyllm.post.grpo import collect_groups, kl_estimate
from tinyllm.post.update import Scorer
from tinyllm.records import Group, Prompt, SamplingParams
from tinyllm.seams import Engine, Judge
from tinyllm.stats import mean_per_token


def evaluator(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    judge: Judge,
    reference: Callable[[], Scorer | None],
    ranks: Ranks = SOLO,
) -> Callable[[int, Sequence[Group]], dict[str, Any] | None]:
    """The function evaluate(step, groups), which samples params.n completions per held-out prompt, and judges them.

    It returns a line of kind `eval`, or None without prompts. reference: returns the start policy's scorer, or None if
    the KL is not measured. The KL (k3, nats per token) is estimated on `groups`, the step's rollouts, so for the policy
    that sampled them. The ranks share sampling and scoring.
    """

    def evaluate(step: int, groups: Sequence[Group]) -> dict[str, Any] | None:
        if not prompts:
            return None
        row: dict[str, Any] = {"kind": "eval", "step": step}
        row |= start_kl(groups, shared(ranks, reference())) if step else dict.fromkeys(("kl", "kl_low", "kl_high"), 0.0)
        judged = ranks.share(prompts, lambda s: collect_groups(engine, s, params, partial(judge, step=step)))
        rollouts = [r for g in judged for r in g.rollouts]
        scored = [r.verdict for r in rollouts if r.verdict.value is not None]
        correct = [dict(v.parts).get("correct") for v in scored]
        lengths = [sum(r.completion.sampled) for r in rollouts]
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
    """A scorer that gives each rank a share of the sequences; every rank gets all results."""
    if ranks.count == 1 or scorer is None:
        return scorer
    return lambda sequences: ranks.share(sequences, lambda share: [x.cpu() for x in scorer(share)])


def start_kl(groups: Sequence[Group], reference: Scorer | None) -> dict[str, float | None]:
    """Mean k3 estimate of KL(sampling policy || start policy) per sampled token of `groups`, in nats.

    Keys: kl, and kl_low and kl_high of its 95% interval with groups as clusters; None where nothing was measured.
    """
    sequences, sampled, owners = [], [], []
    for owner, group in enumerate(groups):
        for rollout in group.rollouts:
            if any(rollout.completion.sampled):
                sequences.append(Scored.of(group.prompt, rollout.completion))
                sampled.append(rollout.completion)
                owners.append(owner)
    if reference is None or not sequences:
        return {"kl": None, "kl_low": None, "kl_high": None}
    sums, sizes = [0.0] * len(groups), [0] * len(groups)
    for owner, completion, start in zip(owners, sampled, reference(sequences), strict=True):
        policy = torch.tensor([x for x in completion.logprobs if x is not None], dtype=torch.float64)
        sums[owner] += kl_estimate(policy, start.cpu().double()).sum().item()
        sizes[owner] += len(policy)
    rows = [owner for owner, size in enumerate(sizes) if size]
    kl = mean_per_token([sums[row] for row in rows], [sizes[row] for row in rows])
    return {"kl": kl.value, "kl_low": kl.low, "kl_high": kl.high}
