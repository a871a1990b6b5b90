"""The curves of runs, as data that a page or a plot can draw: METRICS says which number stands in which chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyllm.record.metrics import CHARTS, METRICS, ChartSpec, Metric, flat, held_out_score, metric, score_kind
from tinyllm.record.rundir import RunDir
from tinyllm.stats import accuracy, clustered_error, t_quantile

if TYPE_CHECKING:
    from tinyllm.view.html.columns import Rollouts

Row = Mapping[str, Any]
Bands = Mapping[int, tuple[float, float]]
"""Step -> interval of its mean reward."""
FROM_ZERO = ("share", "tokens", "nats", "seconds", "steps")
"""Units whose axis starts at 0."""
PARTS_OF_A_STEP = ("sample", "verify", "wait", "record", "update", "publish")
"""Parts of a step whose seconds a line of timing.jsonl has."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    run: int
    """Index of its run."""
    x: Sequence[float]
    """Steps."""
    y: Sequence[float]
    role: int = 0
    """Its number among the series of its run, which decides colour and dash."""
    points: bool = False
    """Whether each value has a marker."""
    raw: bool = False
    """Whether the values themselves are drawn, not a running mean."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """Ends of the interval around y, if there is one."""


@dataclass(frozen=True)
class Chart:
    """Series on common axes."""

    title: str
    note: str
    unit: str
    """share (drawn as per cent), or a word for the axis."""
    series: tuple[Series, ...]

    @property
    def zero(self) -> bool:
        """Whether the axis starts at 0."""
        return self.unit in FROM_ZERO


@dataclass(frozen=True)
class Lines:
    """The lines of one run's metrics.jsonl, nested keys joined by a dot, and the intervals of its rewards."""

    train: tuple[Row, ...]
    evals: tuple[Row, ...]
    bands: Bands

    @classmethod
    def of(cls, run: RunDir, rollouts: Rollouts | None) -> Lines:
        train, evals = (tuple(map(flat, run.metrics(kind))) for kind in ("train", "eval"))
        return cls(train, evals, reward_intervals(rollouts))

    def of_line(self, kind: str) -> tuple[Row, ...]:
        """Lines of one kind."""
        return self.evals if kind == "eval" else self.train


def charts(runs: Sequence[RunDir], rollouts: Sequence[Rollouts | None]) -> list[Chart]:
    """Every curve of the runs, those of one key in one chart. A number that METRICS lacks gets a chart of its own."""
    lines = [Lines.of(run, columns) for run, columns in zip(runs, rollouts, strict=True)]
    special = {"Reward of sampled completions": _reward, "Held-out score": _held_out}
    found = [special.get(spec.title, _plain)(spec, lines) for spec in CHARTS]
    found.append(_timing([run.timings() for run in runs]))
    keys = dict.fromkeys(key for run in lines for row in run.train for key in row if _is_number(row[key]))
    for key in keys:
        if metric(key) is None:
            title = key.replace("_", " ").capitalize()
            found.append(Chart(title, "", "", tuple(_series_of(lines, [Metric(key, "", "metrics", label=key)]))))
    return [chart for chart in found if any(series.y for series in chart.series)]


def metrics_of(spec: ChartSpec, lines: Sequence[Lines]) -> list[Metric]:
    """The rows of METRICS in a chart of which some run has numbers; `reward_parts.*` gives a row for each part."""
    found: list[Metric] = []
    for row in (row for row in METRICS if row.chart == spec.title):
        present = (values for run in lines for values in run.of_line(row.line))
        keys = dict.fromkeys(key for values in present for key in values if _is_number(values[key]))
        if not row.key.endswith(".*"):
            found += [row] if row.key in keys else []
            continue
        prefix = row.key.removesuffix("*")
        names = (key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        found += [Metric(prefix + name, row.text, row.hop, label=name, line=row.line) for name in names]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _values(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if _is_number(row.get(key))]


def _series(name: str, run: int, pairs: Sequence[tuple[float, float]], **more: Any) -> Series:
    return Series(name, run, [x for x, _ in pairs], [y for _, y in pairs], **more)


def _series_of(lines: Sequence[Lines], rows: Sequence[Metric]) -> Iterator[Series]:
    """A series for each metric of each run; held-out values are marked, with their interval where the line has it."""
    for number, run in enumerate(lines):
        for role, row in enumerate(rows):
            held_out = row.line == "eval"
            points = _values(run.of_line(row.line), row.key)
            there = [values for values in run.evals if _is_number(values.get(row.key))] if held_out else []
            band: dict[str, Any] = {}
            if there and all(_is_number(values.get(f"{row.key}_low")) for values in there):
                band = {end: [values[f"{row.key}_{end}"] for values in there] for end in ("low", "high")}
            if points:
                yield _series(row.label, number, points, role=role, points=held_out, **band)


def _plain(spec: ChartSpec, lines: Sequence[Lines]) -> Chart:
    rows, note = metrics_of(spec, lines), spec.note
    all_rows = [row for row in METRICS if row.chart == spec.title]
    if len(rows) == 1 < len(all_rows):  # no legend says which one it is
        note = rows[0].label + (f"; {note}" if note else "")
    return Chart(spec.title, note, spec.unit, tuple(_series_of(lines, rows)))


def _reward(spec: ChartSpec, lines: Sequence[Lines]) -> Chart:
    """Mean reward of sampled completions with its interval, and their accuracy where it differs from the reward."""
    drawn = []
    for number, run in enumerate(lines):
        rewards, accuracies = _values(run.train, "reward_mean"), _values(run.train, "accuracy")
        if rewards:
            band: dict[str, Any] = {}
            if run.bands:
                ends = [run.bands.get(step, (None, None)) for step, _ in rewards]
                band = {"low": [low for low, _ in ends], "high": [high for _, high in ends]}
            drawn.append(_series("reward", number, rewards, **band))
        if accuracies and accuracies != rewards:
            drawn.append(_series("accuracy", number, accuracies, role=1))
    note = spec.note if any(run.bands for run in lines) else ""
    return Chart(spec.title, note, spec.unit, tuple(drawn))


def _held_out(spec: ChartSpec, lines: Sequence[Lines]) -> Chart:
    """The score of held-out rows, named in the title; a mean reward has no interval."""
    drawn, kind, count = [], "accuracy", 0
    for number, run in enumerate(lines):
        scored = [(row, score) for row in run.evals if (score := held_out_score(row))]
        if not scored:
            continue
        kind, count = score_kind(scored[0][0]), scored[-1][0]["prompts"]
        band: dict[str, Any] = {}
        if kind != "reward":
            band = {"low": [score[1] for _, score in scored], "high": [score[2] for _, score in scored]}
        points = [(row["step"], score[0]) for row, score in scored]
        drawn.append(_series(f"held-out {kind}", number, points, points=True, raw=True, **band))
    note = {"accuracy": f"n = {count}, 95% interval (Wilson)", "loss": f"n = {count}, 95% interval"}
    unit = "share" if kind == "accuracy" else ""
    return Chart(spec.title.replace("score", kind), note.get(kind, f"n = {count}"), unit, tuple(drawn))


def _timing(timings: Sequence[Sequence[Row]]) -> Chart:
    drawn = []
    for number, lines in enumerate(timings):
        rows = list({row["step"]: row for row in lines if isinstance(row.get("step"), int)}.values())
        for role, part in enumerate(PARTS_OF_A_STEP):
            if points := _values(rows, f"{part}_s"):
                drawn.append(_series(part, number, points, role=role, raw=True))
    return Chart("Seconds per step", "by hop", "seconds", tuple(drawn))


# Intervals


def reward_intervals(rollouts: Rollouts | None) -> dict[int, tuple[float, float]]:
    """95% interval of the mean reward per step, clustered by group; none where fewer than two groups were scored."""
    if rollouts is None:
        return {}
    bounds = np.flatnonzero(np.diff(rollouts.step)) + 1
    found = {}
    for rows in np.split(np.arange(len(rollouts)), bounds):
        rows = rows[~np.isnan(rollouts.reward[rows])]
        rewards, groups = rollouts.reward[rows], rollouts.group[rows].tolist()
        if len(set(groups)) > 1:
            found[int(rollouts.step[rows[0]])] = clustered_interval(rewards, groups)
    return found


def clustered_interval(values: np.ndarray, clusters: Sequence[Any], *, signed: bool = False) -> tuple[float, float]:
    """95% interval of a mean: stats.accuracy's for values in [0, 1], else mean +- t se with the clustered error.

    signed: the values are differences, for which stats.accuracy does not hold even where all of them lie in [0, 1].
    """
    if not signed and values.min() >= 0 and values.max() <= 1:
        estimate = accuracy(values, clusters)
        return estimate.low, estimate.high
    least, span = float(values.min()), float(np.ptp(values)) or 1.0
    mean, error, count = clustered_error((values - least) / span, clusters)
    half = error * t_quantile(count - 1)
    return least + span * (mean - half), least + span * (mean + half)
