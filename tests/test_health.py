"""The checks of a run's health: what each says of made-up histories, when the loop is told to stop, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from run_samples import CONFIG, make_groups, manifest

from tinyllm.config.sections import DPOConfig, SamplingConfig, SFTConfig
from tinyllm.errors import RunError
from tinyllm.health.checks import LIVE, Monitor, check
from tinyllm.health.finding import LEVELS, Rows
from tinyllm.health.history import History
from tinyllm.record.rundir import RunDir

WHERE = "log-probability of token 1 (id 0) of row 1, prompt 'a' sample 1"
GOOD = {"non_finite": None, "reward_mean": 0.5, "unscored": 0, "unscored_reasons": {}}
NOT_FINITE = GOOD | {"non_finite": WHERE}
UNSCORED = GOOD | {"reward_mean": None, "unscored": 4, "unscored_reasons": {"timed out": 3, "broken": 1}}


def history(*rows, config=CONFIG, evals=(), ledger=(), groups=None) -> History:
    """Lines of the steps 1, 2, ... with these keys."""

    def read(step):
        if groups is None:
            raise RunError("missing")
        return groups[step]

    lines = tuple({"step": step, **row} for step, row in enumerate(rows, 1))
    return History(Path("runs/x"), config, lines, tuple(evals), read, lambda: tuple(ledger))


def of(name, found):
    """The only finding of a check; None when it found nothing."""
    mine = [finding for finding in found if finding.check == name]
    assert len(mine) <= 1
    return mine[0] if mine else None


# Stops


def test_numbers_that_are_not_finite_three_times_in_a_row_stop_a_run():
    assert of("non-finite in a row", check(history(GOOD, NOT_FINITE, NOT_FINITE), LIVE)) is None
    assert of("non-finite in a row", check(history(NOT_FINITE, NOT_FINITE, GOOD, NOT_FINITE), LIVE)) is None
    found = of("non-finite in a row", check(history(GOOD, NOT_FINITE, NOT_FINITE, NOT_FINITE), LIVE))
    assert (found.level, found.step, found.rows) == ("stop", 2, Rows(2, 4))
    assert str(found) == (
        f"3 steps in a row had a non-finite loss or gradient, last in {WHERE}; the weights are those before them. "
        "Lower optimizer.lr or check what was trained on, in runs/x"
    )


def test_nothing_scored_three_times_in_a_row_stops_a_run():
    assert of("unscored in a row", check(history(UNSCORED, GOOD, UNSCORED, UNSCORED), LIVE)) is None
    found = of("unscored in a row", check(history(GOOD, UNSCORED, UNSCORED, UNSCORED), LIVE))
    assert (found.level, found.step, found.rows) == ("stop", 2, Rows(2, 4, "unscored"))
    assert str(found) == (
        "no completion of 3 steps in a row was scored, the last because: timed out. "
        "Check the reward; what was sampled is in runs/x"
    )
    nothing = UNSCORED | {"unscored": 0, "unscored_reasons": {}}
    assert "because: there is none." in str(of("unscored in a row", check(history(*[nothing] * 3), LIVE)))


@pytest.mark.parametrize("config", [SFTConfig(), DPOConfig()])
def test_completions_that_are_given_are_not_unscored(config):
    given = {"non_finite": None, "loss": 1.0}
    assert not check(history(*[given] * 5, config=config), LIVE)
    bad = given | {"non_finite": WHERE}
    assert [f.level for f in check(history(*[bad] * 3, config=config), LIVE)] == ["stop"]


def test_the_bound_is_the_configurations():
    config = replace(CONFIG, stop=replace(CONFIG.stop, bad_steps=1))
    assert check(history(NOT_FINITE, config=config), LIVE)[0].text.startswith("1 steps in a row")


def test_beside_the_loop_counts_go_on_where_a_resumed_run_begins(tmp_path):
    """The lines of metrics.jsonl are all that is needed: those after the checkpoint are trained, and counted, again."""
    with RunDir.create(tmp_path / "run", manifest()) as run:
        for step, row in enumerate((GOOD, NOT_FINITE, NOT_FINITE, NOT_FINITE), 1):
            run.log({"step": step, **row})
        run.log({"step": 4, "kind": "eval", "prompts": 0})
        resumed = History.of(run, 3)
        assert (resumed.last_step, resumed.evals) == (3, ()) and not Monitor()(resumed)
        again = resumed.with_step({"step": 4, **NOT_FINITE}, make_groups())
        assert again.last_step == 4 and again.groups(4) == tuple(make_groups())
        assert [f.level for f in Monitor()(again)] == ["stop"]
        recovered = resumed.with_step({"step": 4, **GOOD}, ()).with_eval({"step": 4, "kind": "eval"})
        assert not Monitor()(recovered) and len(recovered.evals) == 1
        with pytest.raises(RunError):
            recovered.groups(4)


# What the loop says once


def line(number, step, dropped=0, tokens=10.0):
    return {
        "step": step, "group": f"{number}#0", "prompt": str(number), "requested": 4, "failed": 0, "dropped": dropped,
        "reasons": {"timed out": dropped} if dropped else {}, "sampling_s": 1.0, "verifying_s": 0.5,
        "tokens_mean": tokens, "reward_mean": None if dropped == 4 else 0.5,
    }  # fmt: skip


def test_a_pool_that_drops_work_is_said_to_once():
    ledger = [*(line(i, 1) for i in range(6)), line(9, 2, dropped=4, tokens=40.0)]
    quiet = replace(history(GOOD), read_ledger=lambda: pytest.fail("the ledger is read where nothing was dropped"))
    monitor = Monitor()
    assert not monitor(quiet)
    few = replace(quiet, train=({"step": 1, "groups_drawn": 1000}, {"step": 2, **UNSCORED}))
    assert not monitor(few), "nor where next to nothing was"
    dropping = replace(history(GOOD, UNSCORED), read_ledger=lambda: ledger)
    (found,) = monitor(dropping)
    assert (found.level, found.step) == ("problem", 2)
    assert found.text.startswith("14.3% of the completions were dropped; most often because: timed out; dropped groups")
    assert "ledger.jsonl" in found.remedy
    assert not monitor(dropping), "it is said once"
    assert of("selection", check(dropping)) == found
    told = of("selection", check(replace(history(GOOD), read_ledger=lambda: ledger[:6])))
    assert (told.level, told.text) == ("notice", "24 of 24 completions asked of the pool were trained on")


# The others


@pytest.mark.parametrize(
    ("rows", "name", "level", "said", "remedy"),
    [
        ([{"ratio_max": 2.0}, {"ratio_max": 12.0}], "ratio", "warn", "became 12 times as likely within step 2", "fewer"),
        ([{"ratio_max": 200.0}], "ratio", "problem", "became 200 times", "lower learning rate"),
        ([{"ratio_max": 1.0}], "ratio", "notice", "No ratio was larger than 1 (step 1)", ""),
        ([{"clip_fraction_high": 0.2, "clip_fraction_low": 0.1}], "clipping", "warn", "30% of the trained tokens", "Lower"),
        ([{"sampler_equal": 1.0}] * 2, "sampler gap", "notice", "agreed to the last bit on each trained token of 2", ""),
        ([{"sampler_gap": 0.05, "sampler_gap_max": 0.4}], "sampler gap", "warn", "0.05 nats per token in step 1, at most 0.4",
         "objective.sampler_correction"),
        ([{"sampler_gap": 0.01}], "sampler gap", "notice", "differ by 0.01 nats", ""),
        ([{"kl": 0.1}, {"kl": 1.5}], "kl", "warn", "KL to the reference reached 1.5", "objective.beta"),
        ([{"grad_norm": 1.0}] * 8 + [{"grad_norm": 20.0}], "gradient", "warn", "step 9 was 20 times the median", "clip_norm"),
        ([GOOD, NOT_FINITE], "non-finite", "problem", "1 steps had numbers that are not finite", "learning rate"),
        ([{"zero_advantage": 0.2}], "signal", "notice", "80% of the groups from step 1 on had something", ""),
        ([{"zero_advantage": 0.6, "reward_mean": 0.9}], "signal", "warn", "60% of the groups", "Use harder prompts"),
        ([{"zero_advantage": 1.0, "reward_mean": 0.0}], "signal", "problem", "100% of the groups", "Use easier prompts"),
        ([{"truncated": 0.6}], "truncation", "problem", "60% of the completions from step 1 on were cut at 24 tokens", "Raise"),
        ([{"truncated": 0.002}], "truncation", "notice", "0.2% of the completions", ""),
        ([{"unreadable": 0.5}], "unreadable", "warn", "No answer was found in 50%", "reward.rule"),
        ([GOOD], "unscored", "notice", "Every completion was scored", ""),
        ([GOOD, UNSCORED], "unscored", "warn", "4 completions could not be scored", "Check the reward"),
        ([GOOD | {"groups_drawn": 8}, UNSCORED | {"groups_drawn": 8}], "unscored", "problem", "4 completions (6%)",
         "Check the reward"),
    ],
)  # fmt: skip
def test_what_a_check_says(rows, name, level, said, remedy):
    config = replace(CONFIG, sampling=SamplingConfig(max_new_tokens=24, group_size=4))
    found = of(name, check(history(*rows, config=config)))
    assert found is not None and found.level == level
    assert said in found.text and (remedy in found.remedy if remedy else not found.remedy)
    assert 1 <= found.step <= len(rows) and not found.text.endswith(".") and not found.remedy.endswith(".")


def evaluated(*correct):
    return [{"step": step, "kind": "eval", "correct": right, "prompts": 100} for step, right in enumerate(correct)]


def losses(*values):
    rows = enumerate(values)
    return [{"step": n, "loss": x, "loss_low": x - 0.1, "loss_high": x + 0.1, "prompts": 9} for n, x in rows]


@pytest.mark.parametrize(
    ("evals", "level", "said"),
    [
        (evaluated(10, 80), "notice", "The held-out score rose from 0.10 to 0.80 [0.71, 0.87]"),
        (evaluated(10, 90, 40), "warn", "The held-out score was best at step 1 (0.90) and is 0.40 now"),
        (evaluated(50, 52), "warn", "The held-out score did not rise beyond chance: 0.50, then 0.52"),
        (losses(2.0, 1.0), "notice", "The held-out loss fell from 2.000 to 1.000 [0.900, 1.100]"),
        (losses(2.0, 1.0, 1.5), "warn", "The held-out loss was best at step 1 (1.000) and is 1.500 now"),
        (losses(2.0, 2.05), "warn", "The held-out loss did not fall beyond chance: 2.000, then 2.050"),
        (
            [{"step": step, "correct": None, "reward_mean": 0.1 * step, "prompts": 9} for step in (0, 1)],
            "notice",
            "The held-out reward went from 0.00 to 0.10; its interval is not recorded",
        ),
        (evaluated(10), None, None),
    ],
)
def test_what_is_said_of_held_out_rows(evals, level, said):
    found = of("held-out", check(history(GOOD, evals=evals)))
    assert (found and found.level, found and found.text) == (level, said)


def test_completions_that_failed_are_counted_in_the_record():
    reasons = ["stop", "error", "error", "stop"]
    groups = {2: [tiny.group("a", [1, None, None, 0], reasons=reasons)], 3: [tiny.group("a", [1, None, 0, 0])]}
    found = of("failed", check(history(GOOD, UNSCORED, UNSCORED, groups=groups)))
    assert (found.text, found.rows) == ("The sampler failed on 2 completions", Rows(2, 2, "failed"))
    assert of("failed", check(history(GOOD, UNSCORED))) is None, "no record, nothing to say"


def test_nothing_is_said_of_nothing():
    assert check(history()) == [] and Monitor()(history()) == []


def test_the_worst_comes_first():
    found = check(history(*[GOOD | {"ratio_max": 50.0, "zero_advantage": 1.0}] * 2, *[UNSCORED] * 3))
    places = [LEVELS.index(finding.level) for finding in found]
    assert places == sorted(places, reverse=True) and found[0].level == "stop" and len(set(places)) > 2


class Untouchable(dict):
    """A line that nobody may read."""

    def get(self, key, otherwise=None):
        pytest.fail(f"{key} of an old line was read")

    __getitem__ = get


def test_the_loop_looks_at_the_newest_lines_only():
    long = replace(history(), train=(Untouchable(),) * 1000)
    monitor = Monitor()
    for step, row in enumerate((GOOD, NOT_FINITE, GOOD), 1001):
        long = long.with_step({"step": step, **row}, ())
        assert monitor(long) == []


def test_numbers_of_nested_keys_are_found_by_their_name_in_the_table():
    found = history({"reward_parts": {"correct": 0.25}}, {"reward_parts": {"correct": 0.5}})
    assert found.values("reward_parts.correct") == [(1, 0.25), (2, 0.5)] and found.values("reward_parts.format") == []
