"""What the capstone found: every stage on the held-out and the shifted suite, what differs, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyllm import stats
from tinyllm.capstone.rows import SYSTEM_PROMPT, VERIFIER, CapstoneRows
from tinyllm.capstone.stages import MAX_NEW_TOKENS, CapstonePlan, Stage
from tinyllm.evals.run import evaluate
from tinyllm.evals.view import estimate, percent
from tinyllm.record.files import read_json, write_json
from tinyllm.record.rollouts import read_table
from tinyllm.record.rundir import RunDir
from tinyllm.view.html import Section, write_html
from tinyllm.view.html.sections import Block, command, heading, table, text, tiles

SUITES = ("held_out", "shifted")
MODELS = {"grpo": "4-grpo", "dpo": "3-dpo", "sft": "1-sft"}
"""Which run ends in the model of each name, the last one first: it is compared with the others, and with base."""
QUANTITIES = ("reward", "kl", "clip_fraction", "rollout_revision")
RESULT = "capstone.json"
SHOWN = 8
"""Prompts whose completions are shown, before and after."""


def evaluate_stages(
    plan: CapstonePlan, stages: Sequence[Stage], rows: CapstoneRows, out: Path, on_phase: Callable[[str], None]
) -> dict[str, Any]:
    """Evaluate base, SFT, DPO and GRPO on both suites, greedily; the last stage is compared with each before it.

    A suite whose eval.json exists is not evaluated again. Writes capstone.json and returns what it holds.
    """
    folders = {stage.name: stage.folder for stage in stages}
    models = {name: str(folders[run]) for name, run in MODELS.items()} | {"base": plan.model}
    suites = {}
    for suite in SUITES:
        folder = out / "evals" / suite
        if not (folder / "eval.json").exists():
            options: dict[str, Any] = {
                "data.file": str(getattr(rows, suite)),
                "data.system_prompt": SYSTEM_PROMPT,
                "reward.functions": (VERIFIER,),
                "answer.max_new_tokens": MAX_NEW_TOKENS,
                "machine.threads": plan.threads,
                "out": str(folder),
            }
            evaluate(list(models.values()), options, on_phase=on_phase)
        suites[suite] = _named(read_json(folder / "eval.json"), {path: name for name, path in models.items()})
    result = {
        "seed": plan.seed,
        "model": plan.model,
        "stages": [{"name": stage.name, "kind": stage.config.kind} for stage in stages],
        "suites": suites,
        "quantities": quantities(RunDir.read(folders["4-grpo"])),
    }
    write_json(out / RESULT, result)
    return result


def _named(report: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The parts of an evaluation's report that capstone.json has, its models under their stages' names, base first."""

    def say(sentence: str) -> str:
        for path, name in names.items():
            sentence = sentence.replace(path, name)
        return sentence

    order = ["base", *reversed(MODELS)]
    results = {names[line["model"]]: line for line in report["results"] if line["task"] == report["results"][0]["task"]}
    comparisons = [
        {**line, "a": names[line["a"]], "b": names[line["b"]], "sentence": say(line["sentence"])}
        for line in report["comparisons"]
        if line["task"] == report["results"][0]["task"]
    ]
    return {
        "suite": report["suite"],
        "results": {name: {**results[name], "model": name} for name in order},
        "comparisons": comparisons,
        "overlap": report["overlap"],
        "warnings": [say(line) for line in report["warnings"]],
    }


def quantities(run: RunDir) -> dict[str, Any]:
    """Reward, KL, clip fraction and rollout revision at the end of a GRPO run, from its record, with 95% intervals.

    reward: of the last step's completions, clustered by prompt; kl: to the start policy, per token, also clustered by
    prompt; clip_fraction: share of the last step's trained tokens, with Wilson's interval; rollout_revision: the
    optimizer step whose weights sampled a completion of the last step: mean, smallest and largest, which are exact.
    """
    last = run.metrics("train")[-1]
    rollouts = [r for g in run.read_groups(last["step"]) for r in g.rollouts]
    scored = [r for r in rollouts if r.verdict.value is not None]
    reward = stats.accuracy([r.reward for r in scored], [r.completion.prompt_id for r in scored])
    kl = next(row for row in reversed(run.metrics("eval")) if row.get("kl") is not None)
    clipped = (last["clip_fraction_low"] or 0.0) + (last["clip_fraction_high"] or 0.0)
    low, high = stats.wilson(clipped * last["tokens"], last["tokens"])
    steps = [r.completion.revision.step for r in rollouts]
    return {
        "step": last["step"],
        "reward": asdict(reward),
        "kl": {"value": kl["kl"], "low": kl["kl_low"], "high": kl["kl_high"]},
        "clip_fraction": {"value": clipped, "low": low, "high": high},
        "rollout_revision": {"value": sum(steps) / len(steps), "low": min(steps), "high": max(steps)},
    }


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """The outcome as lines of text: a table of accuracies, then the comparisons."""
    lines = [f"{'':10}" + "".join(f"{suite.replace('_', '-'):>26}" for suite in SUITES)]
    for name in ("base", *reversed(MODELS)):
        cells = [estimate(result["suites"][suite]["results"][name]["score"]) for suite in SUITES]
        lines.append(f"{name:10}" + "".join(f"{cell:>26}" for cell in cells))
    lines.append("")
    return lines + [f"{c['a']} and {c['b']}: {c['sentence']}" for c in result["suites"]["held_out"]["comparisons"]]


def write_page(result: Mapping[str, Any], stages: Sequence[Stage], out: Path) -> Path:
    """capstone.html: the outcome first, then curves, rollouts and health of every stage."""
    shown = [stage for stage in stages if stage.name != "2-pairs"]
    extra = [
        Section("Outcome", _outcome(result)),
        Section("Before and after", _samples(out)),
        Section("Replay", _commands(result, stages)),
    ]
    title = f"Capstone, seed {result['seed']}: base, SFT, DPO, GRPO"
    runs = [RunDir.read(stage.folder) for stage in shown]
    return write_html(out / "capstone.html", runs, title, extra, mode="stages", names=[stage.name for stage in shown])


def _outcome(result: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [tiles(_figures(result["quantities"]))]
    for suite, what in zip(SUITES, ("Held-out suite", "Shifted suite: three-digit numbers, other words"), strict=True):
        part = result["suites"][suite]
        head = ("stage", "accuracy [95% interval]", "prompts", "cut", "unreadable", "tokens")
        lines = [
            (
                name,
                estimate(line["score"]),
                line["prompts"],
                percent(line["truncated"]),
                percent(line["unreadable"] or 0),
                f"{line['completion_tokens']:.1f}",
            )
            for name, line in part["results"].items()
        ]
        blocks += [heading(what, "exact format and right result, greedy"), table(head, lines)]
        pairs = [
            (f"{c['a']} against {c['b']}", c["sentence"], f"{c['p_holm']:.2g}", c["test"]) for c in part["comparisons"]
        ]
        blocks.append(table(("paired", "difference", "p (Holm)", "test"), pairs))
    return blocks


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    items = []
    for name in QUANTITIES:
        q, digits = found[name], 0 if name == "rollout_revision" else 3
        band = f"95% interval {q['low']:.{digits}f} to {q['high']:.{digits}f}"
        if name == "rollout_revision":
            band = f"sampled by weights of steps {q['low']} to {q['high']}"
        items.append((f"{name.replace('_', ' ')}, GRPO step {found['step']}", f"{q['value']:.{digits}f}", band))
    return items


def _samples(out: Path) -> list[Block]:
    """Completions of the same prompts by the base model and by the last stage's."""
    folder = out / "evals" / "held_out" / "rollouts"
    last, *_, base = sorted(folder.iterdir(), key=lambda path: int(path.stem))
    before = {g.prompt.id: g for g in read_table(base).groups}
    rows = []
    for group in read_table(last).groups[:SHOWN]:
        first = before[group.prompt.id].rollouts[0]
        rows.append((str(group.prompt.row["prompt"]), first.completion.text, group.rollouts[0].completion.text))
    return [heading("Completions of held-out prompts"), table(("prompt", "base", "after GRPO"), rows, wide=True)]


def _commands(result: Mapping[str, Any], stages: Sequence[Stage]) -> list[Block]:
    blocks = [text("Every stage can be derived again from its record, and the whole from its seed:")]
    blocks += [command(f"tinyllm replay {stage.folder}") for stage in stages]
    return [*blocks, command(f"tinyllm capstone --seed {result['seed']} --out NEW_FOLDER")]
