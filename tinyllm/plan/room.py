"""Memory of a trainer rank and of an engine's device, whether it fits, and what would make it fit.

A trainer rank of N (FSDP, N = 1: one process):

    weights + reference model (whole on each rank) + (gradients + optimizer, of several ranks with fp32 masters) / N
    + (N - 1)/N (gathered weights: all outside the layers and one layer)
    + (N - 1)/N (fp32 gradients of the largest group, before they are reduced)
    + key-value cache (where the ranks sample) + activations + head

The other parts are those of model/memory.py's memory_estimate, which `tinyllm grpo` checks at its start. The head works
on blocks of 256 rows: three fp32 matrices [rows, vocabulary], and the fp32 gradient of the head's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinyllm.config.io import overlay
from tinyllm.model.memory import ModelShape, gib, memory_estimate
from tinyllm.plan.rates import Basis, Rate
from tinyllm.plan.work import Layout

if TYPE_CHECKING:
    import torch

    from tinyllm.config.sections import GRPOConfig

HEADROOM = 0.9
"""Share of a device's memory that may be planned; the rest is for allocator, kernels and driver."""
HEAD_ROWS = 256
"""Rows of the head's blocks (engine/head.py)."""
SHARDED = ("gradients", "optimizer")
MOST_DEVICES = 4096


@dataclass(frozen=True)
class Spec:
    """The configuration, model and longest sequence that memory depends on."""

    config: GRPOConfig
    shape: ModelShape
    dtype: torch.dtype
    longest: int


@dataclass(frozen=True)
class MemoryPart:
    """One part of a device's memory."""

    name: str
    bytes: int
    basis: Basis
    how: str


@dataclass(frozen=True)
class Room:
    """The memory of one kind of device."""

    device: str
    count: int
    parts: tuple[MemoryPart, ...]
    capacity: Rate | None
    remedies: tuple[str, ...] = ()
    """Changes of which each alone would make the job fit; empty where it fits."""

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """None where the device's memory is not known."""
        return None if self.capacity is None else self.total <= HEADROOM * self.capacity.value


HOW = {
    "weights": "weights x bytes",
    "gradients": "4 bytes per trained weight",
    "optimizer": "moments and fp32 masters, 4 bytes each per trained weight",
    "reference model": "weights x bytes",
    "key-value cache": "max_batch x longest x layers x 2 x key-value width",
    "activations": "20% around what was measured on a CPU for Llama, Qwen 3 and GPT-2 layers",
}


def trainer_room(spec: Spec, layout: Layout) -> Room:
    """One trainer rank."""
    n, size, shape = layout.trainers, spec.dtype.itemsize, spec.shape
    samples = not layout.engines
    parts = []
    for name, own in memory_estimate(shape, spec.dtype, spec.config, spec.longest, ranks=n).parts:
        if not own or name == "engines of the pool" or (name == "key-value cache" and not samples):
            continue
        how = HOW[name] + (f", 1/{n} of it" if n > 1 and name in SHARDED else "")
        parts.append(MemoryPart(name, own, "extrapolated" if name == "activations" else "computed", how))
    if n > 1:
        how = "embeddings, head and one layer, of other ranks"
        parts.append(MemoryPart("gathered weights", (shape.root + shape.block) * size * (n - 1) // n, "computed", how))
        if not spec.config.lora.rank:
            largest = max(shape.root, shape.block)
            how = "fp32, of the largest group before it is reduced"
            parts.append(MemoryPart("gathered gradients", 4 * largest * (n - 1) // n, "computed", how))
    rows = max(HEAD_ROWS, spec.config.sampling.max_batch if samples else 0)
    head = 12 * rows * shape.vocabulary + (0 if spec.config.lora.rank else 4 * shape.head)
    parts.append(
        MemoryPart("head", head, "computed", f"three fp32 matrices of {rows} rows x vocabulary, and its gradient")
    )
    return Room("trainer", n, tuple(parts), None)


def engine_room(spec: Spec, layout: Layout) -> Room:
    """One device of an engine."""
    t, size, shape, sampling = layout.gpus_per_engine, spec.dtype.itemsize, spec.shape, spec.config.sampling
    cached = sampling.max_batch * spec.longest
    part = f", 1/{t} of it" if t > 1 else ""
    parts = (
        MemoryPart("weights", shape.parameters * size // t, "computed", HOW["weights"] + part),
        MemoryPart("key-value cache", cached * shape.cache_bytes(size) // t, "computed", HOW["key-value cache"] + part),
        MemoryPart(
            "head", 12 * sampling.max_batch * shape.vocabulary, "computed", "three fp32 matrices of max_batch rows"
        ),
    )
    return Room("engine", layout.engines * t, parts, None)


def rooms(spec: Spec, layout: Layout, capacity: Rate | None) -> tuple[Room, ...]:
    """The memory of every kind of device, with remedies where it does not fit."""
    found = []
    for kind, changes in _KINDS[: 2 if layout.engines else 1]:
        room = replace(kind(spec, layout), capacity=capacity)
        if room.fits is False:
            room = replace(room, remedies=_remedies(kind, changes(spec, layout), capacity))
        found.append(room)
    return tuple(found)


def fits(spec: Spec, layout: Layout, capacity: Rate | None) -> bool:
    """Whether every device has room; true where the memory of a device is not known."""
    kinds = _KINDS[: 2 if layout.engines else 1]
    return all(replace(kind(spec, layout), capacity=capacity).fits is not False for kind, _ in kinds)


Change = tuple[str, Spec, Layout]


def _remedies(kind: Any, changes: Iterator[Change], capacity: Rate | None) -> tuple[str, ...]:
    """The changes of which each alone is enough: of each option the weakest."""
    found: dict[str, str] = {}
    least = None
    for text, spec, layout in changes:
        room = replace(kind(spec, layout), capacity=capacity)
        option = text.partition(" ")[0]
        if room.fits and option not in found:
            found[option] = f"{text}: {gib(room.total)}"
        if least is None or room.total < least[0]:
            least = (room.total, text)
    if found or least is None:
        return tuple(found.values())
    return (f"none of these is enough by itself; the most is saved by {least[1]}: {gib(least[0])}; combine them",)


def _trainer_changes(spec: Spec, layout: Layout) -> Iterator[Change]:
    """Options that lower a trainer rank's memory, weakest first."""
    least = spec.longest - 1
    if spec.config.train.tokens_per_microbatch > least:
        yield f"--train.tokens_per_microbatch {least}", _with_option(spec, "train.tokens_per_microbatch", least), layout
    if not spec.config.model.gradient_checkpointing:
        yield "--model.gradient_checkpointing", _with_option(spec, "model.gradient_checkpointing", True), layout
    if not layout.engines:
        for batch in _halves(spec.config.sampling.max_batch):
            yield f"--sampling.max_batch {batch}", _with_option(spec, "sampling.max_batch", batch), layout
    trainers = layout.trainers
    while (trainers := trainers * 2) <= MOST_DEVICES:
        yield f"--gpus {trainers + layout.devices - layout.trainers}", spec, replace(layout, trainers=trainers)
    if not spec.config.lora.rank:
        yield "--lora.rank 16", _with_option(spec, "lora.rank", 16), layout


def _engine_changes(spec: Spec, layout: Layout) -> Iterator[Change]:
    """Options that lower the memory of an engine's device, weakest first."""
    for batch in _halves(spec.config.sampling.max_batch):
        yield f"--sampling.max_batch {batch}", _with_option(spec, "sampling.max_batch", batch), layout
    count = layout.gpus_per_engine
    while (count := count * 2) <= 64:
        yield f"--gpus-per-engine {count}", spec, replace(layout, gpus_per_engine=count)


def _with_option(spec: Spec, name: str, value: Any) -> Spec:
    return replace(spec, config=overlay(spec.config, {name: value}))


def _halves(count: int) -> Iterator[int]:
    while (count := count // 2) >= 1:
        yield count


_KINDS = ((trainer_room, _trainer_changes), (engine_room, _engine_changes))
"""Kinds of devices, with the options that lower their memory; without engines the first one alone."""
