"""The trained policy: model, optimizer, updater, and the reference policy of a KL term."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm.config.sections import Config
from tinyllm.distributed.fsdp import Sharded, shard
from tinyllm.distributed.ranks import Ranks
from tinyllm.engine.head import score
from tinyllm.engine.policy import Policy
from tinyllm.engine.probe import probe
from tinyllm.errors import ConfigError, TinyLLMError
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory, memory_estimate, require_memory
from tinyllm.post.objectives import objective_of
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Scorer, Updater, adapter_off_scorer, model_scorer

log = logging.getLogger("tinyllm")


@dataclass(frozen=True)
class Learner:
    """The parts that turn batches into new weights."""

    config: Config
    ranks: Ranks
    policy: Policy
    optimizer: Optimizer
    updater: Updater
    reference: Scorer | None
    """Scores sequences under the reference policy; None where the run has none."""
    start_hash: str
    """Hash of the weights that training starts from."""
    reference_hash: str
    """Hash of the weights of the reference policy, or start_hash where the run has none."""
    probe: Mapping[str, tuple[bool, Any, Any]]
    """Which numerical properties hold on this machine; see engine/probe.py."""
    sharded: Sharded | None
    """The sharded model, where several ranks train; else None."""

    def weights_hash(self) -> str:
        """Hash of the weights as they are now; sharded weights are first gathered whole on every rank.

        Raises TinyLLMError where the ranks have different weights.
        """
        if self.sharded is not None:
            self.sharded.copy_to(self.policy.model)
        own = models.weights_hash(self.policy.model, self.start_hash)
        if len(set(self.ranks.gather(own))) > 1:
            raise TinyLLMError(
                "the ranks have different weights, so they did not train the same batches; give all of them the same "
                "model, data and packages, and resume from the last checkpoint"
            )
        return own

    def start_scorer(self) -> Scorer | None:
        """A scorer of the start policy, loaded anew on every call to use no memory between evaluations.

        None, with a warning, where the model's files have changed since the run started.
        """
        model_config = self.config.model
        start: Any = models.load_model(model_config.name, model_config.dtype, model_config.device)
        if models.content_hash(start) != self.start_hash:
            log.warning("%s is not what the run started from any more; its KL is not measured", model_config.name)
            return None
        policy = Policy(start.requires_grad_(False))
        return model_scorer(policy, objective_of(self.config).temperature, self.config.train.tokens_per_microbatch)


def load_learner(config: Config, longest: int, ranks: Ranks) -> Learner:
    """Load the model of a configuration; longest: tokens of the longest sequence, prompt plus completion.

    Raises ModelError and ConfigError for what cannot be trained or does not fit into memory.
    """
    name, device = config.model.name, models.pick_device(config.model.device)
    weights = models.pick_dtype(config.model.dtype, device)
    need = memory_estimate(models.load_config(name), weights, config, longest, ranks=ranks.count)
    require_memory(name, need, device)
    model: Any = models.load_model(name, config.model.dtype, device)
    if device == "cpu":
        keep_freed_memory()
    start_hash = models.content_hash(model)
    if config.lora.rank:
        model = models.add_lora(model, config.lora.rank, config.lora.alpha, config.lora.targets, seed=config.seed)
    policy = Policy(model)
    policy.check()
    if config.model.gradient_checkpointing:
        checkpoint_layers(policy)
    found = probe(policy.head_weight.dtype, policy.device.type)
    reference, reference_hash = _reference(config, policy, start_hash)
    sharded = None if ranks.count == 1 else shard(policy, score, ranks)
    trained = model if sharded is None else sharded.model
    optimizer = Optimizer(trained.named_parameters(), config.optimizer, ranks)
    updater = Updater(policy, optimizer, config, reference, sharded, ranks)
    return Learner(
        config, ranks, policy, optimizer, updater, reference, start_hash, reference_hash, found, sharded
    )  # fmt: skip


def _reference(config: Config, policy: Policy, start_hash: str) -> tuple[Scorer | None, str]:
    """(scorer of the reference policy or None, hash of its weights): the start policy, or model.reference."""
    objective, budget = objective_of(config), config.train.tokens_per_microbatch
    temperature = objective.temperature
    if config.model.reference:
        other: Any = models.load_model(config.model.reference, config.model.dtype, config.model.device)
        if other.config.get_text_config().vocab_size != policy.config.vocab_size:
            raise ConfigError(
                f"model.reference = {config.model.reference!r} has another vocabulary than {config.model.name!r}; "
                "choose a model of the same family"
            )
        scorer = model_scorer(Policy(other.requires_grad_(False)), temperature, budget)
        return scorer, models.content_hash(other)
    if config.lora.rank:
        return adapter_off_scorer(policy, temperature, budget), start_hash
    if not objective.needs_reference:
        return None, start_hash
    start = Policy(copy.deepcopy(policy.model).requires_grad_(False))
    return model_scorer(start, temperature, budget), start_hash


def checkpoint_layers(policy: Policy) -> None:
    """Turn on gradient checkpointing in eval mode: only the layers' own training flag is set, so dropout stays off."""
    policy.causal.gradient_checkpointing_enable({"use_reentrant": False})
    for module in policy.causal.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
