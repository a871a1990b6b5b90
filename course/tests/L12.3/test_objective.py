"""Section 2: clipped objective."""

import math

import pytest
import torch


def gradient(grpo, logp_new, *args, **axes):
    logp_new = logp_new.clone().requires_grad_()
    loss, stats = grpo.clipped_objective(logp_new, *args, **axes)
    loss.backward()
    return loss.item(), logp_new.grad, stats


def test_hand_grpo_objective(grpo):
    """Why: five numbers you can do on paper pin the whole formula. Ratios 1.1, 1.3, 0.5, 0.9, 1.3 with A = 1, 1, -1,
    -1, -1 give the terms 1.1, 1.2 (clipped), -0.8 (clipped), -0.9 and -1.3 (not clipped: a bad token got likelier), so
    the loss is 0.7 / 5, and a clipped token has no gradient.
    """
    q = torch.tensor([1.1, 1.3, 0.5, 0.9, 1.3])
    loss, grad, _ = gradient(grpo, q.log(), torch.zeros(5), torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]))
    assert loss == pytest.approx(0.14)
    assert grad.tolist() == pytest.approx([-0.22, 0.0, 0.0, 0.18, 0.26])


def test_clip_fraction_looks_at_the_sign(grpo):
    """Why: it is the number to watch when updates may be too large. Only a token that A pushes out of bounds counts."""
    q = torch.tensor([1.5, 1.5, 0.5, 0.5])
    _, _, stats = gradient(grpo, q.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert (stats.clip_fraction_low, stats.clip_fraction_high) == (0.25, 0.25)


def test_gradient_flows_through_the_new_policy_only(grpo):
    """Why: on policy the ratio is exactly 1 and its gradient is A times that of logp. If the old policy were
    differentiated too, the two would cancel and nothing would be learned, without any error.
    """
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, stats = grpo.clipped_objective(logp, logp, torch.tensor([1.0, -3.0]))
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([-0.5, 1.5])
    assert stats.ratio_max == 1.0


def test_each_completion_weighs_the_same(grpo):
    """Why: a policy of four equal tokens sees [3] with A = 1 and [0, 1, 3] with A = -1. Averaged per completion first,
    the short right answer pulls as hard as the long wrong one; averaged over tokens it would be outvoted 3 to 1.
    """
    z = torch.zeros(4, requires_grad=True)
    logp = torch.log_softmax(z, -1)[torch.tensor([[3, 0, 0], [0, 1, 3]])]
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, _ = grpo.clipped_objective(logp, logp.detach(), torch.tensor([1.0, -1.0]), mask)
    loss.backward()
    assert (-z.grad).tolist() == pytest.approx([-1 / 6, -1 / 6, 0.0, 1 / 3], abs=1e-6)


def test_stop_token_is_trained_and_padding_is_not(grpo):
    """Why: a mask shifted by one trains padding and forgets the last token, so the model never learns to stop."""
    logp, mask = torch.full((2, 4), -1.0), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    _, grad, stats = gradient(grpo, logp, logp, torch.tensor([1.0, 1.0]), mask, aggregate="token")
    assert (grad != 0).tolist() == mask.bool().tolist()
    assert stats.tokens == 5


def test_masked_positions_may_hold_nan(grpo):
    """Why: 0 times NaN is NaN. Padding and failed completions hold whatever was in memory, and one of them must not
    poison the step; masking has to come before the arithmetic.
    """
    mask = torch.tensor([[1, 0], [0, 0]])
    clean, bad = torch.tensor([[-1.0, 0.0], [0.0, 0.0]]), torch.tensor([[-1.0, math.nan], [math.nan, math.nan]])
    a = torch.tensor([1.0, math.nan])
    loss, grad, stats = gradient(grpo, bad, bad, a, mask, beta=0.1, logp_ref=bad)
    expected, expected_grad, _ = gradient(grpo, clean, clean, torch.tensor([1.0, 0.0]), mask, beta=0.1, logp_ref=clean)
    assert loss == expected and torch.equal(grad, expected_grad)
    nothing, grad, _ = gradient(grpo, bad, bad, a, torch.zeros(2, 2))
    assert nothing == 0 and grad.abs().sum() == 0


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
def test_micro_batches_share_one_denominator(grpo, aggregate):
    """Why: cutting a step to fit memory must not change it. Each part is divided by the whole step's denominator."""
    lengths = [1, 4, 2, 3]
    mask = torch.tensor([[i < n for i in range(4)] for n in lengths])
    logp, a = torch.full((4, 4), -1.0), torch.tensor([1.0, -1.0, 0.5, -0.5])
    axes = {"aggregate": aggregate, "constant_length": 6}
    _, whole, _ = gradient(grpo, logp, logp, a, mask, **axes)
    n = grpo.step_denominator(mask, aggregate, 6)
    parts = [
        gradient(grpo, logp[i : i + 1], logp[i : i + 1], a[i : i + 1], mask[i : i + 1], denominator=n, **axes)[1]
        for i in range(4)
    ]
    assert torch.allclose(torch.cat(parts), whole)


def test_kl_pulls_towards_the_reference(grpo):
    """Why: with the sign or the direction wrong the term that should hold the policy back drives it away. Value and
    gradient are those of p = softmax(1, 0, 0, 0) against the uniform policy, summed over what p would sample.
    """
    z = torch.tensor([1.0, 0.0, 0.0, 0.0], requires_grad=True)
    logp = torch.log_softmax(z, -1)
    p, uniform = logp.detach().exp(), torch.full((1,), math.log(0.25))
    total = 0.0
    for k in range(4):
        loss, _ = grpo.clipped_objective(logp[k : k + 1], logp[k : k + 1], torch.zeros(1), beta=1.0, logp_ref=uniform)
        total = total + p[k] * loss
    total.backward()
    assert total.item() == pytest.approx(0.11799, abs=1e-5)
    assert z.grad.tolist() == pytest.approx([0.22537, -0.07512, -0.07512, -0.07512], abs=1e-5)


def test_kl_of_a_rare_token_stays_finite(grpo):
    """Why: exp overflows in fp32 above 88. Clipped after it, the loss looks fine and the gradient is NaN."""
    logp, ref = torch.tensor([-101.0, -1.0]), torch.tensor([-1.0, -1.5])
    loss, grad, _ = gradient(grpo, logp, logp, torch.zeros(2), beta=1.0, logp_ref=ref)
    assert math.isfinite(loss) and torch.isfinite(grad).all()
    assert grad[0] < 0  # the token the reference likes becomes likelier
    assert grad[1].item() == pytest.approx((1 - math.exp(-0.5)) / 2, abs=1e-7)
