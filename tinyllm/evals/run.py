"""evaluate(): models on a suite, judged, recorded, counted, compared.

suite -> sample -> verify -> record -> numbers          (the numbers can be computed from the record alone)

DIR/eval.json                 everything measured; the same bytes for the same models, suite and seed
DIR/eval.png                  scores with their intervals
DIR/rollouts/1.parquet ...    every completion with its verdict, one file per model; the columns of a run's rollouts
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyllm import rewards
from tinyllm.config.io import overlay
from tinyllm.config.sections import GRPOConfig, RewardConfig
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.remote.chat import ChatServer
from tinyllm.errors import ConfigError, DataError, EngineError, MissingExtra, RunError
from tinyllm.evals import measure
from tinyllm.evals.config import MachineConfig, SuiteConfig, suite_of_run
from tinyllm.evals.suite import cluster_labels, load_task, task_configs
from tinyllm.evals.summary import summary
from tinyllm.evals.training import suite_overlap
from tinyllm.model import models
from tinyllm.model.refs import ModelRef, find_subject, load_policy
from tinyllm.post.grpo import Verify, collect_groups, group_rollouts, judge_completions
from tinyllm.record.files import new_folder, write_atomic, write_errors, write_json
from tinyllm.record.rollouts import write_table
from tinyllm.record.rundir import new_run_path
from tinyllm.records import Group, Logged, Prompt, SamplingParams, Step

log = logging.getLogger("tinyllm")

_BATCHES = 4
"""Batches of completions between two messages of progress."""


@dataclass(frozen=True)
class EvalResult:
    """Where an evaluation is written, and what eval.json holds."""

    path: Path
    report: dict[str, Any]

    @property
    def plot(self) -> Path:
        return self.path / "eval.png"


def evaluate(
    names: Sequence[str],
    options: Mapping[str, Any],
    *,
    reward: Callable[..., Any] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> EvalResult:
    """Evaluate models on a suite and write the folder; every model after the first is compared with the first.

    names: see find_subject in model/refs.py. options: dotted name -> value, laid over the defaults, or over the
    held-out suite of the runs among the models when they name no suite. reward: a reward function as an object.
    Raises the errors of errors.py, a user's mistakes before anything is sampled.
    """
    if not names:
        raise ConfigError("no model to evaluate; name a bundled model, a folder, a hub id, a run, or RUN@STEP")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"model {twice[0]} is given twice; leave one out")
    given = overlay(SuiteConfig(), options)
    with _free_folder(given.out) as path:
        subjects = [find_subject(name) for name in names]
        config, of_run = choose_suite(subjects, options)
        if config.machine.threads:
            torch.set_num_threads(config.machine.threads)
        judged = config.reward if reward is None else replace(config.reward, functions=(reward,))  # type: ignore[arg-type]
        evaluation = _Evaluation(subjects, config, judged, of_run, on_phase)
        try:
            report, record = evaluation.run()
        finally:
            evaluation.close()
        from tinyllm.evals.view import draw

        on_phase("writing")
        with new_folder(path) as folder:
            (folder / "rollouts").mkdir()
            for number, table in enumerate(record, 1):
                write_atomic(folder / "rollouts" / f"{number}.parquet", table)
            try:
                write_atomic(folder / "eval.png", draw(report))
            except MissingExtra as error:
                log.warning("%s", error)
            write_json(folder / "eval.json", report)
    return EvalResult(path, report)


def choose_suite(subjects: Sequence[ModelRef], options: Mapping[str, Any]) -> tuple[SuiteConfig, str | None]:
    """The suite that the options name, else the held-out prompts of the runs among the models and the first run's path.

    Raises ConfigError when there is neither, and for runs with different suites.
    """
    config = overlay(SuiteConfig(), options)
    first: tuple[str, SuiteConfig] | None = None
    if not (config.task or config.data.file or config.data.dataset):
        for subject in subjects:
            if subject.run is None or not isinstance(subject.run.config, GRPOConfig):
                continue  # SFT and DPO hold out rows with completions, not a suite
            name, own = str(subject.run.path), suite_of_run(subject.run.config)
            if first is None:
                first = name, own
            elif (own.data, _scoring(own.reward)) != (first[1].data, _scoring(first[1].reward)):
                raise ConfigError(
                    f"{first[0]} and {name} have different held-out prompts or verifiers; name a suite with --task or "
                    "--data"
                )
        if first is None:
            raise ConfigError(
                "no suite: name one with --task arithmetic (see: tinyllm tasks), or --data FILE --verifier SPEC"
            )
        config = overlay(first[1], options)
    answer = config.answer
    if answer.samples > 1 and answer.drawn_at == 0:
        raise ConfigError(f"answer.samples = {answer.samples} at temperature 0: all would be equal; change one of them")
    return config, first[0] if first else None


def _scoring(reward: RewardConfig) -> RewardConfig:
    """The section with fixed values for the options that do not decide a verdict."""
    return replace(reward, timeout_s=1.0, workers=1, allow_probes=())


@contextlib.contextmanager
def _free_folder(out: str | None) -> Iterator[Path]:
    """The folder to write, empty; removed again when the evaluation fails. Raises RunError."""
    path = Path(out) if out else new_run_path("evals")
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(entry.name for entry in path.iterdir())
    if others:
        raise RunError(f"{path} holds other files ({others[0]}); choose an empty or new folder with --out")
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


class _Evaluation:
    """The suite and the models, found and checked; `run` samples, judges and counts."""

    def __init__(
        self,
        subjects: Sequence[ModelRef],
        config: SuiteConfig,
        judged: RewardConfig,
        of_run: str | None,
        on_phase: Callable[[str], None],
    ) -> None:
        self.subjects, self.config, self.on_phase = subjects, config, on_phase
        on_phase("reading the suite")
        self.servers = {s.name: ChatServer.connect(s.source) for s in subjects if s.is_server}
        self.tokenizers = {s.name: models.load_tokenizer(s.source) for s in subjects if not s.is_server}
        self.tasks = [load_task(config, data, judged, of_run) for data in task_configs(config)]
        self.labels: dict[str, Any] = {}
        for task in self.tasks:
            self.labels |= cluster_labels(task.prompts, config.clusters)
        on_phase("looking for training prompts in the suite")
        self.overlap, self.warnings = suite_overlap(config, subjects, self.tasks)
        left_out = {match["prompt_id"] for match in self.overlap["found"]}
        self.kept = [[p.id for p in task.prompts if p.id not in left_out] for task in self.tasks]
        for task, kept in zip(self.tasks, self.kept, strict=True):
            if not kept:
                raise DataError(f"{task.name}: every prompt is among the training prompts; nothing is left to evaluate")
        self.prompts = {s.name: self._prompts(s) for s in subjects}
        self.verifies: list[rewards.RewardJudge] = []
        try:
            for task in self.tasks:
                self.verifies.append(rewards.make_judge(judged, task.data))
        except BaseException:
            self.close()
            raise

    def _prompts(self, subject: ModelRef) -> list[tuple[Prompt, ...]]:
        """The prompts of each task as this model reads them."""
        tokenizer = self.tokenizers.get(subject.name)
        found = [task.read_by(tokenizer, set(ids)) for task, ids in zip(self.tasks, self.kept, strict=True)]
        for task, prompts in zip(self.tasks, found, strict=True):
            if not prompts:
                raise DataError(f"{subject.name} can read no prompt of {task.name}; raise --data.max_prompt_tokens")
        return found

    def close(self) -> None:
        for verify in self.verifies:
            verify.close()

    def run(self) -> tuple[dict[str, Any], list[memoryview]]:
        """(report, the record of every model as Parquet)."""
        record, answers, weights = [], [], {}
        for number, subject in enumerate(self.subjects):
            if number:
                gc.collect()  # the memory of the model before
            weights[subject.name], by_task = self._sample(subject)
            answers.append([[measure.answers_of(g, self.labels[g.prompt.id]) for g in groups] for groups in by_task])
            names = [
                task.name for task, groups in zip(self.tasks, by_task, strict=True) for g in groups for _ in g.rollouts
            ]
            groups = tuple(g for groups in by_task for g in groups)
            record.append(write_table(Step(0, groups, Logged(extras={"task": names}))))
        suite = list(zip(self.tasks, self.verifies, strict=True))
        report = summary(self.config, suite, self.kept, weights, answers, self.overlap)
        return {**report, "warnings": [*self.warnings, *report["warnings"]]}, record

    def _sample(self, subject: ModelRef) -> tuple[str | None, list[list[Group]]]:
        """One model on every task: (hash of its weights, judged groups by task)."""
        by_task = self.prompts[subject.name]
        answer = self.config.answer
        params = SamplingParams(
            max_new_tokens=answer.max_new_tokens,
            n=answer.samples,
            temperature=answer.drawn_at,
            top_k=answer.top_k,
            top_p=answer.top_p,
            min_p=answer.min_p,
            stop_strings=answer.stop_strings,
            seed=self.config.seed,
        )
        client: Any = self.servers.get(subject.name)
        if not subject.is_server:
            self.on_phase(f"loading {subject.name}")
            longest = max(len(p.token_ids) for prompts in by_task for p in prompts) + answer.max_new_tokens
            room = max(map(len, by_task)) * answer.samples, longest
            tokenizer = self.tokenizers[subject.name]
            client = _load_engine(subject, self.config.machine, tokenizer, room)
            params = replace(params, stop_token_ids=models.stop_token_ids(tokenizer, client.policy.causal))
            for prompts in by_task:
                client.check(prompts, params)  # refuses what does not fit, before any work
        judged = []
        for task, prompts, verify in zip(self.tasks, by_task, self.verifies, strict=True):
            judged.append(self._judge(f"{subject.name} on {task.name}", client, prompts, params, verify))
        reasons = [r.verdict.reason for groups in judged for g in groups for r in g.rollouts]
        if all(reason is not None for reason in reasons):
            raise EngineError(f"{subject.name}: no completion could be scored; the first: {reasons[0]}")
        weights = None if subject.is_server else client.revision.hash
        return weights, judged

    def _judge(
        self, what: str, client: Any, prompts: Sequence[Prompt], params: SamplingParams, judge: Verify
    ) -> list[Group]:
        """Sample and judge in parts, to report progress and to refuse a reward outside [0, 1] early."""
        size = max(1, _BATCHES * self.config.machine.max_batch // params.n)
        groups: list[Group] = []
        for first in range(0, len(prompts), size):
            self.on_phase(f"{what}: {first} of {len(prompts)} prompts")
            part = prompts[first : first + size]
            collect = _served_groups if isinstance(client, ChatServer) else collect_groups
            groups += collect(client, part, params, judge)
            for group in groups[first:]:
                for rollout in group.rollouts:
                    measure.score(rollout.verdict)
        return groups


def _load_engine(subject: ModelRef, machine: MachineConfig, tokenizer: Any, room: tuple[int, int]) -> EmbeddedEngine:
    """The model ready to sample. room: (samples of the largest task, tokens of the longest prompt and completion)."""
    samples = min(machine.max_batch, room[0])
    cached = samples * room[1]
    policy, revision = load_policy(subject, machine.dtype, machine.device, samples=samples, cached=cached)
    engine = EmbeddedEngine(policy, tokenizer, max_batch=machine.max_batch)
    engine.publish(revision)
    return engine


def _served_groups(server: ChatServer, prompts: Sequence[Prompt], params: SamplingParams, judge: Verify) -> list[Group]:
    """As collect_groups, for completions that are text without token ids."""
    completions = server.sample(prompts, params)
    return group_rollouts(prompts, completions, judge_completions(judge, prompts, completions).verdicts)
