"""Intervals for proportions, and the score of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import NormalDist
from typing import Any


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion: all p with |successes/n - p| <= z sqrt(p (1 - p) / n).

    Holds its level for small n and near 0 and 1, where p +- z se does not. Source: Wilson (1927). (0, 1) for n = 0.
    """
    assert 0 <= successes <= n and 0 < level < 1, (successes, n, level)
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half) if successes else 0.0, min(1.0, middle + half) if successes < n else 1.0


def held_out_score(row: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """(score, low, high) of an `eval` line: accuracy with its 95% interval, None when nothing was scored.

    Without a notion of correct it is the mean reward, whose interval the line cannot tell: low = high = score.
    """
    if not row["prompts"]:
        return None
    if row.get("correct") is None:
        return row["reward_mean"], row["reward_mean"], row["reward_mean"]
    return row["correct"] / row["prompts"], *wilson(row["correct"], row["prompts"])
