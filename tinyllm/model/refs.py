"""Names of what can be sampled from: a model, a run's final or best weights, a checkpoint, a model on a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinyllm.config.sections import GRPOConfig
from tinyllm.engine.policy import Policy
from tinyllm.errors import RunError
from tinyllm.model import models
from tinyllm.model.memory import MemoryEstimate, keep_freed_memory, memory_estimate, model_shape, require_memory
from tinyllm.record.metrics import held_out_score, score_kind
from tinyllm.record.rundir import MANIFEST, RunDir
from tinyllm.records import Revision


@dataclass(frozen=True)
class ModelRef:
    """A model argument, found but not loaded."""

    name: str
    """As the user wrote it."""
    source: str
    """The model (bundled, folder, hub id) whose tokenizer is used; its weights too, except for a checkpoint."""
    run: RunDir | None = None
    step: int | None = None
    """Of a checkpoint."""

    @property
    def is_server(self) -> bool:
        return self.source.startswith(("http://", "https://"))


def find_subject(word: str) -> ModelRef:
    """Finds MODEL, RUN, RUN@best, RUN@20 or http://host:port/v1#model. Raises ModelError, RunError."""
    if word.startswith(("http://", "https://")):
        return ModelRef(word, word)
    folder, at, part = word.rpartition("@")
    if at and (Path(folder) / MANIFEST).exists():
        return _part_of_run(word, RunDir.read(folder), part)
    if (Path(word) / MANIFEST).exists():
        return _part_of_run(word, RunDir.read(word), "model")
    if at and (part.isdecimal() or part == "best"):
        raise RunError(f"{folder}: no run here ({MANIFEST} is missing); see: tinyllm runs")
    models.resolve(word)
    return ModelRef(word, word)


def _part_of_run(word: str, run: RunDir, part: str) -> ModelRef:
    if part.isdecimal():
        step = int(part)
        if step not in run.checkpoints.steps():
            raise RunError(f"{run.path} has no checkpoint of step {step}; {_offer(run)}")
        return ModelRef(word, run.config.model.name, run, step)
    if part not in ("model", "best"):
        raise RunError(f"{word}: write RUN, RUN@best, or RUN@STEP; {_offer(run)}")
    if part == "best" and not (run.path / part).is_dir() and _ended_best(run):
        part = "model"
    if not (run.path / part).is_dir():
        what = (
            "no final model (it did not end)" if part == "model" else "no best weights (no evaluation beat the first)"
        )
        raise RunError(f"{run.path} has {what}; {_offer(run)}")
    return ModelRef(word, str(run.path / part), run)


def _ended_best(run: RunDir) -> bool:
    """Whether the last evaluation is the best: the final model then has the best weights, and there is no best/."""
    scores = [(row, score[0]) for row in run.metrics("eval") if row["step"] and (score := held_out_score(row))]
    signs = [-value if score_kind(row) == "loss" else value for row, value in scores]
    return bool(signs) and all(value < signs[-1] for value in signs[:-1])


def _offer(run: RunDir) -> str:
    steps = ", ".join(f"{run.path}@{step}" for step in run.checkpoints.steps())
    return f"checkpoints: {steps}" if steps else "it has no checkpoints"


def load_policy(subject: ModelRef, dtype: str, device: str, *, samples: int, cached: int) -> tuple[Policy, Revision]:
    """The model ready to sample and its revision, checked against memory first. Raises ModelError, RunError.

    samples: completions that run together; cached: tokens of the key-value cache.
    """
    if subject.run is not None and dtype == "auto":
        dtype = subject.run.config.model.dtype
    device = models.pick_device(device)
    _require_room(subject, models.pick_dtype(dtype, device), device, samples, cached)
    model: Any = models.load_model(subject.source, dtype, device)
    if device == "cpu":
        keep_freed_memory()
    if subject.step is not None:
        model = _with_checkpoint(subject, model)
    policy = Policy(model.requires_grad_(False))
    policy.check()
    return policy, Revision(subject.step or 0, models.content_hash(model))


def _require_room(subject: ModelRef, dtype: torch.dtype, device: str, samples: int, cached: int) -> None:
    """Raises ModelError where weights, cache and logits exceed the free memory."""
    arch = models.load_config(subject.source)
    shape = model_shape(arch)
    cache = cached * shape.cache_bytes(dtype.itemsize)
    logits = 3 * 4 * samples * shape.vocabulary
    needed = MemoryEstimate((*memory_estimate(shape, dtype).parts, ("key-value cache", cache), ("logits", logits)))
    require_memory(subject.name, needed, device)


@torch.no_grad()
def _with_checkpoint(subject: ModelRef, model: Any) -> Any:
    """The start model with the trained weights of a checkpoint in place. Raises RunError."""
    run, step = subject.run, subject.step
    assert run is not None
    config: GRPOConfig = run.config
    was, now = run.manifest["hashes"].get("weights"), models.content_hash(model)
    if config.lora.rank:
        if str(next(model.parameters()).dtype) == f"torch.{run.manifest['facts'].get('dtype')}" and was != now:
            raise RunError(f"{subject.source} has changed since {run.path} started from it; restore it")
        model = models.add_lora(model, config.lora.rank, config.lora.alpha, config.lora.targets, seed=config.seed)
    _, tensors, _ = run.load_checkpoint(step)
    parameters = dict(model.named_parameters())
    for name, weight in tensors["weights"].items():
        if name not in parameters or parameters[name].shape != weight.shape:
            raise RunError(
                f"{subject.name}: its {name} does not fit the model {subject.source}; is that another model?"
            )
        parameters[name].copy_(weight)
    return model
