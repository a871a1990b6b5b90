"""Whether a run was well, in plain words: each finding has its number, its step and a remedy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tinyllm.health.ledger import Selection, selection
from tinyllm.record.rundir import RunDir
from tinyllm.view.html.columns import FINISH, Rollouts
from tinyllm.view.html.curves import Chart, score

CHARTS = (
    "Sampler against trainer", "Tokens equal to the bit", "Groups without signal", "Truncated", "Ratio",
    "Clip fraction", "Reward parts", "Answers not found", "Policy lag", "Gradient norm",
)  # fmt: skip
"""Titles of the charts that stand beside the findings."""
Finding = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def health_charts(charts: Sequence[Chart]) -> list[Chart]:
    """Those of the run's charts that tell of its health, in our order."""
    return [chart for title in CHARTS for chart in charts if chart["title"] == title]


def findings(run: RunDir, rollouts: Rollouts | None) -> list[Finding]:
    """Every finding, the worst first; a check whose numbers were not recorded says nothing."""
    train, evals = run.metrics("train"), run.metrics("eval")
    found = [finding for check in CHECKS for finding in check(train)]
    found += [*_held_out(evals), *_unscored(train, rollouts), *_limit(run, train), *_failed(rollouts), *_selected(run)]
    return sorted(found, key=lambda finding: ("bad", "warn", "ok").index(finding["level"]))


def unscored_reasons(train: Rows) -> list[list[Any]]:
    """(reason, count, first step, last step) of all completions that a verifier could not score."""
    counts: Counter[str] = Counter()
    steps: dict[str, list[int]] = {}
    for row in train:
        for reason, count in (row.get("unscored_reasons") or {}).items():
            counts[reason] += count
            steps.setdefault(reason, []).append(row["step"])
    return [[reason, count, steps[reason][0], steps[reason][-1]] for reason, count in counts.most_common()]


def selected(run: RunDir) -> Selection | None:
    """Who was asked for and who was trained on, where the run had a pool."""
    lines = run.ledger()
    trained = [row["step"] for row in run.metrics("train")]
    return selection(lines, max(trained)) if lines and trained else None


def selection_rows(found: Selection) -> list[list[Any]]:
    """A row per quarter of the groups: by what, from, to, and counts of completions."""
    return [
        [q.axis, f"{q.low:.3g}", f"{q.high:.3g}", q.requested, q.finished, q.trained, q.dropped]
        for q in found.quartiles
    ]


def _selected(run: RunDir) -> Iterator[Finding]:
    found = selected(run)
    if found is None:
        return
    if found.warnings:
        text = f"{'; '.join(found.warnings)}."
        yield _finding("bad" if len(found.warnings) > 1 else "warn", text[0].upper() + text[1:])
    else:
        yield _finding("ok", f"{found.trained:,} of {found.requested:,} completions asked of the pool were trained on.")


def _finding(level: str, text: str, **rows: Any) -> Finding:
    """rows: what the browser is to show, as {step: [first, last], verdict: ...}."""
    return {"level": level, "text": text} | ({"filter": rows} if rows else {})


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]


def _late(points: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """(mean over the last third, its first step)."""
    late = points[-max(1, len(points) // 3) :]
    return statistics.fmean(value for _, value in late), late[0][0]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else f"{100 * share:.2g}%"


def _signal(train: Rows) -> Iterator[Finding]:
    points = _points(train, "zero_advantage")
    if not points:
        return
    share, first = _late(points)
    rewards = [row["reward_mean"] for row in train if row["step"] >= first and row.get("reward_mean") is not None]
    if share < 0.5:
        yield _finding("ok", f"{_percent(1 - share)} of the groups from step {first} on had something to learn from.")
        return
    high = max((row["reward_mean"] for row in train if row.get("reward_mean") is not None), default=0.0)
    solved = bool(rewards) and statistics.fmean(rewards) > high / 2
    remedy = "harder prompts" if solved else "easier prompts or a reward with more steps"
    yield _finding(
        "bad" if share > 0.9 else "warn",
        f"{_percent(share)} of the groups from step {first} on had nothing to learn from (zero advantage): "
        f"use {remedy}, larger groups, or dynamic sampling.",
        step=[first, points[-1][0]],
        verdict="no signal",
    )


def _ratio(train: Rows) -> Iterator[Finding]:
    points = _points(train, "ratio_max")
    if not points:
        return
    step, largest = max(points, key=lambda point: point[1])
    if largest > 10:
        yield _finding(
            "bad" if largest > 100 else "warn",
            f"A token became {largest:.3g} times as likely within step {step} (largest ratio): use fewer updates per "
            "batch or a lower learning rate.",
            step=[step, step],
        )
    else:
        yield _finding("ok", f"No ratio was larger than {largest:.3g} (step {step}).")


def _clip(train: Rows) -> Iterator[Finding]:
    sums = [
        (row["step"], (row.get("clip_fraction_high") or 0) + (row.get("clip_fraction_low") or 0))
        for row in train
        if row.get("clip_fraction_high") is not None
    ]
    if sums and max(share for _, share in sums) > 0.2:
        step, share = max(sums, key=lambda point: point[1])
        yield _finding(
            "warn",
            f"{_percent(share)} of the trained tokens of step {step} were clipped and taught nothing: lower the "
            "learning rate or the updates per batch.",
            step=[step, step],
        )


def _gap(train: Rows) -> Iterator[Finding]:
    equal, gaps, largest = (_points(train, key) for key in ("sampler_equal", "sampler_gap", "sampler_gap_max"))
    if equal and min(share for _, share in equal) == 1:
        yield _finding("ok", f"Sampler and trainer agreed to the last bit on each trained token of {len(equal)} steps.")
    elif gaps:
        step, gap = max(gaps, key=lambda point: abs(point[1]))
        most = f", at most {max(value for _, value in largest):.3g}" if largest else ""
        yield _finding(
            "warn" if abs(gap) > 0.02 else "ok",
            f"Sampler and trainer differ by {abs(gap):.2g} nats per token in step {step}{most}"
            + (": set objective.sampler_correction, or sample in the trainer's precision." if abs(gap) > 0.02 else "."),
            step=[step, step],
        )


def _entropy(train: Rows) -> Iterator[Finding]:
    points = _points(train, "entropy")
    if len(points) > 3 and any("reward_mean" in row for row in train):  # what is given, not sampled, may well be sure
        late, _ = _late(points)
        if late < 0.02 and late < points[0][1] / 10:
            yield _finding(
                "warn",
                f"Entropy fell from {points[0][1]:.2g} to {late:.2g} nats per token: completions of a group hardly "
                "differ any more. Stop earlier, or use a KL term or a higher clip bound.",
            )


def _gradient(train: Rows) -> Iterator[Finding]:
    bad = [row["step"] for row in train if row.get("non_finite")]
    if bad:
        yield _finding(
            "bad",
            f"{len(bad)} steps had numbers that are not finite and changed nothing, the first is step {bad[0]}: "
            "lower the learning rate.",
            step=[bad[0], bad[0]],
        )
    points = [(step, value) for step, value in _points(train, "grad_norm") if value > 0]
    if len(points) >= 8:
        middle = statistics.median(value for _, value in points)
        step, largest = max(points, key=lambda point: point[1])
        if largest > 10 * middle:
            yield _finding(
                "warn",
                f"The gradient of step {step} was {largest / middle:.0f} times the median ({largest:.3g}): look at "
                "its rollouts; optimizer.clip_norm limits such steps.",
                step=[step, step],
            )


def _kl(train: Rows) -> Iterator[Finding]:
    points = _points(train, "kl")
    if points and points[-1][1] > 1:
        yield _finding("warn", f"KL to the reference reached {points[-1][1]:.2g} nats per token: raise objective.beta.")


def _unreadable(train: Rows) -> Iterator[Finding]:
    points = _points(train, "unreadable")
    if points:
        share, first = _late(points)
        if share > 0.2:
            yield _finding(
                "warn",
                f"No answer was found in {_percent(share)} of the completions from step {first} on: state the answer's "
                "form in the prompt, or choose another rule of the verifier.",
                step=[first, points[-1][0]],
            )


CHECKS: tuple[Callable[[Rows], Iterator[Finding]], ...] = (
    _signal, _ratio, _clip, _gap, _entropy, _gradient, _kl, _unreadable
)  # fmt: skip
"""Each yields what it finds in the lines of the steps."""


def _limit(run: RunDir, train: Rows) -> Iterator[Finding]:
    points = _points(train, "truncated")
    if not points:
        return
    share, first = _late(points)
    limit = run.manifest["config"].get("sampling", {}).get("max_new_tokens", "?")
    if share > 0.1:
        yield _finding(
            "bad" if share > 0.5 else "warn",
            f"{_percent(share)} of the completions from step {first} on were cut at {limit} tokens: raise "
            "sampling.max_new_tokens, or reward shorter answers.",
            step=[first, points[-1][0]],
            verdict="truncated",
        )
    else:
        yield _finding("ok", f"{_percent(share)} of the completions from step {first} on were cut at {limit} tokens.")


def _unscored(train: Rows, rollouts: Rollouts | None) -> Iterator[Finding]:
    reasons = unscored_reasons(train)
    if reasons:
        total = sum(count for _, count, _, _ in reasons)
        share = f" ({_percent(total / len(rollouts))})" if rollouts and not rollouts.omitted_steps else ""
        reason, count, step, last = reasons[0]
        yield _finding(
            "bad" if rollouts and total > len(rollouts) / 20 else "warn",
            f"{total} completions{share} could not be scored and were not trained on; the most frequent reason is "
            f"{reason!r} ({count} times, first in step {step}).",
            step=[step, last],
            verdict="unscored",
        )
    elif any(row.get("unscored") == 0 for row in train):
        yield _finding("ok", "Every completion was scored.")


def _failed(rollouts: Rollouts | None) -> Iterator[Finding]:
    if rollouts is not None and (count := int((rollouts.finish == FINISH.index("error")).sum())):
        yield _finding("warn", f"The sampler failed on {count} completions.", verdict="failed")


def _held_out(evals: Rows) -> Iterator[Finding]:
    scored = [(row["step"], *values) for row in evals if (values := score(row))]
    if len(scored) < 2:
        return
    (_, start, _, start_high), (_, value, low, high) = scored[0], scored[-1]
    step, best, best_low, _ = max(scored, key=lambda point: point[1])
    if best > high and best_low > value:
        yield _finding("warn", f"The held-out score was best at step {step} ({best:.2f}) and is {value:.2f} now.")
    elif value > start_high and low > start:
        yield _finding("ok", f"The held-out score rose from {start:.2f} to {value:.2f} [{low:.2f}, {high:.2f}].")
    else:
        yield _finding("warn", f"The held-out score did not rise beyond chance: {start:.2f}, then {value:.2f}.")
