"""`tinyllm plan` in the terminal: rates, memory, hops, step times and balance, each number with its basis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from tinyllm.model.memory import gib
from tinyllm.plan.cost import Plan, Split
from tinyllm.plan.rates import Rate
from tinyllm.plan.room import HEADROOM, Room
from tinyllm.plan.work import Layout, Workload

RATES = (
    ("compute", "TFLOP/s of a device", 1e12),
    ("bandwidth", "GB/s of its memory", 1e9),
    ("efficiency", "share of both reached", 1.0),
    ("network", "GB/s from other devices", 1e9),
    ("disk", "GB/s of the disk", 1e9),
    ("memory", "GiB of a device", 2.0**30),
    ("sample", "TFLOP/s when sampling", 1e12),
    ("update", "TFLOP/s when training", 1e12),
    ("verify", "seconds of a verdict", 1.0),
    ("record", "tokens recorded /s", 1.0),
    ("publish", "GB/s of weights published", 1e9),
)


def show(name: str, plan: Plan, warnings: Sequence[str], out: Console) -> None:
    """Print the plan."""
    _say(out, _job(name, plan.job))
    _say(out, f"layout: {describe(plan.layout)}, {plan.layout.verifiers} verifiers")
    out.print(_rates_table(plan))
    for room in plan.rooms:
        out.print(_room_table(room))
        for line in _verdict(room):
            _say(out, line)
    out.print(_hops_table(plan))
    for line in (*_summary(plan), *(f"assumed: {w}" for w in warnings), *(f"note: {n}" for n in plan.notes)):
        _say(out, line)


def _say(out: Console, line: str) -> None:
    out.print(line, soft_wrap=True, markup=False)


def _job(name: str, job: Workload) -> str:
    """The job in a sentence."""
    how = [
        f"LoRA of rank {job.lora_rank}, {job.trained / 1e6:,.1f}M weights" if job.lora_rank else "all weights",
        *(["gradient checkpointing"] if job.checkpointing else []),
        *(["a reference policy"] if job.reference else []),
    ]
    return (
        f"{name}: {job.shape.parameters / 1e6:,.1f}M parameters in {job.dtype}, trained: {', '.join(how)}\n"
        f"a step: {job.groups:.4g} prompts of {job.prompt_tokens:,.0f} tokens x {job.group_size} completions of "
        f"{job.completion_tokens:,.0f} (at most {job.max_new_tokens}); {100 * job.live_share:.0f}% of it trained"
    )


def describe(layout: Layout) -> str:
    """A layout in words."""
    if not layout.engines:
        return f"{layout.trainers} trainer{_s(layout.trainers)}, which sample{'s' if layout.trainers == 1 else ''} too"
    width = f" of {layout.gpus_per_engine} devices" if layout.gpus_per_engine > 1 else ""
    return f"{layout.trainers} trainer{_s(layout.trainers)} + {layout.engines} engine{_s(layout.engines)}{width}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _table(*columns: str) -> Table:
    """An empty table: name, number, basis, how."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column in ("GiB", "seconds", "share", "value")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=column != "how")
    return table


def _rates_table(plan: Plan) -> Table:
    table = _table("rate", "value", "basis", "how")
    for name, label, unit in RATES:
        rate: Rate | None = getattr(plan.rates, name)
        if rate is not None:
            table.add_row(label, f"{rate.value / unit:.4g}", rate.basis, rate.source)
    return table


def _room_table(room: Room) -> Table:
    whose = f"each of {room.count} {room.device}s" if room.count > 1 else f"the {room.device}"
    table = _table(f"memory of {whose}", "GiB", "basis", "how")
    for part in room.parts:
        table.add_row(part.name, f"{part.bytes / 2**30:.2f}", part.basis, part.how)
    basis = "extrapolated" if any(part.basis == "extrapolated" for part in room.parts) else "computed"
    table.add_row("together", f"{room.total / 2**30:.2f}", basis, "")
    return table


def _verdict(room: Room) -> Iterator[str]:
    if room.capacity is None:
        yield "fits? the memory of a device is not known: give --gpu-memory-gib"
        return
    where = f"{HEADROOM:.0%} of {gib(room.capacity.value)} ({room.capacity.basis})"
    if room.fits:
        yield f"fits into {where}"
        return
    yield f"DOES NOT FIT into {where}; what would make it fit:"
    for remedy in room.remedies or ("a smaller model",):
        yield f"  {remedy}"


def _hops_table(plan: Plan) -> Table:
    table = _table("hop", "seconds", "share", "basis", "how")
    whole = plan.synchronous_s or math.inf
    for hop in plan.hops:
        seconds, share = ("-", "-") if hop.seconds is None else (_seconds(hop.seconds), f"{hop.seconds / whole:.0%}")
        table.add_row(hop.name, seconds, share, hop.basis, hop.how)
    return table


def _summary(plan: Plan) -> Iterator[str]:
    """Step times, the bound, the balance."""
    if not plan.synchronous_s:
        yield "step time: not known without rates; give --run RUN, --measure, or --tflops and --bandwidth-gb-s"
        return
    yield f"step, synchronous: {_seconds(plan.synchronous_s)} s, the sum of the hops"
    lag = max(0, math.ceil(plan.synchronous_s / plan.asynchronous_s - 1e-9) - 1) if plan.asynchronous_s else 0
    yield (
        f"step, asynchronous: {_seconds(plan.asynchronous_s)} s, the largest of what overlaps, "
        f"from a max_lag of {lag} on"
    )
    basis = "measured" if all(hop.basis in ("measured", "assumed") for hop in plan.hops) else "extrapolated"
    yield (
        f"expected with max_lag {plan.layout.max_lag}: {_seconds(plan.step_s)} s a step ({basis}), "
        f"{plan.job.sampled_tokens / plan.step_s:,.0f} tokens/s; bound by: {plan.bound}"
    )
    if plan.engines_needed is not None:
        yield f"balance: {plan.engines_needed} engine{_s(plan.engines_needed)} apart would keep these trainers busy"
    if plan.verifiers_needed is not None:
        yield f"balance: {plan.verifiers_needed} verifier{_s(plan.verifiers_needed)} would keep up with them"
    for split in plan.best:
        yield _best(split, plan.layout.devices)


def _best(split: Split, devices: int) -> str:
    kind = "synchronous" if not split.layout.max_lag else f"max_lag {split.layout.max_lag}"
    what = f"fastest use of {devices} device{_s(devices)} that fits, {kind}"
    later = " (cannot be started yet)" if split.layout.max_lag and split.layout.trainers > 1 else ""
    return f"{what}: {describe(split.layout)}, {_seconds(split.step_s)} s a step{later}"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
