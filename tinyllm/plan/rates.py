"""The rates of sampling, training, verifying and of hardware: measured in a run, measured by a short probe, or given.

Every rate carries its basis and a sentence on its source; nothing is assumed silently.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from tinyllm.config.sections import GRPOConfig, PoolConfig
from tinyllm.errors import RunError
from tinyllm.model.memory import needs_reference_model
from tinyllm.plan import work
from tinyllm.plan.work import Workload
from tinyllm.record.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from tinyllm.model.memory import ModelShape

Basis = Literal["measured", "given", "computed", "extrapolated", "assumed", "unknown"]
"""measured: on this hardware and this job; given: by the user; computed: exact arithmetic on the configuration;
extrapolated: by a formula, or from a rate measured on another job; assumed: a default."""

EFFICIENCY = 0.4
"""Share of a plain matrix product's rate, and of memory bandwidth, that sampling and training reach. A step of the
bundled model takes 2.1 times its floor on two CPU cores, which is 0.48 (docs/benchmarks.md)."""
RECORD_BYTES_PER_TOKEN = 16
"""Rollouts and derived columns on disk. Nine were seen in a run of the arithmetic task; texts that vary more compress
less."""


@dataclass(frozen=True)
class Rate:
    """A number with its origin."""

    value: float
    basis: Basis
    source: str


@dataclass(frozen=True)
class Rates:
    """The known rates; None: unknown. Where a hop has a rate from a run, the rates of hardware are not used for it."""

    compute: Rate | None = None
    """FLOP/s of a matrix product on one device."""
    bandwidth: Rate | None = None
    """Bytes/s of a device's memory."""
    efficiency: Rate = field(default_factory=lambda: Rate(EFFICIENCY, "assumed", "default of --efficiency"))
    """Share of `compute` and `bandwidth` that sampling and training reach."""
    network: Rate | None = None
    """Bytes/s a device receives from others."""
    disk: Rate | None = None
    """Bytes/s written and synced."""
    memory: Rate | None = None
    """Bytes of a device."""
    sample: Rate | None = None
    """FLOP/s one device reached when sampling, in a run."""
    update: Rate | None = None
    """FLOP/s one device reached in forward, backward and optimizer together, in a run."""
    verify: Rate | None = None
    """Seconds of one verifier for one rollout."""
    record: Rate | None = None
    """Sampled tokens recorded and logged per second, in a run."""
    publish: Rate | None = None
    """Bytes of weights published per second, in a run."""
    publish_sends: bool = False
    """Whether the run of `publish` sent weights to servers; a run of one process only hashes them."""


# From a run


@dataclass(frozen=True)
class RunFacts:
    """The job of a run in numbers, and the mean seconds of each hop of its steps."""

    path: str
    job: Workload
    verifiers: int
    steps: int
    seconds: dict[str, float]
    """sample_s, verify_s, record_s (with what the loop logs), update_s, publish_s; their sum is a step."""
    longest_prompt: int
    draws: float
    """Groups drawn for each of prompts_per_step."""
    served: bool
    """Whether servers sampled, so that publishing was sending."""


HOPS = ("sample_s", "verify_s", "record_s", "update_s", "publish_s")
READ_STEPS = 8
"""Recorded steps read for the length of prompts."""


def read_run(run: RunDir, shape: ModelShape, dtype: torch.dtype) -> RunFacts:
    """Lengths, shares and seconds of a run's own steps. Raises RunError for a run without a timed step.

    The first step, which warms up, is left out where there are more. So are steps that were trained from the record
    after a resume, since nothing was sampled in them.
    """
    config, facts = run.config, run.manifest["facts"]
    if config.pool != PoolConfig() or facts.get("ranks", 1) > 1:
        what = "on several ranks" if config.pool == PoolConfig() else "with a pool"
        raise RunError(f"{run.path} ran {what}, so its seconds are not of one hop each; give a run of one process")
    trained = {row["step"]: row for row in run.metrics("train")}
    timed = {row["step"]: row for row in run.timings() if row.get("sample_s") and row["step"] in trained}
    steps = sorted(timed)[1:] or sorted(timed)
    if not steps:
        raise RunError(f"{run.path} has no timed step yet (timing.jsonl); wait for one, or give another run")
    recorded = [step for step in run.steps() if step in steps][-READ_STEPS:]
    if not recorded:
        raise RunError(f"{run.path} has no rollouts of its timed steps; restore rollouts/ from a copy")
    seconds = {hop: fmean(timed[step].get(hop, 0.0) for step in steps) for hop in HOPS}
    whole = fmean(timed[step]["step_s"] for step in steps)
    seconds["record_s"] += max(0.0, whole - sum(seconds.values()))
    sampled = fmean(timed[step]["sampled_tokens"] for step in steps)
    groups = [group for step in recorded for group in run.read_groups(step)]
    prompts = [len(group.prompt.token_ids) for group in groups]
    drawn = len(groups) / len(recorded)
    draws = drawn / config.train.prompts_per_step
    job = make_job(
        config,
        shape,
        dtype,
        prompt_tokens=fmean(prompts),
        completion_tokens=sampled / (drawn * config.sampling.group_size),
        longest=max(prompts) + config.sampling.max_new_tokens,
        draws=draws,
        live_share=min(1.0, fmean(trained[step]["tokens"] for step in steps) / max(1.0, sampled)),
        adapters=any(server["server"] == "vllm" for server in facts.get("engine", ())),
    )
    return RunFacts(
        path=str(run.path),
        job=job,
        verifiers=verifiers_of(config),
        steps=len(steps),
        seconds=seconds,
        longest_prompt=max(prompts),
        draws=draws,
        served=bool(config.engine.urls),
    )


def verifiers_of(config: GRPOConfig) -> int:
    """How many verify at a time: the pool's, else the workers of the trainer's process."""
    return config.pool.verifiers or config.reward.workers


def make_job(
    config: GRPOConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    prompt_tokens: float,
    completion_tokens: float,
    longest: int,
    draws: float = 1.0,
    live_share: float = 1.0,
    adapters: bool = False,
) -> Workload:
    """The job of a GRPO configuration. draws: groups drawn for each group that a step needs; adapters: servers are sent
    the adapters alone, as vLLM is."""
    return Workload(
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
        groups=config.train.prompts_per_step * draws,
        group_size=config.sampling.group_size,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        max_new_tokens=config.sampling.max_new_tokens,
        longest=longest,
        live_share=live_share,
        max_batch=config.sampling.max_batch,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        updates=config.train.updates_per_batch,
        lora_rank=config.lora.rank,
        reference=needs_reference_model(config) or config.objective.axes.beta > 0,
        checkpointing=config.model.gradient_checkpointing,
        moments=2 if config.optimizer.name == "adamw" else 0,
        publish_adapters=bool(config.lora.rank) and adapters,
    )


def rates_of_run(facts: RunFacts, planned: Workload, devices: int) -> Rates:
    """The hops' rates of a run; extrapolated, with the reasons, where the planned job is another one."""
    reasons = differences(facts.job, planned, devices)
    if facts.served:
        reasons.append("sampled on servers, as if they were one device")
    basis: Basis = "extrapolated" if reasons else "measured"
    what = f"{facts.steps} steps of {facts.path}" + (f"; {', '.join(reasons)}" if reasons else "")
    seconds, job = facts.seconds, facts.job

    def rate(amount: float, hop: str) -> Rate | None:
        return Rate(amount / seconds[hop], basis, what) if seconds[hop] > 0 and amount > 0 else None

    return Rates(
        sample=rate(work.prefill_flops(job) + work.decode_flops(job), "sample_s"),
        update=rate(work.training_flops(job), "update_s"),
        verify=Rate(seconds["verify_s"] * facts.verifiers / job.rollouts, basis, what),
        record=rate(job.sampled_tokens, "record_s"),
        publish=rate(work.weight_bytes(job), "publish_s"),
        publish_sends=facts.served,
    )


def differences(run: Workload, planned: Workload, devices: int) -> list[str]:
    """How a planned job differs from the measured one; lengths and batches count from a difference of a fifth on."""
    found = []
    if run.shape != planned.shape:
        was, now = (f"{job.shape.parameters / 1e6:,.1f}M" for job in (run, planned))
        found.append(f"a model of {was}, planned {now}")
    if run.dtype != planned.dtype:
        found.append(f"in {run.dtype}, planned {planned.dtype}")
    for name, measured, wanted in (
        ("prompts of {} tokens", run.prompt_tokens, planned.prompt_tokens),
        ("completions of {} tokens", run.completion_tokens, planned.completion_tokens),
        ("{} rollouts a step", run.rollouts, planned.rollouts),
        ("{} trained tokens a step", _trained_tokens(run), _trained_tokens(planned)),
    ):
        if not 0.8 <= wanted / measured <= 1.25:
            found.append(f"{name.format(f'{measured:,.0f}')}, planned {wanted:,.0f}")
    for name in ("lora_rank", "checkpointing", "reference", "updates", "moments"):
        if getattr(run, name) != getattr(planned, name):
            found.append(f"{name} {getattr(run, name)}, planned {getattr(planned, name)}")
    if devices > 1:
        found.append(f"one device, planned {devices}")
    return found


def _trained_tokens(job: Workload) -> float:
    return max(1.0, job.live_share * job.distinct_tokens)


# Measured here


def measure(dtype: torch.dtype, device: str, folder: Path, *, size: int = 2048, megabytes: int = 256) -> Rates:
    """A short probe of this machine: a size^3 matrix product, a copy in memory, a file written and synced.

    The best of three each. A device is all of this CPU's threads, or one accelerator.
    """
    import torch

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _best(lambda: torch.mm(a, b), device)
    copied = _best(lambda: target.copy_(source), device)
    block = bytes(2**20)
    written = _best(lambda: _write(folder, block, max(1, megabytes // 4)), "cpu")
    kind = f"{torch.get_num_threads()} threads" if device == "cpu" else device
    return Rates(
        compute=Rate(2 * size**3 / product, "measured", f"{size}^3 product in {str(dtype)[6:]}, {kind}"),
        bandwidth=Rate(2 * source.numel() / copied, "measured", f"copy of {megabytes} MiB, {kind}"),
        disk=Rate(max(1, megabytes // 4) * 2**20 / written, "measured", f"file written and synced in {folder}"),
    )


def _best(action: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of three."""
    import torch

    times = []
    for _ in range(3):
        begin = time.perf_counter()
        action()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def _write(folder: Path, block: bytes, count: int) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
