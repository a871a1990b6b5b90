"""The hop from a batch to new weights: forward, objective, backward, optimizer step.

Micro-batches change nothing but memory: every row is scored with the same bits whatever it is packed with, and the
denominator is that of the whole step. A step whose loss or gradient is not finite leaves the weights as they were.

On several ranks every rank has the same batch, and does the passes over its own share of the micro-batches; gradients,
losses and statistics are sums over all of them.

Legend: B rows, T completion tokens (padded), P predicted tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyllm.config.sections import Config
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.engine.head import Targets, pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.errors import TrainingStopped
from tinyllm.post.batch import Batch, assign_to_ranks
from tinyllm.post.objectives import objective_of
from tinyllm.post.optimizer import Optimizer
from tinyllm.record.hashing import hash_json, hash_tensor, hash_tensors

Scorer = Callable[[Sequence[tuple[Sequence[int], Sequence[int]]]], list[Tensor]]
"""(prompt ids, completion ids) pairs -> log-probabilities of each completion, without gradient."""


@dataclass(frozen=True)
class UpdateResult:
    """What one batch did. Sums and means are over the trained rows that have a gradient."""

    stats: Any
    """The objective's, of the last update of the batch (sampler gap: of the first). Empty when one was not finite."""
    loss: float | None
    grad_norm: float | None
    """Loss and norm are None when they, or the gradient, were not finite."""
    entropy: float | None
    updates: int
    """Optimizer steps taken; 0 when the batch had no signal or was not finite."""
    non_finite: str | None = None
    """Where the first non-finite number was, or None."""
    hashes: dict[str, str] = field(default_factory=dict)
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """Trainer log-probabilities of the first pass, by row: [completion length] each."""


class Updater:
    """Turns batches into optimizer steps. forward: a pass with gradient, where the weights lie in shards."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        config: Config,
        reference: Scorer | None = None,
        forward: Callable[[Targets, float], tuple[Tensor, Tensor]] | None = None,
        ranks: Ranks = SOLO,
    ) -> None:
        self.policy, self.optimizer, self.ranks = policy, optimizer, ranks
        self.forward = forward or partial(score, policy)
        self.objective = objective_of(config)
        self.reference = reference if self.objective.needs_reference else None
        assert not self.objective.needs_reference or reference is not None, "the loss needs a reference"

    def __call__(self, batch: Batch, lr: float) -> UpdateResult:
        """The objective's updates_per_batch steps over the batch; `first` is what the first pass computes."""
        first: dict[int, Tensor] = {}
        references: dict[int, Tensor] = {}
        gap = self.objective.empty
        result = UpdateResult(gap, 0.0, 0.0, None, 0)
        for number in range(self.objective.updates_per_batch if batch.has_signal else 0):
            self.optimizer.zero_grad()
            result = self._accumulate(batch, first, references, result.updates)
            if result.non_finite is not None:  # its numbers say nothing, and JSON has no NaN
                result = replace(result, stats=self.objective.empty, loss=None, grad_norm=None, entropy=None)
                gap = self.objective.empty
                break
            if number == 0:
                gap = result.stats
                self._require_small_gap(gap)
            assert result.grad_norm is not None
            self.optimizer.step(lr, result.grad_norm)
            result = replace(result, updates=number + 1)
        self.optimizer.zero_grad()
        first = _merged(self.ranks, first)
        hashes = {**result.hashes, "logprobs": hash_tensor(_joined(first)), "advantages": hash_tensor(batch.advantages)}
        stats = _with_gap(result.stats, gap) if self.objective.updates_per_batch > 1 else result.stats
        return replace(result, stats=stats, hashes=hashes, logprobs=first)

    def _require_small_gap(self, stats: Any) -> None:
        """Raises TrainingStopped before the weights change when the sampler drew from another distribution."""
        bound = self.objective.max_gap
        if not bound or stats.sampler_gap is None or stats.sampler_gap <= bound:
            return
        self.optimizer.zero_grad()
        raise TrainingStopped(
            f"sampler and trainer log-probabilities differ by {stats.sampler_gap:.3g} nats per token (at most "
            f"{stats.gap_max:.3g}), more than engine.max_gap = {bound:g}; the weights are those before this step. "
            "Check that the servers run this model, in this precision, with log-probabilities after temperature"
        )

    def _accumulate(
        self, batch: Batch, first: dict[int, Tensor], references: dict[int, Tensor], updates: int
    ) -> UpdateResult:
        loss, entropy_sum, entropy_count, stats = 0.0, 0.0, 0, self.objective.empty
        trouble = None
        for rows in assign_to_ranks(batch, self.ranks.count)[self.ranks.rank]:
            if not rows:
                self._idle(batch)
                continue
            part, part_stats, entropy, logp = self._backward(batch, rows, first, references)
            if not math.isfinite(part) and trouble is None:
                trouble = _locate(batch, rows, logp, part)
            loss += part
            stats = stats + part_stats
            entropy_sum += float(entropy.sum(dtype=torch.float64))
            entropy_count += len(entropy)
        sums = self.ranks.gather((loss, entropy_sum, entropy_count, stats, trouble))
        loss, entropy_sum, entropy_count = (sum(each) for each in list(zip(*sums, strict=True))[:3])
        stats = sum((each[3] for each in sums), self.objective.empty)
        trouble = next((each[4] for each in sums if each[4] is not None), None)
        norm = self.optimizer.gradient_norm()
        if trouble is None and not math.isfinite(norm):
            trouble = f"gradient of {self.optimizer.non_finite_gradient()}"
        gradient = _gradient_hash(self.ranks, self.optimizer) if trouble is None else ""
        entropy_mean = entropy_sum / entropy_count if entropy_count else None
        return UpdateResult(stats, loss, norm, entropy_mean, updates, trouble, {"gradient": gradient})

    def _backward(
        self, batch: Batch, rows: tuple[int, ...], first: dict[int, Tensor], references: dict[int, Tensor]
    ) -> tuple[float, Any, Tensor, Sequence[Tensor]]:
        sequences = [(batch.prompts[row], batch.rollouts[row].completion.token_ids) for row in rows]
        targets = pack_targets(sequences, self.policy.device)
        logp, entropy = self.forward(targets, self.objective.temperature)
        parts = logp.split(list(targets.lengths))
        for row, part in zip(rows, parts, strict=True):
            first.setdefault(row, part.detach())
        if self.reference is not None and rows[0] not in references:
            references.update(zip(rows, self.reference(sequences), strict=True))
        held = [references[row] for row in rows] if self.reference is not None else None
        old = [self.objective.old(batch, row, first[row]) for row in rows]
        loss, stats = self.objective.loss(batch, rows, parts, old, held)
        loss.backward()
        return loss.item(), stats, entropy, parts

    def _idle(self, batch: Batch) -> None:
        """A pass that adds nothing, while other ranks have rows: gathering shards takes all of them."""
        row = batch.microbatches[0][0]
        one_token = (batch.prompts[row][:1], batch.rollouts[row].completion.token_ids[:1])
        logp, _ = self.forward(pack_targets([one_token], self.policy.device), self.objective.temperature)
        (logp.sum() * 0.0).backward()


def _merged(ranks: Ranks, own: dict[int, Tensor]) -> dict[int, Tensor]:
    """The rows of all ranks."""
    if ranks.count == 1:
        return own
    return {row: x for rows in ranks.gather({row: x.cpu() for row, x in own.items()}) for row, x in rows.items()}


def _gradient_hash(ranks: Ranks, optimizer: Optimizer) -> str:
    """Of the whole gradient; of the list of its shards, where it is sharded."""
    hashes = ranks.gather(hash_tensors(optimizer.gradients()))
    return hashes[0] if len(hashes) == 1 else hash_json(hashes)


def model_scorer(policy: Policy, temperature: float, budget: int) -> Scorer:
    """Scores with a whole model, at most `budget` rows' worth of tokens at a time (rows are few: one pass each)."""

    @torch.no_grad()
    def scorer(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        out: list[Tensor] = []
        part: list[tuple[Sequence[int], Sequence[int]]] = []
        tokens = 0
        for sequence in [*sequences, None]:
            size = 0 if sequence is None else len(sequence[0]) + len(sequence[1])
            if part and (sequence is None or tokens + size > budget):
                logp, _ = score(policy, pack_targets(part, policy.device), temperature)
                out.extend(logp.split([len(c) for _, c in part]))
                part, tokens = [], 0
            if sequence is not None:
                part.append(sequence)
                tokens += size
        return out

    return scorer


def adapter_off_scorer(policy: Policy, temperature: float, budget: int) -> Scorer:
    """Scores with the adapters switched off: the start policy of a LoRA run."""
    inner = model_scorer(policy, temperature, budget)

    def scorer(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        with policy.model.disable_adapter() if hasattr(policy.model, "disable_adapter") else contextlib.nullcontext():
            return inner(sequences)

    return scorer


def _joined(first: dict[int, Tensor]) -> Tensor:
    """The first pass's log-probabilities in row order."""
    return torch.cat([first[row] for row in sorted(first)]) if first else torch.empty(0)


def _locate(batch: Batch, rows: tuple[int, ...], logp: Sequence[Tensor], loss: float) -> str:
    """Row, token and prompt of the first non-finite log-probability of a micro-batch; logp has one tensor per row."""
    for row, part in zip(rows, logp, strict=True):
        bad = (~part.isfinite()).nonzero()
        if len(bad):
            completion = batch.rollouts[row].completion
            return (
                f"log-probability of token {int(bad[0])} (id {completion.token_ids[int(bad[0])]}) of row {row}, "
                f"prompt {completion.prompt_id!r} sample {completion.sample}"
            )
    prompts = sorted({batch.rollouts[row].completion.prompt_id for row in rows})
    return f"loss {loss} of rows {rows[0]} to {rows[-1]}, prompts {', '.join(prompts)}"


def _with_gap(stats: Any, first: Any) -> Any:
    """The sampler gap is that of the first pass, when the weights were the sampler's."""
    names = ("gap_tokens", "gap_sum", "gap_max", "gap_kl", "gap_equal", "weight_sum")
    return replace(stats, **{name: getattr(first, name) for name in names})
