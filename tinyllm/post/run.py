"""From a configuration to a finished run: build the parts, train, save model and report; or go on with a run."""

from __future__ import annotations

import copy
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tinyllm import models, rewards, tasks
from tinyllm.callbacks import Callback, Interrupted, RunInfo, RunResult
from tinyllm.config import GRPOConfig
from tinyllm.configio import to_dict
from tinyllm.engine.engine import Engine
from tinyllm.engine.head import Policy
from tinyllm.engine.probe import probe
from tinyllm.errors import ConfigError, DataError, RunError, TrainingStopped
from tinyllm.hashing import hash_bytes, hash_file, hash_json, hash_tensors
from tinyllm.manifest import build_manifest
from tinyllm.memory import keep_freed_memory, memory_estimate, require_memory
from tinyllm.post.evaluation import evaluator
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.source import InlineSource, PromptOrder
from tinyllm.post.trainer import Progress, Trainer
from tinyllm.post.update import Scorer, Updater, adapter_off_scorer, model_scorer
from tinyllm.records import Group, Revision, SamplingParams
from tinyllm.rewards.functions import Logged
from tinyllm.rewards.probe import probe_before_training
from tinyllm.rundir import RunDir, new_run_path

log = logging.getLogger("tinyllm")


def grpo(
    config: GRPOConfig, *, reward: Callable[..., Any] | None = None, callbacks: Sequence[Callback] = ()
) -> RunResult:
    """Train by group relative policy optimization; returns where the results are.

    reward: a reward function as a Python object, instead of config.reward.functions. Raises the errors of errors.py:
    before any work for a user's mistake, later with everything saved.
    """
    path = Path(config.run.dir) if config.run.dir else new_run_path()
    RunDir.require_free(path)  # before anything is loaded
    parts = Parts(config, reward, callbacks)
    try:
        with RunDir.create(path, parts.manifest()) as run:
            return parts.train(run, Progress(), recorded=[])
    finally:
        parts.close()


def resume(
    path: str | Path, *, reward: Callable[..., Any] | None = None, callbacks: Sequence[Callback] = ()
) -> RunResult:
    """Go on with a run that was stopped: it ends as it would have without the stop. Raises RunError.

    reward: the reward function the run was started with, where it was given as an object that cannot be imported.
    """
    with RunDir.open(path) as run:
        parts = Parts(run.config, reward, callbacks)
        try:
            parts.require_same_start(run)
            progress = Progress()
            with suppress(RunError):  # none yet, or, after a warning, none whole: start weights and record will do
                _, tensors, state = run.load_checkpoint()
                parts.optimizer.load(tensors)
                progress = Progress(**state["progress"])
            run.require_logged(progress.step)
            return parts.train(run, progress, recorded=run.take_recorded(progress.step))
        finally:
            parts.close()


class Parts:
    """Everything a run is made of, built in the order in which mistakes are cheapest to find."""

    def __init__(self, config: GRPOConfig, reward: Callable[..., Any] | None, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks
        _check(config)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        judged = config.reward if reward is None else replace(config.reward, functions=(reward,))  # type: ignore[arg-type]
        self.config = config if reward is None else _with_reward_name(config, reward)
        self._phase("reading the data")
        self.tokenizer = models.load_tokenizer(config.model.name)
        self.data = tasks.load(replace(config, reward=judged), self.tokenizer)
        _check_data(config, self.data)
        probe_before_training(judged, self.data, judged.allow_probes)
        self.verify = rewards.make_verify(judged, self.data, self.tokenizer)
        try:
            self._load_model()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.verify.close()

    def _phase(self, phase: str) -> None:
        for callback in self.callbacks:
            callback.on_phase(phase)

    def _load_model(self) -> None:
        config = self.config
        self._phase("loading the model")
        name, device = config.model.name, models.pick_device(config.model.device)
        longest = max(len(p.token_ids) for p in (*self.data.train, *self.data.held_out))
        weights = models.pick_dtype(config.model.dtype, device)
        require_memory(name, memory_estimate(models.load_config(name), weights, config, longest), device)
        model: Any = models.load_model(name, config.model.dtype, device, config=config)
        if device == "cpu":
            keep_freed_memory()
        self.start_hash = models.content_hash(model)
        if config.lora.rank:
            model = models.add_lora(model, config.lora.rank, config.lora.alpha, config.lora.targets, seed=config.seed)
        self.policy = Policy(model)
        self.policy.check()
        if config.model.gradient_checkpointing:
            _checkpoint_layers(self.policy)
        self.probe = probe(self.policy.head_weight.dtype, self.policy.device.type)
        self.engine = Engine(
            self.policy, self.tokenizer, max_batch=config.sampling.max_batch, cache_tokens=config.sampling.cache_tokens
        )
        s = config.sampling
        self.params = SamplingParams(
            max_new_tokens=s.max_new_tokens,
            n=s.group_size,
            temperature=s.temperature,
            stop_token_ids=models.stop_token_ids(self.tokenizer, self.policy.causal),
            stop_strings=s.stop_strings,
            seed=config.seed,
        )
        self.engine.slots([*self.data.train, *self.data.held_out], self.params)
        self.reference = self._reference()
        self.optimizer = Optimizer(model.named_parameters(), config.optimizer)
        self.updater = Updater(self.policy, self.optimizer, config, self.reference)

    def _reference(self) -> Scorer | None:
        """Scores under the policy of the KL term (the start policy, or another model); None where it is not held."""
        config = self.config
        self.reference_hash = self.start_hash
        temperature, budget = config.sampling.temperature, config.train.tokens_per_microbatch
        if config.model.reference:
            other = models.load_model(config.model.reference, config.model.dtype, config.model.device)
            if other.config.get_text_config().vocab_size != self.policy.config.vocab_size:
                raise ConfigError(
                    f"model.reference = {config.model.reference!r} has another vocabulary than {config.model.name!r}; "
                    "choose a model of the same family"
                )
            self.reference_hash = models.content_hash(other)
            return model_scorer(Policy(other.requires_grad_(False)), temperature, budget)
        if config.lora.rank:
            return adapter_off_scorer(self.policy, temperature, budget)
        if not config.objective.beta:
            return None
        return model_scorer(Policy(copy.deepcopy(self.policy.model).requires_grad_(False)), temperature, budget)

    def _start_scorer(self) -> Scorer | None:
        """Scores under the start policy; read again each time, since between evaluations nothing needs its memory."""
        model_config = self.config.model
        start: Any = models.load_model(model_config.name, model_config.dtype, model_config.device)
        if models.content_hash(start) != self.start_hash:
            log.warning("%s is not what the run started from any more; its KL is not measured", model_config.name)
            return None
        policy = Policy(start.requires_grad_(False))
        return model_scorer(policy, self.config.sampling.temperature, self.config.train.tokens_per_microbatch)

    # -- the run --------------------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        template = self.tokenizer.chat_template
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return build_manifest(
            to_dict(self.config),
            hashes={
                "weights": self.start_hash,
                "reference": self.reference_hash,
                "tokenizer": hash_bytes(backend.to_str().encode())
                if backend
                else hash_json(self.tokenizer.get_vocab()),
                "chat_template": hash_bytes(template.encode()) if isinstance(template, str) else None,
                "data": self.data.hash,
                "verifier": verifier_hash(self.verify.parts),
            },
            probe={name: {"holds": holds, "tried": detail} for name, (holds, detail, _) in self.probe.items()},
            facts={
                "train_prompts": len(self.data.train),
                "held_out_prompts": len(self.data.held_out),
                "skipped_rows": len(self.data.skipped),
                "parameters": sum(p.numel() for p in self.optimizer.parameters.values()),
                "dtype": str(self.policy.head_weight.dtype).removeprefix("torch."),
                "device": self.policy.device.type,
                "stop_token_ids": list(self.params.stop_token_ids),
                "verifier": self.verify.describe(),
            },
        )

    def require_same_start(self, run: RunDir) -> None:
        """A resumed run starts from the model and the data it was started with."""
        now = self.manifest()["hashes"]
        for name, was in run.manifest["hashes"].items():
            if now.get(name) != was:
                raise RunError(
                    f"{run.path}: the {name.replace('_', ' ')} changed since the run was started "
                    f"(hash {now.get(name)} instead of {was}); put it back, or start a new run"
                )

    def weights_hash(self) -> str:
        if self.config.lora.rank:
            trained = hash_tensors({n: p.detach() for n, p in self.optimizer.parameters.items()})
            return hash_json([self.start_hash, trained])
        return models.content_hash(self.policy.model)

    def train(self, run: RunDir, progress: Progress, recorded: Sequence[int]) -> RunResult:
        config = self.config
        self.engine.publish(Revision(progress.step, self.weights_hash()))
        order = PromptOrder(self.data.train, _data_seed(config), progress.position)
        with _stop_signals(lambda: self._phase("stopping after this step")) as stop_requested:
            trainer = Trainer(
                run=run,
                config=config,
                optimizer=self.optimizer,
                updater=self.updater,
                weights_hash=self.weights_hash,
                reference_hash=self.reference_hash,
                evaluate=self._evaluator(),
                keep_best=lambda step: models.save_model(self.policy.model, self.tokenizer, run.path / "best"),
                callbacks=self.callbacks,
                progress=progress,
                recorded=frozenset(recorded),
                position=lambda: order.position,
                stop_requested=stop_requested,
            )
            facts = {name: fact for name, fact in self.manifest()["facts"].items() if name != "verifier"}
            info = RunInfo(run.path, config, progress.step + 1, facts)
            for callback in self.callbacks:
                callback.on_start(info)
            result: RunResult | None = None
            try:
                if progress.step == 0:
                    trainer.first_evaluation()
                first = progress.step + 1 + len(recorded)
                inline = InlineSource(
                    self.engine, order, self.params, self.verify, config, first_step=first, on_phase=self._phase
                )
                if not _stopped_early(trainer):
                    trainer.loop(_Resumed(run, order, recorded, inline))
                result = self._finish(run, trainer)
            except TrainingStopped:
                trainer.save()
                raise
            except KeyboardInterrupt:  # the second one: nothing more is saved, and what is on disk can go on
                raise Interrupted(run.path, progress.step) from None
            finally:
                for callback in self.callbacks:
                    callback.on_end(result)
        return result

    def _evaluator(self) -> Callable[[int, Sequence[Group]], dict[str, Any] | None]:
        prompts = self.data.held_out[: self.config.eval.prompts or None]
        greedy = replace(self.params, n=1, temperature=0.0)
        reference = self._start_scorer if self.reference is None and self.config.eval.every else lambda: self.reference
        return evaluator(self.engine, prompts, greedy, self.verify, reference)

    def _finish(self, run: RunDir, trainer: Trainer) -> RunResult:
        from tinyllm.report import write_report

        self._phase("saving the model")
        models.save_model(self.policy.model, self.tokenizer, run.path / "model")
        run.checkpoints.wait()
        evals = run.metrics("eval")
        return RunResult(
            run_dir=run.path,
            before=evals[0] if evals else None,
            after=evals[-1] if evals else None,
            plot=write_report(run),
            model_dir=run.path / "model",
            best_step=trainer.progress.best_step,
        )


@dataclass
class _Resumed:
    """The recorded steps first, from the record; then whatever is sampled."""

    run: RunDir
    order: PromptOrder
    recorded: Sequence[int]
    inline: InlineSource
    logged: Logged = field(default_factory=Logged)

    @property
    def seconds(self) -> dict[str, float]:
        return self.inline.seconds

    def publish(self, revision: Revision) -> None:
        self.inline.publish(revision)

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        for step in self.recorded:
            files = self.run.read_recorded(step)
            groups = [group for file in files for group in file.groups]
            self.order.position += len(groups)
            self.logged = Logged(metrics=dict(files[-1].logged))
            yield step, groups
        for step, groups in self.inline:
            self.logged = self.inline.logged
            yield step, groups


def _stopped_early(trainer: Trainer) -> bool:
    patience = trainer.config.train.early_stop_evals
    return bool(patience) and trainer.progress.evals_without_best >= patience


def _data_seed(config: GRPOConfig) -> int:
    return config.seed if config.data.seed is None else config.data.seed


@contextmanager
def _stop_signals(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the loop to stop after its step; a second one stops at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        on_first()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(config: GRPOConfig) -> None:
    s = config.sampling
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(s, name) != off:
            raise ConfigError(
                f"sampling.{name} = {getattr(s, name)}: completions would be drawn from other probabilities than are "
                f"trained; leave it off ({off}) and use sampling.temperature"
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


def _checkpoint_layers(policy: Policy) -> None:
    """Gradient checkpointing in eval mode: only the layers' own training flag is set, so dropout stays off."""
    policy.causal.gradient_checkpointing_enable({"use_reentrant": False})
    for module in policy.causal.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
