"""`ol check C2 RUN`: whether a capstone run is what it says, from its record.

Stages that started from each other's weights, a report with four quantities and their intervals, and evaluations whose
numbers follow from the recorded completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tinyllm.capstone.outcome import MODELS, QUANTITIES, RESULT, SUITES, quantities
from tinyllm.errors import RunError, TinyLLMError, UserError
from tinyllm.evals import measure
from tinyllm.record.files import read_json
from tinyllm.record.rollouts import read_table
from tinyllm.record.rundir import RunDir

KINDS = {"1-sft": "sft", "2-pairs": "grpo", "3-dpo": "dpo", "4-grpo": "grpo"}
STARTS = {"2-pairs": "1-sft", "3-dpo": "1-sft", "4-grpo": "3-dpo"}
"""Whose final weights a stage starts from."""
ANSWERED = (*MODELS, "base")
"""In the order of the evaluations' record."""


class Finding(NamedTuple):
    """One thing that was checked."""

    holds: bool
    what: str
    detail: str


def check_capstone(folder: Path) -> list[Finding]:
    """Every check on the folder of a capstone. Raises UserError when there is none."""
    if not (folder / RESULT).exists():
        raise UserError(f"{folder}: no capstone here ({RESULT} is missing); make one with: tinyllm capstone")
    result = read_json(folder / RESULT)
    found = []
    for check in (_stages, _quantities, _evaluations, _comparisons, _report):
        try:
            found += list(check(folder, result))
        except (TinyLLMError, KeyError, TypeError, ValueError, StopIteration) as error:
            name = check.__name__.strip("_")
            found.append(Finding(False, name, f"cannot be checked: {error or type(error).__name__}"))
    return found


def _stages(folder: Path, result: Mapping[str, Any]) -> Iterator[Finding]:
    listed = {stage["name"]: stage["kind"] for stage in result["stages"]}
    yield Finding(listed == KINDS, "stages", ", ".join(f"{name} ({kind})" for name, kind in listed.items()))
    runs = {name: RunDir.read(folder / name) for name in KINDS}
    for name, kind in KINDS.items():
        run = runs[name]
        done = run.metrics("train")[-1]["step"] if run.metrics("train") else 0
        saved, steps = (run.path / "model").is_dir(), run.config.train.steps
        told = f"{run.manifest['kind']}, {done} of {steps} steps, model {'saved' if saved else 'missing'}"
        yield Finding(run.manifest["kind"] == kind and done == steps and saved, name, told)
    for name, before in STARTS.items():
        ended = runs[before].metrics("train")[-1]["hashes"]["weights"]
        began = runs[name].manifest["hashes"]["weights"]
        yield Finding(began == ended, f"{name} starts from {before}", f"weights {began[:12]}")


def _quantities(folder: Path, result: Mapping[str, Any]) -> Iterator[Finding]:
    again = quantities(RunDir.read(folder / "4-grpo"))
    for name in QUANTITIES:
        said = result["quantities"][name]
        inside = said["low"] <= said["value"] <= said["high"]
        band = f"{said['value']:.4g} [{said['low']:.4g}, {said['high']:.4g}]"
        yield Finding(inside and said == again[name], name.replace("_", " "), f"{band}, as the record says")
    steps = RunDir.read(folder / "4-grpo").metrics("train")
    live = [row for row in steps if row["zero_advantage"] != 1.0]  # a step without signal has no ratio to clip
    missing = [row["step"] for row in live if row["reward_mean"] is None or row["clip_fraction_low"] is None]
    yield Finding(not missing, "logged in every step", f"{len(steps)} steps" + (f", but {missing}" if missing else ""))


def _answers(folder: Path, suite: str, name: str) -> list[measure.Answers]:
    """The recorded answers of one model."""
    path = folder / "evals" / suite / "rollouts" / f"{ANSWERED.index(name) + 1}.parquet"
    return [measure.answers_of(group, group.prompt.id) for group in read_table(path).groups]


def _evaluations(folder: Path, result: Mapping[str, Any]) -> Iterator[Finding]:
    for suite in SUITES:
        for name in ANSWERED:
            again = measure.summarize(_answers(folder, suite, name), 1)
            score = again["score"]
            told = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}] of {again['prompts']} prompts"
            yield Finding(result["suites"][suite]["results"][name]["score"] == score, f"{suite}: {name}", told)


def _comparisons(folder: Path, result: Mapping[str, Any]) -> Iterator[Finding]:
    said = {c["b"]: c for c in result["suites"]["held_out"]["comparisons"] if c["a"] == "grpo"}
    for name in ("sft", "dpo"):
        pair = measure.compare(_answers(folder, "held_out", "grpo"), _answers(folder, "held_out", name), 1)
        same = pair is not None and all(
            said[name][key] == pair[1][key] for key in ("difference", "p", "wins", "losses")
        )
        yield Finding(same, f"grpo against {name}", said[name]["sentence"])


def _report(folder: Path, result: Mapping[str, Any]) -> Iterator[Finding]:
    page = folder / "capstone.html"
    if not page.exists():
        raise RunError(f"{page} is missing")
    yield Finding(page.stat().st_size > 100_000, "report", f"{page}, {page.stat().st_size / 1e6:.1f} MB")
