"""Section 1: grouped advantages."""

import math

import pytest
import torch


def test_grouped_rewards_are_centered(grpo):
    """Why: a reward says something only beside other answers to the same prompt. If an easy and a hard prompt were
    normalized together, every answer to the easy one would be reinforced and every answer to the hard one punished.
    """
    easy, hard = 10, 7  # interleaved: a group is what shares an id, not what lies together
    ids = torch.tensor([easy, hard, easy, hard, easy, hard])
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    a = grpo.group_advantages(rewards, ids)
    for group in (easy, hard):
        assert a[ids == group].sum().abs() < 1e-6
    right, wrong = rewards == 1, rewards == 0
    assert (a[right] > 0).all() and (a[wrong] < 0).all()
    worked = grpo.group_advantages(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 0, 0]), scale="none")
    assert worked.tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_zero_advantage_has_zero_policy_gradient(grpo):
    """Why: equal rewards cannot tell good from bad, so nothing may be learned from them. A computed standard deviation
    of seven times 0.95 is not 0 in floating point, and dividing by it turns rounding noise into a gradient.
    """
    equal = [[1.0] * 3, [0.0] * 3, [0.7], [0.95] * 7, [0.1] * 3, [1 / 3] * 6]
    for rewards in [torch.tensor(r, dtype=dtype) for r in equal for dtype in (torch.float32, torch.float64)]:
        a = grpo.group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), eps=0.0)
        assert a.tolist() == [0.0] * len(rewards)
        logp = torch.full((len(rewards), 3), -1.3, requires_grad=True)
        loss, stats = grpo.clipped_objective(logp, logp.detach() - 0.1, a)
        loss.backward()
        assert loss == 0 and logp.grad.abs().sum() == 0
        assert stats.zero_advantage_share == 1.0


def test_advantages_by_hand(grpo):
    """Why: population or sample standard deviation is a constant factor on every gradient; the paper divides by G."""
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5])
    assert grpo.group_advantages(rewards, ids).tolist() == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=1e-4)
    left_out = grpo.group_advantages(rewards, ids, baseline="leave_one_out", scale="none")
    assert left_out.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_unscored_rollouts_leave_the_baseline(grpo):
    """Why: a verifier that timed out says nothing. Counted as 0 it would lower the mean, and reward its neighbours."""
    rewards = torch.tensor([math.nan, 1.0, 0.0, math.nan])
    a = grpo.group_advantages(rewards, torch.zeros(4, dtype=torch.long))
    assert a.tolist() == pytest.approx([0.0, 1.0, -1.0, 0.0], abs=1e-5)
