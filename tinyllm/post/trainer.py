"""The training loop, and what it logs.

    for step, groups in source:          sample and verify, or read back from the record
        run.record(step, groups)         on disk before it is trained on
        batch = make_batch(groups)       advantages, micro-batches
        update(batch)                    objective, step
        source.publish(revision)         the edge back
        run.log(metrics)

Everything with a user's eye on it (evaluation, display, trackers) is handed in.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinyllm.callbacks import Callback, Interrupted
from tinyllm.config.sections import Config
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.errors import TinyLLMError, TrainingStopped
from tinyllm.post.batch import Batch
from tinyllm.post.objectives import Objective, mean
from tinyllm.post.optimizer import Optimizer, learning_rate
from tinyllm.post.source import Source
from tinyllm.post.update import Updater, UpdateResult
from tinyllm.record.hashing import hash_json
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Revision
from tinyllm.stats import held_out_score, score_kind

Evaluate = Callable[[int, Sequence[Group]], dict[str, Any] | None]
"""(step, that step's groups) -> an eval line, or None when there is nothing to evaluate."""


@dataclass
class Progress:
    """What of a run's course is saved in checkpoints, besides tensors."""

    step: int = 0
    position: int = 0
    """Prompts taken from the order."""
    non_finite: int = 0
    """Steps in a row whose loss or gradient was not finite."""
    unscored: int = 0
    """Steps in a row of which no completion was scored."""
    best: float | None = None
    best_step: int | None = None
    evals_without_best: int = 0


@dataclass
class Trainer:
    """The state of one run and its loop."""

    run: RunDir
    config: Config
    optimizer: Optimizer
    updater: Updater
    weights_hash: Callable[[], str]
    reference_hash: str
    revision: Revision
    """Of the weights as they are."""
    evaluate: Evaluate
    keep_best: Callable[[int], None]
    callbacks: Sequence[Callback] = ()
    progress: Progress = field(default_factory=Progress)
    recorded: frozenset[int] = frozenset()
    """Steps whose rollouts are on disk already (a resumed run trains them from the record)."""
    position: Callable[[], int] = lambda: 0
    """Prompts the source has taken so far."""
    stop_requested: Callable[[], bool] = lambda: False
    ranks: Ranks = SOLO

    def loop(self, source: Source) -> None:
        """Trains until the source ends. Raises Interrupted or TrainingStopped with everything saved."""
        config, objective = self.config, self.updater.objective
        clock = time.perf_counter()
        for step, groups in source:
            timing = {"step": step, **source.seconds}
            begin = time.perf_counter()
            if step not in self.recorded:
                self.run.record(step, groups, extra=source.logged.extras, logged=source.logged.metrics)
            timing["record_s"] = time.perf_counter() - begin
            begin = time.perf_counter()
            self._tell("on_phase", "training")
            batch = replace(objective.batch(groups), revision=self.revision)
            lr = learning_rate(config.optimizer, step, config.train.steps)
            result = self.updater(batch, lr)
            self._require_finite_weights(step)
            timing["update_s"] = time.perf_counter() - begin
            begin = time.perf_counter()
            self.revision = Revision(step, self.weights_hash())
            source.publish(self.revision)
            timing["publish_s"] = time.perf_counter() - begin
            self.progress.step, self.progress.position = step, self.position()
            metrics = step_metrics(objective, step, groups, batch, result, self.revision, lr, source.logged.metrics)
            if self.ranks.count > 1:  # sums over another number of ranks have other last bits
                metrics["ranks"] = self.ranks.count
            self.run.write_derived(step, *derived_columns(batch, result))
            self.run.log(metrics)
            timing |= {"step_s": time.perf_counter() - clock, "sampled_tokens": sampled_tokens(groups)}
            timing |= {"peak_memory_bytes": peak_memory_bytes(), "time": time.time()}
            self.run.log_timing(timing)
            for callback in self.callbacks:
                callback.on_step(metrics, timing, groups)
            self._count_bad_steps(result, groups)
            stop = self._evaluate(step, groups)
            interrupted = self.stop_requested()
            last = step == config.train.steps or stop or interrupted
            if last or step % config.run.checkpoint_every == 0:
                self._tell("on_phase", "saving")
                self.save()
            if interrupted and step < config.train.steps:
                raise Interrupted(self.run.path, step, config.kind)
            if stop:
                return
            clock = time.perf_counter()

    def _require_finite_weights(self, step: int) -> None:
        """A step that ruined the weights is not saved: the checkpoints keep those before it."""
        if name := self.optimizer.non_finite_weight():
            raise TinyLLMError(
                f"step {step} left {name} with weights that are not finite, and was not saved; start again with a "
                f"lower optimizer.lr (now {self.config.optimizer.lr:g}) or with optimizer.clip_norm"
            )

    def save(self) -> None:
        """A checkpoint of the current step. Random numbers are keyed by seed and step: they have no other state."""
        state = {
            "progress": vars(self.progress),
            "seed": self.config.seed,
            "lr": learning_rate(self.config.optimizer, max(1, self.progress.step), self.config.train.steps),
            "reference": self.reference_hash,
        }
        self.run.save_checkpoint(self.progress.step, self.optimizer.tensors(), state)

    def first_evaluation(self) -> None:
        """The line of step 0, before any training."""
        self._log_eval(0, ())

    def _count_bad_steps(self, result: UpdateResult, groups: Sequence[Group]) -> None:
        progress, bound = self.progress, self.config.stop.bad_steps
        progress.non_finite = progress.non_finite + 1 if result.non_finite else 0
        if progress.non_finite >= bound:
            self.save()
            raise TrainingStopped(
                f"{progress.non_finite} steps in a row had a non-finite loss or gradient, last in "
                f"{result.non_finite}; the weights are those before them. "
                f"Lower optimizer.lr or check what was trained on, in {self.run.path}"
            )
        verdicts = [r.verdict for g in groups for r in g.rollouts]
        progress.unscored = 0 if any(v.value is not None for v in verdicts) else progress.unscored + 1
        if progress.unscored >= bound:
            self.save()
            raise TrainingStopped(
                f"no completion of {progress.unscored} steps in a row was scored, the last because: "
                f"{verdicts[-1].reason if verdicts else 'there is none'}. Check the reward; what was sampled "
                f"is in {self.run.path}"
            )

    def _evaluate(self, step: int, groups: Sequence[Group]) -> bool:
        """Evaluates when it is time; True when early stopping says so."""
        every, last = self.config.eval.every, step == self.config.train.steps
        if not (last or (every and step % every == 0)):
            return False
        score = self._log_eval(step, groups)
        if score is None:
            return False
        progress = self.progress
        if progress.best is None or score > progress.best:
            progress.best, progress.best_step, progress.evals_without_best = score, step, 0
            if not last:
                self.keep_best(step)
        else:
            progress.evals_without_best += 1
        patience = self.config.stop.evals_without_best
        return bool(patience) and progress.evals_without_best >= patience

    def _log_eval(self, step: int, groups: Sequence[Group]) -> float | None:
        self._tell("on_phase", "evaluating")
        row = self.evaluate(step, groups)
        if row is None:
            return None
        self.run.log(row)
        for callback in self.callbacks:
            callback.on_eval(row)
        score = held_out_score(row)
        if score is None:
            return None
        return -score[0] if score_kind(row) == "loss" else score[0]

    def _tell(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(*arguments)


def step_metrics(
    objective: Objective,
    step: int,
    groups: Sequence[Group],
    batch: Batch,
    result: UpdateResult,
    revision: Revision,
    lr: float,
    logged: Mapping[str, float],
) -> dict[str, Any]:
    """One line of metrics.jsonl; see callbacks.py for the keys. Means over nothing are None, never NaN."""
    rollouts = [r for g in groups for r in g.rollouts]
    done = [r.completion for r in rollouts if r.completion.finish_reason != "error"]
    return {
        "step": step,
        "revision": str(revision),
        "loss": result.loss,
        **objective.metrics(groups, batch, result.stats, logged),
        "entropy": result.entropy,
        "completion_length": mean([len(c.token_ids) for c in done]),
        "grad_norm": result.grad_norm,
        "lr": lr,
        "tokens": int(result.stats.tokens),
        "updates": result.updates,
        "non_finite": result.non_finite,
        "denominator": batch.denominator,
        "microbatches": [list(rows) for rows in batch.microbatches],
        "hashes": {
            "verdicts": hash_verdicts(groups),
            **result.hashes,
            "weights": revision.hash,
        },
    }


def derived_columns(
    batch: Batch, result: UpdateResult
) -> tuple[list[tuple[str, int]], list[float], dict[int, list[float]]]:
    """What RunDir.write_derived keeps of a trained batch: (group, sample), advantage and log-probabilities by row."""
    names = [(g.id, r.completion.sample) for g in batch.groups for r in g.rollouts]
    return names, batch.advantages.tolist(), {row: x.tolist() for row, x in result.logprobs.items()}


def hash_verdicts(groups: Sequence[Group]) -> str:
    """Hash of every verdict of a step, in order."""
    verdicts = [r.verdict for g in groups for r in g.rollouts]
    return hash_json([[v.value, v.reason, v.answer, v.parts] for v in verdicts])


def sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
