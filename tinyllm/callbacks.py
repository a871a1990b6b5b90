"""The events of a run, as callbacks receive them: the display, the trackers, and a user's own code.

A callback receives records and numbers that are already written, so no callback can change a run. An exception that a
callback raises stops the run like any other.

The keys of a `train` line (metrics.jsonl and on_step) and of an `eval` line (on_eval) are those of METRICS in
record/metrics.py: docs/metrics.md. A number that was not measured is None.
Keys of a timing line: step, step_s, sample_s, verify_s, record_s, update_s, publish_s, sampled_tokens,
peak_memory_bytes, and what the trainer adds. With a pool, wait_s (the trainer's, for groups) stands for sample_s and
verify_s, and trainer_idle, engine_idle (servers_idle) and verifier_idle are shares of the time since the step before.
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
    """A run at the start of training."""

    path: Path
    """The run directory."""
    config: Config
    first_step: int = 1
    """The first step still to do; more than 1 in a resumed run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The manifest's facts: parameters (trained), dtype, device, train_prompts, held_out_prompts, skipped_rows."""


@dataclass(frozen=True)
class RunResult:
    """Folders and held-out evaluations of a finished run."""

    run_dir: Path
    before: Mapping[str, Any] | None
    """The first and the last line of kind `eval`; None when nothing is held out."""
    after: Mapping[str, Any] | None
    model_dir: Path
    best_step: int | None = None
    """The step of the model in best/; None where the run keeps no best model."""

    @property
    def plot(self) -> Path | None:
        """The curves as a picture; None where the run was not drawn."""
        path = self.run_dir / "report.png"
        return path if path.exists() else None


class Interrupted(TinyLLMError):
    """Ctrl-C or SIGTERM: every finished step is saved, and the message has the command that resumes the run."""

    exit_code = 130

    def __init__(self, run_dir: Path, step: int, kind: str):
        self.run_dir, self.step = run_dir, step
        super().__init__(f"stopped after step {step}; go on with: tinyllm {kind} --resume {run_dir}")


class Callback:
    """Base of all callbacks; each method does nothing until it is overridden."""

    def on_phase(self, phase: str) -> None:
        """The work that begins now, in a few words ("loading the model", "sampling"), and details in further lines."""

    def on_start(self, info: RunInfo) -> None:
        """The run directory exists; the first evaluation comes next."""

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """A step was trained, recorded and logged."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        """Held-out prompts were evaluated."""

    def on_end(self, result: RunResult | None) -> None:
        """The run is over; None when it was stopped or failed."""
