"""The history of a run, which checks read: kept by the training loop, or read from a run directory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tinyllm.config.sections import Config, GRPOConfig
from tinyllm.record.metrics import flat
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group

Row = Mapping[str, Any]
"""A line of metrics.jsonl; METRICS in record/metrics.py has its keys."""


@dataclass(frozen=True)
class History:
    """A run up to its last trained step. Lines are in order of their steps."""

    path: Path
    """The run directory."""
    config: Config
    train: tuple[Row, ...]
    """The lines of training steps."""
    evals: tuple[Row, ...]
    """The lines of evaluations."""
    read_groups: Callable[[int], Sequence[Group]]
    """Reads the groups of a step from the record. Raises RunError."""
    read_ledger: Callable[[], Sequence[Row]]
    """Reads the lines of ledger.jsonl; none without a pool."""
    newest: tuple[Group, ...] = ()
    """The groups of the last step, where the training loop keeps the history."""

    @classmethod
    def of(cls, run: RunDir, last_step: int | None = None) -> History:
        """The history of a run directory up to last_step (default: to its end). Raises RunError for damaged metrics.

        Groups and the ledger are read when a check first asks for them.
        """
        rows = [row for row in run.metrics() if last_step is None or row["step"] <= last_step]
        train, evals = (tuple(row for row in rows if row.get("kind", "train") == kind) for kind in ("train", "eval"))
        return cls(run.path, run.config, train, evals, run.read_groups, run.ledger)

    def with_step(self, row: Row, groups: Sequence[Group]) -> History:
        """The history after one more training step: its line of metrics.jsonl and its groups."""
        return replace(self, train=(*self.train, row), newest=tuple(groups))

    def with_eval(self, row: Row) -> History:
        """The history after one more evaluation."""
        return replace(self, evals=(*self.evals, row))

    def groups(self, step: int) -> Sequence[Group]:
        """The groups of a step. Raises RunError when they are not on disk or damaged."""
        return self.newest if self.newest and step == self.last_step else self.read_groups(step)

    @cached_property
    def ledger(self) -> Sequence[Row]:
        """The lines of ledger.jsonl."""
        return self.read_ledger()

    @property
    def last_step(self) -> int:
        """The last trained step; 0 before the first."""
        return self.train[-1]["step"] if self.train else 0

    @property
    def sampled(self) -> int:
        """Completions requested in all steps; 0 for SFT and DPO, whose completions are given."""
        if not isinstance(self.config, GRPOConfig):
            return 0
        return self.config.sampling.group_size * sum(row.get("groups_drawn") or 0 for row in self.train)

    def values(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every training step that has a number under this key of METRICS ("reward_parts.correct")."""
        rows = self.train if "." not in key else [flat(row) for row in self.train]
        return [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]

    def late_mean(self, key: str) -> tuple[float, int] | None:
        """(mean over the last third of the steps that have this key, its first step); None where none has."""
        points = self.values(key)
        late = points[-max(1, len(points) // 3) :]
        return (statistics.fmean(value for _, value in late), late[0][0]) if late else None
