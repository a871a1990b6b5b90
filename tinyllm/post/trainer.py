"""The training loop, and the metrics that it logs.

    for step in source:                    sampled and judged, or read back from the record
        run.record(step)                   on disk before training
        batch = objective.batch(...)       advantages, micro-batches
        update = updater(batch, lr)        objective, backward, optimizer step
        source.publish(revision)           new weights for the sampler
        run.log(metrics)

Evaluation, display and trackers are arguments of the Trainer.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyllm.callbacks import Callback, Interrupted
from tinyllm.config.sections import Config
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.errors import TinyLLMError, TrainingStopped
from tinyllm.health.checks import Monitor
from tinyllm.health.history import History
from tinyllm.post.batch import Batch
from tinyllm.post.objectives import Objective, mean
from tinyllm.post.optimizer import Optimizer, learning_rate
from tinyllm.post.source import Timing
from tinyllm.post.update import Updater, UpdateResult
from tinyllm.record.hashing import hash_json
from tinyllm.record.metrics import held_out_score, score_kind
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Revision, Step
from tinyllm.seams import Source

log = logging.getLogger("tinyllm")

Evaluate = Callable[[int, Sequence[Group]], dict[str, Any] | None]
"""(step number, groups of that step) -> a line of kind `eval`, or None when no rows are held out."""


@dataclass
class Progress:
    """The counters of a run that a checkpoint saves besides tensors."""

    step: int = 0
    """The last trained step."""
    position: int = 0
    """Number of prompts taken from the prompt order by the trained steps."""
    best: float | None = None
    """Best held-out score so far (higher is better; a loss is negated)."""
    best_step: int | None = None
    evals_without_best: int = 0
    """Evaluations in a row since then that were no better."""


@dataclass
class Trainer:
    """The state of one run, and the loop that trains it."""

    run: RunDir
    config: Config
    optimizer: Optimizer
    updater: Updater
    weights_hash: Callable[[], str]
    reference_hash: str
    revision: Revision
    """Revision of the current weights."""
    history: History
    """Metrics and groups logged so far; the checks of health/ read them after every step."""
    evaluate: Evaluate
    keep_best: Callable[[int], None]
    callbacks: Sequence[Callback] = ()
    progress: Progress = field(default_factory=Progress)
    stop_requested: Callable[[], bool] = lambda: False
    ranks: Ranks = SOLO
    monitor: Monitor = field(default_factory=Monitor)

    def loop(self, source: Source) -> None:
        """Train until the source ends or early stopping. Raises Interrupted or TrainingStopped with all steps saved."""
        objective = self.updater.objective
        timing = Timing(self._on_phase)
        for step in source:
            with timing("record_s"):
                self.run.record(step)
            with timing("update_s", "training"):
                batch = objective.batch(step.groups, self.revision)
                lr = learning_rate(self.config.optimizer, step.number, self.config.train.steps)
                update = self.updater(batch, lr)
                self._require_finite_weights(step.number)
            with timing("publish_s"):
                self.revision = Revision(step.number, self.weights_hash())
                source.publish(self.revision)
            self.progress.step, self.progress.position = step.number, self.progress.position + step.prompts
            self._log(step, batch, update, lr, timing)
            self._check()
            if self._evaluate_and_save(step):
                return
            timing = Timing(self._on_phase)

    def _log(self, step: Step, batch: Batch, update: UpdateResult, lr: float, timing: Timing) -> None:
        """Write the step's metrics, derived columns and timing line, then call the callbacks."""
        metrics = step_metrics(self.updater.objective, step, batch, update, self.revision, lr)
        if self.ranks.count > 1:  # the number of ranks changes the last bits of sums
            metrics["ranks"] = self.ranks.count
        self.run.write_derived(step.number, *derived_columns(batch, update))
        self.run.log(metrics)
        self.history = self.history.with_step(metrics, step.groups)
        times = {
            "step": step.number,
            **step.seconds,
            **timing.seconds,
            "step_s": timing.elapsed_s(),
            "sampled_tokens": sampled_tokens(step.groups),
            "peak_memory_bytes": peak_memory_bytes(),
            "time": time.time(),
        }
        self.run.log_timing(times)
        for callback in self.callbacks:
            callback.on_step(metrics, times, step.groups)

    def _evaluate_and_save(self, step: Step) -> bool:
        """Evaluate and save when due; returns True when early stopping ends the run. Raises Interrupted."""
        stop = self._evaluate(step)
        interrupted = self.stop_requested()
        last = step.number == self.config.train.steps or stop or interrupted
        if last or step.number % self.config.run.checkpoint_every == 0:
            self._on_phase("saving")
            self.save()
        if interrupted and step.number < self.config.train.steps:
            raise Interrupted(self.run.path, step.number, self.config.kind)
        return stop

    def _require_finite_weights(self, step: int) -> None:
        """Raises TinyLLMError, before anything is saved, when the step left weights that are not finite."""
        if name := self.optimizer.non_finite_weight():
            raise TinyLLMError(
                f"step {step} left {name} with weights that are not finite, and was not saved; start again with a "
                f"lower optimizer.lr (now {self.config.optimizer.lr:g}) or with optimizer.clip_norm"
            )

    def save(self) -> None:
        """Save a checkpoint. It holds no generator state: every random number is a hash of seed, step and position."""
        state = {
            "progress": vars(self.progress),
            "seed": self.config.seed,
            "lr": learning_rate(self.config.optimizer, max(1, self.progress.step), self.config.train.steps),
            "reference": self.reference_hash,
        }
        self.run.save_checkpoint(self.progress.step, self.optimizer.tensors(), state)

    def first_evaluation(self) -> None:
        """Evaluate before any training, as step 0."""
        self._log_eval(0, ())

    def _check(self) -> None:
        """Log the findings of health/ as warnings. Raises TrainingStopped for a finding of level `stop`."""
        for finding in self.monitor(self.history):
            if finding.level == "stop":
                raise TrainingStopped(str(finding))
            log.warning("step %d: %s", finding.step, finding)

    def _evaluate(self, step: Step) -> bool:
        """Evaluate when due, and keep the best model; returns True when early stopping ends the run."""
        every, last = self.config.eval.every, step.number == self.config.train.steps
        if not (last or (every and step.number % every == 0)):
            return False
        score = self._log_eval(step.number, step.groups)
        if score is None:
            return False
        progress = self.progress
        if progress.best is None or score > progress.best:
            progress.best, progress.best_step, progress.evals_without_best = score, step.number, 0
            if not last:
                self.keep_best(step.number)
        else:
            progress.evals_without_best += 1
        return self.stopped_early()

    def stopped_early(self) -> bool:
        """Whether stop.evals_without_best evaluations in a row were no better than the best one."""
        patience = self.config.stop.evals_without_best
        return bool(patience) and self.progress.evals_without_best >= patience

    def _log_eval(self, step: int, groups: Sequence[Group]) -> float | None:
        self._on_phase("evaluating")
        row = self.evaluate(step, groups)
        if row is None:
            return None
        self.run.log(row)
        self.history = self.history.with_eval(row)
        for callback in self.callbacks:
            callback.on_eval(row)
        score = held_out_score(row)
        if score is None:
            return None
        return -score[0] if score_kind(row) == "loss" else score[0]

    def _on_phase(self, phase: str) -> None:
        for callback in self.callbacks:
            callback.on_phase(phase)


def step_metrics(
    objective: Objective[Any], step: Step, batch: Batch, update: UpdateResult, revision: Revision, lr: float
) -> dict[str, Any]:
    """The `train` line of a step for metrics.jsonl, see record/metrics.py; a mean over nothing is None, never NaN."""
    rollouts = [r for g in step.groups for r in g.rollouts]
    done = [r.completion for r in rollouts if r.completion.finish_reason != "error"]
    return {
        "step": step.number,
        "revision": str(revision),
        "loss": update.loss,
        **objective.metrics(step.groups, batch, update.stats, step.logged.metrics),
        "entropy": update.entropy,
        "completion_length": mean([sum(c.sampled) for c in done]),
        "grad_norm": update.grad_norm,
        "lr": lr,
        "tokens": int(update.stats.tokens),
        "updates": update.updates,
        "non_finite": update.non_finite,
        "denominator": batch.denominator,
        "microbatches": [list(rows) for rows in batch.microbatches],
        "hashes": {
            "verdicts": hash_verdicts(step.groups),
            **update.hashes,
            "weights": revision.hash,
        },
    }


def derived_columns(
    batch: Batch, update: UpdateResult
) -> tuple[list[tuple[str, int]], list[float], dict[int, list[float | None]]]:
    """Columns for RunDir.write_derived: (group id, sample) and advantage of each row; log-probabilities by row."""
    names = [(g.id, r.completion.sample) for g in batch.groups for r in g.rollouts]
    return names, batch.advantages.tolist(), {row: batch.spread(row, x.tolist()) for row, x in update.logprobs.items()}


def hash_verdicts(groups: Sequence[Group]) -> str:
    """Hash of every verdict of a step, in order."""
    verdicts = [r.verdict for g in groups for r in g.rollouts]
    return hash_json([[v.value, v.reason, v.answer, v.parts] for v in verdicts])


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Number of tokens that were sampled for these groups."""
    return sum(sum(r.completion.sampled) for g in groups for r in g.rollouts)


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
