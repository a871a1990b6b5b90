"""Seconds of each hop, what bounds the step, and how many engines and verifiers keep a trainer busy.

    trainer = record + forward and backward + optimizer + publish
    step    = max(sample, verify, trainer, (sample + verify + trainer) / (max_lag + 1))

With max_lag 0 the last term is the sum: the synchronous step. Where the trainers sample themselves, sampling and
training share the devices, and only verification overlaps: their sum takes the place of the two.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinyllm.model.memory import gib
from tinyllm.plan import work
from tinyllm.plan.rates import RECORD_BYTES_PER_TOKEN, Basis, Rate, Rates
from tinyllm.plan.room import Room, Spec, fits, rooms
from tinyllm.plan.work import Layout, Workload


@dataclass(frozen=True)
class Hop:
    """One hop of a step. seconds is None where a rate is missing; how says which."""

    name: str
    seconds: float | None
    basis: Basis
    how: str


@dataclass(frozen=True)
class Split:
    """A way to use the devices."""

    layout: Layout
    step_s: float


@dataclass(frozen=True)
class Plan:
    """A job on a layout: what `tinyllm plan` prints."""

    job: Workload
    layout: Layout
    rates: Rates
    rooms: tuple[Room, ...]
    hops: tuple[Hop, ...]
    synchronous_s: float
    asynchronous_s: float
    """With the largest lag that still helps. Both times are lower bounds where the seconds of a hop are unknown."""
    step_s: float
    """With the layout's max_lag."""
    bound: str
    """The stage that decides step_s."""
    engines_needed: int | None
    """Engines with devices of their own that sample as fast as these trainers train; None where none do."""
    verifiers_needed: int | None
    best: tuple[Split, ...]
    """The fastest way to use as many devices: synchronous, and with lag."""
    notes: tuple[str, ...]


def make_plan(spec: Spec, job: Workload, layout: Layout, rates: Rates) -> Plan:
    """Memory, hops and balance of a job on a layout."""
    hops = step_hops(job, layout, rates)
    stages = stage_seconds(hops, layout)
    return Plan(
        job=job,
        layout=layout,
        rates=rates,
        rooms=rooms(spec, layout, rates.memory),
        hops=hops,
        synchronous_s=step_seconds(stages, 0),
        asynchronous_s=max(stages.values()),
        step_s=step_seconds(stages, layout.max_lag),
        bound=_bound(stages, layout.max_lag),
        engines_needed=engines_needed(job, layout, rates),
        verifiers_needed=verifiers_needed(hops, layout),
        best=best_splits(spec, job, layout, rates),
        notes=tuple(_notes(job, layout, rates, hops)),
    )


# Hops


def step_hops(job: Workload, layout: Layout, rates: Rates) -> tuple[Hop, ...]:
    """The hops in the order of the data."""
    return (
        Hop("prompts", 0.0, "assumed", "read and rendered before the first step; nothing waits for them"),
        _sample(job, layout, rates),
        _verify(job, layout, rates),
        _record(job, rates),
        _train(job, layout, rates),
        _optimizer(job, layout, rates),
        _publish(job, layout, rates),
    )


def _sample(job: Workload, layout: Layout, rates: Rates) -> Hop:
    """Prefill, then max(compute, bytes / bandwidth) of decode, on the busiest engine."""
    engines = layout.engines or layout.trainers
    width = layout.gpus_per_engine if layout.engines else 1
    share = work.sampling_share(job, engines) / width
    prefill, decode = work.prefill_flops(job) * share, work.decode_flops(job) * share
    if rates.sample is not None:
        seconds = (prefill + decode) / rates.sample.value
        return Hop("sample", seconds, rates.sample.basis, _at(rates.sample, "FLOP/s"))
    if rates.compute is None or rates.bandwidth is None:
        return Hop("sample", None, "unknown", NO_RATE)
    reached = rates.efficiency.value
    compute = decode / (reached * rates.compute.value)
    memory = work.decode_bytes(job, engines) / width / (reached * rates.bandwidth.value)
    bound = "memory" if memory > compute else "compute"
    passes = work.decode_steps(job, engines)
    how = f"{passes:,.0f} passes of decode, bound by {bound}; {_hardware(rates)}"
    return Hop("sample", prefill / (reached * rates.compute.value) + max(compute, memory), "extrapolated", how)


def _verify(job: Workload, layout: Layout, rates: Rates) -> Hop:
    if rates.verify is None:
        return Hop("verify", None, "unknown", "seconds of a verdict are not known; give --verify-s, or --run")
    seconds = job.rollouts * rates.verify.value / layout.verifiers
    how = f"{job.rollouts:,.0f} rollouts x {rates.verify.value:.3g} s / {layout.verifiers} verifiers"
    return Hop("verify", seconds, rates.verify.basis, f"{how}; {rates.verify.source}")


def _record(job: Workload, rates: Rates) -> Hop:
    if rates.record is not None:
        seconds = job.sampled_tokens / rates.record.value
        return Hop("record", seconds, rates.record.basis, _at(rates.record, "tokens/s, metrics and the rest with it"))
    if rates.disk is None:
        return Hop("record", None, "unknown", "the disk's rate is not known; give --disk-gb-s, --run or --measure")
    size = job.sampled_tokens * RECORD_BYTES_PER_TOKEN
    how = f"{size / 1e6:.2g} MB, {RECORD_BYTES_PER_TOKEN} bytes a token; {_at(rates.disk, 'B/s')}"
    return Hop("record", size / rates.disk.value, "extrapolated", how)


def _train(job: Workload, layout: Layout, rates: Rates) -> Hop:
    """FLOPs / ranks, plus the collectives, as if they did not overlap with computing."""
    flops = work.training_flops(job) / layout.trainers
    passes = work.microbatches(job, layout.trainers)
    collective, network = 0.0, ""
    if layout.trainers > 1:
        size = work.collective_bytes(job, layout)
        network = f"; {gib(size)} of collectives a rank"
        collective = size / rates.network.value if rates.network is not None else 0.0
        network += " not counted: give --network-gb-s" if rates.network is None else f", {collective:.3g} s"
    name, how = "forward + backward", f"{flops:.3g} FLOP a rank in {passes} micro-batches{network}"
    if rates.update is not None:
        basis = rates.update.basis
        return Hop(name, flops / rates.update.value + collective, basis, f"{how}; {_at(rates.update, 'FLOP/s')}")
    if rates.compute is None:
        return Hop(name, None, "unknown", NO_RATE)
    seconds = flops / (rates.efficiency.value * rates.compute.value) + collective
    return Hop(name, seconds, "extrapolated", f"{how}; {_hardware(rates)}")


def _optimizer(job: Workload, layout: Layout, rates: Rates) -> Hop:
    if rates.update is not None:
        return Hop("optimizer", 0.0, rates.update.basis, "in forward + backward, which the run times together with it")
    if rates.bandwidth is None:
        return Hop("optimizer", None, "unknown", NO_RATE)
    size = work.optimizer_bytes(job, layout.trainers)
    seconds = size / (rates.efficiency.value * rates.bandwidth.value)
    return Hop("optimizer", seconds, "extrapolated", f"{gib(size)} read and written a rank; {_hardware(rates)}")


def _publish(job: Workload, layout: Layout, rates: Rates) -> Hop:
    """Weights are hashed; where engines have devices of their own, written once and read once by all of them."""
    whole, sent = work.weight_bytes(job), work.published_bytes(job)
    basis: Basis = "extrapolated"
    seconds, parts = 0.0, []
    if rates.publish is not None:
        seconds, basis = whole / rates.publish.value, rates.publish.basis
        parts.append(_at(rates.publish, "B/s"))
    elif rates.bandwidth is not None:
        seconds = whole / (rates.efficiency.value * rates.bandwidth.value)
        parts.append("weights hashed at the rate of memory")
    elif not layout.engines:
        return Hop("publish", None, "unknown", NO_RATE)
    if layout.engines and not (rates.publish is not None and rates.publish_sends):
        known = [rate.value for rate in (rates.disk, rates.network) if rate is not None]
        if not known:
            how = "rates of disk and network are not known; give --network-gb-s and --disk-gb-s"
            return Hop("publish", None, "unknown", how)
        write = sent / rates.disk.value if rates.disk is not None else 0.0
        seconds, basis = seconds + write + sent / min(known), "extrapolated"
        parts.append(f"{gib(sent)} written and read by all engines at once")
    return Hop("publish", seconds, basis, "; ".join(parts))


NO_RATE = "no rate; give --run RUN, --measure, or --tflops and --bandwidth-gb-s"


def _at(rate: Rate, unit: str) -> str:
    return f"at {rate.value:.3g} {unit} ({rate.source})"


def _hardware(rates: Rates) -> str:
    kind = rates.compute.basis if rates.compute is not None else "unknown"
    return f"{rates.efficiency.value:g} ({rates.efficiency.basis}) of the {kind} rates of hardware"


# Steps


def stage_seconds(hops: tuple[Hop, ...], layout: Layout) -> dict[str, float]:
    """Seconds of the stages that can overlap: sample, verify, train. A hop of unknown seconds counts as 0."""
    by_name = {hop.name: hop.seconds or 0.0 for hop in hops}
    sample, verify = by_name.pop("sample") + by_name.pop("prompts"), by_name.pop("verify")
    train = sum(by_name.values())
    if not layout.engines:
        return {"sample and train": sample + train, "verify": verify}
    return {"sample": sample, "verify": verify, "train": train}


def step_seconds(stages: dict[str, float], max_lag: int) -> float:
    """Seconds of a step, by the formula at the top of this file."""
    return max(*stages.values(), sum(stages.values()) / (max_lag + 1))


def _bound(stages: dict[str, float], max_lag: int) -> str:
    """The stage that decides."""
    name = max(stages, key=lambda stage: stages[stage])
    if stages[name] < step_seconds(stages, max_lag) and max_lag:
        return f"the way of a group through all hops, in max_lag + 1 = {max_lag + 1} steps"
    return name


def engines_needed(job: Workload, layout: Layout, rates: Rates) -> int | None:
    """The fewest engines apart whose sampling takes no longer than these trainers' own hops."""

    def enough(engines: int) -> bool:
        apart = replace(layout, engines=engines)
        stages = stage_seconds(step_hops(job, apart, rates), apart)
        return 0 < stages["sample"] <= stages["train"]

    most = math.ceil(job.groups)
    if not enough(most):
        return None
    return 1 + bisect.bisect_left(range(1, most + 1), True, key=enough)  # more engines never sample longer


def verifiers_needed(hops: tuple[Hop, ...], layout: Layout) -> int | None:
    """The fewest verifiers that take no longer than the trainers (where these sample too: than both)."""
    stages = stage_seconds(hops, layout)
    other = stages.get("train", stages.get("sample and train", 0.0))
    if not other or not stages["verify"]:
        return None
    return max(1, math.ceil(stages["verify"] * layout.verifiers / other - 1e-9))


def best_splits(spec: Spec, job: Workload, layout: Layout, rates: Rates) -> tuple[Split, ...]:
    """The fastest layouts of as many devices that fit into memory: synchronous, and with lag (1 at least)."""
    found = []
    for lag in (0, max(1, layout.max_lag)):
        best: Split | None = None
        for candidate in _layouts(replace(layout, max_lag=lag)):
            if not fits(spec, candidate, rates.memory):
                continue
            hops = step_hops(job, candidate, rates)
            if any(hop.seconds is None for hop in hops if hop.name in ("sample", "forward + backward")):
                return ()
            seconds = step_seconds(stage_seconds(hops, candidate), lag)
            if best is None or seconds < best.step_s:
                best = Split(candidate, seconds)
        found += [best] if best is not None else []
    return tuple(found)


def _layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts of the same number of devices: every number of engines that leaves a trainer."""
    for engines in range((layout.devices - 1) // layout.gpus_per_engine + 1):
        yield replace(layout, engines=engines, trainers=layout.devices - engines * layout.gpus_per_engine)


def _notes(job: Workload, layout: Layout, rates: Rates, hops: tuple[Hop, ...]) -> Iterator[str]:
    unknown = [hop.name for hop in hops if hop.seconds is None]
    if unknown:
        yield f"not known, and counted as 0: {', '.join(unknown)}"
    if layout.trainers > 1 and rates.network is None:
        yield "collectives of the ranks are not counted: give --network-gb-s"
    if layout.gpus_per_engine > 1:
        yield "an engine on several devices is counted as that many times as fast; its own traffic is left out"
    if layout.max_lag and not layout.engines:
        yield "max_lag overlaps only verification here: the trainers sample themselves (--engine-gpus gives engines)"
    if layout.max_lag and layout.trainers > 1:
        yield f"max_lag {layout.max_lag} needs a pool, which serves one trainer process: this cannot be started yet"
    if job.groups < (layout.engines or layout.trainers):
        yield f"{job.groups:g} groups a step leave some of {layout.engines or layout.trainers} samplers without work"
