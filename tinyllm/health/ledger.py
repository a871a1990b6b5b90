"""The ledger of a pool: how each group went, and whether dropped groups differ from those that were trained on.

Asynchronous training that drops slow work learns to answer briefly, although no reward asks for it. A run with a pool
therefore writes one line per group to ledger.jsonl, and `selection` compares dropped and trained groups by length,
difficulty and time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.health.finding import Finding, Level
from tinyllm.health.history import History
from tinyllm.records import Group

_AXES = {
    "length": ("tokens", "longer", "short completions"),
    "difficulty": ("mean reward", "easier", "hard prompts"),
    "time": ("seconds", "slower", "quick groups"),
}
"""Axis that groups are compared by -> its unit; of dropped groups with a larger value: the word for them, and what
training leans towards."""
_OPPOSITE = {
    "longer": "shorter",
    "easier": "harder",
    "slower": "quicker",
    "short completions": "long completions",
    "hard prompts": "easy prompts",
    "quick groups": "slow groups",
}
DROPPED_SHARE = 0.01
"""A smaller share of dropped completions is not worth a warning."""
_APART = 0.2
"""Dropped and trained groups whose means differ by more than this share of the larger are said to differ."""


def ledger_line(step: int, group: Group, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One line of ledger.jsonl; facts: the pool's (revision, seconds, workers, faults)."""
    lengths = [len(r.completion.token_ids) for r in group.rollouts if r.completion.token_ids]
    values = [r.verdict.value for r in group.rollouts if r.verdict.value is not None]
    reasons = Counter(r.completion.error or r.verdict.reason for r in group.rollouts if r.verdict.value is None)
    return {
        "step": step,
        "group": group.id,
        "prompt": group.prompt.id,
        **facts,
        "requested": len(group.rollouts),
        "failed": sum(r.completion.finish_reason == "error" for r in group.rollouts),
        "dropped": len(group.rollouts) - len(values),
        "reasons": dict(reasons),
        "tokens_mean": sum(lengths) / len(lengths) if lengths else None,
        "tokens_max": max(lengths, default=None),
        "reward_mean": sum(values) / len(values) if values else None,
    }


@dataclass(frozen=True)
class Quartile:
    """A quarter of the groups, in the order of one of _AXES. Counts are of completions."""

    axis: str
    low: float
    high: float
    requested: int
    finished: int
    """Sampled; the others failed."""
    trained: int
    dropped: int


@dataclass(frozen=True)
class Selection:
    """What was requested of the pool and what was trained on. Counts are of completions."""

    requested: int
    trained: int
    """Sampled and scored."""
    dropped: int
    """Requested and not trained on: failed, or not scored."""
    quartiles: tuple[Quartile, ...]
    warnings: tuple[str, ...]
    """One sentence for the share of dropped completions, one for each axis by which dropped groups differ."""


def selection(lines: Sequence[Mapping[str, Any]], last_step: int) -> Selection:
    """What the ledger says of a run whose last trained step is last_step."""
    latest = {(line["step"], line["group"]): line for line in lines}  # a resumed run samples groups again
    groups = [line for line in latest.values() if line["step"] <= last_step]
    requested, dropped = (sum(line[name] for line in groups) for name in ("requested", "dropped"))
    quartiles: list[Quartile] = []
    warnings: list[str] = []
    for axis, values in _values(groups).items():
        known = [(value, line) for value, line in zip(values, groups, strict=True) if value is not None]
        quartiles += _quartiles(axis, known)
        if dropped > DROPPED_SHARE * requested and (found := _difference(axis, known)):
            warnings.append(found)
    if dropped > DROPPED_SHARE * requested:
        reasons: Counter[str] = Counter()
        for line in groups:
            reasons.update(line["reasons"])
        worst = reasons.most_common(1)[0][0]
        share = 100 * dropped / requested
        warnings.insert(0, f"{share:.1f}% of the completions were dropped; most often because: {worst}")
    return Selection(requested, requested - dropped, dropped, tuple(quartiles), tuple(warnings))


def selected(history: History) -> Iterator[Finding]:
    """How many completions asked of the pool were trained on, and whether dropped groups differ from trained ones."""
    if not history.ledger or not history.train:
        return
    found = selection(history.ledger, history.last_step)
    if found.warnings:
        text = "; ".join(found.warnings)
        remedy = "Look up the reasons in ledger.jsonl; where work was ended as too slow, raise engine.deadline_s"
        level: Level = "problem" if len(found.warnings) > 1 else "warn"
        yield Finding(level, "selection", text, history.last_step, remedy)
    else:
        text = f"{found.trained:,} of {found.requested:,} completions asked of the pool were trained on"
        yield Finding("notice", "selection", text, history.last_step)


def selection_now(history: History) -> Iterator[Finding]:
    """`selected`, after a step with dropped completions, once the run has dropped enough of them for a warning.

    In any other step the ledger, which grows with the run, is not read.
    """
    if history.train and history.train[-1].get("unscored"):
        dropped = sum(row.get("unscored") or 0 for row in history.train)
        if dropped > DROPPED_SHARE * history.sampled:
            yield from selected(history)


def _values(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """By axis, each group's value. A group without a reward is as difficult as its prompt is in other steps."""
    seen: dict[str, list[float]] = {}
    for line in groups:
        if line["reward_mean"] is not None:
            seen.setdefault(line["prompt"], []).append(line["reward_mean"])

    def difficulty(line: Mapping[str, Any]) -> float | None:
        others = seen.get(line["prompt"])
        return line["reward_mean"] if not line["dropped"] else sum(others) / len(others) if others else None

    return {
        "length": [line["tokens_mean"] for line in groups],
        "difficulty": [difficulty(line) for line in groups],
        "time": [line["sampling_s"] + line["verifying_s"] for line in groups],
    }


def _quartiles(axis: str, known: Sequence[tuple[float, Mapping[str, Any]]]) -> list[Quartile]:
    ordered = sorted(known, key=lambda pair: pair[0])
    found = []
    for quarter in range(4):
        part = ordered[quarter * len(ordered) // 4 : (quarter + 1) * len(ordered) // 4]
        if part:
            requested, failed, dropped = (sum(line[n] for _, line in part) for n in ("requested", "failed", "dropped"))
            counts = (requested, requested - failed, requested - dropped, dropped)
            found.append(Quartile(axis, part[0][0], part[-1][0], *counts))
    return found


def _difference(axis: str, known: Sequence[tuple[float, Mapping[str, Any]]]) -> str | None:
    """How dropped groups differ from trained ones on this axis, as a sentence; None where they are alike."""
    dropped = [line["dropped"] for _, line in known]
    trained = [line["requested"] - line["dropped"] for _, line in known]
    if not any(dropped) or not any(trained):
        return None
    values = [value for value, _ in known]
    lost, held = (sum(map(operator.mul, values, weights)) / sum(weights) for weights in (dropped, trained))
    if abs(lost - held) <= _APART * max(abs(lost), abs(held)):
        return None
    unit, more, lean = _AXES[axis]
    more, lean = (more, lean) if lost > held else (_OPPOSITE[more], _OPPOSITE[lean])
    return (
        f"dropped groups were {more} than those trained on ({lost:.3g} against {held:.3g} {unit}), so training leans "
        f"towards {lean}"
    )
