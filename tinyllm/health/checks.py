"""Every check of a run's health, and how they are asked. A new alarm is a function and its name in CHECKS or LIVE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tinyllm.health import ledger, rewards, updates
from tinyllm.health.finding import LEVELS, Finding
from tinyllm.health.history import History


class Check(Protocol):
    """Looks at a run's history and says what it finds; of numbers that were not recorded it says nothing."""

    def __call__(self, history: History, /) -> Iterable[Finding]:
        """What it finds; every finding bears the check's name."""
        ...


LIVE: tuple[Check, ...] = (updates.non_finite_in_a_row, rewards.unscored_in_a_row, ledger.selection_now)
"""What the loop asks after each step: these look at the newest steps only, or at more where something is wrong."""
CHECKS: tuple[Check, ...] = (
    updates.non_finite_in_a_row,
    rewards.unscored_in_a_row,
    ledger.selected,
    rewards.signal,
    rewards.held_out,
    rewards.unscored,
    rewards.failed,
    rewards.truncation,
    rewards.unreadable,
    updates.sampler_gap,
    updates.ratio,
    updates.clipping,
    updates.kl,
    updates.entropy,
    updates.gradient,
    updates.non_finite,
)
"""What the report and `show` ask."""


def check(history: History, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Every finding of these checks, the worst first."""
    found = [finding for each in checks for finding in each(history)]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


class Monitor:
    """The checks beside a running loop, which says each thing once."""

    def __init__(self, checks: Sequence[Check] = LIVE) -> None:
        self.checks = list(checks)

    def __call__(self, history: History) -> list[Finding]:
        """What is new after the last step, the worst first and notices left out; a check that found something rests."""
        found: list[Finding] = []
        for each in tuple(self.checks):
            new = [finding for finding in check(history, [each]) if finding.level != "notice"]
            if new:
                self.checks.remove(each)
            found += new
        return sorted(found, key=lambda finding: -LEVELS.index(finding.level))
