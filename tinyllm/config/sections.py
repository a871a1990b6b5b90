"""The configuration of a run: frozen dataclasses. One line per option says its default, its bounds and what it means.

io.py reads, writes and checks them (TOML files, command-line overrides, strict keys).
None means "not set": the preset, the task or the machine decides, as the option's text says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Literal

from tinyllm.axes import AXES, UNNAMED, ObjectiveAxes, PresetName, resolve


def opt(
    default: Any,
    help: str,
    *,
    may_be_empty: bool = False,
    place: bool = False,
    short: str = "",
    shown: str = "",
    **bounds: float,
) -> Any:
    """A dataclass field with its one-line description and bounds (ge, gt, le, lt; of every element of a tuple).

    may_be_empty: "" is a value, not an unset variable of the shell. The rest is for a command's own arguments. place:
    positional, without a name; short: another name, of one letter; shown: how help writes the value. A default of ...
    means that the user must give a value.
    """
    metadata = {"help": help, "bounds": bounds, "may_be_empty": may_be_empty}
    metadata |= {"place": place, "short": short, "shown": shown}
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    name: str = opt("smollm2-135m-instruct", "bundled model, folder, or Hugging Face hub id")
    dtype: Literal["auto", "bfloat16", "float32"] = opt("auto", "compute type; auto = bfloat16 where it is native")
    device: Literal["auto", "cpu", "cuda", "mps"] = opt("auto", "where to run; auto = an accelerator if there is one")
    reference: str | None = opt(None, "model the KL is measured against; not set = the start weights, frozen")
    gradient_checkpointing: bool = opt(False, "recompute activations in backward: less memory, about a third slower")


@dataclass(frozen=True)
class LoraConfig:
    """Train small adapters instead of all weights."""

    rank: int = opt(0, "rank of the adapters; 0 = train all weights", ge=0)
    alpha: float = opt(16.0, "scale of the adapters: alpha / rank times their product", gt=0)
    targets: tuple[str, ...] = opt((), "layers that get an adapter, by name; empty = every linear layer but the head")


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from."""

    task: str = opt("arithmetic", "a task and its settings (see: tinyllm tasks); ignored with file or dataset")
    file: str | None = opt(None, "your own rows, .jsonl or .parquet")
    dataset: str | None = opt(None, "your own rows from `datasets`: name, name:config or name:config:split")
    columns: Mapping[str, str] = opt({}, "our column = yours, for example prompt=question,answer=solution")
    prompt_rule: Literal["auto", "chat", "raw"] = opt("auto", "chat template or raw text; auto = chat if there is one")
    system_prompt: str | None = opt(None, "system message put before every chat prompt", may_be_empty=True)
    seed: int | None = opt(None, "seed of the order of prompts only; not set = the run's seed", ge=0)
    held_out: float | str = opt(0.1, "kept for evaluation: a share of your rows, or a file of rows", ge=0, lt=1)
    max_prompt_tokens: int = opt(512, "longest prompt, template included", ge=1)
    on_bad_row: Literal["refuse", "skip"] = opt("refuse", "what to do with rows that cannot be used")


@dataclass(frozen=True)
class RewardConfig:
    """How completions are judged."""

    functions: tuple[str, ...] = opt((), "module:function, or verifiers with settings; empty = the task's own verifier")
    weights: tuple[float, ...] = opt((), "one weight per function; empty = 1 each")
    combine: Literal["sum", "product", "gate"] = opt(
        "sum", "how several functions make one reward; gate = the first times the weighted sum of the others"
    )
    allow_probes: tuple[str, ...] = opt((), "attacks on the verifier that may pay (tinyllm probe lists them)")
    timeout_s: float = opt(10.0, "seconds one verification may take; later it is marked unscored", gt=0)
    workers: int = opt(2, "processes that verify", ge=1)


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn."""

    group_size: int = opt(8, "completions per prompt; their mean reward is the baseline", ge=2)
    max_new_tokens: int = opt(24, "longest completion, stop token included", ge=1)
    temperature: float = opt(1.0, "1 = the model's own distribution", gt=0)
    stop_strings: tuple[str, ...] = opt((), "texts that end a completion, besides the stop tokens")
    max_batch: int = opt(128, "completions decoded together", ge=1)


@dataclass(frozen=True)
class EngineConfig:
    """Where completions are sampled: in this process, or on servers (keys: TINYLLM_API_KEY, TINYLLM_ADMIN_KEY)."""

    urls: tuple[str, ...] = opt((), "servers, as in http://127.0.0.1:8000 or http://...#MODEL; empty = in this process")
    folder: str | None = opt(None, "folder from which servers load new weights; not set = the run directory")
    max_concurrent: int = opt(64, "requests to servers at the same time", ge=1)
    deadline_s: float = opt(
        600.0, "seconds for a completion or update of a server, all attempts together, or a group of a pool", gt=0
    )
    max_gap: float = opt(
        0.2, "with servers: stop when sampler and trainer differ by more nats per token in a step; 0 = never", ge=0
    )


@dataclass(frozen=True)
class PoolConfig:
    """Sampling and verifying in processes of their own, while the trainer trains (needs the extra `cluster`)."""

    engines: int = opt(0, "processes that sample, of one CPU thread each; 0 = no pool, or servers (engine.urls)", ge=0)
    verifiers: int = opt(0, "processes that verify; 0 = verify in the trainer's process", ge=0)
    max_lag: int = opt(0, "optimizer steps by which a token's weights may be older than the trained ones", ge=0)
    ray_address: str | None = opt(None, "a running Ray cluster, as in 10.0.0.1:6379; not set = one of our own here")


def _axis_options() -> list[tuple[str, Any, Any]]:
    """One option per row of the table of axes, in its order; None is the preset's choice."""
    rows = []
    for axis in AXES.values():
        bound: dict[str, Any]
        kind = Literal[tuple(c for c in axis.choices if c not in axis.report_only)] if axis.choices else axis.type
        if axis.type == int | None:
            bound, kind = {"ge": 1.0}, int
        elif axis.choices:
            bound = {}
        else:
            bound = {"ge": 0.0} if axis.above is None else {"gt": axis.above}
        unset = "" if "not set" in axis.meaning else "; not set = the preset's"
        rows.append((axis.name, kind | None, opt(None, axis.meaning + unset, **bound)))
    return rows


_AXES: Any = make_dataclass(
    "_AXES", [("preset", PresetName | None, None), *_axis_options()], frozen=True, namespace={"__module__": __name__}
)


@dataclass(frozen=True)
class ObjectiveConfig(_AXES):
    """What is minimized: a preset, and one option for each axis in which the run differs (docs/objectives.md)."""

    preset: PresetName | None = opt(None, "row of the table of objectives; not set = grpo with beta = 0")

    @property
    def axes(self) -> ObjectiveAxes:
        """The resolved choice on each axis: the one given, else the preset's."""
        return resolve(self.preset, {name: getattr(self, name) for name in AXES})

    @property
    def name(self) -> PresetName:
        """The preset, also where the run names none."""
        return self.preset or UNNAMED


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated."""

    name: Literal["adamw", "sgd"] = opt("adamw", "the optimizer")
    lr: float = opt(2e-5, "learning rate, at its peak", ge=0)
    betas: tuple[float, float] = opt((0.9, 0.95), "AdamW: decay of the mean of gradients and of squares", ge=0, lt=1)
    weight_decay: float = opt(0.0, "decoupled decay of weights per unit of learning rate", ge=0)
    clip_norm: float = opt(1.0, "largest norm of the whole gradient; 0 = no clipping", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = opt("linear", "learning rate after warm-up; to 0 at the end")
    warmup_steps: int = opt(0, "steps over which the learning rate rises from 0", ge=0)


@dataclass(frozen=True)
class TrainConfig:
    """How much is trained, in which portions."""

    steps: int = opt(36, "batches of rollouts to train on", ge=0)
    prompts_per_step: int = opt(16, "prompts in a batch; each gets group_size completions", ge=1)
    updates_per_batch: int = opt(1, "optimizer updates on each batch of rollouts, each over the whole batch", ge=1)
    tokens_per_microbatch: int = opt(1024, "distinct tokens in one forward and backward pass; bounds memory", ge=1)
    dynamic_sampling: bool | None = opt(None, "draw new prompts for groups without signal; not set = the preset's")
    overlong: float | str | None = opt(
        None, "last share of max_new_tokens over which the reward falls by 1; mask = drop cut completions", ge=0, lt=1
    )

    @property
    def mask_truncated(self) -> bool:
        """Whether completions cut by the length limit are left out of loss and baseline."""
        return isinstance(self.overlong, str)

    @property
    def overlong_buffer(self) -> float | None:
        """The last share of max_new_tokens over which the reward falls by 1; 0 = off, None = the preset's."""
        if not isinstance(self.overlong, str):
            return self.overlong
        share = self.overlong.partition(",")[2]
        return float(share) if share else None


@dataclass(frozen=True)
class ExampleStopConfig:
    """What ends training before its last step."""

    evals_without_best: int = opt(0, "this many evaluations without a new best; 0 = never", ge=0)
    bad_steps: int = opt(3, "this many steps in a row with a non-finite loss, or nothing scored", ge=1)


@dataclass(frozen=True)
class StopConfig(ExampleStopConfig):
    """What ends training before its last step."""

    refills: int = opt(4, "a step that lacks signal after this many refills by dynamic sampling", ge=0)


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy on held-out prompts (greedy)."""

    every: int = opt(12, "steps between evaluations; 0 = only before and after", ge=0)
    prompts: int = opt(0, "held-out prompts to use; 0 = all", ge=0)


@dataclass(frozen=True)
class RunConfig:
    """What is written where."""

    dir: str | None = opt(None, "run directory; not set = runs/<date>-<time>")
    checkpoint_every: int = opt(20, "steps between checkpoints; the last step always has one", ge=1)
    keep_checkpoints: int = opt(2, "checkpoints kept", ge=1)
    threads: int | None = opt(None, "CPU threads; not set = one per core", ge=1)
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = opt((), "services that get the metrics too")


@dataclass(frozen=True)
class GRPOConfig:
    """Everything that decides a run."""

    kind: ClassVar[str] = "grpo"
    seed: int = opt(0, "seed of everything random: order of prompts, sampling, new weights", ge=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.5e-5))
    train: TrainConfig = field(default_factory=TrainConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)


# Training on completions that are given: SFT and DPO


@dataclass(frozen=True)
class ExampleDataConfig:
    """Where the rows come from."""

    file: str | None = opt(None, "your rows, .jsonl or .parquet")
    dataset: str | None = opt(None, "your rows from `datasets`: name, name:config or name:config:split")
    columns: Mapping[str, str] = opt({}, "our column = yours, for example prompt=question,completion=answer")
    prompt_rule: Literal["auto", "chat", "raw"] = opt("auto", "chat template or raw text; auto = chat if there is one")
    system_prompt: str | None = opt(None, "system message put before every chat prompt", may_be_empty=True)
    seed: int | None = opt(None, "seed of the order of rows only; not set = the run's seed", ge=0)
    held_out: float | str = opt(0.1, "kept for evaluation: a share of your rows, or a file of rows", ge=0, lt=1)
    max_tokens: int = opt(1024, "longest row: prompt and completion together", ge=2)
    on_bad_row: Literal["refuse", "skip"] = opt("refuse", "what to do with rows that cannot be used")


@dataclass(frozen=True)
class SFTDataConfig(ExampleDataConfig):
    """Rows with prompt and completion, or with messages (a chat)."""

    turns: Literal["last", "all"] = opt("last", "of a chat: train on its last answer, or on every assistant turn")


@dataclass(frozen=True)
class DPODataConfig(ExampleDataConfig):
    """Rows with prompt, chosen and rejected, or the recorded rollouts of a run."""

    from_run: str | None = opt(None, "run directory: pairs of its rollouts, the better rewarded one chosen")
    pairs_per_group: int = opt(
        1, "pairs of each group of from_run: best with worst, second with second last, ...", ge=1
    )


@dataclass(frozen=True)
class DPOObjectiveConfig:
    """What is minimized: the sigmoid loss of Direct Preference Optimization."""

    beta: float = opt(0.1, "how strongly the policy is held to the reference", gt=0)
    label_smoothing: float = opt(0.0, "chance that a pair is labelled the wrong way round", ge=0, lt=0.5)
    length_normalized: bool = opt(False, "divide each log-ratio by the completion's number of tokens")


@dataclass(frozen=True)
class ExampleTrainConfig:
    """How much is trained, in which portions."""

    epochs: float = opt(1.0, "how often every row is trained on; used when steps is not set", gt=0)
    steps: int = opt(0, "batches to train on; 0 = what epochs makes", ge=0)
    batch_size: int = opt(16, "rows in a batch", ge=1)
    tokens_per_microbatch: int = opt(2048, "distinct tokens in one forward and backward pass; bounds memory", ge=1)


@dataclass(frozen=True)
class SFTConfig:
    """Everything that decides a run of supervised fine-tuning."""

    kind: ClassVar[str] = "sft"
    seed: int = opt(0, "seed of everything random: order of rows, new weights", ge=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: ExampleTrainConfig = field(default_factory=ExampleTrainConfig)
    stop: ExampleStopConfig = field(default_factory=ExampleStopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True)
class DPOConfig:
    """Everything that decides a run of Direct Preference Optimization."""

    kind: ClassVar[str] = "dpo"
    seed: int = opt(0, "seed of everything random: order of pairs, new weights", ge=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DPODataConfig = field(default_factory=DPODataConfig)
    objective: DPOObjectiveConfig = field(default_factory=DPOObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    train: ExampleTrainConfig = field(default_factory=ExampleTrainConfig)
    stop: ExampleStopConfig = field(default_factory=ExampleStopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)


Config = GRPOConfig | SFTConfig | DPOConfig
CONFIGS: Mapping[str, type[Config]] = {kind.kind: kind for kind in (GRPOConfig, SFTConfig, DPOConfig)}
"""The kinds of run, each its own command."""


SHORTCUTS = {
    "model": "model.name",
    "reward": "reward.functions",
    "reference": "model.reference",
    "preset": "objective.preset",
    "from_run": "data.from_run",
    "out": "run.dir",
}
"""Short names, beside `data` (a file or a datasets name); any other section may be left out where that is plain."""
