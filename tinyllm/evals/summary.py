"""eval.json: every number of an evaluation, and the warnings that belong to the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyllm.config.io import to_dict
from tinyllm.evals import measure
from tinyllm.evals.config import SuiteConfig
from tinyllm.evals.suite import Task, task_hash
from tinyllm.record.hashing import hash_json
from tinyllm.rewards import RewardJudge

ALL = "all tasks"
CUT_SHARE = 0.1
"""The share of completions cut by the length limit that is worth a warning."""
Rows = Sequence[measure.Answers]


def summary(
    config: SuiteConfig,
    suite: Sequence[tuple[Task, RewardJudge]],
    kept: Sequence[Sequence[str]],
    weights: Mapping[str, str | None],
    answers: Sequence[Sequence[Rows]],
    overlap: Mapping[str, Any],
) -> dict[str, Any]:
    """What eval.json holds. kept: ids of the prompts of each task that were asked; weights: model -> hash (None for a
    server); answers by model and task. No time, no path of the output: equal work gives equal bytes."""
    names, samples = list(weights), config.answer.samples
    parts = [(task.name, [by_task[i] for by_task in answers]) for i, (task, _) in enumerate(suite)]
    families = [parts]
    if len(parts) > 1:
        families.append([(ALL, [_once(by_task) for by_task in answers])])
    results: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for family in families:
        for task_name, by_model in family:
            for name, rows in zip(names, by_model, strict=True):
                results.append({"task": task_name, "model": name, **measure.summarize(rows, samples)})
        comparisons += _compare(family, names, samples)
    hashes = [task_hash(task, verify) for task, verify in suite]
    described = [
        {
            "name": task.name,
            "hash": digest,
            "prompts": len(ids),
            "overlapping": len(task.prompts) - len(ids),
            "repeated": task.repeated,
            "skipped": len(task.data.skipped),
            "verifier": verify.describe(),
        }
        for (task, verify), digest, ids in zip(suite, hashes, kept, strict=True)
    ]
    answer = {**to_dict(config.answer), "temperature": config.answer.drawn_at, "seed": config.seed}
    about = {"hash": hash_json(hashes), "tasks": described, "data": to_dict(config.data), "clusters": config.clusters}
    return {
        "suite": about,
        "answer": answer,
        "models": [{"name": name, "weights": digest} for name, digest in weights.items()],
        "results": results,
        "comparisons": comparisons,
        "overlap": dict(overlap),
        "warnings": warnings(results, comparisons),
    }


def _once(by_task: Sequence[Rows]) -> list[measure.Answers]:
    """All tasks as one; a prompt that several have counts once."""
    unique: dict[str, measure.Answers] = {}
    for rows in by_task:
        for row in rows:
            unique.setdefault(row.prompt_id, row)
    return list(unique.values())


def _compare(family: Sequence[tuple[str, Sequence[Rows]]], names: Sequence[str], samples: int) -> list[dict[str, Any]]:
    """Every model against the first, task by task, with Holm's correction over them all."""
    found, what = [], []
    for task, by_model in family:
        for name, rows in zip(names[1:], by_model[1:], strict=True):
            pair = measure.compare(by_model[0], rows, samples)
            if pair is not None:
                found.append(pair)
                what.append({"task": task, "a": names[0], "b": name})
    lines = measure.adjusted(found, [(w["a"], w["b"]) for w in what])
    return [{**w, **line} for w, line in zip(what, lines, strict=True)]


def warnings(results: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on each model with failed or truncated completions, and on each difference that may be of format."""
    said = []
    lines = {(line["task"], line["model"]): line for line in results if line["task"] != ALL}
    for (task, model), line in lines.items():
        place = f"{model} on {task}"
        if line["failed"] and line["score"] is None:
            said.append(f"{place}: every completion failed")
        elif line["failed"]:
            low, high = line["if_failed"]
            said.append(
                f"{place}: {100 * line['failed']:.1f}% of completions failed and are left out; had all of them been "
                f"wrong, {line['measure']} would be {low:.3f}, had all been right, {high:.3f}"
            )
        if line["truncated"] >= CUT_SHARE:
            share = f"{100 * line['truncated']:.0f}%"
            said.append(f"{place}: {share} of completions were cut by the length limit (--max-new-tokens)")
    for pair in comparisons:
        if pair["task"] != ALL:
            both = lines[pair["task"], pair["a"]], lines[pair["task"], pair["b"]]
            if found := measure.format_warning(*both, (pair["a"], pair["b"])):
                said.append(f"{pair['task']}: {found}")
    return said
