"""SFT and DPO, whose completions are in the data: the source of steps, and evaluation on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tinyllm.config.io import check
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.distributed.ranks import Ranks
from tinyllm.engine.head import Scored
from tinyllm.errors import ConfigError, DataError, TrainingStopped
from tinyllm.post.dpo import DPOStats
from tinyllm.post.evaluation import shared
from tinyllm.post.objectives import Objective
from tinyllm.post.source import PromptOrder
from tinyllm.post.trainer import Evaluate
from tinyllm.post.update import Scorer
from tinyllm.records import Group, Revision, Rollout, Step
from tinyllm.stats import mean_per_token
from tinyllm.tasks.examples import ExampleData


class ExampleSource:
    """Yields steps of data rows in a seeded order, epoch after epoch; a resumed run takes the same rows again.

    after: number of the last trained step. recorded: numbers of the steps that the run directory already holds.
    """

    def __init__(
        self,
        data: ExampleData,
        order: PromptOrder,
        config: SFTConfig | DPOConfig,
        after: int,
        recorded: Sequence[int] = (),
    ) -> None:
        self.data, self.order, self.train, self.after = data, order, config.train, after
        self.recorded = frozenset(recorded)

    def publish(self, revision: Revision) -> None:
        """Does nothing: no completion is sampled, so no part needs the new weights."""

    def __iter__(self) -> Iterator[Step]:
        for number in range(self.after + 1, self.train.steps + 1):
            rows = self.order.take(self.train.batch_size, {})
            groups = tuple(self.data.of(rows))
            yield Step(number, groups, prompts=len(rows), recorded=number in self.recorded)


def checked_config(config: SFTConfig | DPOConfig, data: ExampleData) -> SFTConfig | DPOConfig:
    """The configuration with train.steps set, from train.epochs where steps is 0.

    Raises DataError for fewer rows than a batch, ConfigError for a row longer than tokens_per_microbatch.
    """
    rows, train = len(data.train), config.train
    if rows < train.batch_size:
        raise DataError(
            f"{data.name}: {rows} rows to train on, fewer than one batch (train.batch_size = "
            f"{train.batch_size}); lower it or give more rows"
        )
    largest = max(_distinct_tokens(g) for groups in data.groups.values() for g in groups)
    if largest > train.tokens_per_microbatch:
        raise ConfigError(
            f"train.tokens_per_microbatch = {train.tokens_per_microbatch} cannot hold the longest row; it needs at "
            f"least {largest}"
        )
    if train.steps:
        return config
    steps = max(1, math.ceil(round(train.epochs * rows / train.batch_size, 6)))  # 1.1 * 10 is not 11 in fp64
    resolved = replace(config, train=replace(train, steps=steps))
    check(resolved)
    return resolved


def likelihood_evaluator(groups: Sequence[Group], scorer: Scorer, ranks: Ranks) -> Evaluate:
    """The function evaluate(step, groups), which returns an `eval` line with the loss of SFT on held-out rows."""

    def evaluate(step: int, _: Sequence[Group]) -> dict[str, Any] | None:
        return _line(step, held_out_likelihood(groups, shared(ranks, scorer) or scorer)) if groups else None

    return evaluate


def preference_evaluator(
    groups: Sequence[Group], objective: Objective[Any], scorer: Scorer, reference: Scorer
) -> Evaluate:
    """The function evaluate(step, groups), which returns an `eval` line of DPO's loss and implicit rewards on held-out
    pairs."""

    def evaluate(step: int, _: Sequence[Group]) -> dict[str, Any] | None:
        return _line(step, held_out_preference(groups, objective, scorer, reference)) if groups else None

    return evaluate


def _line(step: int, row: dict[str, Any]) -> dict[str, Any]:
    if not math.isfinite(row["loss"]):
        raise TrainingStopped(
            f"the held-out loss after step {step} is {row['loss']}; lower optimizer.lr, or take another model "
            "or dtype if no step was made"
        )
    return {"kind": "eval", "step": step, **row}


def held_out_likelihood(groups: Sequence[Group], scorer: Scorer) -> dict[str, Any]:
    """Mean negative log-likelihood per token of held-out completions, in nats, with its 95% interval by prompt."""
    logp = scorer(_sequences(groups))
    first: dict[str, tuple[int, ...]] = {}
    sums: dict[tuple[int, ...], float] = {}
    sizes: dict[tuple[int, ...], int] = {}
    for (group, _), part in zip(_rollouts(groups), logp, strict=True):
        # clusters: the turns of a chat are not independent, nor are several answers to one prompt
        prompt = first.setdefault(group.prompt.id.partition("/")[0], group.prompt.token_ids)
        sums[prompt] = sums.get(prompt, 0.0) - part.sum(dtype=torch.float64).item()
        sizes[prompt] = sizes.get(prompt, 0) + len(part)
    estimate = mean_per_token(list(sums.values()), list(sizes.values()))
    return {
        "prompts": len(first),
        "loss": estimate.value,
        "loss_low": estimate.low,
        "loss_high": estimate.high,
        "tokens": sum(sizes.values()),
    }


@torch.no_grad()
def held_out_preference(
    groups: Sequence[Group], objective: Objective[Any], policy: Scorer, reference: Scorer
) -> dict[str, Any]:
    """Loss and implicit rewards of held-out pairs, with the loss's 95% interval by prompt."""
    total = DPOStats()
    sums: dict[tuple[int, ...], float] = {}
    sizes: dict[tuple[int, ...], int] = {}
    for group in groups:
        batch = objective.batch([group])  # one pair: the loss is divided by 1
        sequences = _sequences([group])
        loss, stats = objective.loss(batch, (0, 1), policy(sequences), (), reference(sequences))
        prompt = group.prompt.token_ids  # clusters: the pairs of one prompt are not independent
        sums[prompt] = sums.get(prompt, 0.0) + loss.item()
        sizes[prompt] = sizes.get(prompt, 0) + 1
        total = total + stats
    estimate = mean_per_token(list(sums.values()), list(sizes.values()))
    row = {"prompts": len(groups), "loss": estimate.value, "loss_low": estimate.low, "loss_high": estimate.high}
    return row | objective.metrics(groups, batch, total, {})


def _rollouts(groups: Sequence[Group]) -> Iterator[tuple[Group, Rollout]]:
    return ((group, rollout) for group in groups for rollout in group.rollouts)


def _sequences(groups: Sequence[Group]) -> list[Scored]:
    return [Scored.of(g.prompt, r.completion) for g, r in _rollouts(groups)]


def _distinct_tokens(group: Group) -> int:
    """Upper bound on the tokens that a forward pass over the group computes: its prompt once, and every completion."""
    return len(group.prompt.token_ids) + sum(len(r.completion.token_ids) - 1 for r in group.rollouts)
