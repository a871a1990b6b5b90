"""Two runs side by side: the first difference, the conditions that differ, and the difference in reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinyllm.errors import RunError
from tinyllm.record.diff import compare_runs
from tinyllm.record.metrics import held_out_score
from tinyllm.record.rundir import RunDir
from tinyllm.stats import Comparison, Estimate, compare
from tinyllm.view.curves import Chart, Series, clustered_interval
from tinyllm.view.html.columns import Rollouts
from tinyllm.view.html.sections import Block, charts, heading, table, text

BINS = 12
"""Spans of steps in the chart of paired differences."""
Cells = dict[tuple[int, str], float]
"""Mean reward of a prompt in a step."""


def comparison(runs: Sequence[RunDir], rollouts: Sequence[Rollouts | None], names: Sequence[str]) -> list[Block]:
    """The blocks of a comparison of two runs."""
    first, second = runs
    return [
        heading("First divergence", "rollouts and metrics, step by step, to the last bit"),
        *_divergence(first, second, names),
        heading("Held-out evaluations"),
        *_evaluations(runs, names),
        heading("Reward on the same prompts"),
        *paired(rollouts, names),
    ]


def _divergence(first: RunDir, second: RunDir, names: Sequence[str]) -> list[Block]:
    try:
        found = compare_runs(first, second)
    except RunError as error:
        return [text(f"The runs cannot be compared step by step: {error}")]
    blocks: list[Block] = []
    if found.difference is not None:
        d = found.difference
        place = [["step", str(d.step)], ["hop", d.hop], ["what", d.what]]
        place += [[name, _short(value)] for name, value in zip(names, (d.first, d.second), strict=True)]
        blocks.append(table(["", "first difference"], place))
    else:
        blocks.append(text(f"{min(found.steps)} steps: rollouts and metrics are equal to the last bit."))
    if found.steps[0] != found.steps[1]:
        blocks.append(text(f"{names[0]} has {found.steps[0]} steps, {names[1]} has {found.steps[1]}."))
    blocks.append(heading("Conditions that differ", "configuration, versions, machine and content hashes"))
    if found.conditions:
        rows = [[name, _short(a), _short(b)] for name, a, b in found.conditions]
        blocks.append(table(["condition", *names], rows))
    else:
        blocks.append(text("Every recorded condition is the same."))
    return blocks


def _short(value: Any) -> str:
    words = "not set" if value is None else str(value)
    return words if len(words) <= 300 else words[:297] + "..."


def _evaluations(runs: Sequence[RunDir], names: Sequence[str]) -> list[Block]:
    scores = [{row["step"]: (row, s) for row in run.metrics("eval") if (s := held_out_score(row))} for run in runs]
    common = sorted(scores[0].keys() & scores[1].keys())
    if not common:
        return [text("The runs share no evaluated step.")]
    rows = []
    for step in common:
        (row_a, a), (row_b, b) = (found[step] for found in scores)
        difference = f"{b[0] - a[0]:+.3f}"
        if row_a.get("correct") is not None and row_b.get("correct") is not None:
            down, up = (math.hypot(b[0] - b[1], a[2] - a[0]), math.hypot(b[2] - b[0], a[0] - a[1]))
            difference += f" [{b[0] - a[0] - down:+.3f}, {b[0] - a[0] + up:+.3f}]"
        rows.append([str(step), *(f"{s[0]:.3f} ({row['prompts']} prompts)" for row, s in ((row_a, a), (row_b, b)))])
        rows[-1].append(difference)
    return [
        text(
            "An evaluation records counts, not which prompts were right, so these differences are not paired: their "
            "95% intervals (Newcombe, from Wilson's) are wider than a paired test's."
        ),
        table(["step", *names, f"{names[1]} minus {names[0]}"], rows),
    ]


def _cells(rollouts: Rollouts) -> Cells:
    scored = ~np.isnan(rollouts.reward)
    sums = np.bincount(rollouts.group[scored], rollouts.reward[scored], len(rollouts.group_step))
    sizes = np.bincount(rollouts.group[scored], minlength=len(rollouts.group_step))
    collected: dict[tuple[int, str], list[float]] = {}
    for group, (step, prompt) in enumerate(zip(rollouts.group_step.tolist(), rollouts.texts["prompt_id"], strict=True)):
        if sizes[group]:
            collected.setdefault((step, str(prompt)), []).append(sums[group] / sizes[group])
    return {cell: sum(means) / len(means) for cell, means in collected.items()}


def paired(rollouts: Sequence[Rollouts | None], names: Sequence[str]) -> list[Block]:
    """Second minus first run, prompt by prompt, over prompts that both sampled in the same step."""
    if rollouts[0] is None or rollouts[1] is None:
        return [text("One of the runs has no recorded rollouts.")]
    a, b = (_cells(columns) for columns in rollouts if columns is not None)
    common = sorted(a.keys() & b.keys())
    if len({prompt for _, prompt in common}) < 2:
        return [text("The runs sampled fewer than two prompts in common in the same steps, so nothing can be paired.")]
    whole, prompts = _by_prompt(a, b, common)
    d = whole.difference
    steps = sorted({step for step, _ in common})
    words = (
        f"Paired are {prompts} prompts that both runs sampled in the same step ({len(common)} times in {len(steps)} "
        f"steps, {steps[0]} to {steps[-1]}); a prompt's rewards are averaged within each run first. "
        f"{names[1]} minus {names[0]}: {d.value:+.3f}, 95% interval [{d.low:+.3f}, {d.high:+.3f}], p = "
        f"{whole.p_value:.3g}; better on {whole.wins} prompts, worse on {whole.losses}."
    )
    return [text(words), charts([_by_steps(a, b, common, steps, names)])]


def _by_prompt(a: Cells, b: Cells, cells: Sequence[tuple[int, str]]) -> tuple[Comparison, int]:
    """stats.compare on each prompt's mean; rewards outside [0, 1] are scaled into it and back."""
    means: dict[str, list[tuple[float, float]]] = {}
    for step, prompt in cells:
        means.setdefault(prompt, []).append((a[step, prompt], b[step, prompt]))
    pairs = np.array([np.mean(values, axis=0) for values in means.values()])
    least = min(0.0, float(pairs.min()))
    span = max(1.0, float(pairs.max()) - least)
    scaled = np.clip((pairs - least) / span, 0, 1)
    found = compare(scaled[:, 0].tolist(), scaled[:, 1].tolist())
    d = found.difference
    return replace(found, difference=Estimate(d.value * span, d.low * span, d.high * span)), len(means)


def _by_steps(a: Cells, b: Cells, common: Sequence[tuple[int, str]], steps: Sequence[int], names: Any) -> Chart:
    points = []
    for span in np.array_split(np.array(steps), min(BINS, len(steps))):
        inside = [cell for cell in common if span[0] <= cell[0] <= span[-1]]
        values = np.array([b[cell] - a[cell] for cell in inside])
        prompts = [prompt for _, prompt in inside]
        if len(set(prompts)) > 1:
            low, high = clustered_interval(values, prompts, signed=True)
            points.append((float(span.mean()), float(values.mean()), low, high))
    x, y, low_, high_ = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [], [])
    series = Series(f"{names[1]} minus {names[0]}", 1, x, y, points=True, raw=True, low=low_, high=high_)
    return Chart("Paired difference in reward", "by spans of steps, with 95% interval", "", (series,))
