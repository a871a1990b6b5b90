"""What a run's metrics say, as charts, and the intervals around them.

A chart is what the page draws: {title, note, unit, zero, series}, where a series is {name, run, x, y, low, high, ...}.
unit: "share" (drawn as per cent), or a word for the axis; zero: whether the axis starts at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tinyllm.record.metrics import held_out_score
from tinyllm.record.rundir import RunDir
from tinyllm.stats import accuracy, clustered_error
from tinyllm.view.html.columns import Rollouts

Chart = dict[str, Any]
Row = Mapping[str, Any]

CHARTS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", "", "", (("loss", "in training"), ("eval:loss", "held out"))),
    ("Preference accuracy", "share of pairs whose chosen answer is preferred", "share", (
        ("preference_accuracy", "in training"), ("eval:preference_accuracy", "held out"))),
    ("Preference margin", "", "", (("margin", "in training"), ("eval:margin", "held out"))),
    ("Implicit rewards", "", "", (("chosen_reward", "chosen"), ("rejected_reward", "rejected"))),
    ("KL per token", "", "nats", (("kl", "to the reference, in training"), ("eval:kl", "to the start, held out"))),
    ("Clip fraction", "share of trained tokens whose ratio is clipped", "share", (
        ("clip_fraction_high", "upper bound"), ("clip_fraction_low", "lower bound"))),
    ("Ratio", "new over old probability of a token", "", (("ratio_max", "largest"), ("ratio_mean", "mean"))),
    ("Entropy", "nats per token", "nats", (("entropy", "entropy"),)),
    ("Completion length", "tokens", "tokens", (
        ("completion_length", "in training"), ("eval:completion_length", "held out"))),
    ("Truncated", "share of completions cut by the token limit", "share", (("truncated", "truncated"),)),
    ("Groups without signal", "share of groups whose advantages are all zero", "share", (
        ("zero_advantage", "zero advantage"),)),
    ("Answers not found", "share of judged completions", "share", (("unreadable", "unreadable"),)),
    ("Sampler against trainer", "difference of their log-probabilities", "nats", (
        ("sampler_gap_max", "largest"), ("sampler_gap", "mean"))),
    ("Tokens equal to the bit", "sampler and trainer log-probabilities", "share", (("sampler_equal", "equal"),)),
    ("Gradient norm", "before clipping", "", (("grad_norm", "norm"),)),
    ("Learning rate", "", "", (("lr", "learning rate"),)),
    ("Trained tokens per step", "", "tokens", (("tokens", "trained"),)),
)  # fmt: skip
"""Charts with one number per step: title, note, unit, and (key, name) of each series."""
FROM_ZERO = ("share", "tokens", "nats", "seconds")
NOT_DRAWN = {"step", "updates", "denominator", "groups_drawn", "groups_trained", "unscored", "prompts", "correct"}
NOT_DRAWN |= {"reward_mean", "reward_std", "accuracy", "loss_low", "loss_high", "kl_low", "kl_high"}
HOPS = ("sample", "verify", "wait", "record", "update", "publish")


def charts(runs: Sequence[RunDir], rollouts: Sequence[Rollouts | None]) -> list[Chart]:
    """Every curve of the runs, those of one key in one chart. Keys that no list names get a chart of their own."""
    rows = [(run.metrics("train"), run.metrics("eval")) for run in runs]
    found = [_reward(rows, rollouts), _held_out(rows)]
    found += [_plain(title, note, unit, series, rows) for title, note, unit, series in CHARTS]
    found += [_nested("Reward parts", "reward_parts", rows), _nested("Logged by the reward", "reward_logged", rows)]
    found.append(_lag(rollouts))
    found.append(_timing([run.timings() for run in runs]))
    known = NOT_DRAWN | {key.removeprefix("eval:") for _, _, _, series in CHARTS for key, _ in series}
    others = dict.fromkeys(k for train, _ in rows for row in train for k in row if _number(row[k]) and k not in known)
    found += [_plain(key.replace("_", " ").capitalize(), "", "", ((key, key),), rows) for key in others]
    return [chart for chart in found if any(series["y"] for series in chart["series"])]


def _chart(title: str, note: str, unit: str, series: list[dict[str, Any]]) -> Chart:
    return {"title": title, "note": note, "unit": unit, "zero": unit in FROM_ZERO, "series": series}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _series(name: str, run: int, pairs: Sequence[tuple[int, float]], **more: Any) -> dict[str, Any]:
    return {"name": name, "run": run, "x": [x for x, _ in pairs], "y": [y for _, y in pairs], **more}


def _values(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if _number(row.get(key))]


def _plain(title: str, note: str, unit: str, series: Sequence[tuple[str, str]], rows: Sequence[Any]) -> Chart:
    def points_of(run: Any, key: str) -> list[tuple[int, float]]:
        train, evals = run
        return _values(evals if key.startswith("eval:") else train, key.removeprefix("eval:"))

    there = [(key, name) for key, name in series if any(points_of(run, key) for run in rows)]
    drawn = []
    for number, run in enumerate(rows):
        evals = run[1]
        for role, (key, name) in enumerate(there):
            points, held_out = points_of(run, key), key.startswith("eval:")
            more: dict[str, Any] = {"role": role, "points": held_out}
            name_of = key.removeprefix("eval:")
            held = [row for row in evals if _number(row.get(name_of))]
            if held_out and all(_number(row.get(f"{name_of}_low")) for row in held):
                more |= {end: [row[f"{name_of}_{end}"] for row in held] for end in ("low", "high")}
            if points:
                drawn.append(_series(name, number, points, **more))
    if len(there) == 1 < len(series):  # no legend says which one it is
        note = there[0][1] + (f"; {note}" if note else "")
    return _chart(title, note, unit, drawn)


def _reward(rows: Sequence[Any], rollouts: Sequence[Rollouts | None]) -> Chart:
    """Mean reward of sampled completions with its 95% interval; completions of a group depend on each other."""
    drawn = []
    for number, (train, _) in enumerate(rows):
        points = _values(train, "reward_mean")
        bands = reward_intervals(rollouts[number])
        low = [bands.get(step, (None, None))[0] for step, _ in points]
        high = [bands.get(step, (None, None))[1] for step, _ in points]
        if points:
            drawn.append(_series("reward", number, points, role=0, low=low, high=high))
        accuracies = _values(train, "accuracy")
        if accuracies and accuracies != points:
            drawn.append(_series("accuracy", number, accuracies, role=1))
    return _chart("Reward of sampled completions", "mean and its 95% interval, by group", "", drawn)


def reward_intervals(rollouts: Rollouts | None, level: float = 0.95) -> dict[int, tuple[float, float]]:
    """95% interval of the mean reward per step, clustered by group; none where fewer than two groups were scored."""
    if rollouts is None:
        return {}
    bounds = np.flatnonzero(np.diff(rollouts.step)) + 1
    found = {}
    for rows in np.split(np.arange(len(rollouts)), bounds):
        rows = rows[~np.isnan(rollouts.reward[rows])]
        rewards, groups = rollouts.reward[rows], rollouts.group[rows].tolist()
        if len(set(groups)) > 1:
            found[int(rollouts.step[rows[0]])] = clustered_interval(rewards, groups, level)
    return found


def clustered_interval(
    values: np.ndarray, clusters: Sequence[Any], level: float = 0.95, *, signed: bool = False
) -> tuple[float, float]:
    """Interval of a mean: that of stats.accuracy for values in [0, 1], else mean +- t se with the clustered error.

    signed: the values are differences, which happen to be positive at most.
    """
    from scipy.stats import t

    if not signed and values.min() >= 0 and values.max() <= 1:
        estimate = accuracy(values, clusters, level)
        return estimate.low, estimate.high
    least, span = float(values.min()), float(np.ptp(values)) or 1.0
    mean, error, count = clustered_error((values - least) / span, clusters)
    half = error * float(t.ppf(0.5 + level / 2, count - 1))
    return least + span * (mean - half), least + span * (mean + half)


def score(row: Row) -> tuple[float, float, float] | None:
    """stats.held_out_score, None for an evaluation of another kind."""
    if row.get("prompts") is None or (row.get("correct") is None and row.get("reward_mean") is None):
        return None
    return held_out_score(row)


def _held_out(rows: Sequence[Any]) -> Chart:
    drawn, what, n = [], "accuracy", 0
    for number, (_, evals) in enumerate(rows):
        scored = [(row, values) for row in evals if (values := score(row))]
        if not scored:
            continue
        n = scored[-1][0]["prompts"]
        points = [(row["step"], values[0]) for row, values in scored]
        more: dict[str, Any] = {"role": 0, "points": True, "raw": True}
        if scored[0][0].get("correct") is None:
            what = "reward"
        else:
            more |= {"low": [values[1] for _, values in scored], "high": [values[2] for _, values in scored]}
        drawn.append(_series(f"held-out {what}", number, points, **more))
    note = f"n = {n}, 95% interval (Wilson)" if what == "accuracy" else f"n = {n}"
    return _chart(f"Held-out {what}", note, "share" if what == "accuracy" else "", drawn)


def _nested(title: str, key: str, rows: Sequence[Any]) -> Chart:
    drawn = []
    for number, (train, _) in enumerate(rows):
        names = dict.fromkeys(name for row in train for name in (row.get(key) or {}))
        for role, name in enumerate(names):
            points = _values([{"step": row["step"], **(row.get(key) or {})} for row in train], name)
            drawn.append(_series(name, number, points, role=role))
    return _chart(title, "mean per step, before weighting" if key == "reward_parts" else "", "", drawn)


def _lag(rollouts: Sequence[Rollouts | None]) -> Chart:
    drawn = []
    for number, columns in enumerate(rollouts):
        if columns is None or not columns.lag.any():
            continue
        largest: dict[int, float] = {}
        for step, lag in zip(columns.step.tolist(), columns.lag.tolist(), strict=True):
            largest[step] = max(largest.get(step, 0), lag)
        drawn.append(_series("largest", number, list(largest.items()), role=0))
    return _chart("Policy lag", "optimizer steps between the sampling weights and the trained ones", "steps", drawn)


def _timing(timings: Sequence[Sequence[Row]]) -> Chart:
    drawn = []
    for number, lines in enumerate(timings):
        rows = list({row["step"]: row for row in lines if isinstance(row.get("step"), int)}.values())
        for role, hop in enumerate(HOPS):
            if points := _values(rows, f"{hop}_s"):
                drawn.append(_series(hop, number, points, role=role, raw=True))
    return _chart("Seconds per step", "by hop", "seconds", drawn)
