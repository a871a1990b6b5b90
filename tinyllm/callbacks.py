"""Callbacks: how the display, the trackers and a user's own code follow a run.

A callback receives records and numbers that are already on disk, so no callback can change a run. An exception that a
callback raises stops the run like any other exception.

The keys of a `train` line (metrics.jsonl and on_step) and of an `eval` line (on_eval) are the rows of METRICS in
record/metrics.py, listed in docs/metrics.md. A number that was not measured is None.
Keys of a timing line: step, step_s, sample_s, verify_s, record_s, update_s, publish_s, sampled_tokens,
peak_memory_bytes and time (Unix seconds). With a pool, wait_s (how long the trainer waited for groups) replaces
sample_s and verify_s, and trainer_idle, engine_idle (servers_idle with model servers) and verifier_idle are idle shares
of the time since the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyllm.config.sections import Config
from tinyllm.errors import TinyLLMError
from tinyllm.records import Group


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run at the start of training."""

    path: Path
    """The run directory."""
    config: Config
    first_step: int = 1
    """The first step to train; above 1 in a resumed run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts from the manifest: number of trained parameters, dtype, device, train_prompts, held_out_prompts,
    skipped_rows."""


@dataclass(frozen=True)
class RunResult:
    """Folders and held-out evaluations of a finished run."""

    run_dir: Path
    before: Mapping[str, Any] | None
    """The first `eval` line of metrics.jsonl; None when no prompts are held out."""
    after: Mapping[str, Any] | None
    """The last `eval` line; None when no prompts are held out."""
    model_dir: Path
    best_step: int | None = None
    """The step with the best evaluation so far; None when no evaluation after a training step gave a score."""

    @property
    def plot(self) -> Path | None:
        """Path of the plot of the run's curves; None when it was not drawn."""
        path = self.run_dir / "report.png"
        return path if path.exists() else None


class Interrupted(TinyLLMError):
    """Ctrl-C or SIGTERM stopped the run: every finished step is saved, and the message says how to resume."""

    exit_code = 130

    def __init__(self, run_dir: Path, step: int, kind: str):
        self.run_dir, self.step = run_dir, step
        super().__init__(f"stopped after step {step}; go on with: tinyllm {kind} --resume {run_dir}")


class Callback:
    """Base class of callbacks; each method does nothing until it is overridden."""

    def on_phase(self, phase: str) -> None:
        """A phase of the work begins: its name ("loading the model", "sampling"), then lines of detail, if any."""

    def on_start(self, info: RunInfo) -> None:
        """The run directory exists; the evaluation before training, or the first step of a resumed run, comes next."""

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """A step was recorded, trained and logged; metrics and timing are its lines, groups its rollouts."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        """Held-out prompts were evaluated; row is the `eval` line."""

    def on_end(self, result: RunResult | None) -> None:
        """The run ended; result is None when it was interrupted or failed."""
