"""From judged completions to numbers: one model on one task, and two models on the same prompts. Loads no model.

Legend: n prompts, k samples of each. A completion whose sampling or verification failed has no score. Every mean leaves
such completions out; they are counted (`failed`), and `if_failed` has the mean with all of them wrong and all right.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyllm import stats
from tinyllm.errors import RewardError
from tinyllm.records import Group, Verdict

FORMAT_GAP = 0.05
"""A difference of two models' shares of truncated or unreadable completions that is worth a warning."""


@dataclass(frozen=True)
class Answers:
    """The judged completions of one prompt."""

    prompt_id: str
    label: Hashable
    """Of its cluster."""
    scores: tuple[float, ...]
    """In [0, 1], of the completions that have one."""
    answers: tuple[str | None, ...]
    """The answers that the verifier found in these completions."""
    failed: int
    truncated: int
    unreadable: int
    """Completions that ended with a stop token and hold no answer."""
    tokens: int
    """Of the completions that have a score, together."""
    judged_right: bool
    """Whether the verifier judges right or wrong (1 or 0), not a reward between."""


def score(verdict: Verdict) -> float | None:
    """1 or 0 where the verdict has the part "correct", else its reward. Raises RewardError for one outside [0, 1]."""
    if verdict.value is None:
        return None
    parts = dict(verdict.parts)
    if "correct" in parts:
        return float(parts["correct"] == 1.0)
    if not 0.0 <= verdict.value <= 1.0:
        raise RewardError(
            f"a completion has the reward {verdict.value:g}, and an evaluation needs scores from 0 to 1; scale the "
            "reward function, or name one of its parts with --reward"
        )
    return verdict.value


def answers_of(group: Group, label: Hashable) -> Answers:
    """The scores and counts of a group. Raises RewardError for a reward outside [0, 1]."""
    scored = [r for r in group.rollouts if r.verdict.value is not None]
    judged_right = all("correct" in dict(r.verdict.parts) for r in scored)
    whole = [r for r in scored if r.completion.finish_reason == "stop"]
    return Answers(
        prompt_id=group.prompt.id,
        label=label,
        scores=tuple(value for r in scored if (value := score(r.verdict)) is not None),
        answers=tuple(r.verdict.answer for r in scored),
        failed=len(group.rollouts) - len(scored),
        truncated=sum(r.completion.finish_reason == "length" for r in group.rollouts),
        unreadable=sum(r.verdict.answer is None for r in whole) if judged_right else 0,
        tokens=sum(len(r.completion.token_ids) for r in scored),
        judged_right=judged_right,
    )


# One model


def summarize(rows: Sequence[Answers], samples: int) -> dict[str, Any]:
    """One entry of `results` in eval.json: one model on one task. Without any scored completion the score is None."""
    scored = [row for row in rows if row.scores]
    total = len(rows) * samples
    failed = sum(row.failed for row in rows)
    right = bool(scored) and all(row.judged_right for row in scored)
    line: dict[str, Any] = {
        "measure": "accuracy" if right or not scored else "reward",
        "prompts": len(scored),
        "clusters": len({row.label for row in scored}),
        "completions": total - failed,
        "score": None,
        "bootstrap": None,
        "pass": {},
        "majority": {},
        "truncated": sum(row.truncated for row in rows) / max(total, 1),
        "unreadable": sum(row.unreadable for row in rows) / max(total, 1) if right else None,
        "failed": failed / max(total, 1),
        "if_failed": None,
        "completion_tokens": sum(row.tokens for row in rows) / max(total - failed, 1),
    }
    if not scored:
        return line
    values, labels = _table(scored)
    line["score"] = asdict(stats.accuracy(values, labels))
    if samples > 1 or labels is not None:
        line["bootstrap"] = list(stats.cluster_bootstrap(values, labels))
    if failed:
        known = sum(sum(row.scores) for row in scored)
        line["if_failed"] = [known / total, (known + failed) / total]
    for k in several(samples) if right else ():
        usable = [row for row in scored if len(row.scores) >= k]
        if not usable:
            continue
        labels = _labels(usable)
        passed = [stats.pass_at_k(row.scores.count(1.0), len(row.scores), k) for row in usable]
        line["pass"][str(k)] = asdict(stats.accuracy(passed, labels))
        if any(answer is not None for row in usable for answer in row.answers):
            voted = [
                stats.majority_at_k(row.answers, [s == 1.0 for s in row.scores], k, seed)
                for seed, row in enumerate(usable)
            ]
            line["majority"][str(k)] = asdict(stats.accuracy(voted, labels))
    return line


def several(samples: int) -> list[int]:
    """The k of pass@k and maj@k: powers of two from 2 on, and all samples."""
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    return [*powers, samples] if samples > 1 else []


def _labels(rows: Sequence[Answers]) -> list[Hashable] | None:
    """Cluster of each prompt; None where each is its own."""
    labels = [row.label for row in rows]
    return labels if len(set(labels)) < len(labels) else None


def _table(rows: Sequence[Answers]) -> tuple[list[list[float]], list[Hashable] | None]:
    """Scores [n, k] with the clusters of the prompts; one column, clustered by prompt, where some samples failed."""
    if len({len(row.scores) for row in rows}) == 1:
        return [list(row.scores) for row in rows], _labels(rows)
    return [[value] for row in rows for value in row.scores], [row.label for row in rows for _ in row.scores]


# Two models on the same prompts


def compare(a: Sequence[Answers], b: Sequence[Answers], samples: int) -> tuple[stats.Comparison, dict[str, Any]] | None:
    """B against A on the prompts that both have a score on, and their entry in eval.json; None without such prompts.

    detectable: the smallest difference that as many prompts show with 80% power, at the discordance of these two,
    s = mean of a (1 - b) + b (1 - a) over prompts, where a, b are their mean scores.
    """
    theirs: Mapping[str, Answers] = {row.prompt_id: row for row in b if row.scores}
    pairs = [(row, theirs[row.prompt_id]) for row in a if row.scores and row.prompt_id in theirs]
    if not pairs:
        return None
    labels = _labels([one for one, _ in pairs])
    first, second = _paired(pairs)
    if samples > 1 and labels is None:
        labels = list(range(len(pairs)))  # the permutation test by prompt, also where all samples agree
    found = stats.compare(first, second, labels)
    means = [(sum(x) / len(x), sum(y) / len(y)) for x, y in zip(first, second, strict=True)]
    discordance = sum(x * (1 - y) + y * (1 - x) for x, y in means) / len(means)
    count = len(pairs) if labels is None else len(set(labels))
    line = {
        "prompts": len(pairs),
        "difference": asdict(found.difference),
        "test": "McNemar, exact" if found.mid_p is not None else "sign-flip permutation",
        "p": found.p_value,
        "mid_p": found.mid_p,
        "wins": found.wins,
        "losses": found.losses,
        "detectable": stats.detectable_difference(count, min(1.0, max(discordance, 1 / count)), samples),
    }
    return found, line


def _paired(pairs: Sequence[tuple[Answers, Answers]]) -> tuple[list[list[float]], list[list[float]]]:
    """Scores of both, prompt by prompt; means where some samples failed."""
    if len({len(row.scores) for pair in pairs for row in pair}) == 1:
        return [list(one.scores) for one, _ in pairs], [list(other.scores) for _, other in pairs]
    first, second = ([[sum(row.scores) / len(row.scores)] for row in rows] for rows in zip(*pairs, strict=True))
    return first, second


def adjusted(
    found: Sequence[tuple[stats.Comparison, dict[str, Any]]], names: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The entries of all comparisons with Holm's p-values, and a sentence for each that follows its Holm p-value."""
    p_values = stats.holm([comparison.p_value for comparison, _ in found])
    lines = []
    for (comparison, line), p, pair in zip(found, p_values, names, strict=True):
        said = stats.verdict(replace(comparison, p_value=p), pair, line["detectable"])
        lines.append({**line, "p_holm": p, "sentence": said})
    return lines


def format_warning(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    """Warns that two models differ in truncated or unreadable completions, so that their scores compare format too."""
    for what in ("truncated", "unreadable"):
        one, other = a[what], b[what]
        if one is not None and other is not None and abs(one - other) >= FORMAT_GAP:
            return (
                f"{names[1]} has {100 * other:.0f}% {what} completions, {names[0]} {100 * one:.0f}%: "
                "their difference is partly one of " + ("length" if what == "truncated" else "format")
            )
    return None
