"""The metrics of a run: every key of metrics.jsonl, in one table.

What the log holds is computed in post/; how it is drawn, compared, shown in a terminal and documented follows from this
table. A new metric is one row of METRICS and the place that computes it. Keys of nested mappings are joined by a dot;
`reward_parts.*` stands for every name in `reward_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinyllm.stats import wilson

Kind = Literal["grpo", "sft", "dpo"]
ALL: tuple[Kind, ...] = ("grpo", "sft", "dpo")
GRPO: tuple[Kind, ...] = ("grpo",)
GIVEN: tuple[Kind, ...] = ("sft", "dpo")
"""Kinds whose completions are given, not sampled."""
DPO: tuple[Kind, ...] = ("dpo",)

HOPS = ("sample", "verify", "advantage", "log-probability", "loss", "gradient", "update", "metrics", "evaluation")
"""Where the numbers of a step come from, in the order in which they are computed. "metrics": names and conditions."""


@dataclass(frozen=True)
class Metric:
    """One key of metrics.jsonl."""

    key: str
    text: str
    """What the number is, in one line."""
    hop: str
    """The member of HOPS that computes it."""
    unit: str = ""
    """share (in [0, 1]), nats (per token), tokens, steps (of the optimizer), count, hash; empty for numbers without."""
    reduction: str = ""
    """Over what the number of a step is taken, and how; empty for a single value."""
    kinds: tuple[Kind, ...] = ALL
    """Kinds of runs that log it."""
    chart: str = ""
    """Title of the chart that it is drawn in; empty: it is not drawn."""
    label: str = ""
    """Its name in the chart's legend."""
    glance: str = ""
    """How the terminal shows it, as a format of `value` and `percent`; empty: it does not."""
    line: Literal["train", "eval"] = "train"


@dataclass(frozen=True)
class ChartSpec:
    """What metrics are drawn in together."""

    title: str
    unit: str = ""
    note: str = ""
    panel: tuple[Kind, ...] = ()
    """Kinds of runs whose report.png has it."""
    health: bool = False
    """Whether it stands beside the findings on a run's health."""


CHARTS = (
    ChartSpec("Reward of sampled completions", "", "mean and its 95% interval, by group", panel=GRPO),
    ChartSpec("Held-out score", panel=ALL),
    ChartSpec("Loss", panel=GIVEN),
    ChartSpec("Preference accuracy", "share", "share of pairs whose chosen answer is preferred", panel=DPO),
    ChartSpec("Preference margin"),
    ChartSpec("Implicit rewards", panel=DPO),
    ChartSpec("KL per token", "nats", panel=GRPO),
    ChartSpec("Clip fraction", "share", "share of trained tokens whose ratio is clipped", panel=GRPO, health=True),
    ChartSpec("Ratio", "", "new over old probability of a token", health=True),
    ChartSpec("Completion length", "tokens", "tokens", panel=ALL),
    ChartSpec("Entropy", "nats", "nats per token", panel=ALL),
    ChartSpec("Truncated", "share", "share of completions cut by the token limit", health=True),
    ChartSpec("Groups without signal", "share", "share of groups whose advantages are all zero", health=True),
    ChartSpec("Answers not found", "share", "share of judged completions", health=True),
    ChartSpec("Sampler against trainer", "nats", "difference of their log-probabilities", health=True),
    ChartSpec("Tokens equal to the bit", "share", "sampler and trainer log-probabilities", health=True),
    ChartSpec("Gradient norm", "", "before clipping", panel=("sft",), health=True),
    ChartSpec("Learning rate", panel=("sft",)),
    ChartSpec("Trained tokens per step", "tokens"),
    ChartSpec("Reward parts", "", "mean per step, before weighting", health=True),
    ChartSpec("Logged by the reward"),
    ChartSpec("Policy lag", "steps", "optimizer steps between the sampling weights and the trained ones", health=True),
)
"""In the order of a page. "Held-out score" is drawn under the name of what was scored: see score_kind."""

_COMPLETIONS, _GROUPS = "mean over completions", "share of groups"
_TOKENS, _PAIRS = "mean over trained tokens", "mean over pairs"

_TRAIN = (
    Metric("step", "The optimizer step, from 1.", "metrics"),
    Metric("revision", "The policy after the step: its number and the hash of its weights.", "update"),
    Metric("loss", "The objective's value, of the last update of the batch.", "loss", "",
        "sum over the batch / denominator", chart="Loss", label="in training", glance="loss {value:.2f}"),
    Metric("preference_accuracy", "Pairs whose chosen completion gained more on the reference; a tie counts half.",
        "loss", "share", _PAIRS, DPO, "Preference accuracy", "in training", "pairs right {value:.2f}"),
    Metric("margin", "Implicit reward of the chosen completion minus that of the rejected one.", "loss", "", _PAIRS,
        DPO, "Preference margin", "in training", "margin {value:.2f}"),
    Metric("chosen_reward", "beta times the log-ratio of the chosen completion to the reference.", "loss", "",
        _PAIRS, DPO, "Implicit rewards", "chosen"),
    Metric("rejected_reward", "beta times the log-ratio of the rejected completion to the reference.", "loss", "",
        _PAIRS, DPO, "Implicit rewards", "rejected"),
    Metric("reward_mean", "Reward of what was sampled; null when nothing was scored.", "verify", "",
        "mean over scored completions", GRPO, "Reward of sampled completions", "reward", "reward {value:.2f}"),
    Metric("reward_std", "Spread of the rewards.", "verify", "", "standard deviation over scored completions",
        GRPO),
    Metric("reward_parts.*", "A named part of the reward, before weighting.", "verify", "", _COMPLETIONS, GRPO,
        "Reward parts"),
    Metric("reward_logged.*", "A number that a reward function logged with log_metric.", "verify", "", "as logged",
        GRPO, "Logged by the reward"),
    Metric("accuracy", "Reward part `correct`; null where no completion has one.", "verify", "share", _COMPLETIONS,
        GRPO, "Reward of sampled completions", "accuracy", "accuracy {value:.2f}"),
    Metric("kl", "Estimate of the KL divergence to the reference; null where no reference is held.", "loss", "nats",
        _TOKENS, GRPO, "KL per token", "to the reference, in training", "KL {value:.2f}"),
    Metric("clip_fraction_high", "Tokens clipped at the upper bound of the ratio.", "loss", "share", _TOKENS, GRPO,
        "Clip fraction", "upper bound"),
    Metric("clip_fraction_low", "Tokens clipped at the lower bound of the ratio.", "loss", "share", _TOKENS, GRPO,
        "Clip fraction", "lower bound"),
    Metric("ratio_max", "Largest ratio of a token's new to its old probability.", "loss", "",
        "largest over trained tokens", GRPO, "Ratio", "largest"),
    Metric("ratio_mean", "Ratio of a token's new to its old probability.", "loss", "", _TOKENS, GRPO, "Ratio",
        "mean"),
    Metric("entropy", "Entropy of the policy's distribution over the vocabulary.", "log-probability", "nats",
        _TOKENS, chart="Entropy", label="entropy", glance="entropy {value:.2f}"),
    Metric("completion_length", "Length of the completions that did not fail.", "sample", "tokens", _COMPLETIONS,
        chart="Completion length", label="in training", glance="length {value:.1f}"),
    Metric("truncated", "Completions cut by the token limit.", "sample", "share", _COMPLETIONS, GRPO, "Truncated",
        "truncated"),
    Metric("zero_advantage", "Trained groups whose advantages are all zero.", "advantage", "share", _GROUPS, GRPO,
        "Groups without signal", "zero advantage"),
    Metric("unreadable", "Judged completions in which no answer was found; null where none has a part `correct`.",
        "verify", "share", _COMPLETIONS, GRPO, "Answers not found", "unreadable"),
    Metric("sampler_gap_max", "Largest difference of sampler and trainer log-probability.", "log-probability",
        "nats", "largest over trained tokens", GRPO, "Sampler against trainer", "largest"),
    Metric("sampler_gap", "Absolute difference of sampler and trainer log-probability.", "log-probability", "nats",
        _TOKENS, GRPO, "Sampler against trainer", "mean"),
    Metric("sampler_kl", "k3 estimate of the KL divergence of the sampler from the trainer.", "log-probability",
        "nats", _TOKENS, GRPO, "Sampler against trainer", "KL"),
    Metric("sampler_equal", "Tokens whose sampler and trainer log-probabilities are the same to the bit.",
        "log-probability", "share", _TOKENS, GRPO, "Tokens equal to the bit", "equal",
        "sampler = trainer {percent:.4g}%"),
    Metric("unscored", "Completions without a reward; they are not trained on.", "verify", "count",
        "sum over completions", GRPO, glance="unscored {value}"),
    Metric("unscored_reasons.*", "Completions without a reward, by the reason.", "verify", "count",
        "sum over completions", GRPO),
    Metric("grad_norm", "Norm of the gradient before clipping; null when it is not finite.", "gradient",
        chart="Gradient norm", label="norm"),
    Metric("lr", "Learning rate of the step.", "update", chart="Learning rate", label="learning rate"),
    Metric("tokens", "Tokens that were trained on.", "loss", "tokens", "sum over completions",
        chart="Trained tokens per step", label="trained"),
    Metric("lag_max", "Optimizer steps between the weights that drew a token and those trained on it.", "sample",
        "steps", "largest over tokens", GRPO, "Policy lag", "largest"),
    Metric("lag_mean", "Optimizer steps between the weights that drew a token and those trained on it.", "sample",
        "steps", "mean over tokens", GRPO, "Policy lag", "mean"),
    Metric("groups_drawn", "Groups that were sampled, refills of dynamic sampling included.", "advantage", "count",
        "", GRPO),
    Metric("groups_trained", "Groups with an advantage that is not zero.", "advantage", "count", "", GRPO),
    Metric("denominator", "What the sum of the loss is divided by.", "advantage"),
    Metric("microbatches", "Rows of each micro-batch, in order.", "advantage"),
    Metric("updates", "Optimizer steps taken on the batch; 0 when nothing had signal or was not finite.", "update",
        "count"),
    Metric("non_finite", "Where the first number that is not finite was; null when all are finite.", "gradient"),
    Metric("ranks", "Number of ranks; only in a run on several.", "metrics", "count"),
    Metric("hashes.verdicts", "Of every verdict, in order.", "verify", "hash"),
    Metric("hashes.advantages", "Of the advantages.", "advantage", "hash"),
    Metric("hashes.logprobs", "Of the trainer's log-probabilities of the first pass.", "log-probability", "hash"),
    Metric("hashes.gradient", "Of the gradient; absent when no update was made.", "gradient", "hash"),
    Metric("hashes.weights", "Of the weights after the step.", "update", "hash"),
)  # fmt: skip


def _held_out(
    key: str,
    text: str,
    unit: str = "",
    reduction: str = "",
    kinds: tuple[Kind, ...] = ALL,
    chart: str = "",
    label: str = "",
) -> Metric:
    return Metric(key, text, "evaluation", unit, reduction, kinds, chart, label, line="eval")


_EVAL = (
    _held_out("kind", "Always `eval`; a line of a training step has no kind."),
    _held_out("step", "The optimizer step after which the held-out rows were evaluated; 0 is the start."),
    _held_out("prompts", "Held-out prompts (SFT, DPO: rows) that were scored.", "count"),
    _held_out("correct", "Completions that are right; null where the reward has no part `correct`.", "count", "",
        GRPO, "Held-out score"),
    _held_out("reward_mean", "Reward of the held-out completions.", "", "mean over scored completions", GRPO,
        "Held-out score"),
    _held_out("loss", "The objective's loss on the held-out rows.", "",
        "mean over trained tokens (SFT) or pairs (DPO)", GIVEN, "Loss", "held out"),
    _held_out("loss_low", "Lower end of its 95% interval, by prompt.", "", "", GIVEN),
    _held_out("loss_high", "Upper end of its 95% interval, by prompt.", "", "", GIVEN),
    _held_out("preference_accuracy", "Held-out pairs whose chosen completion gained more.", "share", _PAIRS, DPO,
        "Preference accuracy", "held out"),
    _held_out("margin", "As in training, of held-out pairs.", "", _PAIRS, DPO, "Preference margin", "held out"),
    _held_out("chosen_reward", "As in training, of held-out pairs.", "", _PAIRS, DPO),
    _held_out("rejected_reward", "As in training, of held-out pairs.", "", _PAIRS, DPO),
    _held_out("tokens", "Tokens of the held-out completions.", "tokens", "sum over completions", ("sft",)),
    _held_out("kl", "k3 estimate of the KL divergence to the start policy, on the step's own rollouts.", "nats",
        "mean over tokens", GRPO, "KL per token", "to the start, held out"),
    _held_out("kl_low", "Lower end of its 95% interval, by group.", "nats", "", GRPO),
    _held_out("kl_high", "Upper end of its 95% interval, by group.", "nats", "", GRPO),
    _held_out("unscored", "Held-out completions without a reward.", "count", "sum over completions", GRPO),
    _held_out("truncated", "Held-out completions cut by the token limit.", "count", "sum over completions", GRPO),
    _held_out("completion_length", "Length of the held-out completions.", "tokens", _COMPLETIONS, GRPO,
        "Completion length", "held out"),
)  # fmt: skip

PAGE_HEAD = """# Metrics

`metrics.jsonl` has one line per training step and per evaluation, the same in every identical run. This page is
generated from the table in `tinyllm/record/metrics.py` (`python -m tinyllm.record.metrics > docs/metrics.md`), which
also decides how a number is drawn, compared and shown. Shares are in [0, 1], nats are per token, and what was not
measured is null. The hop says where in a step a number is computed: `tinyllm diff` names the first where two runs part.
"""

METRICS = _TRAIN + _EVAL
"""Every key of a line of metrics.jsonl. A number that was not measured is null, never NaN."""
_BY_KEY: dict[tuple[str, str], Metric] = {(row.line, row.key): row for row in METRICS}


def metric(key: str, line: str = "train") -> Metric | None:
    """The row of METRICS for a key ("reward_parts.correct") of a line's kind; None for a key that it does not have."""
    return _BY_KEY.get((line, key)) or _BY_KEY.get((line, f"{key.partition('.')[0]}.*"))


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line with the keys of nested mappings joined by a dot, as METRICS names them."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
    return found


def markdown() -> str:
    """METRICS as docs/metrics.md."""
    lines = [PAGE_HEAD]
    for line, title in (("train", "Lines of training steps"), ("eval", "Lines of evaluations")):
        lines += [f"## {title}", "", "| key | what it is | unit | of a step | hop | kinds |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for row in (row for row in METRICS if row.line == line):
            kinds = "all" if row.kinds == ALL else ", ".join(row.kinds)
            lines.append(f"| `{row.key}` | {row.text} | {row.unit} | {row.reduction} | {row.hop} | {kinds} |")
        lines.append("")
    return "\n".join(lines)


# Readers of an eval line


def held_out_score(row: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """(score, low, high) of an `eval` line: accuracy, or loss, with its 95% interval; None when nothing was scored.

    Without a notion of correct it is the mean reward, whose interval the line cannot tell: low = high = score.
    """
    if not row.get("prompts"):
        return None
    if "loss" in row:
        return row["loss"], row["loss_low"], row["loss_high"]
    if row.get("correct") is not None:
        return row["correct"] / row["prompts"], *wilson(row["correct"], row["prompts"])
    return None if row.get("reward_mean") is None else (row["reward_mean"],) * 3


def score_kind(row: Mapping[str, Any]) -> str:
    """What held_out_score gives of this line: accuracy, reward or loss."""
    return "loss" if "loss" in row else "reward" if row.get("correct") is None else "accuracy"


if __name__ == "__main__":
    print(markdown(), end="")
