"""The first place where two runs differ (step, hop, row), and the recorded conditions that differ.

Rollouts and metrics are compared, which identical runs have in common; timings, host and paths are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm.record.manifest import compare_manifests
from tinyllm.record.metrics import HOPS, METRICS, flat, metric
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Rollout

NO_CONDITION = ("config.run.dir", "config.run.trackers", "config.run.keep_checkpoints")
"""Options that cannot change what is compared."""


@dataclass(frozen=True)
class Difference:
    """The first place where two runs are not the same."""

    step: int
    hop: str
    what: str
    """The row or the metric."""
    first: Any
    second: Any

    def __str__(self) -> str:
        place = f"step {self.step}, hop {self.hop}, {self.what}"
        return f"first difference: {place}\n  {_short(self.first)}\n  {_short(self.second)}"


@dataclass(frozen=True)
class RunDiff:
    """What compare_runs found."""

    names: tuple[str, str]
    conditions: list[tuple[str, Any, Any]]
    difference: Difference | None
    steps: tuple[int, int]
    """The last step that each run trained."""

    @property
    def equal(self) -> bool:
        """Whether both runs have the same steps and these are the same to the last bit."""
        return self.difference is None and self.steps[0] == self.steps[1]

    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        lines = []
        if self.conditions:
            lines.append("recorded conditions that differ:")
            lines += [f"  {name}: {_short(a)} | {_short(b)}" for name, a, b in self.conditions]
        else:
            lines.append("every recorded condition is the same")
        if self.difference is not None:
            return [*lines, str(self.difference)]
        common = min(self.steps)
        lines.append(f"{common} steps, rollouts and metrics equal to the last bit")
        if self.steps[0] != self.steps[1]:
            longer = self.names[self.steps[1] > self.steps[0]]
            lines.append(f"{longer} goes on to step {max(self.steps)}")
        return lines


def compare_runs(first: RunDir, second: RunDir) -> RunDiff:
    """Compare two runs step by step, up to their first difference. Raises RunError for a record that cannot be read."""
    conditions = [c for c in compare_manifests(first.manifest, second.manifest) if c[0] not in NO_CONDITION]
    tables = _by_step(first), _by_step(second)
    steps = _last_trained(tables[0]), _last_trained(tables[1])
    difference = next(_differences(first, second, tables), None)
    return RunDiff((str(first.path), str(second.path)), conditions, difference, steps)


_Table = dict[tuple[str, int], dict[str, Any]]


def _last_trained(table: _Table) -> int:
    return max((step for kind, step in table if kind == "train"), default=0)


def _differences(first: RunDir, second: RunDir, tables: tuple[_Table, _Table]) -> Iterator[Difference]:
    recorded = set(first.steps()), set(second.steps())
    common = min(map(_last_trained, tables))
    for step in sorted({*range(common + 1), *(recorded[0] & recorded[1])}):
        if 0 < step <= common:  # a step that both trained has its record and its line in both
            there = [step in steps for steps in recorded], [("train", step) in table for table in tables]
            for hop, what, has in zip(("record", "metrics"), ("rollouts", "line"), there, strict=True):
                if not all(has):
                    yield Difference(step, hop, what, *("there" if x else "missing" for x in has))
        if step in recorded[0] and step in recorded[1]:
            yield from _compare_rollouts(step, first, second)
        for kind in ("train", "eval"):
            a, b = (table.get((kind, step)) for table in tables)
            if a is not None and b is not None:
                yield from _compare_metrics(step, kind, a, b)


def _by_step(run: RunDir) -> _Table:
    """The lines of metrics by kind and step, their keys as METRICS names them."""
    return {(row.get("kind", "train"), row["step"]): flat(row) for row in run.metrics()}


def _compare_rollouts(step: int, first: RunDir, second: RunDir) -> Iterator[Difference]:
    a, b = (_rows(run, step) for run in (first, second))
    for number, ((group_a, one), (group_b, other)) in enumerate(zip(a, b, strict=False)):
        place = f"row {number} (group {group_a.id}, sample {one.completion.sample})"
        if (group_a.id, group_a.prompt.token_ids) != (group_b.id, group_b.prompt.token_ids):
            yield Difference(step, "prompts", place, group_a.prompt.text, group_b.prompt.text)
        for what, x, y in _sampled(one.completion, other.completion):
            yield Difference(step, "sample", f"{place}, {what}", x, y)
        if repr(one.verdict) != repr(other.verdict):
            yield Difference(step, "verify", place, one.verdict, other.verdict)
    if len(a) != len(b):
        yield Difference(step, "prompts", "number of rollouts", len(a), len(b))


def _sampled(x: Completion, y: Completion) -> Iterator[tuple[str, Any, Any]]:
    """Every part of two completions that differs: its name and both values, causes before effects."""
    pairs = [("seed key", x.seed_key, y.seed_key), ("revision", x.revision, y.revision)]
    for name, these, those in (("token", x.token_ids, y.token_ids), ("log-probability", x.logprobs, y.logprobs)):
        pairs += [(f"{name} {at}", *both) for at, both in enumerate(zip(these, those, strict=False))]
    pairs.append(("number of tokens", len(x.token_ids), len(y.token_ids)))
    pairs += [(name, getattr(x, name), getattr(y, name)) for name in ("finish_reason", "error", "text")]
    return ((name, a, b) for name, a, b in pairs if repr(a) != repr(b))


def _compare_metrics(step: int, kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}, key=lambda key: _order(key, kind)):
        if json.dumps(a.get(key)) != json.dumps(b.get(key)):
            yield Difference(step, _hop(key, kind), key, a.get(key), b.get(key))


def _hop(key: str, kind: str) -> str:
    """The hop that computes a key; of a key that METRICS lacks, the last of its line."""
    row = metric(key, kind)
    return row.hop if row is not None else "metrics" if kind == "train" else "evaluation"


def _order(key: str, kind: str) -> tuple[int, bool, int, str]:
    """Hop by hop; in each the hash first, which tells of every bit, then as METRICS has them."""
    row = metric(key, kind)
    place = METRICS.index(row) if row is not None else len(METRICS)
    return HOPS.index(_hop(key, kind)), not key.startswith("hashes."), place, key


def _rows(run: RunDir, step: int) -> list[tuple[Group, Rollout]]:
    """Every rollout of a step with its group; checksums are not looked at, since a changed row is to be found."""
    groups = run.read_rollouts(step).groups
    return [(group, rollout) for group in groups for rollout in group.rollouts]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
