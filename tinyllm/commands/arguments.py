"""The arguments of each command, besides the options of a configuration. One line each: default, meaning, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinyllm.config.sections import opt

_FILE, _RUN, _N, _X = "FILE", "RUN", "N", "X"


@dataclass(frozen=True)
class TrainArguments:
    """Arguments of `tinyllm grpo`, `sft` and `dpo`."""

    config: str | None = opt(None, "options from a file; the command line wins over it", shown="FILE.toml")
    resume: str | None = opt(None, "go on with this run, with its own options", shown=_RUN)


@dataclass(frozen=True)
class EvalArguments:
    """Arguments of `tinyllm eval`."""

    models: tuple[str, ...] = opt((), "what to evaluate; see above", place=True, shown="MODEL_OR_RUN")
    task: tuple[str, ...] = opt((), "a task to evaluate on; may be given again", shown="NAME")
    verifier: tuple[str, ...] = opt((), "judges --data; may be given again", shown="SPEC")
    out: str | None = opt(None, "folder to write to; not set = evals/<date>-<time>", short="o", shown="DIR")
    plan: bool = opt(False, "only say how many prompts and samples a difference needs")


@dataclass(frozen=True)
class ReportArguments:
    """Arguments of `tinyllm report`."""

    run: str = opt(..., "run directory", place=True)
    other: str | None = opt(None, "a second run directory, to compare with", place=True)
    output: str | None = opt(None, "the HTML file; not set = report.html in RUN", short="o", shown=_FILE)


@dataclass(frozen=True)
class RunsArguments:
    """Arguments of `tinyllm runs`."""

    folder: str = opt("runs", "folder of run directories", place=True)


@dataclass(frozen=True)
class ShowArguments:
    """Arguments of `tinyllm show`."""

    run: str = opt(..., "run directory", place=True)
    step: int | None = opt(None, "show the rollouts of this step instead", shown=_N)


@dataclass(frozen=True)
class DiffArguments:
    """Arguments of `tinyllm diff`."""

    first: str = opt(..., "run directory", place=True)
    second: str = opt(..., "run directory", place=True)


@dataclass(frozen=True)
class ReplayArguments:
    """Arguments of `tinyllm replay`."""

    run: str = opt(..., "run directory", place=True)
    steps: str | None = opt(None, "only these steps, from the nearest checkpoint before them", shown="A:B")
    sample: bool = opt(False, "sample every completion again too")
    objective: str | None = opt(None, "what if: another preset, on the recorded rollouts", shown="PRESET")
    reward: str | None = opt(None, "what if: another reward function", shown="MODULE:FUNCTION")
    tolerance: float | None = opt(None, "compare numbers within this, not hashes (another machine)", shown=_X)


@dataclass(frozen=True)
class CapstoneArguments:
    """Arguments of `tinyllm capstone`."""

    model: str = opt("smollm2-135m-instruct", "where to start")
    seed: int = opt(0, "seed of rows, order and sampling", ge=0)
    out: str | None = opt(None, "folder to write, or to go on with; not set = capstones/<time>", shown="DIR")
    threads: int | None = opt(None, "CPU threads; not set = one per core", ge=1, shown=_N)


@dataclass(frozen=True)
class VerifierArguments:
    """Arguments that `tinyllm score` and `probe` share."""

    verifier: tuple[str, ...] = opt(
        (), "a verifier (math:rule=boxed) or module:function; may be given again", shown="SPEC"
    )
    weights: tuple[float, ...] = opt((), "one weight per verifier; empty = 1 each")
    columns: str = opt("", "our column = yours: answer=solution,completion=output", may_be_empty=True)
    timeout_s: float = opt(10.0, "seconds one verdict may take", gt=0, shown="S")
    unsafe_no_sandbox: bool = opt(False, "run code without a sandbox: only code you trust")
    workers: int = opt(2, "processes that verify", ge=1, shown=_N)


@dataclass(frozen=True)
class ScoreArguments(VerifierArguments):
    """Arguments of `tinyllm score`."""

    file: str | None = opt(None, ".jsonl or .parquet; one row per completion", place=True)
    explain: bool = opt(False, "one line per row: verdict, answer, and why")
    out: str | None = opt(None, "write the verdicts to this .jsonl file", shown=_FILE)


@dataclass(frozen=True)
class ProbeArguments(VerifierArguments):
    """Arguments of `tinyllm probe`."""

    data: str | None = opt(None, ".jsonl or .parquet with task rows; not set = the arithmetic task", shown=_FILE)
    rows: int = opt(20, "rows to attack", ge=1, shown=_N)


@dataclass(frozen=True)
class ServeArguments:
    """Arguments of `tinyllm serve`."""

    model: str = opt(..., "bundled name, folder, hub id, RUN, RUN@best, or RUN@20 (a checkpoint)", place=True)
    host: str = opt("127.0.0.1", "address to listen on; others than loopback need an API key", may_be_empty=True)
    port: int = opt(8000, "port; 0 = a free one, which is printed", ge=0, le=65535)
    model_name: str | None = opt(None, "what clients call the model; not set = MODEL", shown="NAME")
    max_batch: int = opt(64, "completions decoded together", ge=1, shown=_N)
    max_length: int | None = opt(
        None, "tokens of prompt and completion; not set = the model's, at most 1024", ge=2, shown=_N
    )
    max_queue: int = opt(1024, "completions that may wait", ge=0, shown=_N)
    max_body_mb: float = opt(4.0, "largest request, in MB", ge=0.001, le=1024, shown="MB")
    dtype: Literal["auto", "bfloat16", "float32"] = opt("auto", "compute type; auto = bfloat16 where it is native")
    device: str = opt("auto", "auto, cpu, cuda, mps")
    threads: int | None = opt(None, "CPU threads; not set = one per core", ge=1, shown=_N)
    api_key: str | None = opt(
        None, "clients send it as a bearer token (or TINYLLM_API_KEY, which ps hides)", may_be_empty=True, shown="KEY"
    )
    admin_key: str | None = opt(
        None, "opens the routes that change weights (or TINYLLM_ADMIN_KEY)", may_be_empty=True, shown="KEY"
    )
    drain_s: float = opt(30.0, "seconds to finish what runs after SIGTERM", ge=0, shown="S")


@dataclass(frozen=True)
class PlanArguments:
    """Arguments of `tinyllm plan`."""

    gpus: int = opt(1, "devices in all: GPUs, or whole CPUs of machines", ge=1, shown=_N)
    engine_gpus: int = opt(0, "of these, devices of engines; 0 = the trainers sample themselves", ge=0, shown=_N)
    gpus_per_engine: int = opt(1, "devices of one engine", ge=1, shown=_N)
    max_lag: int | None = opt(
        None, "revisions a group may be old when trained; 0 = synchronous; not set = pool.max_lag", ge=0, shown=_N
    )
    run: str | None = opt(None, "a run: its configuration, lengths, shares and rates are the start", shown=_RUN)
    measure: bool = opt(False, "probe this machine for a few seconds: products, memory, disk")
    tflops: float | None = opt(None, "TFLOP/s of a matrix product on one device, in the model's dtype", gt=0, shown=_X)
    bandwidth_gb_s: float | None = opt(None, "GB/s of a device's memory", gt=0, shown=_X)
    gpu_memory_gib: float | None = opt(None, "GiB of a device", gt=0, shown=_X)
    network_gb_s: float | None = opt(None, "GB/s a device receives from the others", gt=0, shown=_X)
    disk_gb_s: float | None = opt(None, "GB/s of the disk that runs are written to", gt=0, shown=_X)
    verify_s: float | None = opt(None, "seconds of one verifier for one rollout", ge=0, shown=_X)
    prompt_tokens: float | None = opt(
        None, "mean length of prompts; not set = the run's, else data.max_prompt_tokens", gt=0, shown=_X
    )
    completion_tokens: float | None = opt(
        None, "mean length of completions; not set = the run's, else sampling.max_new_tokens", gt=0, shown=_X
    )
    efficiency: float | None = opt(
        None, "share of TFLOP/s and bandwidth that is reached; not set = 0.4", gt=0, le=1, shown=_X
    )
    live_share: float | None = opt(
        None, "share of tokens in groups with signal; not set = the run's, else 1", gt=0, le=1, shown=_X
    )
    config: str | None = opt(None, "the job's options from a file", shown="FILE.toml")
    json: bool = opt(False, "print the plan as JSON")


# Forms and explanations in their help

EVAL_USAGE = """\
  tinyllm eval MODEL_OR_RUN ... [--task NAME ...] [--samples K] [-o DIR]
  tinyllm eval MODEL_OR_RUN ... --data FILE.jsonl --verifier SPEC
  tinyllm eval RUN              the run's own held-out prompts
  tinyllm eval --plan --task NAME --difference 0.05

A model is a bundled name, a folder, a hub id, RUN (its final model), RUN@best, RUN@20 (a
checkpoint), or http://host:port/v1#model (an OpenAI-compatible server; the key is OPENAI_API_KEY).
The first is compared with each of the others."""
PLAN_USAGE = (
    "Every option of `tinyllm grpo` describes the job, as in --model NAME, --train.prompts_per_step 64, "
    "--sampling.max_new_tokens 1024, --lora.rank 16, --model.gradient_checkpointing, --objective.beta 0.04, "
    "--reward.workers 16 (or --pool.verifiers, the verifiers). MODEL may be a folder with nothing but a config.json."
)
