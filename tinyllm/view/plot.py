"""report.png: the six curves that tell how a run went, from metrics.jsonl alone; which six, its kind says."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyllm.errors import require_extra
from tinyllm.record.files import write_atomic
from tinyllm.record.rundir import RunDir
from tinyllm.stats import held_out_score, score_kind

INK, FAINT, BLUE, ORANGE, GREEN = "#222222", "#9a9a9a", "#2563a8", "#d9822b", "#2e8b57"
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
Rows = Sequence[dict[str, Any]]


def write_report(run: RunDir) -> Path:
    """Draw report.png of a run, finished or not, and return its path. Raises RunError when it has no metrics."""
    require_extra("report", "report.png", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train, evals = run.metrics("train"), run.metrics("eval")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(13, 7.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.02)
        try:
            figure.suptitle(_title(run, train, evals), x=0.012, ha="left", fontsize=14)
            panels = PANELS[run.config.kind]
            for axis, panel in zip(axes.flat, panels, strict=True):
                panel(axis, train, evals)
                _finish(axis, train, evals)
            image = io.BytesIO()
            figure.savefig(image, dpi=140, format="png", metadata={"Software": None})
        finally:
            plt.close(figure)
    path = run.path / "report.png"
    write_atomic(path, image.getbuffer())
    return path


def _title(run: RunDir, train: Rows, evals: Rows) -> str:
    config, data = run.config, run.config.data
    source = str(data.file or data.dataset or getattr(data, "from_run", None) or getattr(data, "task", "?"))
    name = Path(config.model.name).name
    how = config.objective.preset if config.kind == "grpo" else config.kind
    parts = [f"{name} on {Path(source).name}", f"{len(train)} steps, {how}, seed {config.seed}"]
    scores = [score for row in evals if (score := held_out_score(row))]
    if len(scores) > 1:
        parts.append(f"held-out {score_kind(evals[0])} {scores[0][0]:.2f} → {scores[-1][0]:.2f}")
    return "   ·   ".join(parts)


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _line(axis: Any, rows: Rows, key: str, color: str, label: str | None = None, **style: Any) -> None:
    """A curve: the values faint, their mean over 5 neighbours on top; dots when there are few."""
    steps, values = _series(rows, key)
    if not values:
        return
    if len(values) < 8:
        axis.plot(steps, values, color=color, label=label, marker="o", markersize=4, **style)
        return
    windows = [values[max(0, i - 2) : i + 3] for i in range(len(values))]
    smooth = [sum(window) / len(window) for window in windows]
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    axis.plot(steps, smooth, color=color, label=label, linewidth=1.8, **style)


def _reward(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Reward of sampled completions")
    _line(axis, train, "reward_mean", BLUE, "reward")
    if _series(train, "accuracy")[1] not in ([], _series(train, "reward_mean")[1]):
        _line(axis, train, "accuracy", GREEN, "accuracy")
        axis.legend()


def _accuracy(axis: Any, train: Rows, evals: Rows) -> None:
    rows = [row for row in evals if row["prompts"]]
    points = [score for row in rows if (score := held_out_score(row))]
    if not rows:
        axis.set_title("Held-out accuracy")
        return
    kind = score_kind(rows[0])
    interval = "" if kind == "reward" else ", 95% interval"
    axis.set_title(f"Held-out {kind} (n = {rows[-1]['prompts']}{interval})")
    if kind == "accuracy":
        axis.set_ylim(0, 1)
    steps = [row["step"] for row in rows]
    axis.fill_between(steps, [p[1] for p in points], [p[2] for p in points], color=GREEN, alpha=0.15, linewidth=0)
    axis.plot(steps, [p[0] for p in points], color=GREEN, marker="o", markersize=4)
    for index, offset in ((0, (14, -14)), (-1, (-4, 9))):
        axis.annotate(
            f"{points[index][0]:.2f}",
            (steps[index], points[index][0]),
            textcoords="offset points",
            xytext=offset,
            ha="center",
            color=GREEN,
            fontweight="bold",
        )


def _from_zero(axis: Any, highest: float = 0.0) -> None:
    """The y axis from 0 to a little above the curves, and above `highest`."""
    top = max((max(line.get_ydata()) for line in axis.lines), default=0)
    axis.set_ylim(0, max(top, highest) * 1.08 or 1)


def _kl(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("KL per token")
    _line(axis, train, "kl", BLUE, "to the reference, in training")
    _line(axis, evals, "kl", ORANGE, "to the start policy, 95% interval")
    bands = [row for row in evals if row.get("kl_low") is not None]
    bounds = ([row[f"kl_{end}"] for row in bands] for end in ("low", "high"))
    axis.fill_between([row["step"] for row in bands], *bounds, color=ORANGE, alpha=0.15, linewidth=0)
    if axis.lines:
        _from_zero(axis, max((row["kl_high"] for row in bands), default=0.0))
        axis.legend()


def _clip(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Clip fraction (share of trained tokens)")
    _line(axis, train, "clip_fraction_high", ORANGE, "upper bound")
    _line(axis, train, "clip_fraction_low", BLUE, "lower bound", linestyle="--")
    values = [v for key in ("clip_fraction_high", "clip_fraction_low") for v in _series(train, key)[1]]
    axis.set_ylim(0, max([*values, 0.01]) * 1.15)
    if values and not any(values):
        axis.text(0.5, 0.5, "0 throughout: no ratio left its bounds", transform=axis.transAxes, ha="center")
    elif values:
        axis.legend()


def _length(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Completion length (tokens)")
    _line(axis, train, "completion_length", BLUE, "mean")
    _from_zero(axis)
    steps, shares = _series(train, "truncated")
    if any(shares):
        right = axis.twinx()
        right.spines["right"].set_visible(True)
        right.grid(False)
        right.plot(steps, [100 * share for share in shares], color=ORANGE, linewidth=1, alpha=0.8)
        right.set_ylim(0, 104)
        right.set_ylabel("% cut by the limit", color=ORANGE)


def _entropy(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Entropy (nats per token)")
    _line(axis, train, "entropy", BLUE)
    _from_zero(axis)


def _loss(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Training loss")
    _line(axis, train, "loss", BLUE)
    _from_zero(axis)


def _gradient(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Gradient norm, before clipping")
    _line(axis, train, "grad_norm", BLUE)
    _from_zero(axis)


def _rate(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Learning rate")
    steps, rates = _series(train, "lr")
    axis.plot(steps, rates, color=BLUE)
    _from_zero(axis)


def _preference(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Pairs whose chosen completion gained more")
    _line(axis, train, "preference_accuracy", BLUE, "in training")
    _line(axis, evals, "preference_accuracy", GREEN, "held out")
    axis.set_ylim(0, 1.02)
    axis.legend(loc="lower right")


def _implicit_rewards(axis: Any, train: Rows, evals: Rows) -> None:
    axis.set_title("Implicit reward")
    _line(axis, train, "chosen_reward", GREEN, "chosen")
    _line(axis, train, "rejected_reward", ORANGE, "rejected", linestyle="--")
    if axis.lines:
        axis.legend()


PANELS = {
    "grpo": (_reward, _accuracy, _kl, _clip, _length, _entropy),
    "sft": (_loss, _accuracy, _length, _entropy, _gradient, _rate),
    "dpo": (_loss, _accuracy, _preference, _implicit_rewards, _length, _entropy),
}


def _finish(axis: Any, train: Rows, evals: Rows) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max([row["step"] for row in (*train, *evals)], default=1)
    axis.set_xlim(0, max(last, 1) * 1.03)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axis.set_xlabel("step")
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=FAINT)
