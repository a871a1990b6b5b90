"""Intervals and tests of evaluations: numbers by hand, scipy's own, and simulations of what they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from tinyllm import stats

ACCURACIES = np.linspace(0.02, 0.98, 13)


def draws(generator, p, clusters, per, samples, correlation):
    """Scores [clusters * per, samples] whose chance varies between clusters: beta with this correlation."""
    if correlation == 0:
        chance = np.full(clusters, p)
    elif correlation == 1:
        chance = (generator.random(clusters) < p).astype(float)
    else:
        size = 1 / correlation - 1
        chance = generator.beta(p * size, (1 - p) * size, clusters)
    return (generator.random((clusters * per, samples)) < np.repeat(chance, per)[:, None]).astype(float)


# One model


def test_clustered_error_by_hand():
    """Scores 1, 1 | 0, 1 | 0, 0: mean 1/2, sums of deviations 1, 0, -1; se^2 = 3/2 x 2 / 36 = 1/12."""
    mean, error, clusters = stats.clustered_error([[1, 1], [0, 1], [0, 0]])
    assert (mean, clusters) == (0.5, 3) and error == pytest.approx(math.sqrt(1 / 12))
    same = stats.clustered_error([1, 1, 0, 1, 0, 0], ["a", "a", "b", "b", "c", "c"])
    assert same == (mean, pytest.approx(error), 3)


def test_accuracy_with_clusters_by_hand():
    """The same scores: 1/4 / (1/12) = 3 independent ones, t = 4.3027 of 2 degrees of freedom, mean in the middle:
    half the width is t sqrt(1/12 + t^2/36) / (1 + t^2/3) = 4.3027 x 0.77302 / 7.17111 = 0.46381."""
    found = stats.accuracy([[1, 1], [0, 1], [0, 0]])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - 0.46381, 0.5 + 0.46381), abs=1e-4)


def test_without_clusters_the_error_is_the_usual_one():
    x = np.random.default_rng(0).random(50)
    assert stats.clustered_error(x)[1] == pytest.approx(scipy_stats.sem(x))


def test_single_samples_have_wilsons_interval():
    scores = [1.0] * 37 + [0.0] * 13
    theirs = scipy_stats.binomtest(37, 50).proportion_ci(method="wilson")
    found = stats.accuracy(scores)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_where_clusters_agree_the_interval_is_wilsons_on_clusters(value):
    scores = np.full((40, 2), value)
    if value == 0.5:
        scores[:] = [0.0, 1.0]
    found = stats.accuracy(scores)
    assert (found.low, found.high) == pytest.approx(stats.wilson(40 * value, 40))
    assert found.high - found.low > 0.05


def test_where_the_samples_of_each_cluster_agree_it_is_wilsons_on_clusters():
    scores = np.repeat([[1.0]] * 12 + [[0.0]] * 8, 5, axis=1)
    found = stats.accuracy(scores)
    assert (found.low, found.high) == pytest.approx(stats.wilson(12, 20))
    labels = [i // 2 for i in range(40)]
    assert stats.accuracy(np.repeat(scores[:, 0], 2), labels) == found


def test_a_single_cluster_says_nothing():
    found = stats.accuracy([[1, 0, 1, 1]])  # and if they agreed: Wilson for n = 1
    assert (found.value, found.low, found.high) == (0.75, 0.0, 1.0)


@pytest.mark.parametrize(
    ("clusters", "per", "samples", "correlation"),
    [(30, 1, 1, 0), (30, 1, 4, 0.3), (30, 1, 8, 0.1), (30, 1, 8, 0.6), (30, 5, 1, 0.3), (30, 1, 4, 0), (30, 1, 4, 1)],
)
def test_coverage(clusters, per, samples, correlation):
    """Averaged over true accuracies from .02 to .98, a 95% interval holds the truth 93.5 to 96.5% of the time."""
    generator, reps = np.random.default_rng(1), 300
    labels = np.repeat(np.arange(clusters), per).tolist() if per > 1 else None
    hits = 0
    for p in ACCURACIES:
        for _ in range(reps):
            found = stats.accuracy(draws(generator, p, clusters, per, samples, correlation), labels)
            hits += found.low <= p <= found.high
    error = math.sqrt(0.95 * 0.05 / (reps * len(ACCURACIES)))
    assert 0.935 - 2 * error < hits / (reps * len(ACCURACIES)) < 0.965 + 2 * error


def test_mean_per_token_by_hand():
    """Sums 2, 6 over 1, 3 tokens and 5 over 2: 13 / 6; residuals -1/6, -1/2, 2/3; se^2 = 3/2 x (26/36) / 36."""
    found = stats.mean_per_token([2, 6, 5], [1, 3, 2])
    half = scipy_stats.t.ppf(0.975, 2) * math.sqrt(1.5 * (26 / 36)) / 6
    assert (found.value, found.low, found.high) == pytest.approx((13 / 6, 13 / 6 - half, 13 / 6 + half))
    assert stats.mean_per_token([3.0], [2]) == stats.Estimate(1.5, 1.5, 1.5)
    assert stats.mean_per_token([0, 0, 6], [2, 2, 2]).low == 0.0 > stats.mean_per_token([-0.1, 0.1, 6], [2, 2, 2]).low


def test_mean_per_token_of_equal_rows_is_the_t_interval():
    x = np.random.default_rng(0).normal(size=40)
    found = stats.mean_per_token(list(x), [1] * 40)
    theirs = scipy_stats.t.interval(0.95, 39, x.mean(), scipy_stats.sem(x))
    assert (found.low, found.high) == pytest.approx(theirs)


def test_coverage_of_mean_per_token():
    """Rows of 1 to 30 tokens whose losses share a level: the interval holds the true mean in 95% of 2,000 suites."""
    generator, held = np.random.default_rng(1), 0
    for _ in range(2000):
        sizes = generator.integers(1, 31, 60)
        sums = [float((2 + generator.normal() + generator.exponential(1, n)).sum()) for n in sizes]
        found = stats.mean_per_token(sums, [int(n) for n in sizes])
        held += found.low <= 3 <= found.high
    assert 0.93 < held / 2000 < 0.965


def test_the_bootstrap_agrees():
    scores = draws(np.random.default_rng(2), 0.6, 80, 1, 4, 0.4)
    found, (low, high) = stats.accuracy(scores), stats.cluster_bootstrap(scores)
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.015)
    assert stats.cluster_bootstrap(scores) == (low, high), "seeded"


def test_pass_at_k_is_the_mean_over_all_subsets():
    right = [True, False, False, True, False, False]
    for k in range(1, 7):
        subsets = list(itertools.combinations(right, k))
        assert stats.pass_at_k(2, 6, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_majority_at_k_by_hand():
    """Of three samples a, a, b (a is right): one draw is right in 2/3, all three by majority, and two draws are a, a
    once and a tie twice: (1 + 1/2 + 1/2) / 3 = 2/3."""
    answers, right = ["a", "a", "b"], [True, True, False]
    assert [stats.majority_at_k(answers, right, k) for k in (1, 2, 3)] == pytest.approx([2 / 3, 2 / 3, 1])
    assert stats.majority_at_k([None, None, "a"], [False, False, True], 3) == 1.0, "no answer has no vote"
    assert stats.majority_at_k([None, None], [False, False], 2) == 0.0
    many = ["a"] * 12 + ["b"] * 8
    assert stats.majority_at_k(many, [x == "a" for x in many], 10) == pytest.approx(0.76, abs=0.04)


# Two models


def test_mcnemar_by_hand_and_scipy():
    """10 wins, 2 losses: 2 (1 + 12 + 66) / 4096 = 0.0386; mid-p takes off 66 / 4096."""
    exact, mid = stats.mcnemar(10, 2)
    assert exact == pytest.approx(158 / 4096) and mid == pytest.approx(92 / 4096)
    assert exact == pytest.approx(scipy_stats.binomtest(10, 12).pvalue)
    assert stats.mcnemar(0, 0) == (1.0, 1.0) and stats.mcnemar(3, 3)[0] == 1.0


def test_sign_flip_by_hand_and_scipy():
    """Three differences of one sign: 2 of 8 patterns are as extreme."""
    assert stats.sign_flip([0.5, 0.25, 1.0]) == 0.25
    assert stats.sign_flip([0.0, 0.0]) == 1.0
    d = np.random.default_rng(3).normal(0.3, 1, 11)
    theirs = scipy_stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=10_000).pvalue
    assert stats.sign_flip(d) == pytest.approx(theirs)
    d = np.random.default_rng(4).normal(0.4, 1, 60)
    theirs = scipy_stats.permutation_test(
        (d,), np.sum, permutation_type="samples", n_resamples=9999, rng=np.random.default_rng(0)
    ).pvalue
    assert stats.sign_flip(d) == pytest.approx(theirs, abs=0.01)


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([]) == []


def test_comparison_by_hand():
    """n = 10, 4 wins, 1 loss. Bonett and Price: (5 - 2) / 12 = 0.25, variance (7/12 - 1/16) / 12."""
    a, b = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
    found = stats.compare(a, b)
    half = scipy_stats.t.ppf(0.975, 11) * math.sqrt((7 / 12 - 1 / 16) / 12)
    assert found.difference.value == pytest.approx(0.3) and (found.wins, found.losses) == (4, 1)
    assert (found.difference.low, found.difference.high) == pytest.approx((0.25 - half, 0.25 + half))
    assert (found.p_value, found.mid_p) == stats.mcnemar(4, 1)


def test_equal_models_have_an_interval_too():
    found = stats.compare([1.0] * 50, [1.0] * 50)
    assert found.p_value == 1.0 and found.difference.value == 0 and found.difference.low < 0 < found.difference.high


def test_the_difference_turns_with_the_order():
    generator = np.random.default_rng(5)
    a, b = draws(generator, 0.4, 40, 1, 4, 0.3), draws(generator, 0.5, 40, 1, 4, 0.3)
    one, other = stats.compare(a, b), stats.compare(b, a)
    assert one.difference.low == pytest.approx(-other.difference.high)
    assert (one.p_value, one.wins, one.losses) == (other.p_value, other.losses, other.wins)


def paired(generator, n, p, gain, samples, correlation):
    base = draws(generator, p, n, 1, 1, 1)[:, 0] if correlation == 1 else None
    size = 1 / correlation - 1 if correlation < 1 else 0
    chance = generator.beta(p * size, (1 - p) * size, n) if base is None else base
    other = np.clip(chance + gain, 0, 1)
    return (
        (generator.random((n, samples)) < chance[:, None]).astype(float),
        (generator.random((n, samples)) < other[:, None]).astype(float),
    )


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_no_test_rejects_more_often_than_its_level(samples):
    generator, reps = np.random.default_rng(6), 400
    p_values = [
        stats.compare(*paired(generator, 50, p, 0.0, samples, 0.3), seed=i).p_value
        for i, p in enumerate(np.repeat([0.1, 0.5, 0.9], reps))
    ]
    for level in (0.01, 0.05, 0.1):
        rate = np.mean(np.array(p_values) <= level)
        assert rate <= level + 3 * math.sqrt(level * (1 - level) / len(p_values)), (level, rate)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_coverage_of_differences(samples):
    generator, reps, hits, count = np.random.default_rng(7), 250, 0, 0
    for p in (0.05, 0.2, 0.5, 0.8):
        for gain in (0.0, 0.1):
            size = 1 / 0.3 - 1
            for _ in range(reps):
                a, b = paired(generator, 60, p, gain, samples, 0.3)
                found = stats.compare(a, b).difference
                truth = np.mean(np.clip(TRUE_CHANCES[p] + gain, 0, 1)) - p if gain else 0.0
                hits, count = hits + (found.low <= truth <= found.high), count + 1
            assert size > 0
    assert hits / count > 0.935


TRUE_CHANCES = {
    p: scipy_stats.beta(p * (1 / 0.3 - 1), (1 - p) * (1 / 0.3 - 1)).ppf((np.arange(4000) + 0.5) / 4000)
    for p in (0.05, 0.2, 0.5, 0.8)
}


def test_the_detectable_difference_is_detected_in_four_of_five():
    """Models that differ on 30% of prompts; B wins by the detectable difference."""
    n, discordance = 300, 0.3
    delta = stats.detectable_difference(n, discordance)
    generator, found = np.random.default_rng(8), 0
    for _ in range(1000):
        differ = generator.random(n) < discordance
        wins = int((generator.random(int(differ.sum())) < 0.5 + delta / (2 * discordance)).sum())
        found += stats.mcnemar(wins, int(differ.sum()) - wins)[1] <= 0.05
    assert found / 1000 == pytest.approx(0.8, abs=0.04)
    assert stats.prompts_needed(delta, discordance) == pytest.approx(n, abs=1)
    assert stats.detectable_difference(n, discordance, samples=8) < delta


def test_what_is_said():
    found = stats.compare([0.0] * 40 + [1.0] * 10, [0.0] * 10 + [1.0] * 40)
    assert stats.verdict(found, ("sft", "grpo"), 0.1).startswith("grpo is better by 60.0 points [")
    same = stats.compare([0.0, 1.0] * 25, [0.0, 1.0] * 25)
    said = stats.verdict(same, ("sft", "grpo"), 0.104)
    assert said.startswith("no difference between sft and grpo shown (+0.0 points") and said.endswith(
        "detect 10 points"
    )


@pytest.mark.parametrize(
    ("scores", "clusters", "message"),
    [
        ([], None, "shape"),
        ([0.5, 1.2], None, "outside"),
        ([math.nan], None, "not a number"),
        ([1, 0], ["a"], "1 cluster"),
    ],
)
def test_what_cannot_be_scored_is_refused(scores, clusters, message):
    with pytest.raises(ValueError, match=message):
        stats.accuracy(scores, clusters)
    if len(scores) == 2 and clusters is None:
        with pytest.raises(ValueError, match="3 and 2 prompts"):
            stats.compare([0, 0, 1], [0, 1])
