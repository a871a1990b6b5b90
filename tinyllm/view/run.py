"""The text of `tinyllm runs` and `tinyllm show`: a table of runs, one run, the rollouts of one step."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tinyllm.config.io import to_toml
from tinyllm.errors import RunError
from tinyllm.health.checks import check
from tinyllm.health.history import History
from tinyllm.record.metrics import score_kind
from tinyllm.record.rundir import RunDir, find_runs
from tinyllm.view.progress import accuracy, duration, sample_line, source_name


def list_runs(root: str | Path) -> list[tuple[str, ...]]:
    """A table of the runs in a folder: path, kind, model, data, steps, held-out scores. Raises RunError."""
    rows: list[tuple[str, ...]] = [("run", "kind", "model", "data", "steps", "held out")]
    for path in find_runs(root):
        try:
            run = RunDir.read(path)
            train, evals = run.metrics("train"), run.metrics("eval")
        except RunError as error:
            rows.append((str(path), "?", "?", "?", "?", str(error)))
            continue
        config = run.config
        done = f"{train[-1]['step'] if train else 0}/{config.train.steps}"
        result = "  →  ".join(accuracy(row) for row in [*evals[:1], *evals[1:][-1:]]) or "-"
        result = f"{score_kind(evals[0])} {result}" if evals else result
        rows.append((str(path), config.kind, Path(config.model.name).name, source_name(config), done, result))
    if len(rows) == 1:
        raise RunError(f"{root}: no runs here; start one with: tinyllm grpo")
    return rows


def describe_run(run: RunDir) -> list[str]:
    """Options, progress, evaluations, conditions, last metrics and findings of a run, as lines."""
    manifest = run.manifest
    train, evals, timings = run.metrics("train"), run.metrics("eval"), run.timings()
    machine, versions = manifest["machine"], manifest["versions"]
    instance = manifest["instance"]
    lines = [
        f"{run.path}  ({manifest['kind']}, made {instance['created']} on {instance['host']})",
        "",
        "options that differ from the defaults:",
        *(f"  {line}" for line in (to_toml(run.config, sparse=True) or "none\n").splitlines() if line),
        "",
        f"steps       {train[-1]['step'] if train else 0} of {run.config.train.steps}"
        + (f", {duration(sum(row.get('step_s', 0) for row in timings))} in all" if timings else ""),
        f"checkpoints {', '.join(map(str, run.checkpoints.steps())) or 'none'}",
    ]
    lines += [f"held out    {accuracy(row)} at step {row['step']}" for row in evals]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines += [
        f"processor   {machine['processor']}, {machine['capability']}, {machine['threads']} threads",
        *textwrap.wrap(f"versions    {named}", 118, subsequent_indent=" " * 12),
        "hashes",
        *(f"  {name:<22} {value}" for name, value in manifest["hashes"].items() if isinstance(value, str)),
    ]
    if train:
        shown = ((k, v) for k, v in train[-1].items() if isinstance(v, (int, float)) and k != "step")
        lines += ["", f"step {train[-1]['step']}:", *(f"  {name:<22} {value:.6g}" for name, value in shown)]
    return lines + health_lines(History.of(run))


def health_lines(history: History) -> list[str]:
    """What the checks say of a run: level, step and sentence, the remedy below; nothing where nothing was recorded."""
    lines = []
    for finding in check(history):
        head = f"  {finding.level:<8} step {finding.step:<6} "
        lines += textwrap.wrap(f"{head}{finding.text}", 118, subsequent_indent=" " * len(head))
        if finding.remedy:
            lines += textwrap.wrap(
                f"→ {finding.remedy}", 118, initial_indent=" " * len(head), subsequent_indent=" " * (len(head) + 2)
            )
    return ["", "health:", *lines] if lines else []


def describe_step(run: RunDir, step: int, width: int) -> list[str]:
    """Every rollout of a step: reward, prompt, completion, group by group. Raises RunError."""
    if step not in run.steps():
        steps = run.steps()
        have = f"steps {steps[0]} to {steps[-1]}" if steps else "none"
        raise RunError(f"{run.path}: no rollouts of step {step}; there is: {have}")
    lines = []
    for group in run.read_groups(step):
        revision = group.rollouts[0].completion.revision
        lines.append(f"group {group.id}, sampled by revision {revision}")
        lines += [sample_line(group.prompt, rollout, width) for rollout in group.rollouts]
    return lines
