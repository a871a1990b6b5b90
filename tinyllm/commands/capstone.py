"""`tinyllm capstone`: from the base model to the report, in one command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tinyllm.capstone.outcome import evaluate_stages, summary_lines, write_page
from tinyllm.capstone.rows import write_rows
from tinyllm.capstone.stages import CapstonePlan, run_stages, stages
from tinyllm.commands.arguments import CapstoneArguments
from tinyllm.errors import RunError
from tinyllm.record.files import read_json, write_errors, write_json
from tinyllm.record.rundir import new_run_path
from tinyllm.view.callbacks import run_callbacks
from tinyllm.view.progress import ReplayProgress


def main(given: CapstoneArguments, options: Mapping[str, Any]) -> int:
    """Run the command and return its exit code. Raises the errors of errors.py."""
    capstone(CapstonePlan(model=given.model, seed=given.seed, threads=given.threads), given.out)
    return 0


def capstone(plan: CapstonePlan, out: str | Path | None = None) -> Path:
    """Run every stage, evaluate them, write the report, and return the folder. Goes on where it was stopped.

    Raises RunError for a folder that holds something else, or the capstone of another plan.
    """
    path = Path(out) if out else new_run_path("capstones")
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(entry.name for entry in path.iterdir())
    if (path / "plan.json").exists():
        saved = CapstonePlan(**read_json(path / "plan.json")["plan"])
        if replace(saved, threads=plan.threads) != plan:
            raise RunError(f"{path}: holds a capstone with other options (seed {saved.seed}); choose another --out")
    elif others:
        raise RunError(f"{path} holds other files ({others[0]}); choose an empty or new folder with --out")
    else:
        write_json(path / "plan.json", {"plan": asdict(plan)})
    rows = write_rows(path / "rows", plan.seed, plan.examples, plan.prompts, plan.shifted)  # the same each time
    print(f"capstone of {plan.model}, seed {plan.seed}, in {path}", flush=True)
    made = stages(plan, rows, path)
    run_stages(made, run_callbacks, lambda line: print(f"\n{line}", flush=True))
    print("\nevaluation of every stage", flush=True)
    display = ReplayProgress()
    try:
        result = evaluate_stages(plan, made, rows, path, display.on_phase)
    finally:
        display.close()
    page = write_page(result, made, path)
    print("\n".join(["", *summary_lines(result), "", f"report  {page}"]))
    return path
