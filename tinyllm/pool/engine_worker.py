"""An engine of the pool: its own copy of the model, and the scheduler, in a process of its own.

The trainer passes weights as arrays in shared memory. The engine copies them and hashes what it then holds; a hash
other than that of the revision stops the run. Running samples go on with the new weights and keep their cached keys
and values; each completion says which weights drew which of its tokens.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tinyllm.config.sections import LoraConfig, ModelConfig
from tinyllm.engine.build import make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import sample_request
from tinyllm.errors import EngineError
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory
from tinyllm.pool.state import GroupRequest
from tinyllm.records import Completion, Revision

THREADS = 1
"""CPU threads of an engine: several samplers of one thread are faster than one sampler of several threads."""


class EngineWorker:
    """Samples on the CPU, from a copy of the model in its own process; see workers.py for `work`.

    seed: of the run, by which the adapters begin; slots: samples that run together.
    """

    def __init__(self, config: ModelConfig, lora: LoraConfig, seed: int, slots: int) -> None:
        torch.set_num_threads(THREADS)
        keep_freed_memory()
        model: Any = models.load_model(config.name, config.dtype, "cpu")
        self.start_hash = models.content_hash(model)
        if lora.rank:
            model = models.add_lora(model, lora.rank, lora.alpha, lora.targets, seed=seed)
        self.trained = trained_parameters(model)
        self.policy = Policy(model)
        self.scheduler = make_scheduler(self.policy, models.load_tokenizer(config.name), max_batch=slots)
        self.groups: dict[int, tuple[int, list[Completion]]] = {}
        """How many completions each group in flight is to have, and those that are finished."""

    def publish(self, revision: Revision, arrays: Mapping[str, np.ndarray]) -> None:
        """Load these weights. Raises EngineError when their hash is not that of the revision."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays in shared memory cannot be written to, and are only read here
            for name, parameter in self.trained.items():
                parameter.copy_(torch.from_numpy(arrays[name]).view(parameter.dtype).view_as(parameter))
        held = models.weights_hash(self.policy.model, self.start_hash)
        if held != revision.hash:
            raise EngineError(
                f"an engine holds weights of hash {held} after an update to revision {revision}, whose hash is "
                f"{revision.hash}; is {self.policy.causal.config.name_or_path!r} another model there than here?"
            )
        self.scheduler.publish(revision)

    def work(self, new: Sequence[tuple[int, GroupRequest]], budget_s: float) -> list[tuple[int, list[Completion]]]:
        """Accept groups, and sample until one is finished or the time is over."""
        end = time.monotonic() + budget_s
        for name, request in new:
            done: list[Completion] = []
            self.groups[name] = (request.params.n, done)
            self.scheduler.submit(
                sample_request(str(name), request.prompt, request.params, range(request.params.n), done.append)
            )
        while True:
            busy = self.scheduler.step()
            finished = [name for name, (count, done) in self.groups.items() if len(done) == count]
            if finished or not busy or time.monotonic() >= end:
                break
        return [(name, sorted(self.groups.pop(name)[1], key=lambda c: c.sample)) for name in finished]


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of a model that training changes, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def to_arrays(parameters: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The bytes of tensors as arrays, which Ray shares between processes; numpy has no bf16."""
    return {name: p.detach().cpu().reshape(-1).view(torch.uint8).numpy() for name, p in parameters.items()}
