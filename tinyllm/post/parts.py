"""What a run is made of: model, optimizer, updater, manifest; and the run itself, from start to saved model.

The kinds of run (GRPO in run.py, SFT and DPO in examples.py) add where groups come from and how held-out rows are
judged.
"""

from __future__ import annotations

import copy
import logging
import shutil
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tinyllm.callbacks import Callback, Interrupted, RunInfo, RunResult
from tinyllm.config.io import to_dict
from tinyllm.distributed.fsdp import Sharded, shard
from tinyllm.distributed.ranks import Ranks, current_ranks
from tinyllm.engine.head import score
from tinyllm.engine.policy import Policy
from tinyllm.engine.probe import probe
from tinyllm.errors import ConfigError, MissingExtra, RunError, TinyLLMError, TrainingStopped
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory, memory_estimate, require_memory
from tinyllm.post.objectives import objective_of
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.source import PromptOrder, Source
from tinyllm.post.trainer import Evaluate, Progress, Trainer
from tinyllm.post.update import Scorer, Updater, adapter_off_scorer, model_scorer
from tinyllm.record.hashing import hash_bytes
from tinyllm.record.manifest import build_manifest
from tinyllm.record.rundir import RunDir
from tinyllm.records import Revision

log = logging.getLogger("tinyllm")


class Parts(ABC):
    """Everything a run is made of, built in the order in which mistakes are cheapest to find.

    A kind of run defines the methods that come first.
    """

    data: Any
    """The rows of the run: train and held_out (prompts), hash, skipped."""
    verify: Any = None
    """Judges completions; None where rewards are given."""

    def __init__(self, config: Any, callbacks: Sequence[Callback]) -> None:
        self.ranks = current_ranks()
        self.config, self.callbacks = config, callbacks if self.ranks.is_main else ()
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        self.phase("reading the data")
        self.tokenizer = models.load_tokenizer(config.model.name)
        self.read_data()
        try:
            self._load_model()
        except BaseException:
            self.close()
            raise

    # -- what a kind of run defines -------------------------------------------------------------------------------

    @abstractmethod
    def read_data(self) -> None:
        """Set `data`, and refuse what cannot be trained on."""

    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest sequence: prompt and completion."""

    @abstractmethod
    def source(self, run: RunDir, order: PromptOrder, recorded: Sequence[int], after: int) -> Source:
        """Groups from step `after` + 1 on; those of the steps in `recorded` are on disk already."""

    @abstractmethod
    def evaluator(self) -> Evaluate:
        """Judges the held-out rows."""

    @abstractmethod
    def use_model(self) -> None:
        """Build what works on the policy, once that is loaded."""

    @abstractmethod
    def publish(self, revision: Revision) -> None:
        """Tell whatever samples that the weights are of this revision."""

    def own_hashes(self) -> dict[str, Any]:
        """Content hashes for the manifest, besides those of every run."""
        return {}

    def own_facts(self) -> dict[str, Any]:
        """Facts for the manifest, besides those of every run."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of processes."""

    # -- model and optimizer --------------------------------------------------------------------------------------

    def phase(self, phase: str) -> None:
        for callback in self.callbacks:
            callback.on_phase(phase)

    def _load_model(self) -> None:
        config = self.config
        self.phase("loading the model")
        name, device = config.model.name, models.pick_device(config.model.device)
        weights = models.pick_dtype(config.model.dtype, device)
        count = self.ranks.count
        need = memory_estimate(models.load_config(name), weights, config, self.longest(), ranks=count)
        require_memory(name, need, device)
        model: Any = models.load_model(name, config.model.dtype, device, config=config, ranks=count)
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
        self.use_model()
        self.reference = self._reference()
        self.sharded: Sharded | None = None if count == 1 else shard(self.policy, score, self.ranks)
        trained = model if self.sharded is None else self.sharded.model
        self.optimizer = Optimizer(trained.named_parameters(), config.optimizer, self.ranks)
        self.updater = Updater(self.policy, self.optimizer, config, self.reference, self.sharded, self.ranks)

    def _reference(self) -> Scorer | None:
        """Scores under the policy of the KL term (the start policy, or another model); None where it is not held."""
        config = self.config
        self.reference_hash = self.start_hash
        objective, budget = objective_of(config), config.train.tokens_per_microbatch
        temperature = objective.temperature
        if config.model.reference:
            other: Any = models.load_model(config.model.reference, config.model.dtype, config.model.device)
            if other.config.get_text_config().vocab_size != self.policy.config.vocab_size:
                raise ConfigError(
                    f"model.reference = {config.model.reference!r} has another vocabulary than {config.model.name!r}; "
                    "choose a model of the same family"
                )
            self.reference_hash = models.content_hash(other)
            return model_scorer(Policy(other.requires_grad_(False)), temperature, budget)
        if config.lora.rank:
            return adapter_off_scorer(self.policy, temperature, budget)
        if not objective.needs_reference:
            return None
        return model_scorer(Policy(copy.deepcopy(self.policy.model).requires_grad_(False)), temperature, budget)

    def start_scorer(self) -> Scorer | None:
        """Scores under the start policy; read again each time, since between evaluations nothing needs its memory."""
        model_config = self.config.model
        start: Any = models.load_model(model_config.name, model_config.dtype, model_config.device)
        if models.content_hash(start) != self.start_hash:
            log.warning("%s is not what the run started from any more; its KL is not measured", model_config.name)
            return None
        policy = Policy(start.requires_grad_(False))
        return model_scorer(policy, objective_of(self.config).temperature, self.config.train.tokens_per_microbatch)

    # -- the run --------------------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        template = self.tokenizer.chat_template
        return build_manifest(
            to_dict(self.config),
            kind=self.config.kind,
            hashes={
                "weights": self.start_hash,
                "reference": self.reference_hash,
                "tokenizer": models.tokenizer_hash(self.tokenizer),
                "chat_template": hash_bytes(template.encode()) if isinstance(template, str) else None,
                "data": self.data.hash,
                **self.own_hashes(),
            },
            probe={name: {"holds": holds, "tried": detail} for name, (holds, detail, _) in self.probe.items()},
            facts={
                "train_prompts": len(self.data.train),
                "held_out_prompts": len(self.data.held_out),
                "skipped_rows": len(self.data.skipped),
                "parameters": sum(p.numel() for p in self.optimizer.parameters.values()),
                "dtype": str(self.policy.head_weight.dtype).removeprefix("torch."),
                "device": self.policy.device.type,
                **({"ranks": self.ranks.count} if self.sharded is not None else {}),
                **self.own_facts(),
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
        """Of the weights as they are now; those that are trained in shards are made whole first, on every rank."""
        if self.sharded is not None:
            self.sharded.copy_to(self.policy.model)
        own = models.weights_hash(self.policy.model, self.start_hash)
        if len(set(self.ranks.gather(own))) > 1:
            raise TinyLLMError(
                "the ranks have different weights, so they did not train the same batches; give all of them the same "
                "model, data and packages, and resume from the last checkpoint"
            )
        return own

    def train(self, run: RunDir, progress: Progress, recorded: Sequence[int]) -> RunResult:
        config = self.config
        revision = Revision(progress.step, self.weights_hash())
        self.publish(revision)
        seed = config.seed if config.data.seed is None else config.data.seed
        order = PromptOrder(self.data.train, seed, progress.position)
        with _stop_signals(lambda: self.phase("stopping after this step")) as stop_requested:
            trainer = Trainer(
                run=run,
                config=config,
                optimizer=self.optimizer,
                updater=self.updater,
                weights_hash=self.weights_hash,
                reference_hash=self.reference_hash,
                revision=revision,
                evaluate=_agreed(self.ranks, self.evaluator()),
                keep_best=lambda step: self._save_model(run, "best"),
                callbacks=self.callbacks,
                progress=progress,
                recorded=frozenset(recorded),
                position=lambda: order.trained,
                stop_requested=lambda: any(self.ranks.gather(stop_requested())),
                ranks=self.ranks,
            )
            facts = {name: fact for name, fact in self.manifest()["facts"].items() if name != "verifier"}
            info = RunInfo(run.path, config, progress.step + 1, facts)
            for callback in self.callbacks:
                callback.on_start(info)
            result: RunResult | None = None
            try:
                if progress.step == 0:
                    trainer.first_evaluation()
                if not _stopped_early(trainer):
                    trainer.loop(self.source(run, order, recorded, progress.step))
                result = self._finish(run, trainer)
            except TrainingStopped:
                trainer.save()
                raise
            except KeyboardInterrupt:  # the second one: nothing more is saved, and what is on disk can go on
                raise Interrupted(run.path, progress.step, config.kind) from None
            finally:
                for callback in self.callbacks:
                    callback.on_end(result)
        return result

    def _finish(self, run: RunDir, trainer: Trainer) -> RunResult:
        self.phase("saving the model")
        self._save_model(run, "model")
        if trainer.progress.best_step == trainer.progress.step:  # then model/ is the best, and best/ an older one
            shutil.rmtree(run.path / "best", ignore_errors=True)
        self.ranks.on_main(run.checkpoints.wait)
        evals = run.metrics("eval")
        return RunResult(
            run_dir=run.path,
            before=evals[0] if evals else None,
            after=evals[-1] if evals else None,
            plot=self.ranks.on_main(lambda: _picture(run)),
            model_dir=run.path / "model",
            best_step=trainer.progress.best_step,
        )

    def _save_model(self, run: RunDir, name: str) -> None:
        self.ranks.on_main(lambda: models.save_model(self.policy.model, self.tokenizer, run.path / name))


def _picture(run: RunDir) -> Path | None:
    """report.png, where what draws it is installed: a run does not fail at its end for want of a picture."""
    from tinyllm.view.plot import write_report

    try:
        return write_report(run)
    except MissingExtra as error:
        log.warning("%s", error)
        return None


def _agreed(ranks: Ranks, evaluate: Evaluate) -> Evaluate:
    """The evaluation of all ranks; what rank 0 makes of it counts, since what to do next depends on it."""
    return lambda step, groups: ranks.gather(evaluate(step, groups))[0]


def _stopped_early(trainer: Trainer) -> bool:
    patience = trainer.config.stop.evals_without_best
    return bool(patience) and trainer.progress.evals_without_best >= patience


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


def _checkpoint_layers(policy: Policy) -> None:
    """Gradient checkpointing in eval mode: only the layers' own training flag is set, so dropout stays off."""
    policy.causal.gradient_checkpointing_enable({"use_reentrant": False})
    for module in policy.causal.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
