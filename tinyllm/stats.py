"""Uncertainty of evaluations: 95% intervals, paired tests, and the smallest difference that a suite can show.

Scores lie in [0, 1]. A row of scores is one prompt, its columns are the k samples drawn for that prompt. Prompts that
depend on each other (variants of one template, questions about one text) share a cluster; any other prompt is a cluster
of its own.

Legend: n prompts, k samples of each, C clusters, x a score.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil, comb, sqrt
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray | Sequence[Sequence[float]] | Sequence[float]

LEVEL, POWER = 0.95, 0.8
"""Level of every interval and test; power of the difference that a suite can detect."""
RESAMPLES = 9999
"""Draws of the bootstrap, and of a permutation test whose patterns are too many to try all."""
_BATCH = 2_000_000
"""Numbers drawn at a time."""
_SUBSETS = 2000
_EXACT_FLIPS = 12
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
_K2 = (_Z + NormalDist().inv_cdf(POWER)) ** 2


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Comparison:
    """B against A on the same prompts: the difference of their means, its interval, and tests of "no difference"."""

    difference: Estimate
    p_value: float
    """Exact McNemar with one sample per prompt and no clusters, else a sign-flip permutation test over clusters."""
    mid_p: float | None
    """McNemar's mid-p, less conservative than the exact p; None where McNemar's test does not apply."""
    wins: int
    losses: int
    """Prompts (or clusters) on which B is better, and worse."""


# One model


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Score interval of a proportion: all p with |successes/n - p| <= z sqrt(p (1 - p) / n).

    Holds its level for small n and near 0 and 1, where p +- z se does not. Source: Wilson (1927). (0, 1) for n = 0.
    """
    assert 0 <= successes <= n, (successes, n)
    return _score_interval(successes / n, n, _Z) if n else (0.0, 1.0)


def _score_interval(p: float, n: float, z: float) -> tuple[float, float]:
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half) if p > 0 else 0.0, min(1.0, middle + half) if p < 1 else 1.0


def clustered_error(scores: Matrix, clusters: Sequence[Hashable] | None = None) -> tuple[float, float, int]:
    """(mean, its standard error, C), where scores within a cluster may depend on each other.

    se^2 = C / (C - 1) sum_c (sum_{x in c} (x - mean))^2 / N^2 over N scores; NaN for a single cluster.
    Source: Miller, "Adding error bars to evals", arXiv:2411.00640, eq. 4, with the correction for few clusters.
    """
    values, labels = _checked(scores, clusters)
    mean = float(values.mean())
    sums = _cluster_sums(values - mean, labels)
    count = len(sums)
    error = sqrt(count / (count - 1) * float((sums**2).sum())) / values.size if count > 1 else float("nan")
    return mean, error, count


def accuracy(scores: Matrix, clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Mean score with its interval.

    Wilson's interval for the number of independent scores that would have the clustered standard error,
    mean (1 - mean) / se^2, with the t quantile of C - 1 degrees of freedom. Where the scores within every cluster are
    equal (one sample per prompt is such a case), and where the means of all clusters are equal, Wilson's interval with
    n = C. The interval never has width zero and never leaves [0, 1].
    """
    import numpy as np

    values, labels = _checked(scores, clusters)
    mean, error, count = clustered_error(scores, clusters)
    sums, sizes = _cluster_sums(values, labels), np.bincount(labels) * values.shape[1]
    unanimous = len(set(sizes)) == 1 and bool(((sums == 0) | (sums == sizes)).all())
    if unanimous or (error < 1e-12 and count > 1):
        return Estimate(mean, *_score_interval(mean, count, _Z))
    if count < 2:
        return Estimate(mean, 0.0, 1.0)
    return Estimate(mean, *_score_interval(mean, mean * (1 - mean) / error**2, t_quantile(count - 1)))


def mean_per_token(sums: Sequence[float], sizes: Sequence[int]) -> Estimate:
    """A ratio of totals, m = sum_c s_c / sum_c n_c (negative log-likelihood per token), with its interval.

    se^2 = C / (C - 1) sum_c (s_c - m n_c)^2 / N^2 over C rows that are independent of each other, and the t quantile of
    C - 1 degrees of freedom. The lower end is not below 0 where no sum is. The interval of a single row is the value
    itself, since one row does not tell the spread.
    Source: Cochran, Sampling Techniques (1977), eq. 6.13, with the correction for few rows.
    """
    total, count = float(sum(sizes)), len(sums)
    mean = sum(sums) / total
    if count < 2:
        return Estimate(mean, mean, mean)
    squares = sum((s - mean * n) ** 2 for s, n in zip(sums, sizes, strict=True))
    half = t_quantile(count - 1) * sqrt(count / (count - 1) * squares) / total
    low = mean - half if min(sums) < 0 else max(0.0, mean - half)
    return Estimate(mean, low, mean + half)


def cluster_bootstrap(scores: Matrix, clusters: Sequence[Hashable] | None = None, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean over RESAMPLES draws of C whole clusters: a check on `accuracy`.

    Source: Cameron, Gelbach, Miller (2008), section II.
    """
    import numpy as np

    values, labels = _checked(scores, clusters)
    sums, sizes = _cluster_sums(values, labels), _cluster_sums(np.ones_like(values), labels)
    generator, means = np.random.default_rng(seed), []
    for part in np.array_split(np.arange(RESAMPLES), -(-RESAMPLES * len(sums) // _BATCH)):
        drawn = generator.integers(0, len(sums), (len(part), len(sums)))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return float(low), float(high)


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right, from `correct` right ones of n >= k.

    1 - C(n - correct, k) / C(n, k). Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    assert 0 <= correct <= n and 1 <= k <= n, (correct, n, k)
    return 1.0 - comb(n - correct, k) / comb(n, k)


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int, seed: int = 0) -> float:
    """Unbiased chance that the most frequent answer of k samples is right, from n >= k samples of one prompt.

    The mean over all subsets of k samples (over 2,000 random subsets where there are more). A sample without an answer
    (None) has no vote; of answers with equally many votes each is chosen with equal chance.
    Source: Wang et al., arXiv:2203.11171.
    """
    import random

    n = len(answers)
    assert len(right) == n and 1 <= k <= n, (n, len(right), k)
    if comb(n, k) <= _SUBSETS:
        subsets: Any = itertools.combinations(range(n), k)
    else:
        generator = random.Random(seed)
        subsets = (generator.sample(range(n), k) for _ in range(_SUBSETS))
    chances = []
    for subset in subsets:
        votes: dict[Hashable, int] = {}
        for i in subset:
            if answers[i] is not None:
                votes[answers[i]] = votes.get(answers[i], 0) + 1
        most = max(votes.values(), default=0)
        leading = [a for a, count in votes.items() if count == most]
        good = {answers[i] for i in subset if right[i]}
        chances.append(sum(a in good for a in leading) / len(leading) if leading else 0.0)
    return fmean(chances)


# Two models on the same prompts


def compare(a: Matrix, b: Matrix, clusters: Sequence[Hashable] | None = None, seed: int = 0) -> Comparison:
    """How much better B is than A, prompt by prompt.

    The interval is the t interval of the mean difference over the clusters and two more: one in which B wins every
    prompt and one in which A does, so that the width is never zero. With one sample of 0 or 1 per prompt this is Bonett
    and Price (2012), whose coverage is near its level from few prompts on.
    """
    import numpy as np

    (first, labels), (second, _) = _checked(a, clusters), _checked(b, clusters)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} prompts: a paired comparison needs the same ones")
    means = second.mean(1) - first.mean(1)
    sums, sizes = _cluster_sums(means[:, None], labels), _cluster_sums(np.ones((len(means), 1)), labels)
    count, size = len(sums), float(sizes.mean())
    more = np.concatenate([sums, [size, -size]])
    weights = np.concatenate([sizes, [size, size]])
    middle = float(more.sum() / weights.sum())
    error = sqrt(float(((more - middle * weights) ** 2).sum())) / float(weights.sum())
    half = error * t_quantile(count + 1)
    difference = Estimate(float(means.mean()), max(-1.0, middle - half), min(1.0, middle + half))
    wins, losses = int((sums > 0).sum()), int((sums < 0).sum())
    single = first.shape[1] == second.shape[1] == 1 and clusters is None
    if single and set(first.ravel().tolist()) | set(second.ravel().tolist()) <= {0.0, 1.0}:
        return Comparison(difference, *mcnemar(wins, losses), wins, losses)
    return Comparison(difference, sign_flip(sums, seed), None, wins, losses)


def mcnemar(wins: int, losses: int) -> tuple[float, float]:
    """(exact, mid-p) two-sided p-values of "a prompt on which A and B differ is won by either with chance 1/2".

    exact = 2 P(X <= min) for X binomial(wins + losses, 1/2), at most 1; mid-p counts P(X = min) by half on each side.
    Source: Fagerland, Lydersen, Laake (2013), sections 3.3 and 3.4.
    """
    from scipy.stats import binom, binomtest

    n, least = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0, 1.0
    exact = float(binomtest(least, n, 0.5).pvalue)
    return exact, min(1.0, 2 * float(binom.cdf(least, n, 0.5)) - float(binom.pmf(least, n, 0.5)))


def sign_flip(differences: Sequence[float] | np.ndarray, seed: int = 0) -> float:
    """Two-sided p-value of "each cluster's difference is as likely as its negative", for the sum of differences.

    All 2^C sign patterns where C <= 12, else RESAMPLES random patterns, the observed one counted among them, so that
    the test never rejects more often than its level. Source: Phipson, Smyth (2010).
    """
    import numpy as np

    moved = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) - 1e-9 * np.abs(moved).sum()
    if len(moved) <= _EXACT_FLIPS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(moved))))
        return float((np.abs(signs @ moved) >= observed).mean())
    generator, extreme = np.random.default_rng(seed), 1
    for part in np.array_split(np.arange(RESAMPLES), -(-RESAMPLES * len(moved) // _BATCH)):
        signs = generator.integers(0, 2, (len(part), len(moved))) * 2.0 - 1.0
        extreme += int((np.abs(signs @ moved) >= observed).sum())
    return extreme / (RESAMPLES + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that the chance of any false rejection among them keeps its level. Source: Holm (1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def verdict(comparison: Comparison, names: tuple[str, str], detectable: float) -> str:
    """The comparison of the models A and B of these names as a sentence; detectable: see detectable_difference."""
    d = comparison.difference
    if comparison.p_value <= 1 - LEVEL:
        better = names[1] if d.value > 0 else names[0]
        low, high = (d.low, d.high) if d.value > 0 else (-d.high, -d.low)
        return f"{better} is better by {100 * abs(d.value):.1f} points [{100 * low:.1f}, {100 * high:.1f}]"
    return (
        f"no difference between {names[0]} and {names[1]} shown ({100 * d.value:+.1f} points "
        f"[{100 * d.low:.1f}, {100 * d.high:.1f}]); this suite can detect {100 * detectable:.0f} points"
    )


# Before any compute is spent


def detectable_difference(prompts: int, discordance: float, samples: int = 1) -> float:
    """The smallest true difference of two models that a paired test shows with 80% power.

    delta = K sqrt(s / (n + K^2)), K = z_level + z_power, where s is the chance that single samples of the two models
    differ on a prompt (discordance), and s - delta^2 the variance of the difference. Half of that variance is taken to
    come from sampling, and k samples divide this half by k. Source: Connor (1987), eq. 3, for k = 1. At most 1.
    """
    assert prompts >= 1 and 0 < discordance <= 1 and samples >= 1, (prompts, discordance, samples)
    return min(1.0, sqrt(_K2 * _spread(discordance, samples) / (prompts + _K2)))


def prompts_needed(difference: float, discordance: float, samples: int = 1) -> int:
    """How many prompts a paired test needs to show a true difference: the inverse of detectable_difference."""
    assert 0 < difference <= 1 and 0 < discordance <= 1 and samples >= 1, (difference, discordance, samples)
    return max(1, ceil(_K2 * (_spread(discordance, samples) / difference**2 - 1)))


def _spread(discordance: float, samples: int) -> float:
    return discordance * (0.5 + 0.5 / samples)


# Shared


def _checked(scores: Matrix, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    """scores as [n, k] fp64 and the cluster number of each row. Raises ValueError."""
    import numpy as np

    values = np.asarray(scores, dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or not values.size:
        raise ValueError(f"scores of shape {values.shape}: give one row per prompt and one column per sample")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("a score is outside [0, 1] or not a number; leave unscored samples out")
    if clusters is None:
        return values, np.arange(len(values))
    if len(clusters) != len(values):
        raise ValueError(f"{len(clusters)} cluster labels for {len(values)} prompts")
    numbers: dict[Hashable, int] = {}
    return values, np.array([numbers.setdefault(label, len(numbers)) for label in clusters])


def _cluster_sums(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.bincount(labels, weights=values.sum(1))


@functools.cache
def t_quantile(degrees: int) -> float:
    """Of Student's t: half the width of a 95% interval, in standard errors."""
    from scipy.stats import t

    return float(t.ppf(0.5 + LEVEL / 2, degrees))
