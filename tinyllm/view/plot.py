"""report.png: six curves of a run, from metrics.jsonl alone. CHARTS says which ones, by the kind of run."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.callbacks import Callback, RunResult
from tinyllm.errors import MissingExtra, require_extra
from tinyllm.record.files import write_atomic
from tinyllm.record.metrics import CHARTS, held_out_score, score_kind
from tinyllm.record.rundir import RunDir
from tinyllm.view.progress import source_name

if TYPE_CHECKING:
    from tinyllm.view.curves import Chart, Series

INK, FAINT, BLUE, ORANGE, GREEN = "#222222", "#9a9a9a", "#2563a8", "#d9822b", "#2e8b57"
COLORS = (BLUE, ORANGE, "#8a4fa3")
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
TITLES = {
    "Clip fraction": "Clip fraction (share of trained tokens)",
    "Completion length": "Completion length (tokens)",
    "Entropy": "Entropy (nats per token)",
    "Gradient norm": "Gradient norm, before clipping",
    "Preference accuracy": "Pairs whose chosen completion gained more",
}
"""Titles of panels that say the unit or the meaning too; other panels have the title of their chart."""

log = logging.getLogger("tinyllm")


class PlotAtEnd(Callback):
    """Draws report.png of a run that ended. Where matplotlib is missing, the run ends with a warning, not an error."""

    def on_end(self, result: RunResult | None) -> None:
        if result is None:
            return
        try:
            write_report(RunDir.read(result.run_dir))
        except MissingExtra as error:
            log.warning("%s", error)


def write_report(run: RunDir) -> Path:
    """Draw report.png of a run, finished or not, and return its path. Raises RunError for a damaged record."""
    require_extra("report", "report.png", "matplotlib")
    from tinyllm.view.curves import charts

    drawn = {chart.title: chart for chart in charts([run], [None])}
    specs = [spec for spec in CHARTS if run.config.kind in spec.panel]
    last = max([row["step"] for row in run.metrics()], default=1)
    image = io.BytesIO()
    with drawing(image, 2, 3, (13, 7.2)) as (figure, axes):
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.02)
        figure.suptitle(_title(run), x=0.012, ha="left", fontsize=14)
        for axis, spec in zip(axes.flat, specs, strict=True):
            names = [spec.title.replace("score", kind) for kind in ("score", "accuracy", "reward", "loss")]
            chart = next((drawn[name] for name in names if name in drawn), None)
            axis.set_title(TITLES.get(names[1], names[1]) if chart is None else _panel_title(chart))
            if chart is not None:
                _draw(axis, chart)
            if spec.title == "Completion length" and "Truncated" in drawn:
                _draw_truncated(axis, drawn["Truncated"].series[0])
            _finish(axis, last)
    path = run.path / "report.png"
    write_atomic(path, image.getbuffer())
    return path


@contextlib.contextmanager
def drawing(image: io.BytesIO, rows: int, columns: int, inches: tuple[float, float], **style: Any) -> Iterator[Any]:
    """matplotlib's (figure, axes) in the style of all our plots, written to `image` as a PNG at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({**STYLE, **style}):
        figure, axes = plt.subplots(rows, columns, figsize=inches, layout="constrained")
        try:
            yield figure, axes
            figure.savefig(image, dpi=140, format="png", metadata={"Software": None})
        finally:
            plt.close(figure)


def _title(run: RunDir) -> str:
    config, evals = run.config, run.metrics("eval")
    name = Path(config.model.name).name
    how = config.objective.name if config.kind == "grpo" else config.kind
    parts = [f"{name} on {source_name(config)}", f"{len(run.metrics('train'))} steps, {how}, seed {config.seed}"]
    scores = [score for row in evals if (score := held_out_score(row))]
    if len(scores) > 1:
        parts.append(f"held-out {score_kind(evals[0])} {scores[0][0]:.2f} → {scores[-1][0]:.2f}")
    return "   ·   ".join(parts)


def _panel_title(chart: Chart) -> str:
    if chart.title.startswith("Held-out"):
        return f"{chart.title} ({chart.note})"
    return TITLES.get(chart.title, chart.title)


def _draw(axis: Any, chart: Chart) -> None:
    """Draw a chart on matplotlib's axes, with a legend where it has more than one series."""
    for series in chart.series:
        _draw_series(axis, series)
    highest = max(value for series in chart.series for value in (*series.y, *(series.high or ())) if value is not None)
    if chart.title == "Held-out accuracy":
        axis.set_ylim(0, 1)
    elif chart.zero or chart.title in ("Loss", "Gradient norm", "Learning rate"):
        axis.set_ylim(min(0.0, *(min(series.y) for series in chart.series)), highest * 1.08 or 1)
    if chart.title == "Clip fraction" and not highest:
        axis.set_ylim(0, 0.0115)
        axis.text(0.5, 0.5, "0 throughout: no ratio left its bounds", transform=axis.transAxes, ha="center")
    elif len(chart.series) > 1:
        axis.legend()


def _draw_series(axis: Any, series: Series) -> None:
    """The values, faint, under their mean over 5 neighbours; held-out or few values as they are, marked by points.

    Around the values their interval, if they have one.
    """
    color = GREEN if series.points else COLORS[series.role % len(COLORS)]
    if series.low is not None and series.high is not None:
        axis.fill_between(series.x, series.low, series.high, color=color, alpha=0.15, linewidth=0)
    if series.points or series.raw or len(series.y) < 8:
        axis.plot(series.x, series.y, color=color, label=series.name, marker="o", markersize=4)
    else:
        windows = [series.y[max(0, i - 2) : i + 3] for i in range(len(series.y))]
        smooth = [sum(window) / len(window) for window in windows]
        axis.plot(series.x, series.y, color=color, alpha=0.3, linewidth=1)
        axis.plot(series.x, smooth, color=color, label=series.name, linewidth=1.8)
    if series.raw:
        for index, offset in ((0, (14, -14)), (-1, (-4, 9))):
            axis.annotate(
                f"{series.y[index]:.2f}",
                (series.x[index], series.y[index]),
                textcoords="offset points",
                xytext=offset,
                ha="center",
                color=color,
                fontweight="bold",
            )


def _draw_truncated(axis: Any, series: Series) -> None:
    """The share of completions cut by the token limit, on an axis at the right; nothing where no completion was cut."""
    if not any(series.y):
        return
    right = axis.twinx()
    right.spines["right"].set_visible(True)
    right.grid(False)
    right.plot(series.x, [100 * share for share in series.y], color=ORANGE, linewidth=1, alpha=0.8)
    right.set_ylim(0, 104)
    right.set_ylabel("% cut by the limit", color=ORANGE)


def _finish(axis: Any, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlim(0, max(last, 1) * 1.03)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axis.set_xlabel("step")
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=FAINT)
