"""Runs: `train` starts one of any kind, `resume` goes on with one; and what is GRPO's own in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinyllm import rewards, tasks
from tinyllm.callbacks import Callback, RunResult
from tinyllm.config.io import make_config
from tinyllm.config.sections import Config, GRPOConfig
from tinyllm.distributed.ranks import current_ranks, several
from tinyllm.distributed.shared_run import shared_run
from tinyllm.engine.engine import Engine
from tinyllm.engine.remote.served import ServedEngine
from tinyllm.errors import ConfigError, DataError, RunError
from tinyllm.model import models
from tinyllm.pool.judging import OneAtATime
from tinyllm.pool.ray_workers import require_ray
from tinyllm.pool.source import Pool, PoolSource, is_pooled
from tinyllm.post.batch import BatchRules
from tinyllm.post.evaluation import evaluator
from tinyllm.post.examples import ExampleParts
from tinyllm.post.parts import Parts
from tinyllm.post.source import InlineSource, PromptOrder, Source
from tinyllm.post.trainer import Evaluate, Progress
from tinyllm.post.update import model_scorer
from tinyllm.record.hashing import hash_bytes, hash_file, hash_json
from tinyllm.record.rundir import RunDir, new_run_path
from tinyllm.records import Group, Prompt, Revision, SamplingParams
from tinyllm.rewards.functions import Logged
from tinyllm.rewards.probe import probe_before_training


def train(config: Config, *, reward: Callable[..., Any] | None = None, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train by GRPO, SFT or DPO, as the configuration's kind says; returns where the results are.

    reward: a reward function as a Python object, instead of config.reward.functions. Raises the errors of errors.py:
    before any work for a user's mistake, later with everything saved.
    """
    ranks = current_ranks()
    # Before anything is loaded
    path = ranks.on_main(lambda: RunDir.require_free(Path(config.run.dir) if config.run.dir else new_run_path()))
    parts = make_parts(config, reward, callbacks)
    try:
        manifest = parts.manifest()
        with shared_run(ranks, lambda: RunDir.create(path, manifest)) as run:
            return parts.train(run, Progress(), recorded=[])
    finally:
        parts.close()


def resume(
    path: str | Path,
    *,
    reward: Callable[..., Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Go on with a run that was stopped: it ends as it would have without the stop. Raises RunError.

    reward: the reward function the run was started with, where it was given as an object that cannot be imported.
    engine: options of this section that are others now, as {"urls": ("http://127.0.0.1:8001",)}; the record keeps
    those of the start.
    """
    ranks = current_ranks()
    with shared_run(ranks, lambda: RunDir.open(path)) as run:
        parts = make_parts(make_config(run.config, engine=engine) if engine else run.config, reward, callbacks)
        try:
            parts.require_same_start(run)
            progress = Progress()
            with suppress(RunError):  # none yet, or, after a warning, none whole: start weights and record will do
                _, tensors, state = run.load_checkpoint()
                parts.optimizer.load(tensors)
                progress = Progress(**state["progress"])

            def recorded() -> list[int]:
                run.require_logged(progress.step)
                run.leave_lines(progress.step, ranks.count)
                return run.take_recorded(progress.step)

            return parts.train(run, progress, ranks.on_main(recorded))
        finally:
            parts.close()


def make_parts(config: Config, reward: Callable[..., Any] | None, callbacks: Sequence[Callback]) -> Parts:
    """The parts of a run of this kind."""
    if isinstance(config, GRPOConfig):
        return GRPOParts(config, reward, callbacks)
    assert reward is None, "SFT and DPO are given what is right, and judge nothing"
    return ExampleParts(config, callbacks)


class GRPOParts(Parts):
    """A run that samples and verifies."""

    def __init__(self, config: GRPOConfig, reward: Callable[..., Any] | None, callbacks: Sequence[Callback]) -> None:
        _check(config)
        self.judged = config.reward if reward is None else replace(config.reward, functions=(reward,))  # type: ignore[arg-type]
        super().__init__(config if reward is None else _with_reward_name(config, reward), callbacks)

    def read_data(self) -> None:
        self.data = tasks.load(replace(self.config, reward=self.judged), self.tokenizer)
        _check_data(self.config, self.data)
        probe_before_training(self.judged, self.data, self.judged.allow_probes)
        self.verify = rewards.make_verify(self.judged, self.data, self.tokenizer)

    pool: Pool | None = None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.verify.close()

    def longest(self) -> int:
        prompts = max(len(p.token_ids) for p in (*self.data.train, *self.data.held_out))
        return prompts + self.config.sampling.max_new_tokens

    engine: Engine | ServedEngine

    def use_model(self) -> None:
        config = self.config
        s = config.sampling
        self.params = SamplingParams(
            max_new_tokens=s.max_new_tokens,
            n=s.group_size,
            temperature=s.temperature,
            stop_token_ids=models.stop_token_ids(self.tokenizer, self.policy.causal),
            stop_strings=s.stop_strings,
            seed=config.seed,
        )
        prompts = [*self.data.train, *self.data.held_out]
        self.engine = self._served(prompts) if config.engine.urls else self._embedded(prompts)
        if is_pooled(config):
            self.phase("starting the pool")
            self.verify = OneAtATime(self.verify)
            self.pool = Pool(config, self.engine, self.verify, self.judged, self.data, prompts, self.params)

    def _embedded(self, prompts: Sequence[Prompt]) -> Engine:
        s = self.config.sampling
        engine = Engine(self.policy, self.tokenizer, max_batch=s.max_batch)
        engine.slots(prompts, self.params)
        return engine

    def _served(self, prompts: Sequence[Prompt]) -> ServedEngine:
        self.phase("asking the servers")
        scorer = model_scorer(self.policy, 1.0, self.config.train.tokens_per_microbatch)
        return ServedEngine(
            self.config.engine,
            self.policy,
            self.tokenizer,
            prompts,
            self.params,
            score=lambda prompt, ids: scorer([(prompt, ids)])[0].tolist(),
            ranks=self.ranks,
        )

    def train(self, run: RunDir, progress: Progress, recorded: Sequence[int]) -> RunResult:
        if isinstance(self.engine, ServedEngine):
            shared = self.config.engine.folder
            own = f"{run.path.name}-{hash_bytes(bytes(run.path.resolve()))[:8]}"  # others may be called the same
            self.engine.publisher.folder = Path(shared) / own if shared else run.path / "weights"
        return super().train(run, progress, recorded)

    def publish(self, revision: Revision) -> None:
        self.engine.publish(revision)

    def own_hashes(self) -> dict[str, Any]:
        return {"verifier": verifier_hash(self.verify.parts)}

    def own_facts(self) -> dict[str, Any]:
        facts = {"stop_token_ids": list(self.params.stop_token_ids), "verifier": self.verify.describe()}
        return facts | ({"engine": self.engine.facts()} if isinstance(self.engine, ServedEngine) else {})

    def require_same_start(self, run: RunDir) -> None:
        """And samples where it sampled: in process, or on servers of the same kind. Raises RunError."""
        super().require_same_start(run)
        was, now = (
            ", ".join(sorted({server["server"] for server in facts.get("engine", ())})) or "this process"
            for facts in (run.manifest["facts"], self.own_facts())
        )
        if was != now:
            raise RunError(f"{run.path}: its completions come from {was}, and --engine.urls is {now}; give it the same")

    def source(self, run: RunDir, order: PromptOrder, recorded: Sequence[int], after: int) -> Source:
        first = after + 1 + len(recorded)
        self._take_recorded(run, order, recorded, after)
        further: InlineSource | PoolSource
        if self.pool is None:
            further = InlineSource(
                self.engine, order, self.params, self.verify, self.config,
                first_step=first, on_phase=self.phase, ranks=self.ranks,
            )  # fmt: skip
        else:
            further = PoolSource(
                run, self.pool, order, self.params, self.config,
                first_step=first, revision=Revision(after, self.weights_hash()), on_phase=self.phase,
            )  # fmt: skip
        return _Resumed(run, order, recorded, further)

    def _take_recorded(self, run: RunDir, order: PromptOrder, recorded: Sequence[int], after: int) -> None:
        """Moves the order on past what the record has: with refills and a lag there are gaps, so all steps count."""
        gaps = self.config.pool.max_lag and BatchRules.of(self.config).dynamic_sampling
        if gaps:
            order.position = 0
        for step in (*(range(1, after + 1) if gaps else ()), *recorded):
            order.take_recorded([group.prompt.id for group in run.read_groups(step)])

    def evaluator(self) -> Evaluate:
        prompts = self.data.held_out[: self.config.eval.prompts or None]
        greedy = replace(self.params, n=1, temperature=0.0)
        reference = self.start_scorer if self.reference is None and self.config.eval.every else lambda: self.reference
        return evaluator(self.engine, prompts, greedy, self.verify, reference, self.ranks)


@dataclass
class _Resumed:
    """The recorded steps first, from the record; then whatever is sampled."""

    run: RunDir
    order: PromptOrder
    recorded: Sequence[int]
    further: InlineSource | PoolSource
    logged: Logged = field(default_factory=Logged)

    @property
    def seconds(self) -> dict[str, float]:
        return self.further.seconds

    def publish(self, revision: Revision) -> None:
        self.further.publish(revision)

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        for step in self.recorded:
            files = self.run.read_recorded(step)
            groups = [group for file in files for group in file.groups]
            self.order.trained += len(groups)
            self.logged = Logged(metrics=dict(files[-1].logged))
            yield step, groups
        for step, groups in self.further:
            self.logged = self.further.logged
            yield step, groups


def _check(config: GRPOConfig) -> None:
    if config.pool.engines or config.pool.verifiers:
        require_ray()
    if is_pooled(config) and several():
        raise ConfigError(
            "a pool serves one trainer process, and WORLD_SIZE is more than 1; leave --pool out, or torchrun"
        )


def _check_data(config: GRPOConfig, data: Any) -> None:
    if len(data.train) < config.train.prompts_per_step:
        raise DataError(
            f"{data.name}: {len(data.train)} prompts to train on, fewer than one batch (train.prompts_per_step = "
            f"{config.train.prompts_per_step}); lower it or give more rows"
        )
    longest = max(data.train, key=lambda p: len(p.token_ids))
    need = len(longest.token_ids) + config.sampling.max_new_tokens - 1
    if need > config.train.tokens_per_microbatch:
        raise ConfigError(
            f"train.tokens_per_microbatch = {config.train.tokens_per_microbatch} cannot hold prompt {longest.id} with "
            f"a completion of sampling.max_new_tokens = {config.sampling.max_new_tokens}; it needs at least {need}"
        )


def _with_reward_name(config: GRPOConfig, reward: Callable[..., Any]) -> GRPOConfig:
    """The configuration to record for a reward given as an object: where it can be imported from."""
    return replace(config, reward=replace(config.reward, functions=(_importable_name(reward),)))


def _importable_name(function: Any) -> str:
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}:{name}"


def verifier_hash(parts: Sequence[Any]) -> str:
    """Hash of what judges: settings and weights, tinyllm's verifier code, and the source of reward functions."""
    code = {p.name: hash_file(p) for p in sorted(Path(rewards.__file__).parent.glob("*.py"))}
    described = []
    for part in parts:
        judge = part.judge
        if isinstance(judge, rewards.Verifier):
            described.append([part.name, part.weight, judge.spec])
        elif isinstance(judge, str):
            described.append([part.name, part.weight, judge, _module_hash(judge.partition(":")[0])])
        else:
            spec = _importable_name(judge)
            described.append(
                [part.name, part.weight, spec, _module_hash(spec.partition(":")[0]) or _source_hash(judge)]
            )
    return hash_json([code, described])


def _module_hash(module: str) -> str | None:
    """Hash of the source of a module, or of a file."""
    import importlib.util
    import sys

    if module.endswith(".py"):
        return hash_file(module) if Path(module).is_file() else None
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    return hash_file(spec.origin) if spec and spec.origin and Path(spec.origin).exists() else None


def _source_hash(function: Any) -> str | None:
    try:
        return hash_bytes(inspect.getsource(function).encode())
    except (OSError, TypeError):
        return None
