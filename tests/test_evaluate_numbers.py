"""The numbers of an evaluation by hand: one model, two models, what a plan says before compute."""

from __future__ import annotations

import json

import pytest
import tiny

from tinyllm import stats
from tinyllm.commands.cli import main
from tinyllm.errors import RewardError
from tinyllm.evals import measure
from tinyllm.evals.config import SuiteConfig
from tinyllm.evals.measure import Answers
from tinyllm.evals.suite import plan
from tinyllm.records import Group, Prompt, Rollout, Verdict


def answers(name, scores, label=None, read=None, failed=0, right=True):
    read = tuple("1" if s else "0" for s in scores) if read is None else read
    return Answers(name, name if label is None else label, tuple(map(float, scores)), read, failed, 0, 0, 3, right)


def interval(estimate):
    return estimate["value"], estimate["low"], estimate["high"]


# One model


def test_single_samples_have_wilsons_interval():
    line = measure.summarize([answers(str(i), [i < 3]) for i in range(10)], 1)
    assert interval(line["score"]) == (0.3, *stats.wilson(3, 10))
    assert line["bootstrap"] is None and line["pass"] == {} and line["if_failed"] is None
    assert (line["measure"], line["prompts"], line["completions"]) == ("accuracy", 10, 10)


def test_several_samples_are_clustered_by_prompt():
    table = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]
    line = measure.summarize([answers(str(i), row) for i, row in enumerate(table)], 4)
    found = stats.accuracy(table)
    assert interval(line["score"]) == (found.value, found.low, found.high) and found.value == 0.5
    assert line["bootstrap"] == list(stats.cluster_bootstrap(table))
    assert list(line["pass"]) == ["2", "4"] == list(line["majority"])
    # of two samples one right: 1 - C(2,2)/C(4,2), 1 - C(3,2)/C(4,2), 1, 0, 1
    assert line["pass"]["2"]["value"] == pytest.approx((5 / 6 + 3 / 6 + 1 + 0 + 1) / 5)
    assert interval(line["pass"]["4"]) == (0.8, *stats.wilson(4, 5))
    # four votes: a tie counts half, one of four loses
    assert line["majority"]["4"]["value"] == pytest.approx((0.5 + 0 + 1 + 0 + 1) / 5)


def test_a_group_column_joins_prompts():
    rows = [answers(str(i), [i % 4 < 2], label=i // 2) for i in range(8)]
    line = measure.summarize(rows, 1)
    assert interval(line["score"]) == (0.5, *stats.wilson(2, 4)), "the two of a cluster agree: four facts, not eight"
    assert line["clusters"] == 4 and line["bootstrap"] is not None


def test_failed_completions_are_left_out_and_bounded():
    rows = [answers("a", [1, 1], failed=0), answers("b", [0], failed=1), answers("c", [], failed=2)]
    line = measure.summarize(rows, 2)
    assert line["score"]["value"] == pytest.approx(2 / 3) and line["failed"] == 0.5
    assert line["if_failed"] == [2 / 6, 5 / 6]
    assert (line["prompts"], line["completions"]) == (2, 3)
    assert line["pass"]["2"]["value"] == 1.0, "only prompts with two scored samples"
    by_prompt = stats.accuracy([1, 1, 0], ["a", "a", "b"])
    assert interval(line["score"]) == (by_prompt.value, by_prompt.low, by_prompt.high)
    nothing = measure.summarize([answers("c", [], failed=2)], 2)
    assert nothing["score"] is None and nothing["failed"] == 1.0


def test_the_powers_of_two_and_all():
    assert [measure.several(k) for k in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_what_counts_of_a_completion():
    def rollout(reason, verdict, sample):
        return Rollout(tiny.completion("p", sample, (2, 0), reason), verdict)

    right, wrong = Verdict(1.0, None, "7", (("correct", 1.0),)), Verdict(0.1, None, "8", (("correct", 0.0),))
    silent, cut = Verdict(0.0, None, None, (("correct", 0.0),)), Verdict(0.0, None, None, (("correct", 0.0),))
    failed = Verdict(None, "timed out")
    group = Group(
        Prompt("p", (1,), "x"),
        (
            rollout("stop", right, 0),
            rollout("stop", wrong, 1),
            rollout("stop", silent, 2),
            rollout("length", cut, 3),
            rollout("error", failed, 4),
        ),
    )
    found = measure.answers_of(group, "c")
    assert found == Answers("p", "c", (1.0, 0.0, 0.0, 0.0), ("7", "8", None, None), 1, 1, 1, 8, True)
    line = measure.summarize([found], 5)
    assert (line["truncated"], line["unreadable"], line["failed"]) == (0.2, 0.2, 0.2), "each is one of five"
    assert line["completion_tokens"] == 2.0, "each of the four that are scored has two"


def test_a_reward_between_is_a_reward_and_outside_is_refused():
    assert measure.score(Verdict(0.25)) == 0.25
    assert measure.score(Verdict(0.7, None, None, (("correct", 0.9), ("format", 1.0)))) == 0.0, "nearly is not right"
    line = measure.summarize([answers("a", [0.25], right=False), answers("b", [1.0], right=False)], 1)
    assert line["measure"] == "reward" and line["unreadable"] is None and line["score"]["value"] == 0.625
    for value in (-0.1, 1.1):
        with pytest.raises(RewardError, match="from 0 to 1"):
            measure.score(Verdict(value))


# Two models


def test_a_paired_comparison_by_hand():
    """10 wins and 2 losses of 40: McNemar's exact p is 158/4096; the discordance is 0.3."""
    a = [answers(str(i), [i >= 10]) for i in range(40)]
    b = [answers(str(i), [i < 10 or i >= 12]) for i in range(40)]
    comparison, line = measure.compare(a, b, 1)
    assert (line["wins"], line["losses"], line["prompts"]) == (10, 2, 40)
    assert line["p"] == pytest.approx(158 / 4096) and line["test"] == "McNemar, exact"
    assert line["difference"]["value"] == pytest.approx(0.2)
    assert line["detectable"] == stats.detectable_difference(40, 0.3)
    (alone,) = measure.adjusted([(comparison, line)], [("A", "B")])
    assert alone["p_holm"] == line["p"] and alone["sentence"].startswith("B is better by 20.0 points [")
    two = measure.adjusted([(comparison, line)] * 2, [("A", "B"), ("A", "B")])
    assert two[0]["p_holm"] == pytest.approx(2 * 158 / 4096)
    assert two[0]["sentence"].startswith("no difference between A and B shown"), "after the correction"


def test_only_prompts_that_both_have_a_score_on_are_paired():
    a = [answers("x", [1]), answers("y", [0]), answers("z", [], failed=1), answers("only a", [1])]
    b = [answers("y", [1]), answers("x", [1]), answers("z", [1]), answers("only b", [0])]
    _, line = measure.compare(a, b, 1)
    assert (line["prompts"], line["wins"], line["losses"]) == (2, 1, 0)
    assert measure.compare([answers("x", [1])], [answers("y", [1])], 1) is None


def test_samples_and_clusters_are_permuted_by_cluster():
    a = [answers(str(i), [0, 0]) for i in range(6)]
    b = [answers(str(i), [1, 1]) for i in range(6)]
    _, line = measure.compare(a, b, 2)
    assert line["test"] == "sign-flip permutation" and line["p"] == 2 / 2**6
    joined = [Answers(**{**row.__dict__, "label": int(row.prompt_id) // 2}) for row in a]
    _, line = measure.compare(joined, b, 2)
    assert line["p"] == 2 / 2**3 and line["wins"] == 3
    assert line["detectable"] == stats.detectable_difference(3, 1.0, 2), "three facts, not six"
    ragged = [answers("0", [1], failed=1), *b[1:]]
    assert measure.compare(a, ragged, 2)[1]["p"] == 2 / 2**6


def test_a_change_of_format_is_said():
    a, b = {"truncated": 0.0, "unreadable": 0.02}, {"truncated": 0.04, "unreadable": 0.3}
    assert "B has 30% unreadable completions, A 2%" in measure.format_warning(a, b, ("A", "B"))
    assert "length" in measure.format_warning(a, {"truncated": 0.5, "unreadable": 0.0}, ("A", "B"))
    assert measure.format_warning(a, {"truncated": 0.0, "unreadable": None}, ("A", "B")) is None


# Before compute


def test_the_plan_is_that_of_the_statistics():
    (row,) = plan(SuiteConfig(task=("arithmetic",)))
    assert row["prompts"] == row["clusters"] == 162
    share, difference, needed = row["by_discordance"][2]
    assert share == 0.3 and difference == stats.detectable_difference(162, 0.3)
    assert needed == stats.prompts_needed(0.05, 0.3)


def test_the_plan_from_the_shell(capfd, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}?", "answer": str(i), "text": i // 4}) + "\n" for i in range(40))
    )
    line = ["eval", "--plan", "--data", str(rows), "--verifier", "arithmetic", "--clusters", "text"]
    assert main([*line, "--difference", "0.1", "--samples", "4"]) == 0
    out = capfd.readouterr().out
    assert "rows.jsonl: 40 prompts in 10 clusters, 4 samples each" in out and "prompts needed for 10 points" in out
