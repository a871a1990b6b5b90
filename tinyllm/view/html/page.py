"""write_html: runs in, one HTML file out."""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from tinyllm.config.io import to_toml
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import RunError, require_extra
from tinyllm.health.checks import check
from tinyllm.health.history import History
from tinyllm.health.ledger import selection
from tinyllm.health.rewards import unscored_reasons
from tinyllm.record.files import write_atomic, write_errors
from tinyllm.record.metrics import CHARTS, held_out_score, score_kind
from tinyllm.record.rundir import RunDir
from tinyllm.view.curves import Chart
from tinyllm.view.curves import charts as curves
from tinyllm.view.html.columns import (
    MAX_TOKENS,
    Blocks,
    Rollouts,
    pack,
    packed,
    read_rollouts,
    recorded_steps,
    replay_command,
    token_texts,
)
from tinyllm.view.html.compare import comparison
from tinyllm.view.html.sections import (
    Block,
    Section,
    browser,
    charts,
    command,
    heading,
    notes,
    table,
    text,
    tiles,
)
from tinyllm.view.progress import duration, source_name

Mode = Literal["compare", "stages"]
Columns = Sequence[Rollouts | None]


def write_html(
    path: str | Path,
    runs: Sequence[RunDir],
    title: str | None = None,
    extra: Sequence[Section] = (),
    *,
    mode: Mode = "compare",
    names: Sequence[str] | None = None,
) -> Path:
    """Write the report of runs as one HTML file and return its path.

    mode "compare" draws the curves of all runs over one another (and compares two); "stages" shows them one after the
    other, as the stages of one model's training. extra: sections to show first. names: of the runs, their folders' by
    default. Raises RunError for a record that cannot be read, ConfigError when plotly is not installed.
    """
    assert runs, "a report needs a run"
    library = _plotly()
    names = list(names or _names(runs))
    blocks = Blocks()
    rollouts = [read_rollouts(run, MAX_TOKENS // len(runs)) for run in runs]
    sections = [*extra, *_sections(runs, rollouts, names, mode)]
    data = {
        "title": title or " and ".join(names),
        "runs": [
            {
                "name": name,
                "path": str(run.path),
                "replay": replay_command(run),
                "rollouts": None
                if columns is None
                else pack(columns, blocks, token_texts(run, columns.token_ids), _axes(run)),
            }
            for run, columns, name in zip(runs, rollouts, names, strict=True)
        ],
        "sections": [{"title": section.title, "blocks": section.blocks} for section in sections],
        "library": blocks.add_packed(library),
    }
    data_block = blocks.add_json(_finite(data))
    page = _file("page.html")
    parts = {
        "TITLE": html.escape(str(data["title"])),
        "STYLE": _file("style.css"),
        "SCRIPT": "\n".join(_file(name) for name in ("app.js", "browser.js")),
        "DATA": str(data_block),
        # All before the script that starts the page: a browser that draws meanwhile reads long texts very slowly
        "BLOCKS": "\n".join(blocks.html),
    }
    pieces = page.split("@@")  # text, name, text, name, ..., text: what is put in is never searched for names
    whole = "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
    path = Path(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise RunError(f"{path} is a folder; name a file for the report")
        write_atomic(path, whole.encode())
    return path


@functools.cache
def _plotly() -> str:
    """The source of plotly.js, packed. Raises MissingExtra."""
    require_extra("report", "an HTML report", "plotly")
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs().encode())


def _file(name: str) -> str:
    return resources.files("tinyllm.view.html").joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """The value with every NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _names(runs: Sequence[RunDir]) -> list[str]:
    """A short name for each run: as many of its last folders as tell it from the others."""
    paths = [Path(os.path.abspath(run.path)) for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]


def _axes(run: RunDir) -> dict[str, Any]:
    """The axes of the objective that decide which tokens are clipped; empty for SFT and DPO, which clip nothing."""
    if not isinstance(run.config, GRPOConfig):
        return {}
    axes = run.config.objective.axes
    return {name: getattr(axes, name) for name in ("ratio", "clip", "clip_low", "clip_high", "dual_clip")}


# Sections


def _sections(runs: Sequence[RunDir], rollouts: Columns, names: Sequence[str], mode: Mode) -> list[Section]:
    sections = []
    if mode == "stages" and len(runs) > 1:
        sections.append(Section("Stages", _stages(runs, rollouts, names)))
        for run, columns, name in zip(runs, rollouts, names, strict=True):
            found = curves([run], [columns])
            blocks = [_tiles(run), charts(found), *_health(run, [], name)]
            sections.append(Section(name, blocks))
    else:
        sections.append(Section("Overview", _overview(runs, rollouts, names)))
        if len(runs) == 2:
            sections.append(Section("Comparison", comparison(runs, rollouts, names)))
    if any(columns is not None for columns in rollouts):
        sections.append(Section("Rollouts", [browser()]))
    if mode != "stages" or len(runs) == 1:
        health: list[Block] = []
        for run, columns, name in zip(runs, rollouts, names, strict=True):
            health += [heading(name)] if len(runs) > 1 else []
            beside = {spec.title for spec in CHARTS if spec.health}
            health += _health(run, [chart for chart in curves([run], [columns]) if chart.title in beside], name)
        sections.append(Section("Health", health))
    sections.append(Section("Record", [block for pair in zip(runs, names, strict=True) for block in _record(*pair)]))
    return sections


def _overview(runs: Sequence[RunDir], rollouts: Columns, names: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    for run, name in zip(runs, names, strict=True):
        blocks += [heading(name)] if len(runs) > 1 else []
        blocks.append(_tiles(run))
        if len(runs) == 1 and (found := [f for f in check(History.of(run)) if f.level != "notice"]):
            blocks.append(notes(found, name))
    return [*blocks, charts(curves(runs, rollouts)), *_before_after(runs, rollouts, names)]


def _tiles(run: RunDir) -> Block:
    """Model, steps, held-out score and time of a run."""
    train, evals = run.metrics("train"), run.metrics("eval")
    config = run.config
    done = train[-1]["step"] if train else 0
    preset = config.objective.preset if isinstance(config, GRPOConfig) else None
    how = config.kind.upper() + (f", preset {preset}" if preset else "")
    items = [
        ("model", Path(config.model.name).name, f"on {source_name(config)}"),
        (how, f"{done} steps", f"of {config.train.steps}, seed {config.seed}"),
    ]
    scored = [(row, score) for row in evals if (score := held_out_score(row))]
    if scored:
        (_, before), (last, after) = scored[0], scored[-1]
        kind = score_kind(last)
        digits = 3 if kind == "loss" else 2
        value = f"{before[0]:.{digits}f} → " if len(scored) > 1 else ""
        band = f"95% interval {after[1]:.{digits}f} to {after[2]:.{digits}f}, " if kind != "reward" else ""
        note = f"{band}n = {last['prompts']}, step {last['step']}"
        items.append((f"held-out {kind}", f"{value}{after[0]:.{digits}f}", note))
    if seconds := sum(row.get("step_s") or 0 for row in run.timings()):
        tokens = sum(row.get("sampled_tokens") or 0 for row in run.timings())
        speed = f"{tokens / seconds:,.0f} sampled tokens per second" if tokens else ""
        items.append(("time in steps", duration(seconds), speed))
    return tiles(items)


def _before_after(runs: Sequence[RunDir], rollouts: Columns, names: Sequence[str], count: int = 4) -> list[Block]:
    """Completions of prompts that were sampled early and again late; none of runs whose completions are given."""
    blocks: list[Block] = []
    for run, columns, name in zip(runs, rollouts, names, strict=True):
        if columns is None or not isinstance(run.config, GRPOConfig):
            continue
        seen: dict[str, list[int]] = {}
        for group, prompt in enumerate(columns.texts["prompt_id"]):
            seen.setdefault(str(prompt), []).append(group)
        wide = {p: (groups[0], groups[-1]) for p, groups in seen.items() if len(groups) > 1}
        step = columns.group_step
        chosen = sorted(wide.values(), key=lambda pair: int(step[pair[0]]) - int(step[pair[1]]))[:count]
        chosen = [(first, last) for first, last in chosen if step[first] < step[last]]
        if chosen:
            first_row = {int(group): row for row, group in reversed(list(enumerate(columns.group.tolist())))}
            rows = [
                [columns.questions[first], *(_sample(columns, first_row[group]) for group in (first, last))]
                for first, last in chosen
            ]
            blocks += [
                heading("The same prompt early and late" + (f": {name}" if len(names) > 1 else ""), "first sample"),
                table(["prompt", "early", "late"], rows, wide=True),
            ]
    return blocks


def _sample(columns: Rollouts, row: int) -> str:
    reward = columns.reward[row]
    verdict = f"reward {reward:g}" if reward == reward else f"unscored: {columns.texts['reason'][row]}"
    return f"[step {columns.step[row]}, {verdict}]\n{columns.texts['completion'][row]}"


def _health(run: RunDir, drawn: Sequence[Chart], name: str) -> list[Block]:
    """The findings on a run, its unscored completions, the quarters of its ledger, and these charts."""
    history = History.of(run)
    found = check(history)
    blocks = [notes(found, name) if found else text("No metric that a health check reads was recorded.")]
    if reasons := unscored_reasons(history.train):
        blocks += [heading("Unscored completions"), table(["reason", "count", "first step", "last step"], reasons)]
    if history.ledger and history.train:
        quarters = selection(history.ledger, history.last_step).quartiles
        head = ["by", "from", "to", "requested", "finished", "trained", "dropped"]
        note = "Completions, by quarters of the groups: what was asked of the pool, and what became of it."
        rows = [
            [q.axis, f"{q.low:.3g}", f"{q.high:.3g}", q.requested, q.finished, q.trained, q.dropped] for q in quarters
        ]
        blocks += [heading("Selection", note), table(head, rows)]
    return [*blocks, charts(drawn)] if drawn else blocks


def _stages(runs: Sequence[RunDir], rollouts: Columns, names: Sequence[str]) -> list[Block]:
    rows: list[list[str]] = []
    for run, name in zip(runs, names, strict=True):
        kind = run.config.kind.upper()
        for row in run.metrics("eval"):
            values = held_out_score(row)
            cells = [f"{values[0]:.3f} [{values[1]:.3f}, {values[2]:.3f}]" if values and "loss" not in row else "-"]
            cells.append(f"{row['loss']:.4f}" if isinstance(row.get("loss"), (int, float)) else "-")
            cells.append(f"{row['kl']:.4f}" if isinstance(row.get("kl"), (int, float)) else "-")
            rows.append([name, kind, str(row["step"]), *cells])
    head = ["stage", "kind", "step", "score, 95% interval", "loss", "KL"]
    shown = table(head, rows) if rows else text("No held-out evaluation was made.")
    return [heading("Held-out evaluations, stage after stage"), shown, *_before_after(runs, rollouts, names)]


def _record(run: RunDir, name: str) -> list[Block]:
    """The conditions of a run, its hashes and options, and the command that computes the run again."""
    manifest = run.manifest
    instance, machine = manifest["instance"], manifest["machine"]
    steps = recorded_steps(run)
    facts = [
        ["run directory", str(run.path)],
        ["kind", run.config.kind],
        ["made", f"{instance['created']} on {instance['host']}"],
        ["command", " ".join(map(str, instance["command"]))],
        ["steps recorded", f"{steps[0]} to {steps[-1]}" if steps else "none"],
        ["checkpoints", ", ".join(map(str, run.checkpoints.steps())) or "none"],
        ["machine", f"{machine['processor']}, {machine['threads']} threads"],
        *([f"hash of {key}", value] for key, value in manifest["hashes"].items() if isinstance(value, str)),
        *([key, value] for key, value in manifest["versions"].items() if value),
    ]
    blocks = [heading(name), table(["", "record"], facts)]
    if steps:
        blocks += [heading("Compute it again", "every hash must be equal")]
        blocks.append(command(f"{replay_command(run)} {steps[0]}:{steps[-1]}"))
    return [*blocks, heading("Options that differ from the defaults"), text(to_toml(run.config, sparse=True) or "none")]
