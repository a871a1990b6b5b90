"""An engine of the pool: its own copy of the model, and the scheduler, in a process of its own.

The trainer passes weights as arrays in shared memory. The engine copies them and hashes what it then holds; a hash
other than that of the revision stops the run. Running samples go on with the new weights and keep their cached keys
and values; each completion says which weights drew which of its tokens.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyllm.config.sections import LoraConfig, ModelConfig
from tinyllm.engine.build import make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import sample_request
from tinyllm.errors import EngineError
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory
from tinyllm.pool.state import GroupRequest
from tinyllm.records import Completion, Revision


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from, in whatever process."""

    model: ModelConfig
    lora: LoraConfig
    seed: int
    threads: int
    max_batch: int


class EngineWorker:
    """See workers.py for `work`."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.threads)
        name = spec.model.name
        model: Any = models.load_model(name, spec.model.dtype, spec.model.device)
        if model.device.type == "cpu":
            keep_freed_memory()
        self.start_hash = models.content_hash(model)
        if spec.lora.rank:
            model = models.add_lora(model, spec.lora.rank, spec.lora.alpha, spec.lora.targets, seed=spec.seed)
        self.trained = dict(trained_parameters(model))
        self.policy = Policy(model)
        self.scheduler = make_scheduler(self.policy, models.load_tokenizer(name), max_batch=spec.max_batch)
        self.done: dict[int, dict[int, Completion]] = {}
        """Finished completions by sample, of each group in flight."""
        self.sizes: dict[int, int] = {}

    def publish(self, revision: Revision, arrays: Mapping[str, np.ndarray]) -> None:
        """Load these weights. Raises EngineError when their hash is not that of the revision."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(from_array(arrays[name], parameter.dtype))
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
            done: dict[int, Completion] = {}
            self.done[name], self.sizes[name] = done, request.params.n

            def finish(completion: Completion, done: dict[int, Completion] = done) -> None:
                done[completion.sample] = completion

            self.scheduler.submit(
                sample_request(str(name), request.prompt, request.params, range(request.params.n), finish)
            )
        while True:
            busy = self.scheduler.step()
            finished = [name for name, done in self.done.items() if len(done) == self.sizes[name]]
            if finished or not busy or time.monotonic() >= end:
                break
        return [(name, self._take(name)) for name in finished]

    def _take(self, name: int) -> list[Completion]:
        done = self.done.pop(name)
        return [done[sample] for sample in range(self.sizes.pop(name))]


def trained_parameters(model: Any) -> list[tuple[str, Tensor]]:
    """The parameters of a model that training changes, by name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def to_arrays(parameters: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors as arrays that Ray shares between processes; bf16, which numpy lacks, as its 16 bits."""
    return {name: _plain(p.detach().cpu().contiguous()).numpy() for name, p in parameters.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def from_array(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The tensor again, reading the array's memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is shared, so it cannot be written to, and is not
        tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor
