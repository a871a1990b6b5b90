"""Section 1 of post/grpo.py: hand-computed advantages, a slow twin in plain loops, and properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.errors import ConfigError, RewardError
from tinyllm.post.grpo import group_advantages

NAN = math.nan


def advantages(rewards, ids=None, dtype=torch.float64, **axes):
    ids = [0] * len(rewards) if ids is None else ids
    return group_advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(ids), **axes).tolist()


def slow_twin(rewards, ids, baseline="mean", scale="std", eps=1e-6):
    """The definition, one rollout at a time."""
    result = []
    for reward, group in zip(rewards, ids, strict=True):
        members = [r for r, g in zip(rewards, ids, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(set(members)) < 2:
            result.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members))
        b = mean if baseline == "mean" else (math.fsum(members) - reward) / (len(members) - 1)
        result.append((reward - b) / (std + eps) if scale == "std" else reward - b)
    return result


def test_worked_example():
    """[0, 1, 1]: mean 2/3, std sqrt(2)/3, so -sqrt(2) and twice sqrt(2)/2."""
    assert advantages([0, 1, 1], eps=0) == pytest.approx([-math.sqrt(2), math.sqrt(0.5), math.sqrt(0.5)])
    assert advantages([0, 1, 1], scale="none") == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_one_success_in_four_has_population_and_centred_advantages():
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=1e-4)
    assert advantages([1, 0, 0, 0], scale="none") == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_uses_the_std_of_the_whole_group():
    """Seven equal non-dyadic rewards beside one other: their own std is rounding noise, the group's is not."""
    rewards = [0.0] + [0.95] * 7
    scaled = advantages(rewards, dtype=torch.float32, baseline="leave_one_out")
    assert scaled[0] == pytest.approx(-3.0237, abs=1e-4)
    assert scaled[1:] == pytest.approx([3.0237 / 7] * 7, abs=1e-4)
    unscaled = advantages(rewards, dtype=torch.float32, baseline="leave_one_out", scale="none")
    assert unscaled == pytest.approx([-0.95] + [0.95 / 7] * 7)


@pytest.mark.parametrize("axes", [{}, {"baseline": "leave_one_out"}, {"scale": "none"}])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-6])
def test_equal_rewards_give_exactly_zero(eps, axes):
    for value in (0.95, 0.1, 0.7, 1 / 3, -2.7, 1e30):
        for size in range(1, 9):
            for dtype in (torch.float32, torch.float64):
                assert advantages([value] * size, dtype=dtype, eps=eps, **axes) == [0.0] * size


def test_a_group_of_one_gives_zero_also_when_its_other_members_failed():
    assert advantages([0.7]) == [0.0]
    for baseline in ("mean", "leave_one_out"):
        assert advantages([NAN, 0.7, NAN, NAN], baseline=baseline) == [0.0] * 4
        assert advantages([NAN, NAN], baseline=baseline) == [0.0] * 2


def test_an_unscored_rollout_moves_neither_mean_nor_std():
    for axes in ({}, {"scale": "none"}, {"baseline": "leave_one_out"}):
        pair = advantages([1.0, 0.0], **axes)
        assert advantages([1.0, 0.0, NAN], **axes) == [*pair, 0.0]
        assert advantages([NAN, 1.0, NAN, 0.0], **axes) == [0.0, pair[0], 0.0, pair[1]]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_is_an_error_that_names_its_row(value):
    with pytest.raises(RewardError, match="row 2 is -?inf"):
        advantages([0.0, 1.0, value, NAN])


def test_groups_are_cut_by_id_not_by_position():
    rewards, ids = [1.0, 5.0, 0.0, 9.0, 1.0, 5.0], [-7, 10**12, -7, 10**12, -7, 3]
    a = advantages(rewards, ids, scale="none")
    assert a == pytest.approx([1 / 3, -2.0, -2 / 3, 2.0, 1 / 3, 0.0])


def test_result_has_the_rewards_type_and_no_gradient_and_arguments_are_not_written():
    rewards = torch.tensor([0.0, 1.0, NAN, 0.5], requires_grad=True)
    ids = torch.tensor([4, 4, 4, 4])
    result = group_advantages(rewards, ids)
    assert result.dtype == torch.float32 and not result.requires_grad
    assert rewards._version == 0 and ids._version == 0
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_unknown_axis_values_are_refused_by_name():
    for axes, message in [
        ({"baseline": "median"}, "baseline is 'median'"),
        ({"scale": "range"}, "scale is 'range'"),
        ({"eps": -1e-6}, "eps is -1e-06"),
        ({"eps": NAN}, "eps is nan"),
    ]:
        with pytest.raises(ConfigError, match=message):
            advantages([0.0, 1.0], **axes)


reward = st.one_of(st.sampled_from([0.0, 1.0, 0.95, 0.5, NAN]), st.floats(-100, 100, width=32))
batch = st.lists(st.tuples(reward, st.integers(-3, 3)), min_size=1, max_size=24)
axes = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(["mean", "leave_one_out"]),
        "scale": st.sampled_from(["std", "none"]),
        "eps": st.sampled_from([1e-6, 1e-4]),
    }
)


@given(batch, axes)
@settings(max_examples=100, deadline=None)
def test_equals_the_slow_twin(rows, axes):
    rewards, ids = [r for r, _ in rows], [g for _, g in rows]
    assert advantages(rewards, ids, **axes) == pytest.approx(slow_twin(rewards, ids, **axes), rel=1e-6, abs=1e-6)


@given(batch, axes, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_order_of_rows_and_names_of_groups_do_not_matter(rows, axes, random):
    before = advantages([r for r, _ in rows], [g for _, g in rows], **axes)
    order = list(range(len(rows)))
    random.shuffle(order)
    names = random.sample(range(-(10**9), 10**9), 7)
    after = advantages([rows[i][0] for i in order], [names[rows[i][1]] for i in order], **axes)
    assert after == pytest.approx([before[i] for i in order], rel=1e-6, abs=1e-6)


@given(batch, axes, st.integers(-1000, 1000))
@settings(max_examples=100, deadline=None)
def test_a_shift_of_all_rewards_of_a_group_changes_nothing(rows, axes, shift):
    rows = [(round(r * 8) / 8 if r == r else r, g) for r, g in rows]  # so that the shift itself is exact
    before = advantages([r for r, _ in rows], [g for _, g in rows], **axes)
    after = advantages([r + shift if g == 1 else r for r, g in rows], [g for _, g in rows], **axes)
    assert after == pytest.approx(before, rel=1e-6, abs=1e-6)


@given(batch)
@settings(max_examples=100, deadline=None)
def test_a_group_sums_to_zero_and_no_member_exceeds_the_bound(rows):
    ids = [g for _, g in rows]
    for dtype, close in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        a = advantages([r for r, _ in rows], ids, dtype=dtype)
        for group in set(ids):
            members = [x for x, g in zip(a, ids, strict=True) if g == group]
            scored = sum(1 for r, g in rows if g == group and r == r)
            assert abs(sum(members)) < close
            assert all(abs(x) <= math.sqrt(max(scored - 1, 0)) + close for x in members)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
def test_whole_number_rewards_do_not_cut_the_advantages(dtype):
    found = group_advantages(torch.tensor([1, 0, 0, 0]).to(dtype), torch.zeros(4, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=1e-4)


def test_an_advantage_beyond_its_type_is_an_error_not_infinity():
    with pytest.raises(RewardError, match="60000 do not fit torch.float16: scale them"):
        advantages([60000.0, -60000.0], dtype=torch.float16, baseline="leave_one_out", scale="none")
