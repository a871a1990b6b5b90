"""A finding: what a check says about a run, and the rollouts that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["notice", "warn", "problem", "stop"]
LEVELS: tuple[Level, ...] = ("notice", "warn", "problem", "stop")
"""notice: a number worth knowing, nothing is wrong; warn: worth a look; problem: training fails or
teaches nothing unless something is changed; stop: more steps are useless, and the loop ends the run."""


@dataclass(frozen=True)
class Rows:
    """The rollouts that show a finding: those of these steps with this verdict; None: of all steps, of any verdict."""

    first_step: int | None = None
    last_step: int | None = None
    verdict: Literal["no signal", "truncated", "unscored", "failed"] | None = None


@dataclass(frozen=True)
class Finding:
    """One statement about a run."""

    level: Level
    check: str
    """The name of the check that found it."""
    text: str
    """The statement with its numbers, without a full stop."""
    step: int
    """The step that shows it; of several, the first."""
    remedy: str = ""
    """What the user can do, as a sentence without a full stop; empty for a notice."""
    rows: Rows | None = None

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}" if self.remedy else self.text


def percent(share: float) -> str:
    """A share as per cent, with two digits where it is small."""
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else f"{100 * share:.2g}%"
