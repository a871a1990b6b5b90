"""evaluate(): models on a suite, judged, recorded, counted, compared.

suite -> sample -> verify -> record -> numbers          (the numbers follow from the record alone)

DIR/eval.json                 everything measured; the same bytes for the same models, suite and seed
DIR/eval.png                  scores with their intervals
DIR/rollouts/1.parquet ...    every completion with its verdict, one file per model; the columns of a run's rollouts
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyllm import models, rewards, tasks
from tinyllm.config import GRPOConfig, RewardConfig
from tinyllm.configio import to_dict
from tinyllm.errors import ConfigError, DataError, EngineError, RunError, TinyLLMError
from tinyllm.evals import measure
from tinyllm.evals.config import SuiteConfig
from tinyllm.evals.overlap import THRESHOLD, find_overlap, prompt_text
from tinyllm.evals.server import Server
from tinyllm.evals.subjects import Subject, find_subject, load_engine
from tinyllm.evals.suite import NO_LIMIT, PlainTokenizer, Task, cluster_labels, load_task, task_configs, task_hash
from tinyllm.files import new_folder, write_atomic, write_errors, write_json
from tinyllm.hashing import hash_json
from tinyllm.post.grpo import collect_groups
from tinyllm.records import Group, Rollout, SamplingParams, Verdict
from tinyllm.rollouts import write_table
from tinyllm.rundir import new_run_path
from tinyllm.tasks.files import read_file, rename

ALL = "all"
_CHUNKS = 4
"""Batches of completions between two signs of life."""


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
    config: SuiteConfig,
    *,
    reward: Callable[..., Any] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> EvalResult:
    """Evaluate models on a suite and write the folder; every model after the first is compared with the first.

    names: see subjects.find_subject. config: without a task or data of its own it is already that of a run
    (suite_for). reward: a reward function as an object. Raises the errors of errors.py, a user's mistakes before
    anything is sampled.
    """
    _check(names, config)
    if config.machine.threads:
        torch.set_num_threads(config.machine.threads)
    with _free_folder(config.out) as path:
        subjects = [find_subject(name) for name in names]
        judged = config.reward if reward is None else replace(config.reward, functions=(reward,))  # type: ignore[arg-type]
        config, judged, of_run = suite_for(subjects, config, judged)
        on_phase("reading the suite")
        evaluation = _Evaluation(subjects, config, judged, of_run, on_phase)
        try:
            report, groups = evaluation.run()
        finally:
            evaluation.close()
        from tinyllm.evals.view import draw

        on_phase("writing")
        with new_folder(path) as folder:
            (folder / "rollouts").mkdir()
            for number, judged_groups in enumerate(groups, 1):
                write_atomic(folder / "rollouts" / f"{number}.parquet", write_table(0, 0, judged_groups))
            write_atomic(folder / "eval.png", draw(report))
            write_json(folder / "eval.json", report)
    return EvalResult(path, report)


def suite_for(
    subjects: Sequence[Subject], config: SuiteConfig, judged: RewardConfig
) -> tuple[SuiteConfig, RewardConfig, str | None]:
    """The suite that is meant: the one that is named, else the held-out prompts of the runs among the models.

    Returns it with its reward and the run it is of. Raises ConfigError.
    """
    from tinyllm.evals.config import suite_of_run

    if config.task or config.data.file or config.data.dataset:
        return config, judged, None
    runs = {str(s.run.path): s.run for s in subjects if s.run is not None}
    if not runs:
        raise ConfigError(
            "no suite: name one with --task arithmetic (see: tinyllm tasks), or --data FILE --verifier SPEC"
        )
    (first, run), *others = runs.items()
    own = suite_of_run(run.config)
    for name, other in others:
        theirs = suite_of_run(other.config)
        if (own.data, _scoring(own.reward)) != (theirs.data, _scoring(theirs.reward)):
            raise ConfigError(f"{first} and {name} have different held-out prompts; name a suite with --task or --data")
    default = SuiteConfig()
    given_answer = {k: v for k, v in vars_of(config.answer).items() if v != vars_of(default.answer)[k]}
    merged = replace(
        config,
        data=own.data,
        reward=own.reward if config.reward == default.reward else config.reward,
        prompts=config.prompts or own.prompts,
        answer=replace(own.answer, **given_answer),
    )
    return merged, merged.reward if judged == config.reward else judged, first


def vars_of(section: Any) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.__dataclass_fields__}


def _scoring(reward: RewardConfig) -> RewardConfig:
    """Without what does not decide a verdict."""
    return replace(reward, timeout_s=1.0, workers=1, allow_probes=())


def _check(names: Sequence[str], config: SuiteConfig) -> None:
    if not names:
        raise ConfigError("no model to evaluate; name a bundled model, a folder, a hub id, a run, or RUN@STEP")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"model {twice[0]} is given twice; leave one out")
    answer = config.answer
    if answer.samples > 1 and answer.drawn_at == 0:
        raise ConfigError(f"answer.samples = {answer.samples} at temperature 0: all would be equal; give one of them")


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
    """The suite read and checked for every model; `run` does the work."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        config: SuiteConfig,
        judged: RewardConfig,
        of_run: str | None,
        on_phase: Callable[[str], None],
    ) -> None:
        self.subjects, self.config, self.judged, self.on_phase = subjects, config, judged, on_phase
        self.warnings: list[str] = []
        self.servers = {s.name: Server.connect(s.source) for s in subjects if s.is_server}
        self.tokenizers = {s.name: None if s.is_server else models.load_tokenizer(s.source) for s in subjects}
        configs = task_configs(config)
        self.suites = {
            name: [load_task(config, data, judged, tokenizer, of_run) for data in configs]
            for name, tokenizer in self.tokenizers.items()
        }
        self.tasks: list[Task] = [load_task(config, data, judged, None, of_run) for data in configs]
        self.labels: dict[str, Any] = {}
        for task in self.tasks:
            self.labels |= cluster_labels(task.prompts, config.clusters)
        self.overlap = self._overlap()
        left_out = {match["prompt_id"] for match in self.overlap["found"]}
        self.kept = [[p.id for p in task.prompts if p.id not in left_out] for task in self.tasks]
        for task, kept in zip(self.tasks, self.kept, strict=True):
            if not kept:
                raise DataError(f"{task.name}: every prompt is among the training prompts; nothing is left to evaluate")
        self.verifies: list[rewards.Verify] = []
        try:
            for task in self.tasks:
                self.verifies.append(rewards.make_verify(judged, task.data))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for verify in self.verifies:
            verify.close()

    # -- training prompts in the suite ----------------------------------------------------------------------------

    def _overlap(self) -> dict[str, Any]:
        """Which of the suite's prompts are among the training prompts known: of the runs, and of --train."""
        self.on_phase("looking for training prompts in the suite")
        checked, found = [], {}
        for name, texts in self._train_prompts():
            checked.append({"train": name, "prompts": len(texts)})
            for task in self.tasks:
                for match in find_overlap([prompt_text(p.row["prompt"]) for p in task.prompts], texts):
                    prompt = task.prompts[match.prompt]
                    found.setdefault(
                        prompt.id,
                        {
                            "task": task.name,
                            "prompt_id": prompt.id,
                            "kind": match.kind,
                            "similarity": match.similarity,
                            "prompt": prompt_text(prompt.row["prompt"]),
                            "train": name,
                            "train_prompt": match.train,
                        },
                    )
        return {"threshold": THRESHOLD, "checked": checked, "found": list(found.values())}

    def _train_prompts(self) -> Iterator[tuple[str, list[str]]]:
        if self.config.train:
            columns = self.config.data.columns if self.config.data.file else {}
            rows = [rename(row, columns, place) for place, row in read_file(self.config.train)]
            if missing := next((i for i, row in enumerate(rows, 1) if "prompt" not in row), None):
                raise DataError(f"--train {self.config.train}: row {missing} has no column 'prompt'")
            yield self.config.train, [prompt_text(row["prompt"]) for row in rows]
        seen: set[str] = set()
        for subject in self.subjects:
            if subject.run is None or str(subject.run.path) in seen:
                continue
            seen.add(str(subject.run.path))
            run: GRPOConfig = subject.run.config
            plain = replace(run, data=replace(run.data, max_prompt_tokens=NO_LIMIT))
            try:
                rows = [prompt.row for prompt in tasks.load(plain, PlainTokenizer()).train]
            except TinyLLMError as error:
                self.warnings.append(
                    f"the training prompts of {subject.run.path} cannot be read, so they are not looked for: {error}"
                )
                continue
            yield str(subject.run.path), [prompt_text(row["prompt"]) for row in rows]

    # -- the work -------------------------------------------------------------------------------------------------

    def run(self) -> tuple[dict[str, Any], list[list[Group]]]:
        """(report, groups of every model, task after task)."""
        recorded: list[list[Group]] = []
        answers: list[list[list[measure.Answers]]] = []  # by model, by task
        hashes = []
        for subject in self.subjects:
            weights, by_task = self._model(subject)
            hashes.append(weights)
            recorded.append([group for groups in by_task for group in groups])
            answers.append([[measure.answers_of(g, self.labels[g.prompt.id]) for g in groups] for groups in by_task])
        return self._report(hashes, answers), recorded

    def _model(self, subject: Subject) -> tuple[str | None, list[list[Group]]]:
        """One model on every task: (hash of its weights, groups by task)."""
        suites = self.suites[subject.name]
        kept = [[p for p in suite.prompts if p.id in set(ids)] for suite, ids in zip(suites, self.kept, strict=True)]
        for task, prompts in zip(suites, kept, strict=True):
            if not prompts:
                raise DataError(f"{subject.name} can read no prompt of {task.name}; raise --data.max_prompt_tokens")
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
        client: Any
        weights = None
        if subject.is_server:
            client = self.servers[subject.name]
        else:
            self.on_phase(f"loading {subject.name}")
            longest = max(len(p.token_ids) for prompts in kept for p in prompts) + answer.max_new_tokens
            room = (max(len(prompts) for prompts in kept) * answer.samples, longest)
            tokenizer = self.tokenizers[subject.name]
            client = load_engine(subject, self.config.machine, tokenizer, room)
            params = replace(params, stop_token_ids=models.stop_token_ids(tokenizer, client.policy.causal))
            weights = client.revision.hash
            for prompts in kept:
                client.slots(prompts, params)  # before any work
        judged = []
        for task, prompts, verify in zip(suites, kept, self.verifies, strict=True):
            judged.append(self._task(subject, client, task.name, prompts, params, verify))
        del client
        gc.collect()
        failures = [r.verdict.reason for groups in judged for g in groups for r in g.rollouts]
        if all(reason is not None for reason in failures):
            raise EngineError(f"{subject.name}: no completion could be scored; the first: {failures[0]}")
        return weights, judged

    def _task(
        self,
        subject: Subject,
        client: Any,
        name: str,
        prompts: list[Any],
        params: SamplingParams,
        verify: rewards.Verify,
    ) -> list[Group]:
        """Part by part, so that there are signs of life and a mistake in a reward shows early."""
        size = max(1, _CHUNKS * self.config.machine.max_batch // params.n)
        groups: list[Group] = []
        for first in range(0, len(prompts), size):
            self.on_phase(f"{subject.name} on {name}: {first} of {len(prompts)} prompts")
            part = prompts[first : first + size]
            if subject.is_server:
                groups += _served_groups(client, part, params, verify)
            else:
                groups += collect_groups(client, part, params, verify)
            for group in groups[first:]:
                for rollout in group.rollouts:
                    measure.score(rollout.verdict)
        return groups

    # -- the report -----------------------------------------------------------------------------------------------

    def _report(self, hashes: list[str | None], answers: list[list[list[measure.Answers]]]) -> dict[str, Any]:
        names = [subject.name for subject in self.subjects]
        parts = [(task.name, [by_task[i] for by_task in answers]) for i, task in enumerate(self.tasks)]
        if len(parts) > 1:
            parts.append((ALL, [_once(by_task) for by_task in answers]))
        samples = self.config.answer.samples
        results, comparisons = [], []
        for name, by_model in parts:
            lines = [measure.summarize(rows, samples) for rows in by_model]
            results += [{"task": name, "model": model, **line} for model, line in zip(names, lines, strict=True)]
        for family in [parts[:-1], parts[-1:]] if len(parts) > 1 else [parts]:
            comparisons += self._compare(family, names, samples)
        hashed = [task_hash(t, v) for t, v in zip(self.tasks, self.verifies, strict=True)]
        answer = {**to_dict(self.config.answer), "temperature": self.config.answer.drawn_at}
        report = {
            "suite": {
                "hash": hash_json(hashed),
                "tasks": [
                    {
                        "name": task.name,
                        "hash": digest,
                        "prompts": len(kept),
                        "overlapping": len(task.prompts) - len(kept),
                        "repeated": task.repeated,
                        "skipped": len(task.data.skipped),
                        "verifier": verify.describe(),
                    }
                    for task, digest, kept, verify in zip(self.tasks, hashed, self.kept, self.verifies, strict=True)
                ],
                "data": to_dict(self.config.data),
                "clusters": self.config.clusters,
            },
            "answer": {**answer, "seed": self.config.seed},
            "models": [{"name": name, "weights": digest} for name, digest in zip(names, hashes, strict=True)],
            "results": results,
            "comparisons": comparisons,
            "overlap": self.overlap,
        }
        return {**report, "warnings": [*self.warnings, *_warnings(report)]}

    def _compare(self, parts: Sequence[Any], names: Sequence[str], samples: int) -> list[dict[str, Any]]:
        """Every model against the first, task by task, with Holm's correction over them all."""
        found, what = [], []
        for task, by_model in parts:
            for name, rows in zip(names[1:], by_model[1:], strict=True):
                pair = measure.compare(by_model[0], rows, samples)
                if pair is not None:
                    found.append(pair)
                    what.append({"task": task, "a": names[0], "b": name})
        lines = measure.adjusted(found, [(w["a"], w["b"]) for w in what])
        return [{**w, **line} for w, line in zip(what, lines, strict=True)]


def _once(by_task: Sequence[Sequence[measure.Answers]]) -> list[measure.Answers]:
    """All tasks as one, a prompt that several have counted once."""
    unique: dict[str, measure.Answers] = {}
    for rows in by_task:
        for row in rows:
            unique.setdefault(row.prompt_id, row)
    return list(unique.values())


def _served_groups(server: Server, prompts: list[Any], params: SamplingParams, verify: rewards.Verify) -> list[Group]:
    """As collect_groups, for completions that are text without token ids."""
    completions = server.sample(prompts, params)
    verdicts = iter(verify(prompts, [c for c in completions if c.error is None]))
    rollouts = iter(
        [
            Rollout(c, Verdict(None, f"sampling failed: {c.error}") if c.error is not None else next(verdicts))
            for c in completions
        ]
    )
    return [Group(prompt, tuple(next(rollouts) for _ in range(params.n))) for prompt in prompts]


def _warnings(report: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    said = []
    lines = {(line["task"], line["model"]): line for line in report["results"]}
    for (task, model), line in lines.items():
        if line["failed"] and line["score"] is not None:
            low, high = line["if_failed"]
            said.append(
                f"{model} on {task}: {100 * line['failed']:.1f}% of completions failed and are left out; had all of "
                f"them been wrong, {line['measure']} would be {low:.3f}, had all been right, {high:.3f}"
            )
        if line["truncated"] >= 0.1:
            said.append(
                f"{model} on {task}: {100 * line['truncated']:.0f}% of completions were cut by the length limit; "
                "raise --max-new-tokens"
            )
    for pair in report["comparisons"]:
        both = lines[pair["task"], pair["a"]], lines[pair["task"], pair["b"]]
        if found := measure.format_warning(*both, (pair["a"], pair["b"])):
            said.append(f"{pair['task']}: {found}")
    return said
