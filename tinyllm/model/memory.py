"""What a machine offers and what a run needs: native bf16, free memory, the memory that a run takes.

Sizes in bytes. The estimate is arithmetic on the model's configuration (no weight is read), so a run that cannot fit
is refused before a download or any other work.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tinyllm.config.sections import Config, DPOConfig, GRPOConfig
from tinyllm.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")


@functools.cache
def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware: x86 with AVX512-BF16 or AMX-BF16, Arm with FEAT_BF16.

    Read from the CPU's feature flags as torch reports them. Without such a unit torch computes bf16 by widening to
    fp32, slower than fp32 itself. Also False where torch was built without oneDNN, whose kernels use the unit.
    """
    import torch

    flags = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(flags.get(f) for f in ("avx512_bf16", "amx_bf16", "bf16"))


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step instead of returning it to the system.

    Otherwise blocks over 32 MiB are mapped and cleared anew for every use, which takes about 8% of a step of the
    bundled model on a CPU (benchmarks/allocator.py). Does nothing where the C library is another one.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def in_brief_thread(function: Callable[[], T]) -> T:
    """Runs a function in a thread that ends with the call; returns or raises what the function does.

    A thread that has computed in parallel keeps its OpenMP workers as long as it lives. Where two threads have workers,
    GNU's OpenMP counts more workers than cores and lets them sleep at every parallel region: an engine in a thread
    beside a main thread that loaded the model decodes at two thirds of its speed.
    """
    with ThreadPoolExecutor(1, "brief") as threads:
        return threads.submit(function).result()


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part, in the order in which they are needed."""

    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        return f"{gib(self.total)} ({', '.join(f'{name} {gib(size)}' for name, size in self.parts if size)})"


def gib(size: float) -> str:
    """A number of bytes as text, such as 1.5 GiB."""
    return f"{size / 2**30:.1f} GiB"


def available_memory(device: str) -> tuple[int, int]:
    """(free, total) bytes of a device's memory; for the CPU within the limit of the container, if there is one."""
    import psutil
    import torch

    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)
    if device.startswith("mps"):
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return free, total
    return min(free, limit - used), min(total, limit)


def skeleton(arch: PretrainedConfig) -> PreTrainedModel:
    """The model without weights (on the meta device): every shape, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(arch)


def decoder_layers(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The `count` decoder layers of a model; none where they do not lie in one list."""
    import torch

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, on which its memory and time depend: numbers of weights, and widths in elements."""

    parameters: int
    """Every weight once (a tied head is its embedding)."""
    trunk: int
    """Weights that multiply each token: all but embeddings and head."""
    head: int
    """Weights of the head: vocabulary x hidden."""
    block: int
    """Weights of the largest layer."""
    root: int
    """Weights outside the layers: embeddings, last norm, head."""
    linear_sides: int
    """Inputs plus outputs of all linear layers but the head: what adapters of rank 1 have."""
    hidden: int
    layers: int
    query: int
    """Query heads x their size."""
    key_value: int
    """Key-value heads x their size."""
    feed_forward: int
    vocabulary: int
    positions: int | None
    """Longest sequence."""

    def trained(self, lora_rank: int) -> int:
        """Weights that are trained: all, or those of the adapters."""
        return lora_rank * self.linear_sides if lora_rank else self.parameters

    def cache_bytes(self, element_bytes: int) -> int:
        """Key-value cache of one token: layers x (key and value) x their heads' width."""
        return self.layers * 2 * self.key_value * element_bytes


def model_shape(arch: PretrainedConfig) -> ModelShape:
    """The shape of a model from its configuration; no weight is read."""
    import torch

    model = skeleton(arch)
    text = arch.get_text_config()
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    idle = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} | {id(head.weight)}
    layers = text.num_hidden_layers
    blocks = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model, layers)]
    parameters = model.num_parameters()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=parameters,
        trunk=sum(p.numel() for p in model.parameters() if id(p) not in idle),
        head=head.weight.numel(),
        block=max(blocks, default=parameters),
        root=parameters - sum(blocks),
        linear_sides=sum(m.in_features + m.out_features for m in linears),
        hidden=text.hidden_size,
        layers=layers,
        query=heads * head_size,
        key_value=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        feed_forward=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", None),
    )


def memory_estimate(
    arch: PretrainedConfig | ModelShape,
    dtype: torch.dtype,
    config: Config | None = None,
    longest: int | None = None,
    *,
    ranks: int = 1,
) -> MemoryEstimate:
    """Memory of a model's weights; with a run's config of gradients and optimizer too; with `longest` of all parts.

    P parameters in `dtype`, P_t of them trained. Gradients and AdamW's two moments are fp32, 12 bytes per P_t, and
    bf16 weights have fp32 masters, 4 more; a separate reference model is another P. On N ranks each has its own weights
    and reference, and 1/N of gradients, moments and fp32 masters (which all weights have then). The key-value cache
    holds max_batch x longest tokens (`longest`: most tokens of a prompt with its completion). Activations per token and
    layer are about 8 H + 5 H_q + 4 I elements (H hidden size, H_q query heads x their size, I feed-forward size), or H
    with gradient checkpointing and one layer in full: 20% around what was measured for Llama, Qwen 3 and GPT-2 layers.
    """
    import torch

    size = dtype.itemsize
    if config is None and not isinstance(arch, ModelShape):
        return MemoryEstimate((("weights", skeleton(arch).num_parameters() * size),))
    shape = arch if isinstance(arch, ModelShape) else model_shape(arch)
    parts = [("weights", shape.parameters * size)]
    if config is None:
        return MemoryEstimate(tuple(parts))
    trained = shape.trained(config.lora.rank)
    moments = 2 if config.optimizer.name == "adamw" else 0
    masters = trained if dtype == torch.bfloat16 else 0
    if ranks > 1:
        masters = shape.parameters + (trained if config.lora.rank else 0)
    optimizer = 4 * (moments * trained + masters)
    parts += [("gradients", 4 * trained // ranks), ("optimizer", optimizer // ranks)]
    if needs_reference_model(config):
        parts.append(("reference model", shape.parameters * size))
    if longest is None:
        return MemoryEstimate(tuple(parts))

    if isinstance(config, GRPOConfig):
        sampling = config.sampling
        cached = sampling.max_batch * longest
        cache = cached * shape.cache_bytes(size)
        parts.append(("key-value cache", cache))
        if config.pool.engines and config.pool.ray_address is None:  # processes of this machine
            parts.append(("engines of the pool", config.pool.engines * (shape.parameters * size + cache)))
        in_step = config.train.prompts_per_step * (longest + (sampling.group_size - 1) * sampling.max_new_tokens)
    else:
        in_step = config.train.batch_size * longest * (2 if isinstance(config, DPOConfig) else 1)
    tokens = min(config.train.tokens_per_microbatch, in_step)
    in_layer = 8 * shape.hidden + 5 * shape.query + 4 * shape.feed_forward
    kept = shape.layers * shape.hidden + in_layer if config.model.gradient_checkpointing else shape.layers * in_layer
    parts.append(("activations", tokens * kept * size))
    return MemoryEstimate(tuple(parts))


def needs_reference_model(config: Config) -> bool:
    """Whether a run holds a second whole model: a named reference, or the start policy for a loss that measures KL.

    With adapters the start policy is the model without them.
    """
    measured = isinstance(config, DPOConfig) or (isinstance(config, GRPOConfig) and config.objective.axes.beta > 0)
    return bool(config.model.reference) or (measured and not config.lora.rank)


def require_memory(name: str, estimate: MemoryEstimate, device: str) -> None:
    """Raises ModelError, with the estimate and the remedies, when it exceeds the device's free memory."""
    free, total = available_memory(device)
    if estimate.total > free:
        remedy = "choose a smaller model"
        if "logits" in dict(estimate.parts):
            remedy += ", or lower --max-batch"
        elif len(estimate.parts) > 1:
            remedy += ", or train adapters (--lora.rank 16), or lower train.tokens_per_microbatch, sampling.max_batch"
            remedy += ", pool.engines" if dict(estimate.parts).get("engines of the pool") else ""
        raise ModelError(
            f"model {name} is too large for this machine: it needs about {estimate}, and {device} has {gib(free)} free "
            f"of {gib(total)}; {remedy}"
        )
