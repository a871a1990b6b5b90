"""The options of an evaluation: its prompts, how completions are sampled, how they are judged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from tinyllm.config.sections import DataConfig, GRPOConfig, RewardConfig, opt


@dataclass(frozen=True)
class MachineConfig:
    """Device, threads and batches. Of these options only the compute type can change a number."""

    dtype: Literal["auto", "bfloat16", "float32"] = opt("auto", "compute type; auto = bfloat16 where it is native")
    device: Literal["auto", "cpu", "cuda", "mps"] = opt("auto", "where to run; auto = an accelerator if there is one")
    threads: int | None = opt(None, "CPU threads; not set = one per core", ge=1)
    max_batch: int = opt(128, "completions decoded together", ge=1)


@dataclass(frozen=True)
class AnswerConfig:
    """How completions are sampled."""

    samples: int = opt(1, "completions per prompt", ge=1)
    max_new_tokens: int = opt(24, "longest completion, stop token included", ge=1)
    temperature: float | None = opt(None, "0 = greedy; not set = 0 for one sample, 1 for several", ge=0)
    top_k: int = opt(0, "draw from the k likeliest tokens; 0 = off", ge=0)
    top_p: float = opt(1.0, "draw from the likeliest tokens that hold this much probability; 1 = off", gt=0, le=1)
    min_p: float = opt(0.0, "drop tokens below this share of the likeliest one; 0 = off", ge=0, le=1)
    stop_strings: tuple[str, ...] = opt((), "texts that end a completion, besides the stop tokens")

    @property
    def drawn_at(self) -> float:
        """The temperature completions are drawn at."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else 1.0


@dataclass(frozen=True)
class SuiteConfig:
    """Everything that decides an evaluation but the models."""

    kind: ClassVar[str] = "eval"
    task: tuple[str, ...] = opt((), "tasks to evaluate on: arithmetic, gym:NAME (see: tinyllm tasks)")
    prompts: int = opt(0, "prompts of each task to use, the first ones; 0 = all", ge=0)
    clusters: str | None = opt(None, "column whose equal values mark prompts that depend on each other")
    train: str | None = opt(None, "training rows to look for in the suite, .jsonl or .parquet, besides those of runs")
    seed: int = opt(0, "seed of sampling", ge=0)
    difference: float = opt(0.05, "with --plan: the difference that should be seen", gt=0, le=1)
    out: str | None = opt(None, "folder to write to; not set = evals/<date>-<time>")
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(held_out=0.0))
    reward: RewardConfig = field(default_factory=RewardConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)


def suite_of_run(config: GRPOConfig) -> SuiteConfig:
    """A run's own held-out prompts, answered and judged as its evaluations were."""
    sampling = config.sampling
    return SuiteConfig(
        prompts=config.eval.prompts,
        data=replace(config.data, seed=None),
        reward=config.reward,
        answer=AnswerConfig(max_new_tokens=sampling.max_new_tokens, stop_strings=sampling.stop_strings),
    )
