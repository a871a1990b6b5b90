"""Checks on sampled completions and their verdicts: signal, truncation, answers, unscored, failed, held-out rows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import RunError
from tinyllm.health.finding import Finding, Rows, percent
from tinyllm.health.history import History, Row
from tinyllm.record.metrics import held_out_score, score_kind

STEPS_READ = 100
"""The most steps of the record that one check reads."""


def unscored_in_a_row(history: History) -> Iterator[Finding]:
    """stop.bad_steps steps in a row, up to the last, of which no completion was scored (reward_mean is null)."""
    bad = list(takewhile(lambda row: row.get("reward_mean", 0) is None, reversed(history.train)))
    if len(bad) >= history.config.stop.bad_steps:
        reasons = bad[0].get("unscored_reasons") or {"there is none": 1}
        yield Finding(
            "stop",
            "unscored in a row",
            f"no completion of {len(bad)} steps in a row was scored, the last because: "
            f"{max(sorted(reasons), key=lambda reason: reasons[reason])}",
            bad[-1]["step"],
            f"Check the reward; what was sampled is in {history.path}",
            Rows(bad[-1]["step"], bad[0]["step"], "unscored"),
        )


def unscored_reasons(train: Sequence[Row]) -> list[tuple[str, int, int, int]]:
    """(reason, count, first step, last step) of all completions that a verifier could not score."""
    counts: Counter[str] = Counter()
    steps: dict[str, list[int]] = {}
    for row in train:
        for reason, count in (row.get("unscored_reasons") or {}).items():
            counts[reason] += count
            steps.setdefault(reason, []).append(row["step"])
    return [(reason, count, steps[reason][0], steps[reason][-1]) for reason, count in counts.most_common()]


def unscored(history: History) -> Iterator[Finding]:
    """How many completions have no reward, and why."""
    reasons = unscored_reasons(history.train)
    if not reasons:
        if any(row.get("unscored") == 0 for row in history.train):
            yield Finding("notice", "unscored", "Every completion was scored", history.last_step)
        return
    total = sum(count for _, count, _, _ in reasons)
    sampled = history.sampled
    share = f" ({percent(total / sampled)})" if sampled else ""
    reason, count, first, last = reasons[0]
    yield Finding(
        "problem" if sampled and total > sampled / 20 else "warn",
        "unscored",
        f"{total} completions{share} could not be scored and were not trained on; the most frequent reason is "
        f"{reason!r} ({count} times, first in step {first})",
        first,
        "Check the reward on them",
        Rows(first, last, "unscored"),
    )


def failed(history: History) -> Iterator[Finding]:
    """Completions whose sampling failed, counted in the record of the newest steps that have unscored completions."""
    steps = [row["step"] for row in history.train if row.get("unscored")]
    counts: dict[int, int] = {}
    for step in steps[-STEPS_READ:]:
        try:
            groups = history.groups(step)
        except RunError:  # moved away or damaged: replay and the page report that
            continue
        if count := sum(r.completion.finish_reason == "error" for group in groups for r in group.rollouts):
            counts[step] = count
    if counts:
        first, last = min(counts), max(counts)
        since = f" from step {steps[-STEPS_READ]} on" if len(steps) > STEPS_READ else ""
        text = f"The sampler failed on {sum(counts.values())} completions{since}"
        remedy = "See their reasons in the record"
        yield Finding("warn", "failed", text, first, remedy, Rows(first, last, "failed"))


def signal(history: History) -> Iterator[Finding]:
    """The share of groups whose advantages are not all zero."""
    late = history.late_mean("zero_advantage")
    if late is None:
        return
    share, first = late
    if share < 0.5:
        text = f"{percent(1 - share)} of the groups from step {first} on had something to learn from"
        yield Finding("notice", "signal", text, first)
        return
    rewards = history.values("reward_mean")
    recent = [value for step, value in rewards if step >= first]
    high = max((value for _, value in rewards), default=0.0)
    solved = bool(recent) and statistics.fmean(recent) > high / 2
    remedy = "harder prompts" if solved else "easier prompts or a reward with more steps"
    yield Finding(
        "problem" if share > 0.9 else "warn",
        "signal",
        f"{percent(share)} of the groups from step {first} on had nothing to learn from (zero advantage)",
        first,
        f"Use {remedy}, larger groups, or dynamic sampling",
        Rows(first, history.values("zero_advantage")[-1][0], "no signal"),
    )


def truncation(history: History) -> Iterator[Finding]:
    """The share of completions that the token limit cut."""
    late = history.late_mean("truncated")
    if late is None or not isinstance(history.config, GRPOConfig):
        return
    share, first = late
    limit = history.config.sampling.max_new_tokens
    text = f"{percent(share)} of the completions from step {first} on were cut at {limit} tokens"
    if share <= 0.1:
        yield Finding("notice", "truncation", text, first)
        return
    yield Finding(
        "problem" if share > 0.5 else "warn",
        "truncation",
        text,
        first,
        "Raise sampling.max_new_tokens, or reward shorter answers",
        Rows(first, history.values("truncated")[-1][0], "truncated"),
    )


def unreadable(history: History) -> Iterator[Finding]:
    """The share of completions in which no answer was found."""
    late = history.late_mean("unreadable")
    if late is not None and late[0] > 0.2:
        share, first = late
        yield Finding(
            "warn",
            "unreadable",
            f"No answer was found in {percent(share)} of the completions from step {first} on",
            first,
            "State the answer's form in the prompt, or choose another reward.rule",
            Rows(first, history.values("unreadable")[-1][0]),
        )


def held_out(history: History) -> Iterator[Finding]:
    """Whether the held-out score became better beyond chance, and whether it is still at its best."""
    scored = [(row, score) for row in history.evals if (score := held_out_score(row))]
    if len(scored) < 2:
        return
    kind = score_kind(scored[-1][0])
    if kind == "reward":
        was, now = scored[0][1][0], scored[-1][1][0]
        text = f"The held-out reward went from {was:.2f} to {now:.2f}; its interval is not recorded"
        yield Finding("notice", "held-out", text, scored[-1][0]["step"])
        return
    lower = kind == "loss"
    name, better, digits = ("loss", "fell", 3) if lower else ("score", "rose", 2)
    sign = -1 if lower else 1
    points = [(row["step"], sign * value, *sorted((sign * low, sign * high))) for row, (value, low, high) in scored]
    (_, start, _, start_high), (last, value, low, high) = points[0], points[-1]
    step, best, best_low, _ = max(points, key=lambda point: point[1])
    was, now, ends = sign * start, sign * value, sorted((sign * low, sign * high))
    if best > high and best_low > value:
        text = f"The held-out {name} was best at step {step} ({sign * best:.{digits}f}) and is {now:.{digits}f} now"
        yield Finding("warn", "held-out", text, step, "Take the model in best/, or stop earlier")
    elif value > start_high and low > start:
        band = f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
        text = f"The held-out {name} {better} from {was:.{digits}f} to {now:.{digits}f} {band}"
        yield Finding("notice", "held-out", text, last)
    else:
        verb = "fall" if lower else "rise"
        text = f"The held-out {name} did not {verb} beyond chance: {was:.{digits}f}, then {now:.{digits}f}"
        yield Finding("warn", "held-out", text, last, "Train longer, or evaluate on more prompts")
