"""Checks on the updates: numbers that are not finite, gradients, ratios, clipping, KL, entropy, the sampler gap."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import takewhile

from tinyllm.health.finding import Finding, Rows, percent
from tinyllm.health.history import History

LARGE_RATIO, HUGE_RATIO = 10, 100
CLIPPED_SHARE = 0.2
GAP_NATS = 0.02
LOW_ENTROPY_NATS = 0.02
HIGH_KL_NATS = 1
LARGE_GRADIENT = 10
"""Times the median."""


def non_finite_in_a_row(history: History) -> Iterator[Finding]:
    """stop.bad_steps steps in a row, up to the last, whose loss or gradient was not finite."""
    bad = list(takewhile(lambda row: row.get("non_finite"), reversed(history.train)))
    if len(bad) >= history.config.stop.bad_steps:
        yield Finding(
            "stop",
            "non-finite in a row",
            f"{len(bad)} steps in a row had a non-finite loss or gradient, last in {bad[0]['non_finite']}; the weights "
            "are those before them",
            bad[-1]["step"],
            f"Lower optimizer.lr or check what was trained on, in {history.path}",
            Rows(bad[-1]["step"], bad[0]["step"]),
        )


def non_finite(history: History) -> Iterator[Finding]:
    """Steps with a loss or gradient that was not finite, anywhere in the run."""
    bad = [row["step"] for row in history.train if row.get("non_finite")]
    if bad:
        yield Finding(
            "problem",
            "non-finite",
            f"{len(bad)} steps had numbers that are not finite and changed nothing, the first is step {bad[0]}",
            bad[0],
            "Lower the learning rate",
            Rows(bad[0], bad[0]),
        )


def gradient(history: History) -> Iterator[Finding]:
    """A step whose gradient was far larger than those of the others."""
    points = [(step, value) for step, value in history.values("grad_norm") if value > 0]
    if len(points) < 8:
        return
    middle = statistics.median(value for _, value in points)
    step, largest = max(points, key=lambda point: point[1])
    if largest > LARGE_GRADIENT * middle:
        yield Finding(
            "warn",
            "gradient",
            f"The gradient of step {step} was {largest / middle:.0f} times the median ({largest:.3g})",
            step,
            "Look at its rollouts; optimizer.clip_norm limits such steps",
            Rows(step, step),
        )


def ratio(history: History) -> Iterator[Finding]:
    """The largest ratio of a token's new to its old probability."""
    points = history.values("ratio_max")
    if not points:
        return
    step, largest = max(points, key=lambda point: point[1])
    if largest > LARGE_RATIO:
        yield Finding(
            "problem" if largest > HUGE_RATIO else "warn",
            "ratio",
            f"A token became {largest:.3g} times as likely within step {step} (largest ratio)",
            step,
            "Use fewer updates per batch or a lower learning rate",
            Rows(step, step),
        )
    else:
        yield Finding("notice", "ratio", f"No ratio was larger than {largest:.3g} (step {step})", step)


def clipping(history: History) -> Iterator[Finding]:
    """The step with the largest share of clipped tokens."""
    sums = [
        (row["step"], (row.get("clip_fraction_high") or 0) + (row.get("clip_fraction_low") or 0))
        for row in history.train
        if row.get("clip_fraction_high") is not None
    ]
    if sums and max(share for _, share in sums) > CLIPPED_SHARE:
        step, share = max(sums, key=lambda point: point[1])
        yield Finding(
            "warn",
            "clipping",
            f"{percent(share)} of the trained tokens of step {step} were clipped and taught nothing",
            step,
            "Lower the learning rate or the updates per batch",
            Rows(step, step),
        )


def sampler_gap(history: History) -> Iterator[Finding]:
    """Whether sampler and trainer agree on the probability of what was sampled."""
    equal, gaps, largest = (history.values(key) for key in ("sampler_equal", "sampler_gap", "sampler_gap_max"))
    if equal and min(share for _, share in equal) == 1:
        text = f"Sampler and trainer agreed to the last bit on each trained token of {len(equal)} steps"
        yield Finding("notice", "sampler gap", text, equal[0][0])
    elif gaps:
        step, gap = max(gaps, key=lambda point: abs(point[1]))
        most = f", at most {max(value for _, value in largest):.3g}" if largest else ""
        large = abs(gap) > GAP_NATS
        yield Finding(
            "warn" if large else "notice",
            "sampler gap",
            f"Sampler and trainer differ by {abs(gap):.2g} nats per token in step {step}{most}",
            step,
            "Set objective.sampler_correction, or sample in the trainer's precision" if large else "",
            Rows(step, step),
        )


def entropy(history: History) -> Iterator[Finding]:
    """Whether sampling became nearly certain. SFT and DPO are not checked: given completions may well be certain."""
    points = history.values("entropy")
    if len(points) > 3 and any("reward_mean" in row for row in history.train):
        late, first = history.late_mean("entropy") or (0.0, 0)
        if late < LOW_ENTROPY_NATS and late < points[0][1] / 10:
            yield Finding(
                "warn",
                "entropy",
                f"Entropy fell from {points[0][1]:.2g} to {late:.2g} nats per token: completions of a group hardly "
                "differ any more",
                first,
                "Stop earlier, or use a KL term or a higher clip bound",
            )


def kl(history: History) -> Iterator[Finding]:
    """Whether the KL divergence to the reference policy is high."""
    points = history.values("kl")
    if points and points[-1][1] > HIGH_KL_NATS:
        step, value = points[-1]
        text = f"KL to the reference reached {value:.2g} nats per token"
        yield Finding("warn", "kl", text, step, "Raise objective.beta")
