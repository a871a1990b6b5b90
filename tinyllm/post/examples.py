"""Runs on given completions (SFT, DPO): where their groups come from, and the loss on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tinyllm.config.io import check
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.errors import ConfigError, DataError, TrainingStopped
from tinyllm.post.dpo import DPOStats
from tinyllm.post.evaluation import shared
from tinyllm.post.parts import Parts
from tinyllm.post.source import PromptOrder, Source
from tinyllm.post.trainer import Evaluate
from tinyllm.post.update import Scorer, model_scorer
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Logged, Revision
from tinyllm.stats import mean_per_token
from tinyllm.tasks.examples import ExampleData, load_examples


class ExampleSource:
    """Rows in a seeded order, epoch after epoch. Nothing is sampled, so a resumed run takes the same rows again."""

    def __init__(self, data: ExampleData, order: PromptOrder, config: SFTConfig | DPOConfig, after: int) -> None:
        self.data, self.order, self.train, self.after = data, order, config.train, after
        self.seconds: dict[str, float] = {}
        self.logged = Logged()

    def publish(self, revision: Revision) -> None:
        """Nobody samples."""

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        for step in range(self.after + 1, self.train.steps + 1):
            rows = self.order.take(self.train.batch_size, {})
            self.order.trained += len(rows)
            yield step, self.data.of(rows)


class ExampleParts(Parts):
    """A run of SFT or DPO."""

    def read_data(self) -> None:
        config = self.config
        self.data: ExampleData = load_examples(config, self.tokenizer)
        rows, train = len(self.data.train), config.train
        if rows < train.batch_size:
            raise DataError(
                f"{self.data.name}: {rows} rows to train on, fewer than one batch (train.batch_size = "
                f"{train.batch_size}); lower it or give more rows"
            )
        largest = max(_distinct_tokens(g) for groups in self.data.groups.values() for g in groups)
        if largest > train.tokens_per_microbatch:
            raise ConfigError(
                f"train.tokens_per_microbatch = {train.tokens_per_microbatch} cannot hold the longest row; it needs at "
                f"least {largest}"
            )
        if not train.steps:
            steps = max(1, math.ceil(round(train.epochs * rows / train.batch_size, 6)))  # 1.1 * 10 is not 11 in fp64
            self.config = replace(config, train=replace(train, steps=steps))
            check(self.config)

    def longest(self) -> int:
        return self.data.longest

    def use_model(self) -> None:
        """Nothing samples with it."""

    def publish(self, revision: Revision) -> None:
        """Nothing samples with it."""

    def close(self) -> None:
        """There are no processes."""

    def source(self, run: RunDir, order: PromptOrder, recorded: Sequence[int], after: int) -> Source:
        return ExampleSource(self.data, order, self.config, after)

    def evaluator(self) -> Evaluate:
        groups = self.data.of(self.data.held_out[: self.config.eval.prompts or None])
        scorer = model_scorer(self.policy, 1.0, self.config.train.tokens_per_microbatch)

        def evaluate(step: int, _: Sequence[Group]) -> dict[str, Any] | None:
            if not groups:
                return None
            if self.config.kind == "sft":
                row = held_out_likelihood(groups, shared(self.ranks, scorer) or scorer)
            else:
                assert self.reference is not None
                row = held_out_preference(groups, self.updater.objective, scorer, self.reference)
            if not math.isfinite(row["loss"]):
                raise TrainingStopped(
                    f"the held-out loss after step {step} is {row['loss']}; lower optimizer.lr, or take another model "
                    "or dtype if no step was made"
                )
            return {"kind": "eval", "step": step, **row}

        return evaluate


def held_out_likelihood(groups: Sequence[Group], scorer: Scorer) -> dict[str, Any]:
    """Mean negative log-likelihood per token of held-out completions, with its interval; prompts are the clusters."""
    logp = scorer(_sequences(groups))
    first: dict[str, tuple[int, ...]] = {}
    sums: dict[tuple[int, ...], float] = {}
    sizes: dict[tuple[int, ...], int] = {}
    for (group, _), part in zip(_rollouts(groups), logp, strict=True):
        # the turns of a chat depend on each other, and so do the answers to one prompt
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
def held_out_preference(groups: Sequence[Group], objective: Any, policy: Scorer, reference: Scorer) -> dict[str, Any]:
    """Loss and implicit rewards of held-out pairs, with the loss's interval; prompts are the clusters."""
    total = DPOStats()
    sums: dict[tuple[int, ...], float] = {}
    sizes: dict[tuple[int, ...], int] = {}
    for group in groups:
        batch = replace(objective.batch([group]), denominator=1.0)
        sequences = _sequences([group])
        loss, stats = objective.loss(batch, (0, 1), policy(sequences), (), reference(sequences))
        prompt = group.prompt.token_ids  # the pairs of a prompt depend on each other
        sums[prompt] = sums.get(prompt, 0.0) + loss.item()
        sizes[prompt] = sizes.get(prompt, 0) + 1
        total = total + stats
    estimate = mean_per_token(list(sums.values()), list(sizes.values()))
    row = {"prompts": len(groups), "loss": estimate.value, "loss_low": estimate.low, "loss_high": estimate.high}
    return row | objective.metrics(groups, batch, total, {})


def _rollouts(groups: Sequence[Group]) -> Iterator[tuple[Group, Any]]:
    return ((group, rollout) for group in groups for rollout in group.rollouts)


def _sequences(groups: Sequence[Group]) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(g.prompt.token_ids, r.completion.token_ids) for g, r in _rollouts(groups)]


def _distinct_tokens(group: Group) -> int:
    """At most what a pass over the group computes: its prompt once, and every completion."""
    return len(group.prompt.token_ids) + sum(len(r.completion.token_ids) - 1 for r in group.rollouts)
