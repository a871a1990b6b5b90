"""The stages of the capstone: which runs, with which settings. A stage that is finished is not run again.

base -> 1-sft   worked examples
     -> 2-pairs the SFT model samples (a GRPO run at learning rate 0); its rollouts make the pairs
     -> 3-dpo   better against worse completions
     -> 4-grpo  verifiable reward
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.callbacks import Callback
from tinyllm.capstone.rows import SYSTEM_PROMPT, VERIFIER, CapstoneRows
from tinyllm.config.io import make_config
from tinyllm.config.sections import Config, DPOConfig, GRPOConfig, SFTConfig
from tinyllm.post.run import resume, train
from tinyllm.record.rundir import MANIFEST, RunDir

MAX_NEW_TOKENS = 22
"""The longest right answer, for example <think>192-9</think><answer>183</answer> with its end, has 20."""
WARMUP_STEPS = 4
"""Of GRPO: Adam's first steps follow the noise of a few batches, and cost accuracy at the full learning rate."""


@dataclass(frozen=True)
class CapstonePlan:
    """Sizes, learning rates and seed of a capstone. The defaults take about 20 minutes on two cores without bf16."""

    model: str = "smollm2-135m-instruct"
    seed: int = 0
    threads: int | None = None
    examples: int = 360
    prompts: int = 4000
    shifted: int = 100
    epochs: float = 2.0
    sft_lr: float = 1e-4
    pair_steps: int = 3
    dpo_lr: float = 2e-6
    grpo_steps: int = 54
    grpo_lr: float = 1.5e-5
    prompts_per_step: int = 16
    group_size: int = 8
    monitored: int = 40
    """Held-out prompts for the curves of training; the evaluation uses all."""


@dataclass(frozen=True)
class Stage:
    """One run."""

    name: str
    config: Config
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def finished(self) -> bool:
        """Whether the run trained its last step and saved its model."""
        if not (self.folder / MANIFEST).exists() or not self.model.is_dir():
            return False
        run = RunDir.read(self.folder)
        return bool(run.metrics("train")) and run.metrics("train")[-1]["step"] == run.config.train.steps


def stages(plan: CapstonePlan, rows: CapstoneRows, out: Path) -> list[Stage]:
    """The runs, in order; each starts from the model of a run before it."""

    def stage(name: str, defaults: Config, start: str | Path, **options: Any) -> Stage:
        run = {"threads": plan.threads, "checkpoint_every": 1000, "dir": str(out / name)}
        return Stage(name, make_config(defaults, model=str(start), run=run, **options), out / name)

    watched = {"every": 12, "prompts": plan.monitored}
    batch = {"prompts_per_step": plan.prompts_per_step}
    sampled: dict[str, Any] = {
        "data": {"file": str(rows.prompts), "held_out": str(rows.held_out), "system_prompt": SYSTEM_PROMPT},
        "reward": {"functions": (VERIFIER,)},
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS, "group_size": plan.group_size},
    }
    sft = stage(
        "1-sft",
        SFTConfig(),
        plan.model,
        seed=plan.seed,
        eval=watched,
        data={"file": str(rows.examples), "system_prompt": SYSTEM_PROMPT},
        optimizer={"lr": plan.sft_lr},
        train={"epochs": plan.epochs},
    )
    pairs = stage(
        "2-pairs",
        GRPOConfig(),
        sft.model,
        **sampled,
        seed=plan.seed,
        eval={"every": 0, "prompts": 1},
        optimizer={"lr": 0.0},
        train={**batch, "steps": plan.pair_steps},
    )
    dpo = stage(
        "3-dpo",
        DPOConfig(),
        sft.model,
        seed=plan.seed,
        eval=watched,
        data={"from_run": str(pairs.folder)},
        optimizer={"lr": plan.dpo_lr},
        train={"batch_size": 8},
    )
    grpo = stage(
        "4-grpo",
        GRPOConfig(),
        dpo.model,
        **sampled,
        seed=plan.seed + 1,
        eval=watched,
        optimizer={"lr": plan.grpo_lr, "warmup_steps": min(WARMUP_STEPS, plan.grpo_steps // 4)},
        train={**batch, "steps": plan.grpo_steps},
    )
    return [sft, pairs, dpo, grpo]


def run_stages(
    all_stages: Sequence[Stage], callbacks: Callable[[], Sequence[Callback]], say: Callable[[str], None]
) -> None:
    """Run what is not finished, in order. Raises the errors of the runs."""
    for number, stage in enumerate(all_stages, 1):
        title = f"stage {number} of {len(all_stages)}: {stage.name}"
        if stage.finished:
            say(f"{title} is done already")
            continue
        say(title)
        if (stage.folder / MANIFEST).exists():
            resume(stage.folder, callbacks=callbacks())
        else:
            train(stage.config, callbacks=callbacks())
        for checkpoint in (stage.folder / "checkpoints").iterdir():  # gigabytes, and the stage is done
            shutil.rmtree(checkpoint)
