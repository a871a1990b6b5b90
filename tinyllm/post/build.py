"""Builds the parts of a run, a frozen `Run`, from a configuration.

Parts are built in the order in which a user's mistakes are cheapest to find: configuration, data, verifier, model,
engine, pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyllm import rewards, tasks
from tinyllm.callbacks import Callback
from tinyllm.config.io import to_dict
from tinyllm.config.sections import Config, DPOConfig, GRPOConfig, SFTConfig
from tinyllm.distributed.ranks import Ranks, current_ranks, several
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.remote.served import ServedEngine, make_served_engine, weights_folder
from tinyllm.errors import ConfigError, DataError, RunError
from tinyllm.model import models
from tinyllm.pool.ray_workers import require_ray
from tinyllm.pool.source import Pool, PoolSource, is_pooled
from tinyllm.post.batch import BatchRules
from tinyllm.post.evaluation import evaluator
from tinyllm.post.examples import ExampleSource, checked_config, likelihood_evaluator, preference_evaluator
from tinyllm.post.learner import Learner, load_learner
from tinyllm.post.source import InlineSource, PromptOrder, RecordedSource
from tinyllm.post.trainer import Evaluate
from tinyllm.post.update import model_scorer
from tinyllm.record.hashing import hash_bytes
from tinyllm.record.manifest import build_manifest
from tinyllm.record.rundir import RunDir
from tinyllm.records import Prompt, Revision, SamplingParams
from tinyllm.rewards.functions import importable_name
from tinyllm.rewards.probe import probe_before_training
from tinyllm.seams import Engine, Judge, Source
from tinyllm.tasks import TaskData
from tinyllm.tasks.examples import load_examples

MakeSource = Callable[[RunDir, int, Sequence[int], Revision], Source]
"""(run directory, number of prompts already trained on, numbers of recorded steps to read back, revision of the weights
now) -> the source of the run's further steps."""


@dataclass(frozen=True)
class Sampling:
    """The parts that only a run which samples has."""

    engine: EmbeddedEngine | ServedEngine
    judge: Judge
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """The parts of one run, used by `train`, `resume` and `replay`."""

    config: Config
    """The configuration as recorded in the manifest."""
    ranks: Ranks
    callbacks: tuple[Callback, ...]
    tokenizer: Any
    learner: Learner
    sampling: Sampling | None
    """None where the data holds the completions (SFT, DPO)."""
    source: MakeSource
    evaluate: Evaluate
    manifest: Mapping[str, Any]
    close: Callable[[], None]
    """Ends worker processes and connections; safe to call twice."""

    def phase(self, phase: str) -> None:
        """Tell all callbacks which phase of the work begins."""
        for callback in self.callbacks:
            callback.on_phase(phase)

    def publish(self, revision: Revision) -> None:
        """Tell the engine, if the run has one, that the policy's weights are now of this revision."""
        if self.sampling is not None:
            self.sampling.engine.publish(revision)


def build_run(
    config: Config, reward: Callable[..., Any] | None, callbacks: Sequence[Callback], path: Path | None = None
) -> Run:
    """Build the parts of a run of the configuration's kind.

    reward: a reward function as a Python object, in place of config.reward.functions. path: the run directory; None for
    replay, which uses no servers. Raises the errors of errors.py.
    """
    ranks = current_ranks()
    watching = tuple(callbacks) if ranks.is_main else ()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if isinstance(config, GRPOConfig):
        return _sampling_run(config, reward, ranks, watching, path)
    assert reward is None, "SFT and DPO are given what is right, and judge nothing"
    return _given_run(config, ranks, watching)


def _tell(callbacks: Sequence[Callback], phase: str) -> None:
    for callback in callbacks:
        callback.on_phase(phase)


# -- GRPO: completions are sampled and judged -------------------------------------------------------------------------


def _sampling_run(
    config: GRPOConfig,
    reward: Callable[..., Any] | None,
    ranks: Ranks,
    callbacks: tuple[Callback, ...],
    path: Path | None,
) -> Run:
    _check(config)
    judged_by = config.reward if reward is None else replace(config.reward, functions=(reward,))  # type: ignore[arg-type]
    if reward is not None:  # the record names the module it can be imported from
        config = replace(config, reward=replace(config.reward, functions=(importable_name(reward),)))
    with ExitStack() as stack:
        _tell(callbacks, "reading the data")
        tokenizer = models.load_tokenizer(config.model.name)
        data = tasks.load(replace(config, reward=judged_by), tokenizer)
        _check_data(config, data)
        probe_before_training(judged_by, data, judged_by.allow_probes)
        judge = rewards.make_judge(judged_by, data)
        stack.callback(judge.close)

        _tell(callbacks, "loading the model")
        prompts = [*data.train, *data.held_out]
        longest = max(len(p.token_ids) for p in prompts) + config.sampling.max_new_tokens
        learner = load_learner(config, longest, ranks)
        params = _sampling_params(config, tokenizer, learner)
        engine = _engine(config, tokenizer, learner, prompts, params, path, callbacks)
        stack.callback(engine.close)
        pool = None
        if is_pooled(config):
            _tell(callbacks, "starting the pool")
            pool = Pool(config, engine, judge, judged_by, data, params)
            stack.callback(pool.close)

        hashes = {"data": data.hash, "verifier": rewards.verifier_hash(judge.parts)}
        facts = _data_facts(data) | {"stop_token_ids": list(params.stop_token_ids), "verifier": judge.describe()}
        facts |= engine.facts()
        return Run(
            config=config,
            ranks=ranks,
            callbacks=callbacks,
            tokenizer=tokenizer,
            learner=learner,
            sampling=Sampling(engine, judge, params),
            source=_sampled_source(config, learner, engine, judge, pool, data, params, callbacks),
            evaluate=_accuracy(config, learner, engine, judge, data, params),
            manifest=_manifest(config, tokenizer, learner, hashes, facts),
            close=stack.pop_all().close,
        )


def _sampling_params(config: GRPOConfig, tokenizer: Any, learner: Learner) -> SamplingParams:
    s = config.sampling
    return SamplingParams(
        max_new_tokens=s.max_new_tokens,
        n=s.group_size,
        temperature=s.temperature,
        stop_token_ids=models.stop_token_ids(tokenizer, learner.policy.causal),
        stop_strings=s.stop_strings,
        seed=config.seed,
    )


def _engine(
    config: GRPOConfig,
    tokenizer: Any,
    learner: Learner,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    path: Path | None,
    callbacks: Sequence[Callback],
) -> EmbeddedEngine | ServedEngine:
    """The engine of a configuration: servers where it names some, else the policy itself."""
    if not config.engine.urls:
        engine = EmbeddedEngine(learner.policy, tokenizer, max_batch=config.sampling.max_batch)
        engine.check(prompts, params)  # refuses prompts that do not fit, before any work
        return engine
    _tell(callbacks, "asking the servers")
    scorer = model_scorer(learner.policy, 1.0, config.train.tokens_per_microbatch)
    assert path is not None, "a run that publishes weights to servers has a run directory"
    return make_served_engine(
        config.engine,
        learner.policy,
        tokenizer,
        prompts,
        params,
        score=lambda prompt, ids: scorer([(prompt, ids)])[0].tolist(),
        folder=weights_folder(config.engine, path),
        max_lag=config.pool.max_lag,
        ranks=learner.ranks,
    )


def _sampled_source(
    config: GRPOConfig,
    learner: Learner,
    engine: Engine,
    judge: Judge,
    pool: Pool | None,
    data: TaskData,
    params: SamplingParams,
    callbacks: Sequence[Callback],
) -> MakeSource:
    def on_phase(phase: str) -> None:
        _tell(callbacks, phase)

    def make(run: RunDir, position: int, recorded: Sequence[int], revision: Revision) -> Source:
        first = revision.step + 1 + len(recorded)
        # With refills and a lag the positions that were taken have gaps between them: then all recorded steps count
        gaps = config.pool.max_lag and BatchRules.of(config).dynamic_sampling
        order = PromptOrder(data.train, _order_seed(config), 0 if gaps else position)
        for step in (*(range(1, revision.step + 1) if gaps else ()), *recorded):
            order.take_recorded([group.prompt.id for group in run.read_groups(step)])
        further: Source
        if pool is None:
            further = InlineSource(
                engine, order, params, judge, config, first_step=first, on_phase=on_phase, ranks=learner.ranks
            )
        else:
            further = PoolSource(
                run, pool, order, params, config, first_step=first, revision=revision, on_phase=on_phase
            )
        return RecordedSource(run, recorded, further) if recorded else further

    return make


def _order_seed(config: Config) -> int:
    return config.seed if config.data.seed is None else config.data.seed


def _accuracy(
    config: GRPOConfig, learner: Learner, engine: Engine, judge: Judge, data: TaskData, params: SamplingParams
) -> Evaluate:
    prompts = data.held_out[: config.eval.prompts or None]
    greedy = replace(params, n=1, temperature=0.0)
    read_again = learner.reference is None and config.eval.every
    reference = learner.start_scorer if read_again else lambda: learner.reference
    return evaluator(engine, prompts, greedy, judge, reference, learner.ranks)


def _check(config: GRPOConfig) -> None:
    if config.pool.engines or config.pool.verifiers:
        require_ray()
    if is_pooled(config) and several():
        raise ConfigError(
            "a pool serves one trainer process, and WORLD_SIZE is more than 1; leave --pool out, or torchrun"
        )


def _check_data(config: GRPOConfig, data: TaskData) -> None:
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


# -- SFT and DPO: completions are given -------------------------------------------------------------------------------


def _given_run(config: SFTConfig | DPOConfig, ranks: Ranks, callbacks: tuple[Callback, ...]) -> Run:
    _tell(callbacks, "reading the data")
    tokenizer = models.load_tokenizer(config.model.name)
    data = load_examples(config, tokenizer)
    resolved = checked_config(config, data)
    _tell(callbacks, "loading the model")
    learner = load_learner(resolved, data.longest, ranks)
    groups = data.of(data.held_out[: resolved.eval.prompts or None])
    scorer = model_scorer(learner.policy, 1.0, resolved.train.tokens_per_microbatch)
    if isinstance(resolved, SFTConfig):
        evaluate = likelihood_evaluator(groups, scorer, ranks)
    else:
        assert learner.reference is not None
        evaluate = preference_evaluator(groups, learner.updater.objective, scorer, learner.reference)

    def make(run: RunDir, position: int, recorded: Sequence[int], revision: Revision) -> Source:
        order = PromptOrder(data.train, _order_seed(resolved), position)
        return ExampleSource(data, order, resolved, revision.step, recorded)

    return Run(
        config=resolved,
        ranks=ranks,
        callbacks=callbacks,
        tokenizer=tokenizer,
        learner=learner,
        sampling=None,
        source=make,
        evaluate=evaluate,
        manifest=_manifest(resolved, tokenizer, learner, {"data": data.hash}, _data_facts(data)),
        close=lambda: None,
    )


# -- the manifest -----------------------------------------------------------------------------------------------------


def _data_facts(data: Any) -> dict[str, Any]:
    return {
        "train_prompts": len(data.train),
        "held_out_prompts": len(data.held_out),
        "skipped_rows": len(data.skipped),
    }


def _manifest(
    config: Config, tokenizer: Any, learner: Learner, hashes: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    template = tokenizer.chat_template
    own = {
        "parameters": sum(p.numel() for p in learner.optimizer.parameters.values()),
        "dtype": str(learner.policy.head_weight.dtype).removeprefix("torch."),
        "device": learner.policy.device.type,
        **({"ranks": learner.ranks.count} if learner.sharded is not None else {}),
    }
    return build_manifest(
        to_dict(config),
        kind=config.kind,
        hashes={
            "weights": learner.start_hash,
            "reference": learner.reference_hash,
            "tokenizer": models.tokenizer_hash(tokenizer),
            "chat_template": hash_bytes(template.encode()) if isinstance(template, str) else None,
            **hashes,
        },
        probe={name: {"holds": holds, "tried": detail} for name, (holds, detail, _) in learner.probe.items()},
        facts={**own, **facts},
    )


def require_same_start(run: Run, recorded: RunDir) -> None:
    """Check that a resumed run has the same model, data and verifier, and the same kind of sampler, as at its start.

    Raises RunError that names the first difference.
    """
    now = run.manifest["hashes"]
    for name, was in recorded.manifest["hashes"].items():
        if now.get(name) != was:
            raise RunError(
                f"{recorded.path}: the {name.replace('_', ' ')} changed since the run was started "
                f"(hash {now.get(name)} instead of {was}); put it back, or start a new run"
            )
    where, here = (
        ", ".join(sorted({server["server"] for server in facts.get("engine", ())})) or "this process"
        for facts in (recorded.manifest["facts"], run.manifest["facts"])
    )
    if where != here:
        raise RunError(
            f"{recorded.path}: its completions come from {where}, and --engine.urls is {here}; give it the same"
        )
