"""From groups to a batch: which rows count, in what, and what goes through the model together."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import EOS, group

from tinyllm.config.io import make_config
from tinyllm.engine.trie import Trie
from tinyllm.post.batch import Batch, BatchRules, has_signal, make_batch

SMALL = {"sampling": {"max_new_tokens": 10}, "optimizer": {"name": "sgd"}}


def rules(**options) -> BatchRules:
    return BatchRules.of(make_config(**{**SMALL, **options}))


def in_microbatches(batch: Batch) -> list[int]:
    return [row for rows in batch.microbatches for row in rows]


def test_advantages_are_those_of_each_group():
    batch = make_batch([group("a", [1, 0, 0, 0]), group("b", [5, 5, 5, 1])], rules())
    r3 = math.sqrt(3)
    expected = torch.tensor([r3, -1 / r3, -1 / r3, -1 / r3, 1 / r3, 1 / r3, 1 / r3, -r3], dtype=torch.float64)
    torch.testing.assert_close(batch.advantages, expected, atol=1e-5, rtol=0)
    assert batch.advantages[:4].sum().abs() < 1e-12
    assert batch.denominator == 8 and in_microbatches(batch) == list(range(8))


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"baseline": "leave_one_out", "scale": "none"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"baseline": "mean", "scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ({"preset": "dr_grpo"}, [0.75, -0.25, -0.25, -0.25]),
        ({"baseline": "leave_one_out"}, [4 / 3 * math.sqrt(3), *[-4 / 9 * math.sqrt(3)] * 3]),
    ],
)
def test_baseline_and_scale_come_from_the_objective(axes, expected):
    batch = make_batch([group("a", [1, 0, 0, 0])], rules(objective=axes))
    torch.testing.assert_close(batch.advantages, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_seven_equal_rewards_are_exactly_zero():
    """Case B6: 0.95 seven times has a computed deviation that is not 0."""
    batch = make_batch([group("a", [0.95] * 7)], rules())
    assert batch.advantages.tolist() == [0.0] * 7
    assert not batch.has_signal and batch.denominator == 7


def test_a_masked_completion_does_not_move_the_baseline():
    """Case B9: the reward of a truncated completion that is masked is read by nobody."""
    reasons = ["stop", "stop", "length"]
    one, other = (
        make_batch([group("a", [1, 0, x], reasons=reasons)], rules(train={"overlong": "mask"})) for x in (0, 100)
    )
    assert one.advantages.tolist() == other.advantages.tolist()
    assert one.advantages[2] == 0 and one.rewards[2].isnan() and not one.trained[2]
    torch.testing.assert_close(one.advantages[:2], torch.tensor([1.0, -1.0]).double(), atol=1e-5, rtol=0)
    assert one.denominator == 2 and in_microbatches(one) == [0, 1]
    counted = make_batch([group("a", [1, 0, 0], reasons=reasons)], rules())
    assert counted.denominator == 3 and in_microbatches(counted) == [0, 1, 2]


def test_an_unscored_completion_leaves_its_group():
    with_it = make_batch([group("a", [1, None, 0])], rules())
    without = make_batch([group("a", [1, 0])], rules())
    assert with_it.advantages[[0, 2]].tolist() == without.advantages.tolist()
    assert with_it.advantages[1] == 0 and with_it.denominator == 2 and in_microbatches(with_it) == [0, 2]
    assert not has_signal(group("a", [1, None, 1]), rules())
    alone = make_batch([group("a", [1, None, None])], rules())
    assert alone.advantages.tolist() == [0, 0, 0] and not alone.has_signal


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
def test_empty_completions_are_harmless(aggregate):
    """Case C12: no token, no part in the denominator, no NaN; also when all of a step are empty."""
    chosen = rules(objective={"aggregate": aggregate})
    batch = make_batch(
        [group("a", [1, 0, 0.5], ids=[(), (EOS,), (2, EOS)], reasons=["error", "stop", "length"])], chosen
    )
    assert batch.advantages.isfinite().all()
    assert in_microbatches(batch) == [1] and batch.trained.tolist() == [False, True, True]  # 0.5 is the mean
    assert batch.denominator == {"sequence": 2, "token": 3, "constant": 30}[aggregate]
    nothing = make_batch([group("a", [None, None], ids=[(), ()], reasons=["error", "error"])], chosen)
    assert not nothing.has_signal and nothing.advantages.tolist() == [0, 0]
    none_left = make_batch(
        [group("a", [1, 1])], rules(objective={"aggregate": aggregate}, train={"dynamic_sampling": True})
    )
    assert not none_left.has_signal and none_left.rollouts == () and none_left.denominator == 0


@pytest.mark.parametrize(("aggregate", "expected"), [("sequence", 3), ("token", 2 + 1 + 4), ("constant", 4 * 10)])
def test_denominator_is_that_of_the_whole_step(aggregate, expected):
    """Rows of advantage 0 count, an unscored one does not; the constant length counts every row, as Dr. GRPO does."""
    groups = [
        group("a", [1, 0], ids=[(2, EOS), (EOS,)]),
        group("b", [None, 1], ids=[(2, 3, EOS), (2, 3, 4, EOS)]),
    ]
    assert make_batch(groups, rules(objective={"aggregate": aggregate})).denominator == expected


def test_constant_length_is_the_option_or_the_limit():
    groups = [group("a", [1, 0])]
    assert make_batch(groups, rules(objective={"preset": "dr_grpo"})).denominator == 20
    assert make_batch(groups, rules(objective={"preset": "dr_grpo", "constant_length": 7})).denominator == 14


def test_overlong_penalty_falls_linearly_over_the_buffer():
    """DAPO eq. 13 with a buffer of 4 of 10 tokens: nothing up to 6, then -1/4 for each more."""
    lengths = (1, 6, 7, 8, 10)
    ids = [(*range(2, 1 + n), EOS) for n in lengths]
    batch = make_batch([group("a", [1, 0, 1, 1, 0], ids=ids)], rules(train={"overlong": 0.4}))
    assert batch.rewards.tolist() == pytest.approx([1, 0, 0.75, 0.5, -1])
    no_buffer = make_batch([group("a", [1, 0, 1, 1, 0], ids=ids)], rules(train={"overlong": 0.0}))
    assert no_buffer.rewards.tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_overlong_penalty_never_makes_an_equal_group_useful(reward):
    ids = [(*range(2, 11), EOS), (EOS,)]
    chosen = rules(train={"overlong": 0.4})
    batch = make_batch([group("a", [reward] * 2, ids=ids)], chosen)
    assert batch.rewards.tolist() == [reward] * 2 and batch.advantages.tolist() == [0, 0] and not batch.has_signal


def test_overlong_penalty_leaves_unscored_rows_unscored():
    ids = [(*range(2, 11), EOS)] * 3
    batch = make_batch([group("a", [1, None, 0], ids=ids)], rules(train={"overlong": 0.4}))
    assert batch.rewards[[0, 2]].tolist() == [0, -1] and batch.rewards[1].isnan()


def test_dynamic_sampling_keeps_groups_with_signal_in_order():
    """Case H7: what is left has rows, prompts, rewards and advantages of one length and one order."""
    groups = [group(n, r) for n, r in (("a", [1, 1]), ("b", [1, 0]), ("c", [0, 0]), ("d", [0, 2]), ("e", [3, 4]))]
    chosen = rules(train={"dynamic_sampling": True, "prompts_per_step": 2})
    batch = make_batch(groups, chosen)
    assert [g.prompt.id for g in batch.groups] == ["b", "d"]
    assert [r.completion.prompt_id for r in batch.rollouts] == ["b", "b", "d", "d"]
    assert len(batch.prompts) == len(batch.rewards) == len(batch.advantages) == len(batch.trained) == 4
    assert batch.denominator == 4 and in_microbatches(batch) == [0, 1, 2, 3]
    assert len(make_batch(groups, rules()).groups) == 5


def test_dynamic_sampling_sees_what_training_sees():
    """A group that differs only in completions that are left out has no signal."""
    different = group("a", [1, 1, 0], reasons=["stop", "stop", "length"])
    assert has_signal(different, rules())
    masked = rules(train={"overlong": "mask", "dynamic_sampling": True})
    assert not has_signal(different, masked) and make_batch([different], masked).groups == ()


def test_rows_without_a_gradient_are_in_no_microbatch_unless_the_kl_needs_them():
    groups = [group("a", [0, 1, 2]), group("b", [1, 1, 1]), group("c", [1, None, 1])]
    assert in_microbatches(make_batch(groups, rules())) == [0, 2]
    with_kl = make_batch(groups, rules(objective={"beta": 0.1}))
    assert in_microbatches(with_kl) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert with_kl.denominator == make_batch(groups, rules()).denominator == 8


def test_microbatches_hold_the_token_budget():
    """What counts are distinct prefixes: a shared prompt once, the last token never."""
    prompts = [tuple(range(2, 12)), tuple(range(12, 22))]
    groups = [
        group(f"g{i}", [0, 1, 2, 4], ids=[(20 + s, 21, 22, EOS) for s in range(4)], prompt_ids=p)
        for i, p in enumerate(prompts)
    ]
    for budget in (13, 16, 19, 25, 44, 100):
        batch = make_batch(groups, rules(train={"tokens_per_microbatch": budget}))
        assert in_microbatches(batch) == list(range(8))
        for rows in batch.microbatches:
            trie = Trie()
            for row in rows:
                trie.add([*batch.prompts[row], *batch.rollouts[row].completion.token_ids[:-1]])
            assert len(trie) <= budget
    cuts = {
        b: len(make_batch(groups, rules(train={"tokens_per_microbatch": b})).microbatches) for b in (13, 16, 22, 44, 43)
    }
    assert cuts == {13: 8, 16: 4, 22: 2, 44: 1, 43: 2}
