"""From a batch to new weights: forward, objective, backward, optimizer step.

The split into micro-batches affects only memory: a row's log-probabilities have the same bits whatever it is packed
with, and the denominator is that of the whole step. A pass whose loss or gradient is not finite changes no weights.

All ranks have the same batch, and each passes over its own share of the micro-batches; gradients, losses and statistics
are summed over ranks.

Legend: P predicted (scored) tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinyllm.config.sections import Config
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.engine.head import Scorable, Targets, pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.errors import TrainingStopped
from tinyllm.post.batch import Batch, assign_to_ranks
from tinyllm.post.objectives import Objective, objective_of
from tinyllm.post.optimizer import Optimizer
from tinyllm.record.hashing import hash_json, hash_tensor, hash_tensors

Scorer: TypeAlias = Callable[[Sequence[Scorable]], list[Tensor]]
"""Sequences -> one tensor per sequence: log-probabilities of its scored tokens, without gradient."""
Forward: TypeAlias = Callable[[Targets, float], tuple[Tensor, Tensor]]
"""(packed targets, temperature) -> (log-probability with gradient [P], entropy [P])."""


@dataclass(frozen=True)
class UpdateResult:
    """Results of training on one batch. Sums and means are over the rows that have a gradient."""

    stats: Any
    """The objective's statistics of the last pass over the batch; empty when that pass was not finite."""
    loss: float | None
    """Loss of the last pass; None when the loss or the gradient was not finite."""
    grad_norm: float | None
    """L2 norm of the last pass's gradient; None when the loss or the gradient was not finite."""
    entropy: float | None
    """Mean entropy in nats per trained token; None without any token."""
    updates: int
    """Optimizer steps taken; 0 when the batch had no signal or was not finite."""
    non_finite: str | None = None
    """Place of the first non-finite number; None when all were finite."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the last gradient, the first pass's log-probabilities and the advantages."""
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """The trainer's log-probabilities of the first pass, by row number: one per trained token of the row."""


@dataclass(frozen=True)
class _FirstPass:
    """Log-probabilities of the first pass that later passes reuse: by row of this rank, one per trained token."""

    policy: Mapping[int, Tensor]
    """Under the weights before the first update, without gradient."""
    reference: Mapping[int, Tensor]
    """Under the reference policy; empty where the loss needs none."""


@dataclass(frozen=True)
class _MicroBatch:
    """Results of forward and backward of one micro-batch, besides gradients."""

    loss: float
    stats: Any
    entropy: Tensor
    policy: Mapping[int, Tensor]
    """Log-probabilities by row, without gradient."""
    reference: Mapping[int, Tensor]


@dataclass(frozen=True)
class _Pass:
    """Results of one pass over a whole batch, summed over micro-batches and ranks."""

    loss: float
    grad_norm: float
    entropy: float | None
    stats: Any
    non_finite: str | None
    gradient_hash: str
    scored: _FirstPass


class Updater:
    """Makes optimizer steps from batches. forward: the forward pass of sharded weights; None: of `policy` itself."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        config: Config,
        reference: Scorer | None = None,
        forward: Forward | None = None,
        ranks: Ranks = SOLO,
    ) -> None:
        self.policy, self.optimizer, self.ranks = policy, optimizer, ranks
        self.forward: Forward = forward or partial(score, policy)
        self.objective: Objective[Any] = objective_of(config)
        self.reference = reference if self.objective.needs_reference else None
        assert not self.objective.needs_reference or reference is not None, "the loss needs a reference"

    def __call__(self, batch: Batch, lr: float) -> UpdateResult:
        """Make the objective's updates_per_batch optimizer steps on the batch, at learning rate lr.

        Every pass uses the old and reference log-probabilities of the first pass. Raises TrainingStopped, with the
        weights unchanged, when the objective's stop_reason refuses the statistics of the first pass.
        """
        first: _FirstPass | None = None
        last: _Pass | None = None
        updates = 0
        for _ in range(self.objective.updates_per_batch if batch.has_signal else 0):
            self.optimizer.zero_grad()
            last = self._pass(batch, first)
            first = first or last.scored
            if last.non_finite is not None:
                break
            if not updates and (reason := self.objective.stop_reason(last.stats)) is not None:
                self.optimizer.zero_grad()
                raise TrainingStopped(reason)
            self.optimizer.step(lr, last.grad_norm)
            updates += 1
        self.optimizer.zero_grad()
        logprobs = _merged(self.ranks, {} if first is None else first.policy)
        hashes = {} if last is None else {"gradient": last.gradient_hash}
        hashes |= {"logprobs": hash_tensor(_joined(logprobs)), "advantages": hash_tensor(batch.advantages)}
        if last is None:
            return UpdateResult(self.objective.empty, 0.0, 0.0, None, 0, None, hashes, logprobs)
        if last.non_finite is not None:  # JSON has no NaN
            return UpdateResult(self.objective.empty, None, None, None, updates, last.non_finite, hashes, logprobs)
        return UpdateResult(last.stats, last.loss, last.grad_norm, last.entropy, updates, None, hashes, logprobs)

    def _pass(self, batch: Batch, first: _FirstPass | None) -> _Pass:
        """Forward and backward over all micro-batches; first: results of the first pass, None during that pass."""
        loss, entropy_sum, entropy_count, stats = 0.0, 0.0, 0, self.objective.empty
        trouble = None
        policy: dict[int, Tensor] = {}
        reference: dict[int, Tensor] = {}
        for rows in assign_to_ranks(batch, self.ranks.count)[self.ranks.rank]:
            if not rows:
                self._idle(batch)
                continue
            done = self._backward(batch, rows, first)
            if not math.isfinite(done.loss) and trouble is None:
                trouble = _locate(batch, done.policy, done.loss)
            loss += done.loss
            stats = stats + done.stats
            entropy_sum += float(done.entropy.sum(dtype=torch.float64))
            entropy_count += len(done.entropy)
            policy |= done.policy
            reference |= done.reference
        shares = self.ranks.gather((loss, entropy_sum, entropy_count, stats, trouble))
        loss, entropy_sum, entropy_count = (sum(each) for each in list(zip(*shares, strict=True))[:3])
        stats = sum((each[3] for each in shares), self.objective.empty)
        trouble = next((each[4] for each in shares if each[4] is not None), None)
        norm = self.optimizer.gradient_norm()
        if trouble is None and not math.isfinite(norm):
            trouble = f"gradient of {self.optimizer.non_finite_gradient()}"
        return _Pass(
            loss=loss,
            grad_norm=norm,
            entropy=entropy_sum / entropy_count if entropy_count else None,
            stats=stats,
            non_finite=trouble,
            gradient_hash=_gradient_hash(self.ranks, self.optimizer) if trouble is None else "",
            scored=_FirstPass(policy, reference),
        )

    def _backward(self, batch: Batch, rows: tuple[int, ...], first: _FirstPass | None) -> _MicroBatch:
        """Forward and backward of one micro-batch: adds its share to the gradients."""
        sequences = [batch.scored(row) for row in rows]
        targets = pack_targets(sequences, self.policy.device)
        logp, entropy = self.forward(targets, self.objective.temperature)
        parts = logp.split(list(targets.lengths))
        policy = {row: part.detach() for row, part in zip(rows, parts, strict=True)}
        if first is not None:
            reference = first.reference
        else:
            scored = self.reference(sequences) if self.reference is not None else []
            reference = dict(zip(rows, scored, strict=bool(scored)))
        before = policy if first is None else first.policy
        old = [self.objective.old(batch, row, before[row]) for row in rows]
        held = [reference[row] for row in rows] if self.reference is not None else None
        loss, stats = self.objective.loss(batch, rows, parts, old, held)
        loss.backward()
        return _MicroBatch(loss.item(), stats, entropy, policy, reference)

    def _idle(self, batch: Batch) -> None:
        """A pass that adds a gradient of 0, for a rank without rows: gathering shards needs every rank."""
        row = batch.microbatches[0][0]
        one_token = (batch.prompts[row][:1], batch.rollouts[row].completion.token_ids[:1])
        logp, _ = self.forward(pack_targets([one_token], self.policy.device), self.objective.temperature)
        (logp.sum() * 0.0).backward()


def _merged(ranks: Ranks, own: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The log-probabilities of all ranks' rows, by row number."""
    if ranks.count == 1:
        return dict(own)
    return {row: x for rows in ranks.gather({row: x.cpu() for row, x in own.items()}) for row, x in rows.items()}


def _gradient_hash(ranks: Ranks, optimizer: Optimizer) -> str:
    """Hash of the whole gradient; on several ranks, hash of the list of their shards' hashes."""
    hashes = ranks.gather(hash_tensors(optimizer.gradients()))
    return hashes[0] if len(hashes) == 1 else hash_json(hashes)


def model_scorer(policy: Policy, temperature: float, budget: int) -> Scorer:
    """A scorer by an unsharded model: packs sequences in order, at most `budget` tokens (prompts included) a pass."""

    @torch.no_grad()
    def scorer(sequences: Sequence[Scorable]) -> list[Tensor]:
        out: list[Tensor] = []
        part: list[Scorable] = []
        tokens = 0
        for sequence in [*sequences, None]:
            size = 0 if sequence is None else len(sequence[0]) + len(sequence[1])
            if part and (sequence is None or tokens + size > budget):
                targets = pack_targets(part, policy.device)
                logp, _ = score(policy, targets, temperature)
                out.extend(logp.split(list(targets.lengths)))
                part, tokens = [], 0
            if sequence is not None:
                part.append(sequence)
                tokens += size
        return out

    return scorer


def adapter_off_scorer(policy: Policy, temperature: float, budget: int) -> Scorer:
    """A scorer by the model with its adapters switched off: the start policy of a LoRA run."""
    inner = model_scorer(policy, temperature, budget)

    def scorer(sequences: Sequence[Scorable]) -> list[Tensor]:
        with policy.model.disable_adapter() if hasattr(policy.model, "disable_adapter") else contextlib.nullcontext():
            return inner(sequences)

    return scorer


def _joined(logprobs: Mapping[int, Tensor]) -> Tensor:
    """Log-probabilities of all rows as one tensor, in row order."""
    return torch.cat([logprobs[row] for row in sorted(logprobs)]) if logprobs else torch.empty(0)


def _locate(batch: Batch, logp: Mapping[int, Tensor], loss: float) -> str:
    """Names the first non-finite log-probability of a micro-batch (token, row, prompt), else its rows and loss."""
    for row, part in logp.items():
        bad = (~part.isfinite()).nonzero()
        if len(bad):
            completion = batch.rollouts[row].completion
            position = batch.positions(row)[int(bad[0])]
            return (
                f"log-probability of token {position} (id {completion.token_ids[position]}) of row {row}, "
                f"prompt {completion.prompt_id!r} sample {completion.sample}"
            )
    rows = list(logp)
    prompts = sorted({batch.rollouts[row].completion.prompt_id for row in rows})
    return f"loss {loss} of rows {rows[0]} to {rows[-1]}, prompts {', '.join(prompts)}"
