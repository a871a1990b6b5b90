"""`tinyllm plan`: memory and seconds of a job. Mistakes in options are told before torch is imported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.commands.arguments import PlanArguments
from tinyllm.config.io import load_toml, overlay
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import ConfigError, ModelError, RunError
from tinyllm.plan.room import MOST_DEVICES
from tinyllm.record.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from tinyllm.model.memory import ModelShape
    from tinyllm.plan.cost import Plan
    from tinyllm.plan.rates import Rates, RunFacts
    from tinyllm.plan.work import Layout, Workload

GIB = 2.0**30


def main(given: PlanArguments, options: Mapping[str, Any]) -> int:
    """Run the command and return its exit code. Raises the errors of errors.py."""
    _check(given)
    run = RunDir.read(given.run) if given.run else None
    if run is not None and run.config.kind != "grpo":
        raise RunError(f"{run.path} is a run of {run.config.kind}, which does not sample; give --run a run of grpo")
    base = run.config if run is not None else GRPOConfig()
    config = overlay(load_toml(given.config, base) if given.config else base, options)
    plan, warnings = make(given, config, run)
    if given.json:
        print(json.dumps(as_json(plan, warnings), indent=2))
        return 0
    from tinyllm.plan.view import show
    from tinyllm.view.progress import console

    show(config.model.name, plan, warnings, console())
    return 0


def _check(given: PlanArguments) -> None:
    if given.gpus > MOST_DEVICES:
        raise ConfigError(f"--gpus {given.gpus}: plans are made for at most {MOST_DEVICES} devices; lower it")
    if given.engine_gpus >= given.gpus:
        raise ConfigError(
            f"--engine-gpus {given.engine_gpus}: leaves none of --gpus {given.gpus} to train on; lower it"
        )
    if given.engine_gpus % given.gpus_per_engine:
        raise ConfigError(
            f"--engine-gpus {given.engine_gpus}: not a multiple of --gpus-per-engine {given.gpus_per_engine}"
        )
    if (given.tflops is None) != (given.bandwidth_gb_s is None):
        raise ConfigError("--tflops and --bandwidth-gb-s belong together: decode is bound by one or the other")


# From options to a plan


@dataclass(frozen=True)
class Lengths:
    """Tokens of a job's sequences."""

    prompt: float
    completion: float
    longest: int


def make(given: PlanArguments, config: GRPOConfig, run: RunDir | None) -> tuple[Plan, list[str]]:
    """The plan of a configuration, and what was assumed about it. Raises ConfigError, ModelError, RunError."""
    from tinyllm.model.memory import model_shape
    from tinyllm.plan.cost import make_plan
    from tinyllm.plan.rates import make_job, read_run, verifiers_of
    from tinyllm.plan.room import Spec
    from tinyllm.plan.work import Layout

    dtype = _dtype(given, config, run)
    facts = None if run is None else read_run(run, model_shape(_run_architecture(run)), _run_dtype(run))
    same = run is not None and run.config.model.name == config.model.name
    shape = facts.job.shape if facts is not None and same else model_shape(read_architecture(config.model.name))
    lengths, warnings = _lengths(given, config, facts)
    _check_lengths(config, shape, lengths)
    job = make_job(
        config,
        shape,
        dtype,
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        longest=lengths.longest,
        draws=facts.draws if facts is not None else 1.0,
        live_share=given.live_share or (facts.job.live_share if facts is not None else 1.0),
        adapters=facts is not None and facts.job.publish_adapters,
    )
    if given.live_share is None and facts is None:
        warnings.append("every group is taken to have signal (--live-share)")
    layout = Layout(
        trainers=given.gpus - given.engine_gpus,
        engines=given.engine_gpus // given.gpus_per_engine,
        gpus_per_engine=given.gpus_per_engine,
        verifiers=verifiers_of(config),
        max_lag=config.pool.max_lag if given.max_lag is None else given.max_lag,
    )
    rates = _rates(given, config, dtype, facts, job, layout)
    return make_plan(Spec(config, shape, dtype, lengths.longest), job, layout, rates), warnings


def read_architecture(name: str) -> Any:
    """A model's configuration; a folder needs no weights for it. Raises ModelError."""
    from tinyllm.model.models import load_config

    folder = Path(name).expanduser()
    return load_config(name, folder if (folder / "config.json").is_file() else None)


def _run_architecture(run: RunDir) -> Any:
    """Of the model that was trained: what the run saved (its start may be gone), else what it started from."""
    saved = [run.path / name for name in ("model", "best") if (run.path / name / "config.json").is_file()]
    return read_architecture(str(saved[0]) if saved else run.config.model.name)


def _run_dtype(run: RunDir) -> torch.dtype:
    from tinyllm.model.models import pick_dtype

    return pick_dtype(run.manifest["facts"].get("dtype") or run.config.model.dtype)


def _dtype(given: PlanArguments, config: GRPOConfig, run: RunDir | None) -> torch.dtype:
    """auto is bfloat16 on hardware that is given, the run's own with a run, else what suits this machine."""
    from tinyllm.model.models import pick_device, pick_dtype

    if config.model.dtype == "auto" and given.tflops is not None:
        return pick_dtype("bfloat16")
    if config.model.dtype == "auto" and run is not None:
        return _run_dtype(run)
    return pick_dtype(config.model.dtype, pick_device(config.model.device))


def _lengths(given: PlanArguments, config: GRPOConfig, facts: RunFacts | None) -> tuple[Lengths, list[str]]:
    """Given, else the run's, else the configuration's bounds, which is said."""
    new, notes = config.sampling.max_new_tokens, []
    prompt, completion = given.prompt_tokens, given.completion_tokens
    longest_prompt = prompt
    if prompt is None and facts is not None:
        prompt, longest_prompt = facts.job.prompt_tokens, facts.longest_prompt
    if prompt is None:
        prompt = longest_prompt = config.data.max_prompt_tokens
        notes.append(f"every prompt is taken to have data.max_prompt_tokens = {prompt} tokens (--prompt-tokens)")
    if completion is None and facts is not None and facts.job.max_new_tokens == new:
        completion = facts.job.completion_tokens
    if completion is None:
        completion = new
        notes.append(f"every completion is taken to have sampling.max_new_tokens = {new} tokens (--completion-tokens)")
    if completion > new:
        raise ConfigError(
            f"--completion-tokens {completion:g}: more than sampling.max_new_tokens = {new}; raise "
            "--sampling.max_new_tokens"
        )
    return Lengths(prompt, completion, math.ceil(longest_prompt or prompt) + new), notes


def _check_lengths(config: GRPOConfig, shape: ModelShape, lengths: Lengths) -> None:
    """The limits that a run has too."""
    if shape.positions is not None and lengths.longest > shape.positions:
        raise ModelError(
            f"model {config.model.name} has {shape.positions} positions, and the longest prompt with "
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens} has {lengths.longest}; lower it, "
            "or give --prompt-tokens"
        )
    if lengths.longest - 1 > config.train.tokens_per_microbatch:
        raise ConfigError(
            f"train.tokens_per_microbatch = {config.train.tokens_per_microbatch} cannot hold the longest prompt with a "
            f"completion of sampling.max_new_tokens = {config.sampling.max_new_tokens}; it needs at least "
            f"{lengths.longest - 1}"
        )


def _rates(
    given: PlanArguments,
    config: GRPOConfig,
    dtype: torch.dtype,
    facts: RunFacts | None,
    job: Workload,
    layout: Layout,
) -> Rates:
    """What is given before what a run measured before what is measured here."""
    from tinyllm.model.memory import available_memory
    from tinyllm.model.models import pick_device
    from tinyllm.plan.rates import Rate, Rates, measure, rates_of_run

    device = pick_device(config.model.device)
    rates = measure(dtype, device, Path(".")) if given.measure else Rates()
    if given.tflops is None:
        rates = replace(rates, memory=Rate(available_memory(device)[1], "measured", f"{device} of this machine"))
    if facts is not None:
        of_run = rates_of_run(facts, job, layout.devices)
        names = (
            ["verify", "record"] if given.tflops is not None else ["sample", "update", "verify", "record", "publish"]
        )
        rates = replace(rates, **{name: getattr(of_run, name) for name in names})
        rates = replace(rates, publish_sends=of_run.publish_sends)

    def told(name: str, unit: float) -> Rate | None:
        value = getattr(given, name)
        return None if value is None else Rate(value * unit, "given", f"--{name.replace('_', '-')}")

    hardware: dict[str, Any] = {
        "compute": told("tflops", 1e12),
        "bandwidth": told("bandwidth_gb_s", 1e9),
        "network": told("network_gb_s", 1e9),
        "disk": told("disk_gb_s", 1e9),
        "memory": told("gpu_memory_gib", GIB),
        "verify": told("verify_s", 1.0),
        "efficiency": told("efficiency", 1.0),
    }
    return replace(rates, **{name: rate for name, rate in hardware.items() if rate is not None})


def as_json(plan: Plan, warnings: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON has it: everything the tables show, in bytes and seconds."""
    found = asdict(plan)
    for room, plain in zip(plan.rooms, found["rooms"], strict=True):
        plain |= {"total": room.total, "fits": room.fits}
    return found | {"assumed": list(warnings)}
