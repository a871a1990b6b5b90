"""TRL's GRPOTrainer on a CPU, step by step."""

from __future__ import annotations

import gc
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tinyllm.config.sections import GRPOConfig as OurConfig
from tinyllm.errors import ConfigError
from tinyllm.model import models
from tinyllm.model.memory import available_memory, native_bf16
from tinyllm.records import Prompt

KINDS = {
    "fp32": "fp32 weights",
    "autocast": "fp32 weights, bf16 autocast",
    "bf16": "bf16 weights",
}
PAGE = 64
"""Tokens of a page of the paged cache."""


@dataclass(frozen=True)
class TRLSetup:
    """One configuration of TRL to try."""

    kind: str
    """fp32, autocast or bf16."""
    device_batch: int
    paged: bool = False
    """Generation by transformers' continuous batching over a paged cache."""

    @classmethod
    def parse(cls, text: str) -> TRLSetup:
        """kind:batch or kind:batch:paged."""
        kind, _, rest = text.partition(":")
        batch, _, paged = rest.partition(":")
        if kind not in KINDS or not batch.isdigit() or paged not in ("", "paged"):
            raise ConfigError(
                f"TRL configuration {text!r}; write kind:batch or kind:batch:paged, kind one of {', '.join(KINDS)}"
            )
        return cls(kind, int(batch), bool(paged))

    def __str__(self) -> str:
        return f"{self.kind}:{self.device_batch}{':paged' if self.paged else ''}"


def require_trl() -> str:
    """The version of TRL. Raises ConfigError when it is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "TRL is not installed; install the extra: pip install -e '.[trl]' --constraint constraints.txt"
        )
    from importlib import metadata

    return metadata.version("trl")


def default_setups(batches: Sequence[int]) -> list[TRLSetup]:
    """What is tried: every kind with every device batch; bf16 only where the CPU multiplies it natively."""
    kinds = ("fp32", "autocast", "bf16") if native_bf16() else ("fp32",)
    return [TRLSetup(kind, batch) for kind in kinds for batch in batches]


def fits(model: Any, setup: TRLSetup, sequence: int) -> bool:
    """Whether weights, gradients, moments and the activations of one device batch fit into free memory.

    Activations per token and layer as in tinyllm.model.memory
    (8 H + 5 H_q + 4 I elements), without gradient checkpointing.
    """
    c = model.config.get_text_config()
    head_size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    per_layer = 8 * c.hidden_size + 5 * c.num_attention_heads * head_size + 4 * c.intermediate_size
    size = 4 if setup.kind == "fp32" else 2
    activations = setup.device_batch * sequence * c.num_hidden_layers * per_layer * size
    return 16 * model.num_parameters() + activations < 0.9 * available_memory("cpu")[0]


class TRLSide:
    """A GRPOTrainer with the objective, optimizer and sampling of a tinyllm configuration.

    Gradient checkpointing is off, nothing is logged or saved. reward has TRL's signature. stop_token_ids empty:
    completions have exactly max_new_tokens tokens.
    """

    def __init__(
        self,
        setup: TRLSetup,
        config: OurConfig,
        prompts: Sequence[Prompt],
        reward: Callable[..., list[float]],
        stop_token_ids: tuple[int, ...],
        folder: Path,
        steps: int,
    ) -> None:
        warnings.filterwarnings("ignore")
        transformers.logging.set_verbosity_error()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        from datasets import Dataset
        from transformers import PrinterCallback, TrainerCallback
        from trl import GRPOTrainer

        self.tokenizer = models.load_tokenizer(config.model.name)
        self.tokenizer.padding_side = "left"
        same = self.tokenizer(text=[p.text for p in prompts])["input_ids"]
        assert same == [list(p.token_ids) for p in prompts], "TRL would see other prompts"
        self.model = models.load_model(config.model.name, "bfloat16" if setup.kind == "bf16" else "float32", "cpu")
        self.model.generation_config.eos_token_id = list(stop_token_ids) or None
        rows = Dataset.from_list([{"prompt": p.text, "id": p.id} for p in prompts])
        self.trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=reward,
            args=_arguments(setup, config, max(len(p.token_ids) for p in prompts), folder, steps),
            train_dataset=rows,
            processing_class=self.tokenizer,
        )
        self.trainer.remove_callback(PrinterCallback)
        if not stop_token_ids:
            self.trainer.eos_token_ids = [-1]
            for generation in (self.model.generation_config, self.trainer.generation_config):
                generation.eos_token_id = None
            self.trainer.generation_kwargs["eos_token_id"] = None

        outer, updates = self, config.train.updates_per_batch
        self._between: Callable[[int, float], bool] = lambda step, seconds: True

        class Clock(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % updates == 0:
                    outer._begin = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % updates:
                    return
                seconds = time.perf_counter() - outer._begin
                if not outer._between(state.global_step // updates, seconds):
                    control.should_training_stop = True

        self.trainer.add_callback(Clock())
        self._begin = 0.0

    def train(self, between: Callable[[int, float], bool]) -> None:
        """Trains; after each step calls between(step, its seconds), and stops when that is false.

        A step is a batch of rollouts with all its updates, timed from sampling to new weights, without the data loader.
        """
        self._between = between
        self.trainer.train()

    def close(self) -> None:
        """Frees the memory."""
        del self.trainer, self.model
        gc.collect()


def _arguments(setup: TRLSetup, config: OurConfig, longest: int, folder: Path, steps: int) -> Any:
    from trl import GRPOConfig

    o, s, train = config.optimizer, config.sampling, config.train
    rows = train.prompts_per_step * s.group_size
    if rows % setup.device_batch:
        raise ConfigError(f"TRL device batch {setup.device_batch} does not divide the {rows} completions of a step")
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        seed=config.seed,
        bf16=setup.kind == "autocast",
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=setup.device_batch,
        gradient_accumulation_steps=rows // setup.device_batch,
        num_generations=s.group_size,
        max_completion_length=s.max_new_tokens,
        temperature=s.temperature,
        top_p=1.0,
        top_k=0,
        beta=config.objective.axes.beta,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        num_iterations=train.updates_per_batch,
        use_transformers_continuous_batching=setup.paged,
        transformers_continuous_batching_config=_cache(rows, longest, s.max_new_tokens) if setup.paged else None,
        max_steps=steps * train.updates_per_batch,
        learning_rate=o.lr,
        lr_scheduler_type=o.schedule,
        warmup_steps=o.warmup_steps,
        optim="adamw_torch_fused",
        adam_beta1=o.betas[0],
        adam_beta2=o.betas[1],
        adam_epsilon=o.eps,
        weight_decay=o.weight_decay,
        max_grad_norm=o.clip_norm,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _cache(rows: int, longest: int, new: int) -> dict[str, int]:
    """A paged cache that holds every sequence of a step (unset, it takes most of the machine's free memory)."""
    pages = -(-(longest + new) // PAGE) + 1
    return {"page_size": PAGE, "num_blocks": rows * pages, "max_batch_tokens": max(rows, min(4096, rows * longest))}


def random_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """A different value for every completion, so that every group has signal."""
    return torch.rand(len(completions)).tolist()
