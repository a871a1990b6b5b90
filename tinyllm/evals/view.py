"""An evaluation as tables and sentences in the terminal, and as a plot, eval.png."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinyllm.errors import require_extra
from tinyllm.view.plot import BLUE, GREEN, INK, ORANGE, drawing
from tinyllm.view.progress import clip

COLORS = (BLUE, ORANGE, GREEN, "#8a4fa3", "#b8323a", "#5b6770")
SHOWN_MATCHES = 5
Report = Mapping[str, Any]


def show(report: Report, out: Console) -> None:
    """Print the report."""
    tasks = report["suite"]["tasks"]
    counts = ", ".join(f"{task['name']} {task['prompts']} prompts" for task in tasks)
    answer = report["answer"]
    how = "greedy" if answer["temperature"] == 0 else f"temperature {answer['temperature']:g}"
    samples = "1 sample" if answer["samples"] == 1 else f"{answer['samples']} samples"
    _say(out, f"suite {report['suite']['hash'][:12]}: {counts}; {samples} each, {how}, seed {answer['seed']}")
    out.print(results_table(report, out.width))
    if (more := samples_table(report, out.width)) is not None:
        out.print(more)
    for line in (*comparison_lines(report), *overlap_lines(report["overlap"])):
        _say(out, line)
    for warning in report["warnings"]:
        _say(out, f"warning: {warning}")


def _say(out: Console, line: str) -> None:
    out.print(line, soft_wrap=True, markup=False)


def results_table(report: Report, width: int) -> Table:
    """One row per task and model: score with its interval, prompts, shares of truncated, unreadable, failed ones."""
    measures = {line["measure"] for line in report["results"]}
    names = (f"{'score' if len(measures) > 1 else measures.pop()} [95%]",)
    shares = ("truncated", "unreadable", "failed")
    table, room = _table(report, width, names, ("prompts", *shares))
    for lead, line in _leads(report, room):
        cells = [str(line["prompts"]), *(percent(line[name]) for name in shares)]
        table.add_row(*lead, estimate(line["score"]), *cells)
    return table


def samples_table(report: Report, width: int) -> Table | None:
    """pass@k and maj@k for k = all samples (eval.json has smaller k too); None for single samples."""
    ks = list(dict.fromkeys(k for line in report["results"] for k in line["pass"]))
    if not ks:
        return None
    votes = [f"maj@{ks[-1]} [95%]"] if any(line["majority"] for line in report["results"]) else []
    table, room = _table(report, width, (f"pass@{ks[-1]} [95%]", *votes), ())
    for lead, line in _leads(report, room):
        cells = [estimate(line["pass"].get(ks[-1])), estimate(line["majority"].get(ks[-1]))]
        table.add_row(*lead, *cells[: 1 + len(votes)])
    return table


def _table(report: Report, width: int, left: Sequence[str], right: Sequence[str]) -> tuple[Table, int]:
    """An empty table of these columns, and how many characters it leaves for the name of a task or model."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    leads = ("task", "model") if len(report["suite"]["tasks"]) > 1 else ("model",)
    for name in (*leads, *left):
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table, max(10, (width - 23 * len(left) - sum(len(name) + 2 for name in right)) // len(leads) - 2)


def _leads(report: Report, room: int) -> Iterator[tuple[list[Text], Report]]:
    """(cells with task and model, entry of the report) of each row; only the first row of a task has its name."""
    last = None
    for line in report["results"]:
        lead = [Text(shorten(line["model"], room))]
        if len(report["suite"]["tasks"]) > 1:
            lead.insert(0, Text(shorten(line["task"], room) if line["task"] != last else ""))
        last = line["task"]
        yield lead, line


def comparison_lines(report: Report) -> list[str]:
    """Each comparison in a sentence, with its p-value."""
    several = len(report["suite"]["tasks"]) > 1
    corrected = len(report["comparisons"]) > 1
    lines = []
    for pair in report["comparisons"]:
        place = f"{pair['task']}: " if several else ""
        p = f"p = {pair['p']:.2g}" + (f", Holm {pair['p_holm']:.2g}" if corrected else "")
        lines.append(f"{place}{pair['sentence']} ({pair['test']}, {p}; {pair['wins']} wins, {pair['losses']} losses)")
    return lines


def overlap_lines(overlap: Report) -> list[str]:
    """Which prompts of the suite were found among training prompts, and so were left out."""
    if not overlap["checked"]:
        return ["overlap with training prompts: not checked, none are known; give --train FILE"]
    known = ", ".join(f"{c['prompts']:,} of {c['train']}" for c in overlap["checked"])
    found = overlap["found"]
    if not found:
        return [f"overlap with training prompts: none ({known})"]
    kinds = [match["kind"] for match in found]
    lines = [
        f"overlap with training prompts: {kinds.count('exact')} exact and {kinds.count('near')} near duplicates "
        f"left out of the suite ({known})"
    ]
    for match in found[:SHOWN_MATCHES]:
        lines.append(f"  {match['kind']:5}  {clip(match['prompt'], 50)}  =  {clip(match['train_prompt'], 50)}")
    if len(found) > SHOWN_MATCHES:
        lines.append(f"  and {len(found) - SHOWN_MATCHES} more, all in eval.json")
    return lines


def show_plan(rows: Sequence[Report], out: Console) -> None:
    """Print the rows of suite.plan()."""
    for row in rows:
        clusters = f" in {row['clusters']} clusters" if row["clusters"] < row["prompts"] else ""
        samples = "1 sample" if row["samples"] == 1 else f"{row['samples']} samples"
        _say(out, f"{row['task']}: {row['prompts']} prompts{clusters}, {samples} each")
        _say(
            out,
            f"  the accuracy of one model is known to ± {100 * row['half_width']:.1f} points at most (one sample, 95%)",
        )
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("  two models differ on")
        table.add_column("smallest difference shown (80% power)", justify="right")
        table.add_column(f"prompts needed for {100 * row['difference']:g} points", justify="right")
        for share, difference, needed in row["by_discordance"]:
            need = f"{needed:,}" if share >= row["difference"] else "not possible"
            shown = f"{100 * difference:.1f} points" if difference <= share else "none"
            table.add_row(f"  {100 * share:.0f}% of prompts", shown, need)
        out.print(table)
    _say(out, "The share on which two models differ is seen in their first comparison: (wins + losses) / prompts.")


def estimate(found: Mapping[str, float] | None) -> str:
    """0.852 [0.790, 0.899]; - for none."""
    return "-" if found is None else f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def shorten(name: str, width: int) -> str:
    """A name in at most `width` characters; a longer one loses its middle, since paths differ in their ends."""
    if len(name) <= width:
        return name
    tail = max(1, 2 * (width - 1) // 3)
    return name[: width - 1 - tail] + "…" + name[-tail:]


# The plot


def draw(report: Report) -> memoryview:
    """eval.png as bytes: a point with its interval for every model and task."""
    require_extra("report", "eval.png", "matplotlib")
    results = [line for line in report["results"] if line["score"] is not None]
    names = [model["name"] for model in report["models"]]
    tasks = list(dict.fromkeys(line["task"] for line in results))
    height = 1.5 + 0.42 * len(results) + 0.3 * len(tasks)
    image = io.BytesIO()
    style = {"axes.grid.axis": "x", "axes.spines.left": False}
    with drawing(image, 1, 1, (10, max(2.6, height)), **style) as (_, axis):
        places, labels, y = [], [], 0.0
        for task in tasks:
            lines = [line for line in results if line["task"] == task]
            if len(tasks) > 1:
                words = f"{shorten(task, 60)}  ({max(line['prompts'] for line in lines)} prompts)"
                axis.text(0.0, y - 0.05, words, fontweight="bold", va="center")
                y += 0.75
            for line in lines:
                _point(axis, y, line, COLORS[names.index(line["model"]) % len(COLORS)])
                places.append(y)
                labels.append(shorten(line["model"], 38))
                y += 1.0
            y += 0.3
        axis.set_yticks(places, labels)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(y - 0.6, -0.7)
        axis.set_xlim(0, 1)
        measures = sorted({line["measure"] for line in results})
        axis.set_xlabel(f"{' or '.join(measures)} with 95% interval")
        axis.set_title(_title(report, tasks), pad=12)
    return image.getbuffer()


def _point(axis: Any, y: float, line: Report, color: str) -> None:
    """A row of the plot: the score as a dot on its interval, and pass@k of all samples as a hollow dot."""
    score = line["score"]
    axis.plot([score["low"], score["high"]], [y, y], color=color, linewidth=5, alpha=0.35, solid_capstyle="butt")
    axis.plot([score["value"]], [y], marker="o", markersize=8, color=color)
    passed = list(line["pass"].items())[-1:]
    for k, found in passed:
        axis.plot([found["low"], found["high"]], [y, y], color=color, linewidth=1.2, alpha=0.6)
        axis.plot([found["value"]], [y], marker="o", markersize=7, markerfacecolor="white", color=color)
        axis.annotate(
            f"pass@{k}", (found["value"], y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8
        )
    text = f"{score['value']:.3f}"
    lost = line["truncated"] + (line["unreadable"] or 0.0)
    if lost >= 0.005:
        text += f"   ({100 * lost:.0f}% cut or unreadable)"
    axis.annotate(
        text, (1.0, y), xytext=(8, 0), textcoords="offset points", va="center", color=INK, annotation_clip=False
    )


def _title(report: Report, tasks: Sequence[str]) -> str:
    answer = report["answer"]
    how = "greedy" if answer["samples"] == 1 and answer["temperature"] == 0 else f"{answer['samples']} samples"
    what = (
        f"{shorten(tasks[0], 40)} ({report['suite']['tasks'][0]['prompts']} prompts)" if len(tasks) == 1 else "Accuracy"
    )
    return f"{what}, {how}, suite {report['suite']['hash'][:8]}"
