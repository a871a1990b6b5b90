"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["notice", "warn", "problem", "stop"]
LEVELS: tuple[Level, ...] = ("notice", "warn", "problem", "stop")
"""notice: a number worth knowing, nothing is wrong; warn: look at this; problem: this will not end well; stop: going on
is of no use, and the loop ends the run."""


@dataclass(frozen=True)
class Rows:
    """Which rollouts show a finding: those of these steps, with this verdict."""

    first_step: int | None = None
    last_step: int | None = None
    verdict: Literal["no signal", "truncated", "unscored", "failed"] | None = None


@dataclass(frozen=True)
class Finding:
    """One sentence on a run."""

    level: Level
    check: str
    """The name of the check that found it."""
    text: str
    """What is so, with its numbers; no full stop at the end."""
    step: int
    """The step that shows it, or the first of them."""
    remedy: str = ""
    """What to do about it, as a sentence without its full stop; empty for a notice."""
    rows: Rows | None = None

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}" if self.remedy else self.text


def percent(share: float) -> str:
    """A share as per cent, with two digits where it is small."""
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else f"{100 * share:.2g}%"
