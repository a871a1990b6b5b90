"""tinyllm: train language models with group relative policy optimization on verifiable rewards.

import tinyllm
result = tinyllm.grpo(model="smollm2-135m-instruct", data="rows.jsonl", reward=my_reward, steps=40)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm.callbacks import Callback, RunResult
    from tinyllm.config.sections import DPOConfig, GRPOConfig, SFTConfig
    from tinyllm.evals.run import EvalResult

__version__ = "0.1.0"


def grpo(
    config: GRPOConfig | None = None,
    *,
    reward: str | Callable[..., Any] | None = None,
    callbacks: Sequence[Callback] | None = None,
    **options: Any,
) -> RunResult:
    """Train; returns paths and the first and last evaluation. The same as `tinyllm grpo`, from Python.

    config: where to start from (default: the arithmetic job). options: any option, by its name without the section
    where that is plain (steps=40), or a section (sampling={"group_size": 4}); `data` is a file or a dataset's name.
    reward: a reward function, or "module:function". callbacks: default is the progress display.
    Raises the errors of tinyllm.errors, whose messages name the option, its value and the remedy.
    """
    from tinyllm.config.sections import GRPOConfig

    if isinstance(reward, str):
        options["reward"], reward = reward, None
    return _train(config or GRPOConfig(), reward, callbacks, options)


def sft(config: SFTConfig | None = None, *, callbacks: Sequence[Callback] | None = None, **options: Any) -> RunResult:
    """Supervised fine-tuning on completions that are given. The same as `tinyllm sft`, from Python; see grpo."""
    from tinyllm.config.sections import SFTConfig

    return _train(config or SFTConfig(), None, callbacks, options)


def dpo(config: DPOConfig | None = None, *, callbacks: Sequence[Callback] | None = None, **options: Any) -> RunResult:
    """Direct Preference Optimization on pairs. The same as `tinyllm dpo`, from Python; see grpo."""
    from tinyllm.config.sections import DPOConfig

    return _train(config or DPOConfig(), None, callbacks, options)


def _train(
    config: Any, reward: Callable[..., Any] | None, callbacks: Sequence[Callback] | None, options: dict[str, Any]
) -> RunResult:
    from tinyllm.config.io import make_config
    from tinyllm.post import run
    from tinyllm.view.callbacks import run_callbacks

    return run.train(make_config(config, **options), reward=reward, callbacks=run_callbacks(callbacks))


def resume(
    run_dir: str | Path,
    *,
    reward: Callable[..., Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> RunResult:
    """Go on with a run that was stopped or killed; it ends as it would have without. `tinyllm grpo --resume`.

    reward: needed only where the run was started with a function that cannot be imported by its name.
    engine: where servers have moved to, as {"urls": ("http://127.0.0.1:8001",)}; no other option may change.
    Raises the errors of tinyllm.errors.
    """
    from tinyllm.post import run
    from tinyllm.view.callbacks import run_callbacks

    return run.resume(run_dir, reward=reward, engine=engine, callbacks=run_callbacks(callbacks))


def evaluate(
    models: str | Path | Sequence[str | Path], *, reward: str | Callable[..., Any] | None = None, **options: Any
) -> EvalResult:
    """Evaluate models on a frozen suite and write the results; `tinyllm eval`, without its table.

    models: bundled names, folders, hub ids, runs, RUN@best, RUN@20, servers. options: any option of `tinyllm eval
    --help` by its name (task="arithmetic", samples=8, out="folder"); without task or data, a run's held-out prompts.
    reward: a reward function, or "module:function". The result's `report` is what eval.json holds.
    Raises the errors of tinyllm.errors.
    """
    from tinyllm.commands import eval as command

    return command.evaluate(models, reward, **options)
