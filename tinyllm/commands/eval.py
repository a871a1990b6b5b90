"""`tinyllm eval`: evaluate models. Mistakes in options are told before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm.commands.arguments import EvalArguments
from tinyllm.config.io import flat_keywords, overlay
from tinyllm.config.options import split_list
from tinyllm.errors import ConfigError
from tinyllm.evals.config import SuiteConfig


def main(given: EvalArguments, options: Mapping[str, Any]) -> int:
    """Run the command and return its exit code. Raises the errors of errors.py."""
    flat = suite_options(given, options)
    from tinyllm.evals.view import show, show_plan
    from tinyllm.view.progress import ReplayProgress, console

    if given.plan:
        from tinyllm.evals.suite import plan

        show_plan(plan(overlay(SuiteConfig(), flat)), console())
        return 0
    display = ReplayProgress()
    display.on_phase("starting")
    try:
        from tinyllm.evals.run import evaluate

        result = evaluate(list(given.models), flat, on_phase=display.on_phase)
    finally:
        display.close()
    show(result.report, console())
    print(f"written  {result.path}")
    return 0


def suite_options(given: EvalArguments, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of SuiteConfig by dotted name, with those that have a short spelling of their own. Raises ConfigError."""
    flat = dict(options)
    short = {"task": given.task, "reward.functions": given.verifier, "out": given.out}
    flat |= {name: value for name, value in short.items() if value}
    config = overlay(SuiteConfig(), flat)
    if given.plan and not (config.task or config.data.file or config.data.dataset):
        raise ConfigError("--plan needs a suite: --task NAME, or --data FILE --verifier SPEC")
    if not given.plan and not given.models:
        raise ConfigError("no model to evaluate; name one, as in: tinyllm eval smollm2-135m-instruct --task arithmetic")
    return flat


def evaluate(
    models: str | Path | Sequence[str | Path], reward: Callable[..., Any] | str | None = None, **given: Any
) -> Any:
    """tinyllm.evaluate: the same as the command, from Python, without its table."""
    from tinyllm.evals import run

    if isinstance(reward, str):
        given["reward"], reward = reward, None
    names = [models] if isinstance(models, str | Path) else list(models)
    return run.evaluate([str(name) for name in names], flat_options(given), reward=reward)


def flat_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Python keywords as options of SuiteConfig; `verifier` is another name of `reward`, and `task` may be "a,b"."""
    known = {("reward" if name == "verifier" else name): value for name, value in given.items()}
    if isinstance(known.get("task"), str):
        known["task"] = split_list(known["task"])
    return flat_keywords(known, SuiteConfig)
