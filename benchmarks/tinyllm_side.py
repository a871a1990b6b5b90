"""One training step of tinyllm, as a run does it, that a benchmark can call again and again.

EmbeddedEngine, collect_groups, make_batch, Updater, Optimizer, hashes, record and metrics are the run's own, driven by
the run's own loop; only prompts, verifier and stop tokens are the benchmark's. A step is timed from sampling to the
last line written.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from common import PartTimer

import tinyllm.engine.exact_runner
import tinyllm.engine.head
import tinyllm.post.trainer
import tinyllm.post.update
from tinyllm.callbacks import Callback
from tinyllm.config.io import to_dict
from tinyllm.config.sections import GRPOConfig
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import Scheduler
from tinyllm.health.history import History
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.source import InlineSource, PromptOrder
from tinyllm.post.trainer import Trainer
from tinyllm.post.update import Updater, model_scorer
from tinyllm.record.manifest import build_manifest
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Judged, Prompt, Revision, SamplingParams, Step, Verdict

Place = tuple[Any, str, str, tuple[str, ...]]
"""What PartTimer.wrapping takes."""
FOREVER = 10**9
"""Steps of a run that the benchmark ends."""
RECORDING: tuple[Place, ...] = (
    (tinyllm.post.update, "hash_tensors", "hash", ()),
    (tinyllm.post.update, "hash_tensor", "hash", ()),
    (tinyllm.post.trainer, "hash_verdicts", "hash", ()),
    (RunDir, "record", "record", ()),
    (RunDir, "log", "record", ()),
    (RunDir, "log_timing", "record", ()),
)
"""Where a step hashes and records, besides the hash of the weights."""


class Side(Callback):
    """A run in `folder` whose steps are taken one at a time. Close it, or use it in a with statement."""

    def __init__(
        self,
        config: GRPOConfig,
        prompts: Sequence[Prompt],
        verify: Callable[..., list[Verdict]],
        stop_token_ids: tuple[int, ...],
        folder: Path,
        model: Any = None,
        tokenizer: Any = None,
    ) -> None:
        keep_freed_memory()
        self.config, self.prompts = config, prompts
        if model is None:
            model = models.load_model(config.model.name, config.model.dtype, "cpu")
        tokenizer = tokenizer or models.load_tokenizer(config.model.name)
        self.policy = Policy(model)
        self.policy.check()
        s, train = config.sampling, config.train
        self.engine = EmbeddedEngine(self.policy, tokenizer, max_batch=s.max_batch)
        params = SamplingParams(
            max_new_tokens=s.max_new_tokens,
            n=s.group_size,
            temperature=s.temperature,
            stop_token_ids=stop_token_ids,
            seed=config.seed,
        )
        reference = None
        if config.objective.axes.beta:
            frozen = Policy(copy.deepcopy(model).requires_grad_(False))
            reference = model_scorer(frozen, s.temperature, train.tokens_per_microbatch)
        self.optimizer = Optimizer(model.named_parameters(), config.optimizer)
        self.updater = Updater(self.policy, self.optimizer, config, reference)
        self.run = RunDir.create(folder, build_manifest(to_dict(config), hashes={}, probe={}))
        start = Revision(0, models.content_hash(model))
        self.trainer = Trainer(
            run=self.run,
            config=config,
            optimizer=self.optimizer,
            updater=self.updater,
            weights_hash=lambda: models.content_hash(self.policy.model),
            reference_hash="",
            revision=start,
            history=History.of(self.run),
            evaluate=lambda step, groups: None,
            keep_best=lambda step: None,
            callbacks=(self,),
        )
        self.engine.publish(start)
        order = PromptOrder(prompts, config.seed)
        self._source = _OneStep(InlineSource(self.engine, order, params, verify, config))
        self.metrics: Mapping[str, Any] = {}
        self.groups: Sequence[Group] = ()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.run.close()

    @property
    def dtype(self) -> torch.dtype:
        return self.policy.head_weight.dtype

    def step(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self.trainer.loop(self._source)
        return time.perf_counter() - begin

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.metrics, self.groups = metrics, groups

    def timed(self, timer: PartTimer) -> AbstractContextManager[None]:
        """While it is entered, `timer` collects seconds by part of PARTS."""
        places: list[Place] = [
            (Scheduler, "_admit", "prefill", ()),
            (Scheduler, "_decode", "decode", ()),
            (Policy, "logits", "head, sampling", ("prefill", "decode")),
            (tinyllm.engine.exact_runner, "draw", "draw", ("prefill", "decode")),
            (Updater, "_backward", "objective", ()),
            (self.updater, "forward", "forward", ("objective",)),
            (torch.Tensor, "backward", "backward", ("objective",)),
            (tinyllm.engine.head._Head, "forward", "head, training", ("forward",)),
            (tinyllm.engine.head._Head, "backward", "head, training", ("backward",)),
            (Optimizer, "gradient_norm", "optimizer", ()),
            (Optimizer, "step", "optimizer", ()),
            (self.trainer, "weights_hash", "hash", ()),
            *RECORDING,
        ]
        if self.updater.reference is not None:
            places.append((self.updater, "reference", "reference", ()))
        return timer.wrapping(*places)


PARTS = (
    "decode",
    "head, sampling",
    "draw",
    "prefill",
    "forward",
    "backward",
    "head, training",
    "reference",
    "objective",
    "optimizer",
    "hash",
    "record",
    "rest",
)
"""decode and prefill without head and draw; forward and backward without head; rest: all that is not named."""


class _OneStep:
    """One step of a source at a time."""

    def __init__(self, inner: InlineSource) -> None:
        self.inner, self._steps = inner, iter(inner)

    def publish(self, revision: Revision) -> None:
        self.inner.publish(revision)

    def __iter__(self) -> Iterator[Step]:
        yield next(self._steps)


def random_verdicts(prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> Judged:
    """A different value for every completion, so that every group has signal."""
    return Judged(tuple(Verdict((c.seed_key % 10_007) / 10_007) for c in completions))


def parameter_counts(policy: Policy) -> tuple[int, int]:
    """(weights of the trunk that multiply every token, weights of the head)."""
    embeddings = policy.causal.get_input_embeddings().weight
    matrices = {
        id(p): p.numel() for p in policy.trunk.parameters() if p is not embeddings and p is not policy.head_weight
    }
    return sum(matrices.values()), policy.head_weight.numel()


def floor_flops(policy: Policy, groups: Sequence[Group], prompt_tokens: int, reference: bool) -> dict[str, float]:
    """The least FLOPs of a step, by part.

    2 per weight and token when sampling, 6 in training (2 forward, 4 backward); the head only where a token is drawn
    or scored; attention and recomputation count nothing. prompt_tokens: of all prompts, each once per group. A
    reference policy adds one forward.
    """
    trunk, head = parameter_counts(policy)
    sampled = sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)
    flops = {
        "decode": 2.0 * trunk * sampled,
        "head, sampling": 2.0 * head * sampled,
        "prefill": 2.0 * trunk * prompt_tokens,
        "forward": 2.0 * trunk * (prompt_tokens + sampled),
        "backward": 4.0 * trunk * (prompt_tokens + sampled),
        "head, training": 6.0 * head * sampled,
    }
    if reference:
        flops["reference"] = 2.0 * trunk * (prompt_tokens + sampled) + 2.0 * head * sampled
    return flops
