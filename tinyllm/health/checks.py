"""Every check of a run's health, and the functions that ask them.

A new check is a function of the type `Check` in rewards.py or updates.py and its name in one list here: ALARMS for a
check that the training loop asks too, CHECKS for one that only the report and `tinyllm show` ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tinyllm.health import ledger, rewards, updates
from tinyllm.health.finding import LEVELS, Finding
from tinyllm.health.history import History


class Check(Protocol):
    """A function from a run's history to findings; none where the numbers that it reads were not recorded."""

    def __call__(self, history: History, /) -> Iterable[Finding]:
        """The findings; `check` of each names this function."""
        ...


ALARMS: tuple[Check, ...] = (updates.non_finite_in_a_row, rewards.unscored_in_a_row)
"""Asked by the training loop after each step, and by the report. They read the newest steps only, so that a step of a
long run takes no longer."""
LIVE: tuple[Check, ...] = (*ALARMS, ledger.selection_now)
"""Asked by the training loop after each step."""
CHECKS: tuple[Check, ...] = (
    *ALARMS,
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
"""Asked by the report and by `tinyllm show`."""


def check(history: History, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Every finding of these checks, the most severe first."""
    found = [finding for each in checks for finding in each(history)]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


class Monitor:
    """The checks of a running loop. A check that has found something is not asked again."""

    def __init__(self, checks: Sequence[Check] = LIVE) -> None:
        self.checks = list(checks)

    def __call__(self, history: History) -> list[Finding]:
        """The findings after the last step, the most severe first, without notices."""
        found: list[Finding] = []
        for each in tuple(self.checks):
            new = [finding for finding in check(history, [each]) if finding.level != "notice"]
            if new:
                self.checks.remove(each)
            found += new
        return sorted(found, key=lambda finding: -LEVELS.index(finding.level))
