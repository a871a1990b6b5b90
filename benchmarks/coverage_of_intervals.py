"""How often a 95% interval holds the truth, by simulation: the table in docs/evaluation.md.

    python benchmarks/coverage_of_intervals.py [--draws 2000]

Each cell: share of draws whose interval holds the true accuracy, in percent. 95 is promised; the standard error of a
cell is 100 sqrt(0.95 x 0.05 / draws), 0.5 at 2,000. Seeded: the same draws give the same table.
Prompts differ in how hard they are: the chance of a right sample is beta-distributed over clusters with the correlation
given (0: all alike, 1: every sample of a cluster agrees).
"""

from __future__ import annotations

import argparse
import functools

import numpy as np

from tinyllm import stats

ACCURACIES = (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
DESIGNS = (  # what, clusters, prompts in each, samples of each, correlation
    ("1 sample, 30 prompts", 30, 1, 1, 0.0),
    ("1 sample, 162 prompts", 162, 1, 1, 0.0),
    ("4 samples, 30 prompts, correlation 0.3", 30, 1, 4, 0.3),
    ("8 samples, 30 prompts, correlation 0.6", 30, 1, 8, 0.6),
    ("8 samples, 162 prompts, correlation 0.6", 162, 1, 8, 0.6),
    ("1 sample, 30 groups of 5 prompts, correlation 0.3", 30, 5, 1, 0.3),
)
GAINS = (0.0, 0.05, 0.1, 0.2)


def chances(generator: np.random.Generator, p: float, clusters: int, correlation: float) -> np.ndarray:
    """The chance of a right sample in each cluster: mean p."""
    if correlation == 0:
        return np.full(clusters, p)
    size = 1 / correlation - 1
    return generator.beta(p * size, (1 - p) * size, clusters)


def accuracy_coverage(design: tuple, p: float, draws: int, wald: bool = False) -> float:
    """Share of draws whose interval holds p; wald: p +- 1.96 of the unclustered standard error, for comparison."""
    _, clusters, per, samples, correlation = design
    generator = np.random.default_rng(1)
    labels = np.repeat(np.arange(clusters), per).tolist() if per > 1 else None
    hits = 0
    for _ in range(draws):
        chance = np.repeat(chances(generator, p, clusters, correlation), per)[:, None]
        scores = (generator.random((clusters * per, samples)) < chance).astype(float)
        if wald:
            mean = scores.mean()
            half = 1.96 * np.sqrt(mean * (1 - mean) / scores.size)
            hits += mean - half <= p <= mean + half
        else:
            found = stats.accuracy(scores, labels)
            hits += found.low <= p <= found.high
    return hits / draws


@functools.cache
def many_chances(p: float) -> np.ndarray:
    """Enough that their mean is the true one."""
    return chances(np.random.default_rng(3), p, 1_000_000, 0.3)


def difference_coverage(samples: int, p: float, gain: float, draws: int, prompts: int = 60) -> float:
    """Share of draws whose interval of the difference holds the true one; B wins `gain` on every prompt it can."""
    generator = np.random.default_rng(2)
    truth = np.clip(many_chances(p) + gain, 0, 1).mean() - p if gain else 0.0
    hits = 0
    for _ in range(draws):
        first = chances(generator, p, prompts, 0.3)
        a = generator.random((prompts, samples)) < first[:, None]
        b = generator.random((prompts, samples)) < np.clip(first + gain, 0, 1)[:, None]
        found = stats.compare(a.astype(float), b.astype(float)).difference
        hits += found.low <= truth <= found.high
    return hits / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    draws = parser.parse_args().draws
    print("| accuracy: true value | " + " | ".join(f"{p:g}" for p in ACCURACIES) + " |")
    print("| --- |" + " --- |" * len(ACCURACIES))
    for design in DESIGNS:
        cells = [f"{100 * accuracy_coverage(design, p, draws):.1f}" for p in ACCURACIES]
        print(f"| {design[0]} | " + " | ".join(cells) + " |", flush=True)
    for design in (DESIGNS[0], DESIGNS[3]):
        cells = [f"{100 * accuracy_coverage(design, p, draws, wald=True):.1f}" for p in ACCURACIES]
        print(f"| for comparison, p ± 1.96 se, unclustered: {design[0]} | " + " | ".join(cells) + " |", flush=True)
    print("\n| difference: true gain | " + " | ".join(f"{gain:g}" for gain in GAINS) + " |")
    print("| --- |" + " --- |" * len(GAINS))
    for samples in (1, 4):
        for p in (0.1, 0.5, 0.8):
            cells = [f"{100 * difference_coverage(samples, p, gain, draws):.1f}" for gain in GAINS]
            what = "1 sample" if samples == 1 else f"{samples} samples"
            print(f"| {what}, 60 prompts, A at {p:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
