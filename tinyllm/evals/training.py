"""Looks for training prompts in the suite: those of the runs among the models, and those of --train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinyllm import tasks
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import DataError, TinyLLMError
from tinyllm.evals.config import SuiteConfig
from tinyllm.evals.overlap import THRESHOLD, find_overlap, prompt_text
from tinyllm.evals.suite import NO_LIMIT, PlainTokenizer, Task
from tinyllm.model.refs import ModelRef
from tinyllm.record.rundir import RunDir
from tinyllm.tasks.files import read_file, rename
from tinyllm.tasks.recipes import RECIPES


def suite_overlap(
    config: SuiteConfig, subjects: Sequence[ModelRef], suite: Sequence[Task]
) -> tuple[dict[str, Any], list[str]]:
    """(what was compared and found, warnings about what could not be read). Raises DataError for --train."""
    checked: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    warnings: list[str] = []
    for name, texts in _training_prompts(config, subjects, warnings):
        checked.append({"train": name, "prompts": len(texts)})
        for task in suite:
            for match in find_overlap([prompt_text(p.row["prompt"]) for p in task.prompts], texts):
                prompt = task.prompts[match.prompt]
                line = {
                    "task": task.name,
                    "prompt_id": prompt.id,
                    "kind": match.kind,
                    "similarity": match.similarity,
                    "prompt": prompt_text(prompt.row["prompt"]),
                    "train": name,
                    "train_prompt": match.train,
                }
                found.setdefault(prompt.id, line)
    return {"threshold": THRESHOLD, "checked": checked, "found": list(found.values())}, warnings


def _training_prompts(
    config: SuiteConfig, subjects: Sequence[ModelRef], warnings: list[str]
) -> Iterator[tuple[str, list[str]]]:
    if config.train:
        yield config.train, _prompts_of_file(config)
    runs = {str(subject.run.path): subject.run for subject in subjects if subject.run is not None}
    for name, run in runs.items():
        try:
            rows = _rows_of_run(run)
        except TinyLLMError as error:
            warnings.append(f"the training prompts of {name} cannot be read, so they were not looked for: {error}")
            continue
        yield name, [prompt_text(row["prompt"]) for row in rows]


def _rows_of_run(run: RunDir) -> list[Mapping[str, Any]]:
    """The rows a run trains on: for GRPO those it draws prompts from, for SFT and DPO those in its record."""
    if not isinstance(run.config, GRPOConfig):
        recorded = (group.prompt for step in run.steps() for group in run.read_groups(step))
        prompts = {prompt.id: prompt for prompt in recorded}.values()
        return [{"prompt": prompt.messages or prompt.row["prompt"]} for prompt in prompts]  # one for each turn
    plain = replace(run.config, data=replace(run.config.data, max_prompt_tokens=NO_LIMIT))
    return [prompt.row for prompt in tasks.load(plain, PlainTokenizer()).train]


def _prompts_of_file(config: SuiteConfig) -> list[str]:
    """The prompts of --train, read with the columns of the suite's own rows."""
    assert config.train is not None
    recipe = next((RECIPES[name] for name in config.task if name in RECIPES), None)
    columns = {**(recipe.columns if recipe else {}), **config.data.columns}
    wanted = {ours: theirs for ours, theirs in columns.items() if ours == "prompt"}
    rows = [(place, rename(row, wanted, place)) for place, row in read_file(config.train)]
    for place, row in rows:
        if not row.get("prompt"):
            raise DataError(f"--train: {place} has no prompt; map its column with --data.columns prompt=NAME")
    return [prompt_text(row["prompt"]) for _, row in rows]
