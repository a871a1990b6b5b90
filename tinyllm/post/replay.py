"""Replay: recompute a run from its initial weights and its recorded rollouts, hop by hop, and compare with the record.

Each step's verdicts, advantages, log-probabilities, loss, gradient and new weights are computed again and compared with
the record; the first difference is reported with its step, hop and, if known, row. With another objective or reward,
replay answers "what if" on the same rollouts: nothing is compared, and the metrics are written to derived/.

Replay uses the code of training (judge, Objective, Updater, Optimizer), so the two cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyllm.axes import PRESETS
from tinyllm.callbacks import Callback
from tinyllm.config.io import overlay
from tinyllm.config.sections import Config, EngineConfig, GRPOConfig, PoolConfig
from tinyllm.distributed.fsdp import like, local
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.resample import Versions, resample
from tinyllm.errors import ConfigError, RunError
from tinyllm.model import models
from tinyllm.post.batch import Batch
from tinyllm.post.build import Run, build_run
from tinyllm.post.grpo import group_rollouts, judge_completions
from tinyllm.post.optimizer import learning_rate
from tinyllm.post.trainer import derived_columns, hash_verdicts, step_metrics
from tinyllm.post.update import UpdateResult
from tinyllm.record.files import json_text, write_atomic
from tinyllm.record.hashing import hash_tensor, hash_tensors
from tinyllm.record.manifest import compare_manifests
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Revision, Rollout, Step


@dataclass(frozen=True)
class Divergence:
    """Where a replay first differs from the record."""

    step: int
    hop: str
    """record, sample, verify, advantage, log-probability, loss, gradient, update or checkpoint."""
    where: str | None
    """The row (group and sample), tensor or file that differs, if known."""
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return f"step {self.step}, {self.hop}{place}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True)
class ReplayResult:
    """Outcome of a replay."""

    steps: tuple[int, ...]
    """Numbers of the replayed steps."""
    divergence: Divergence | None
    """The first difference; None when every comparison was equal, or nothing was compared."""
    conditions: tuple[tuple[str, Any, Any], ...]
    """Properties of the manifest that differ on this machine: (name, recorded, now)."""
    what_if: Path | None = None
    """File with the metrics under another objective or reward."""


def replay(
    path: str | Path,
    *,
    steps: tuple[int, int] | None = None,
    sample: bool = False,
    objective: str | None = None,
    reward: str | None = None,
    tolerance: float | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
    callbacks: Sequence[Callback] = (),
) -> ReplayResult:
    """Recompute the recorded steps of a run and compare every hop with the record.

    steps: first and last step (None: all); training starts from the nearest checkpoint before. sample: also sample
    every completion again. objective, reward: "what if" under another preset or reward function; nothing is compared.
    tolerance: compare numbers within this relative and absolute difference instead of hashes, as on another processor.
    on_step: called with (steps done, steps in all). Raises RunError, ConfigError.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance {tolerance}: must be a finite number of at least 0")
    run = RunDir.read(path)
    first, last = _range(run, steps)
    config = _here(run, _what_if(run.config, sample, objective, reward), sample)
    again = build_run(replace(config, eval=replace(config.eval, every=0)), None, callbacks)
    try:
        player = _Player(run, again, sample, tolerance, compare=objective is None and reward is None)
        done, divergence = 0, None
        for step in player.start(first, last):
            divergence = player.step(step)
            done += 1
            on_step(done, last - first + 1)
            if divergence:
                break
        if divergence is None and player.compare:
            divergence = player.final_model(last)
        written = None if player.compare else again.ranks.on_main(lambda: player.write_what_if(objective, reward))
    finally:
        again.close()
    conditions = [
        c
        for c in compare_manifests(run.manifest, again.manifest)
        if c[0].partition(".")[0] in ("hashes", "probe", "versions", "machine") or c[0] == "facts.ranks"
    ]
    return ReplayResult(tuple(range(first, first + done)), divergence, tuple(conditions), written)


def _range(run: RunDir, steps: tuple[int, int] | None) -> tuple[int, int]:
    trained = [row["step"] for row in run.metrics("train") if "hashes" in row]
    if not trained:
        raise RunError(f"{run.path}: no step was trained, so there is nothing to replay")
    if missing := sorted(set(range(1, max(trained))) - set(trained)):
        raise RunError(f"{run.path / 'metrics.jsonl'}: the line of step {missing[0]} is missing or damaged; restore it")
    first, last = steps or (1, trained[-1])
    if not 1 <= first <= last <= trained[-1]:
        raise ConfigError(f"--steps {first}:{last}: the run has steps 1 to {trained[-1]}")
    return first, last


def _here(run: RunDir, config: Config, sample: bool) -> Config:
    """The configuration without servers and pool: the embedded engine samples the same bits as tinyllm's servers."""
    if not isinstance(config, GRPOConfig):
        return config
    config = replace(config, pool=PoolConfig())
    if not config.engine.urls:
        return config
    others = {facts["server"] for facts in run.manifest["facts"].get("engine", ())} - {"tinyllm"}
    if sample and others:
        raise ConfigError(f"--sample: completions came from {', '.join(sorted(others))}, which cannot be drawn again")
    return replace(config, engine=EngineConfig())


def _what_if(config: Config, sample: bool, objective: str | None, reward: str | None) -> Config:
    if not isinstance(config, GRPOConfig):
        if asked := [n for n, given in (("sample", sample), ("objective", objective), ("reward", reward)) if given]:
            raise ConfigError(f"--{asked[0]}: a run of {config.kind} sampled nothing; leave it out")
        return config
    if objective is not None and objective not in PRESETS:
        raise ConfigError(f"--objective {objective!r}: choose one of {', '.join(PRESETS)}")
    changes: dict[str, Any] = {}
    if objective is not None:
        changes["objective.preset"] = objective
    if reward is not None:
        changes |= {"reward.functions": (reward,), "reward.weights": ()}
    changed: GRPOConfig = overlay(config, changes)
    return changed


class _Player:
    """Replays steps of `run` with the freshly built parts `again`."""

    def __init__(self, run: RunDir, again: Run, sample: bool, tolerance: float | None, compare: bool) -> None:
        self.run, self.again, self.sample, self.tolerance, self.compare = run, again, sample, tolerance, compare
        self.learner, self.sampling = again.learner, again.sampling
        self.objective = again.learner.updater.objective
        self.metrics = {row["step"]: row for row in run.metrics("train")}
        self.checkpoints = set(run.checkpoints.steps())
        self.lines: list[dict[str, Any]] = []
        self.lag = run.config.pool.max_lag if sample else 0
        self.versions = Versions(again.learner.optimizer.parameters, self.lag + 1)

    def start(self, first: int, last: int) -> Iterator[int]:
        """Bring the weights to the state before step `first`, then yield the numbers of the steps to replay."""
        begin = 0
        for step in sorted((s for s in self.checkpoints if s < first - self.lag), reverse=True):
            try:
                _, tensors, _ = self.run.load_checkpoint(step)
            except RunError:
                continue  # damaged: take an earlier checkpoint, or the initial weights
            self.learner.optimizer.load(tensors)
            begin = step
            break
        self._publish(Revision(begin, self.learner.weights_hash()))
        for step in range(begin + 1, first):
            self._train(step, self._groups(step))
        yield from range(first, last + 1)

    def step(self, number: int) -> Divergence | None:
        """Replay one step; returns the first difference, or None."""
        file = self.run.read_rollouts(number)
        if file.changed and self.compare:
            return Divergence(number, "record", file.changed[0], "a row with another checksum", "the row as it is now")
        groups = file.groups
        if self.sample and (found := self._sampled(number, groups)):
            return found
        judged = self._judged(number, groups)
        if not self.compare:
            batch, update, revision = self._train(number, judged)
            step = Step(number, tuple(judged))
            self.lines.append(step_metrics(self.objective, step, batch, update, revision, self._lr(number)))
            return None
        if found := self._verified(number, groups, judged):
            return found
        batch, update, revision = self._train(number, groups)
        if self.again.ranks.is_main and not self.run.derived_path(number).exists():
            self.run.write_derived(number, *derived_columns(batch, update))
        return self._compared(number, batch, update, revision)

    def _groups(self, step: int) -> list[Group]:
        return self.run.read_rollouts(step).groups

    def _lr(self, step: int) -> float:
        return learning_rate(self.again.config.optimizer, step, self.again.config.train.steps)

    def _train(self, step: int, groups: Sequence[Group]) -> tuple[Batch, UpdateResult, Revision]:
        batch = self.objective.batch(groups, self._recorded(step - 1))
        result = self.learner.updater(batch, self._lr(step))
        self._publish(Revision(step, self.learner.weights_hash()))
        return batch, result, self.revision

    def _publish(self, revision: Revision) -> None:
        self.revision = revision
        if self.sample:
            self.versions.keep(revision.step)
        self.again.publish(revision)

    def _recorded(self, step: int) -> Revision:
        """The recorded revision of a step; the replayed weights may differ, on another processor or in a "what if"."""
        return Revision(step, self.metrics[step]["hashes"]["weights"]) if step in self.metrics else self.revision

    # -- hops -----------------------------------------------------------------------------------------------------

    def _sampled(self, step: int, groups: Sequence[Group]) -> Divergence | None:
        assert self.sampling is not None and isinstance(self.sampling.engine, EmbeddedEngine)
        params = replace(self.sampling.params, step=step)
        again = resample(self.sampling.engine, self.versions, groups, params)
        for group, rollout in _rows(groups):
            old = rollout.completion
            new = again.get((group.prompt.id, group.prompt.draw, old.sample))
            if new is None:  # the completion failed, or has tokens of the environment
                continue
            for i, pair in enumerate(zip(old.token_ids, new.token_ids, strict=False)):
                if pair[0] != pair[1]:
                    return Divergence(step, "sample", f"{_name(group, rollout)}, token {i}", *pair)
            if len(old.token_ids) != len(new.token_ids):
                return Divergence(
                    step, "sample", f"{_name(group, rollout)}, length", len(old.token_ids), len(new.token_ids)
                )
            for i, (was, now) in enumerate(zip(old.logprobs, new.logprobs, strict=True)):
                if was is None or now is None:  # inserted by the environment
                    continue
                if not self._same(was, now):
                    return Divergence(step, "log-probability", f"{_name(group, rollout)}, token {i}", was, now)
        return None

    def _judged(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups with new verdicts, except those that _keeps names."""
        if self.sampling is None:
            return list(groups)
        prompts = [group.prompt for group in groups]
        completions = [rollout.completion for _, rollout in _rows(groups)]
        verdicts = judge_completions(partial(self.sampling.judge, step=step), prompts, completions).verdicts
        kept = [
            rollout.verdict if rollout.completion.finish_reason == "error" or self._keeps(rollout) else verdict
            for (_, rollout), verdict in zip(_rows(groups), verdicts, strict=True)
        ]
        return group_rollouts(prompts, completions, kept)

    def _keeps(self, rollout: Rollout) -> bool:
        """Whether the recorded verdict stays: one without a value, since a failure to judge cannot be derived again."""
        return self.compare and rollout.verdict.value is None

    def _verified(self, step: int, groups: Sequence[Group], judged: Sequence[Group]) -> Divergence | None:
        for (group, was), (_, now) in zip(_rows(groups), _rows(judged), strict=True):
            if was.verdict != now.verdict:
                return Divergence(step, "verify", _name(group, was), _verdict(was), _verdict(now))
        recorded, again = self.metrics[step]["hashes"]["verdicts"], hash_verdicts(groups)
        return None if recorded == again else Divergence(step, "verify", None, recorded, again)

    def _compared(self, step: int, batch: Batch, result: UpdateResult, revision: Revision) -> Divergence | None:
        row = self.metrics[step]
        hashes = row["hashes"]
        if self.tolerance is not None:
            return self._close(step, row, result)
        if hashes["advantages"] != hash_tensor(batch.advantages):
            return Divergence(step, "advantage", None, hashes["advantages"], hash_tensor(batch.advantages))
        if found := self._log_probabilities(step, batch, result, row):
            return found
        pairs = (
            ("loss", row["loss"], result.loss if batch.has_signal else 0.0),
            ("gradient", hashes.get("gradient"), result.hashes.get("gradient")),
            ("update", hashes["weights"], revision.hash),
        )
        for hop, was, now in pairs:
            if was != now:
                return Divergence(step, hop, None, was, now)
        return next((found for found in self.again.ranks.gather(self._checkpoint(step)) if found), None)

    def _log_probabilities(
        self, step: int, batch: Batch, result: UpdateResult, row: dict[str, Any]
    ) -> Divergence | None:
        if row.get("sampler_equal") == 1.0:  # the record holds the trainer's own numbers, token by token
            for index, logp in sorted(result.logprobs.items()):
                rollout = batch.rollouts[index]
                if not batch.is_current(index):
                    continue
                for i, now in zip(batch.positions(index), logp.tolist(), strict=True):
                    was = rollout.completion.logprobs[i]
                    if was != now:
                        name = (
                            f"row {index} (prompt {rollout.completion.prompt_id}, sample {rollout.completion.sample})"
                        )
                        return Divergence(step, "log-probability", f"{name}, token {i}", was, now)
        recorded, again = row["hashes"]["logprobs"], result.hashes["logprobs"]
        return None if recorded == again else Divergence(step, "log-probability", None, recorded, again)

    def _close(self, step: int, row: dict[str, Any], result: UpdateResult) -> Divergence | None:
        """Compare entropy, loss and gradient norm within the tolerance; hashes are not compared."""
        for hop, key, now in (
            ("log-probability", "entropy", result.entropy),
            ("loss", "loss", result.loss),
            ("gradient", "grad_norm", result.grad_norm),
        ):
            was = row[key]
            if was != now and (was is None or now is None or not self._same(was, now)):
                return Divergence(step, hop, key, was, now)
        return None

    def _same(self, was: float, now: float) -> bool:
        if self.tolerance is None:
            return was == now
        return math.isclose(was, now, rel_tol=self.tolerance, abs_tol=self.tolerance)

    def _checkpoint(self, step: int) -> Divergence | None:
        if step not in self.checkpoints:
            return None
        try:
            _, saved, _ = self.run.load_checkpoint(step)
        except RunError as error:
            return Divergence(step, "checkpoint", str(error), "whole", "damaged")
        for group, tensors in self.learner.optimizer.tensors().items():
            for name, tensor in tensors.items():
                own = local(tensor).cpu()
                was = saved.get(group, {}).get(name)
                if was is None or not torch.equal(local(like(was.reshape(tensor.shape), tensor)).cpu(), own):
                    recorded = None if was is None else hash_tensor(was)
                    return Divergence(step, "checkpoint", f"{group} {name}", recorded, hash_tensor(own))
        return None

    def final_model(self, last: int) -> Divergence | None:
        """The first difference between model/ and the replayed weights of the last step, or None."""
        folder = self.run.path / "model"
        if (
            self.tolerance is not None
            or last != max(self.metrics)
            or not folder.is_dir()
            or self.again.config.lora.rank
        ):
            return None
        saved = models.load_model(
            str(folder), self.again.config.model.dtype, self.again.config.model.device
        ).state_dict()
        for name, tensor in self.learner.policy.causal.state_dict().items():
            if name in saved and not torch.equal(saved[name], tensor):
                return Divergence(last, "update", f"model/ {name}", hash_tensor(saved[name]), hash_tensor(tensor))
        assert hash_tensors(saved), "a saved model has weights"
        return None

    def write_what_if(self, objective: str | None, reward: str | None) -> Path:
        """Write the metrics under another objective or reward to derived/, each line marked "what_if"."""
        name = "-".join(["what-if", *(x.replace(":", ".").replace("/", ".") for x in (objective, reward) if x)])
        mark = {"what_if": {"objective": objective, "reward": reward}}
        path = self.run.path / "derived" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, "".join(json_text(mark | line) + "\n" for line in self.lines).encode())
        return path


def _rows(groups: Sequence[Group]) -> Iterator[tuple[Group, Rollout]]:
    for group in groups:
        for rollout in group.rollouts:
            yield group, rollout


def _name(group: Group, rollout: Rollout) -> str:
    return f"row of group {group.id}, sample {rollout.completion.sample}"


def _verdict(rollout: Rollout) -> str:
    v = rollout.verdict
    return f"{v.value} ({v.reason})" if v.value is None else f"{v.value} (answer {v.answer!r})"
