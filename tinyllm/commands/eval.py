"""`tinyllm eval`: words to an evaluation. Help and mistakes in options answer at once, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm.commands.text import option_lines
from tinyllm.config.io import flatten, overlay, parse_overrides, shortcut
from tinyllm.config.options import split_list
from tinyllm.errors import ConfigError
from tinyllm.evals.config import SuiteConfig

USAGE = """
  tinyllm eval MODEL_OR_RUN ... [--task NAME ...] [--samples K] [-o DIR]
  tinyllm eval MODEL_OR_RUN ... --data FILE.jsonl --verifier SPEC
  tinyllm eval RUN              the run's own held-out prompts
  tinyllm eval --plan --task NAME --difference 0.05

A model is a bundled name, a folder, a hub id, RUN (its final model), RUN@best, RUN@20 (a checkpoint), or
http://host:port/v1#model (an OpenAI-compatible server; the key is OPENAI_API_KEY).
The first is compared with each of the others. A section may be left out: --max-new-tokens 64."""


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises the errors of errors.py."""
    if {"-h", "--help"} & set(words):
        print(help_text())
        return 0
    names, given, plan_only = parse(words)
    from tinyllm.evals.view import show, show_plan
    from tinyllm.view.progress import ReplayProgress, console

    if plan_only:
        from tinyllm.evals.suite import plan

        show_plan(plan(overlay(SuiteConfig(), given)), console())
        return 0
    display = ReplayProgress()
    display.on_phase("starting")
    try:
        from tinyllm.evals.run import evaluate

        result = evaluate(names, given, on_phase=display.on_phase)
    finally:
        display.close()
    show(result.report, console())
    print(f"written  {result.path}")
    return 0


def parse(words: Sequence[str]) -> tuple[list[str], dict[str, Any], bool]:
    """(models, options by dotted name, whether only to plan). Raises ConfigError."""
    names: list[str] = []
    rest: list[str] = []
    given_tasks: list[str] = []
    verifiers: list[str] = []
    plan_only = False
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--plan":
            plan_only = True
            continue
        if word == "-o":
            word = "--out"
        if not word.startswith("-"):
            names.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            if not queue or queue[0].startswith("--") or queue[0] == "-o":
                raise ConfigError(f"{word} needs a value; see: tinyllm eval --help")
            value = queue.pop(0)
        if name == "--task":
            given_tasks += split_list(value)
        elif name == "--verifier":  # a spec has commas of its own
            verifiers.append(value)
        else:
            rest.append(f"{name}={value}" if name.startswith("--") else name)
    flat = parse_overrides(rest, SuiteConfig)
    if given_tasks:
        flat["task"] = tuple(given_tasks)
    if verifiers:
        flat["reward.functions"] = tuple(verifiers)
    config = overlay(SuiteConfig(), flat)
    if plan_only and not (config.task or config.data.file or config.data.dataset):
        raise ConfigError("--plan needs a suite: --task NAME, or --data FILE --verifier SPEC")
    if not plan_only and not names:
        raise ConfigError("no model to evaluate; name one, as in: tinyllm eval smollm2-135m-instruct --task arithmetic")
    return names, flat, plan_only


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
    """Python keywords as dotted name -> value: any option by its name, or a section; `data` is a file or a dataset."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name == "task":
            flat[name] = tuple(split_list(value)) if isinstance(value, str) else tuple(value)
        elif name in ("data", "reward", "verifier") and not isinstance(value, Mapping):
            flat |= shortcut("data" if name == "data" else "reward", value)
        else:
            flat |= flatten({name: value}, SuiteConfig, loose=True)
    return flat


def help_text() -> str:
    """Every option with its default and meaning, section by section."""
    about = "Evaluate models on a frozen suite: accuracy with intervals, and paired comparisons."
    return "\n".join([about, USAGE, *option_lines(SuiteConfig)])
