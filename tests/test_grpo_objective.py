"""Section 2 of post/grpo.py: hand-computed losses and gradients, and what must not change them."""

import math
from dataclasses import replace

import pytest
import torch
from objective import NAN, gradient, t

from tinyllm.axes import PRESETS
from tinyllm.errors import ConfigError
from tinyllm.post.grpo import (
    ObjectiveStats,
    clipped_objective,
    group_advantages,
    kl_estimate,
    step_denominator,
)

EOS = 3


class Bandit:
    """A context-free policy: four logits z, the same at every position; token 3 ends a completion."""

    def __init__(self, z=(0.0, 0.0, 0.0, 0.0), dtype=torch.float64):
        self.z = torch.tensor(z, dtype=dtype, requires_grad=True)

    def logp(self, completions, width=None, fill=NAN):
        """[B, T] log-probabilities of the sampled tokens, and their mask."""
        width = width or max(map(len, completions))
        table = torch.log_softmax(self.z, -1)
        blank = torch.full((), fill, dtype=self.z.dtype)
        rows = [torch.stack([table[k] for k in c] + [blank] * (width - len(c))) for c in completions]
        mask = torch.tensor([[True] * len(c) + [False] * (width - len(c)) for c in completions])
        return torch.stack(rows), mask

    def step(self, completions, advantages, width=None, **axes):
        """One SGD step at learning rate 1: how z moves, and the loss."""
        logp, mask = self.logp(completions, width)
        loss, stats = clipped_objective(logp, logp.detach(), torch.tensor(advantages), mask, **axes)
        self.z.grad = None
        loss.backward()
        return (-self.z.grad).tolist(), loss.item(), stats


# ---- the formula with a handful of floats


def test_five_floats():
    """q = 1.1, 1.3, 0.5, 0.9, 1.3 with A = 1, 1, -1, -1, -1: terms 1.1, 1.2, -0.8, -0.9, -1.3; loss = -(-0.7) / 5."""
    q = t([1.1, 1.3, 0.5, 0.9, 1.3])
    loss, grad, stats = gradient(q.log(), torch.zeros(5), t([1, 1, -1, -1, -1]))
    assert loss == pytest.approx(0.14)
    assert grad.tolist() == pytest.approx([-1.1 / 5, 0, 0, 0.9 / 5, 1.3 / 5])
    assert (stats.clip_fraction_low, stats.clip_fraction_high) == (0.2, 0.2)
    assert stats.ratio_max == pytest.approx(1.3) and stats.ratio_mean == pytest.approx(5.1 / 5)


def test_clipping_and_its_fraction_look_at_the_sign_of_the_advantage():
    q, a = t([1.5, 1.5, 0.5, 0.5]), t([1, -1, 1, -1])
    losses = [clipped_objective(q[i : i + 1].log(), t([0.0]), a[i : i + 1])[0].item() for i in range(4)]
    assert losses == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    _, stats = clipped_objective(q.log(), torch.zeros(4), a)
    assert (stats.clip_fraction_low, stats.clip_fraction_high) == (0.25, 0.25)


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient():
    logp = torch.randn(64, 7) * 3 - 5
    a = torch.randn(64)
    for old in (logp, logp.detach()):  # also when the caller forgets to detach
        _, grad, stats = gradient(logp, old, a, aggregate="token")
        assert stats.ratio_mean == 1.0 and stats.ratio_max == 1.0
        assert torch.allclose(grad, (-a[:, None] / (64 * 7)).expand(64, 7))
    same = logp.clone().requires_grad_()
    clipped_objective(same, same, a)[0].backward()
    assert torch.allclose(same.grad, (-a[:, None] / (64 * 7)).expand(64, 7))


@pytest.mark.parametrize(
    ("aggregate", "moved", "loss"),
    [
        ("token", (-0.125, -0.125, 0.125, 0.125), 0.5),
        ("sequence", (-1 / 6, -1 / 6, 0.0, 1 / 3), 0.0),
        ("constant", (-0.0625, -0.0625, 0.0625, 0.0625), 0.25),
    ],
)
def test_each_aggregate_moves_the_policy_as_computed_by_hand(aggregate, moved, loss):
    """[3] is right, [0, 1, 3] is wrong; A = +1, -1."""
    for width in (3, 6):
        dz, value, _ = Bandit().step([[3], [0, 1, 3]], [1.0, -1.0], width, aggregate=aggregate, constant_length=4)
        assert dz == pytest.approx(moved) and value == pytest.approx(loss)


def test_sequence_ratio_is_the_exponential_of_the_mean_log_ratio():
    """Log-ratios 0.2 and 0.4 (mean 0.3), A = -1: loss e^0.3, split evenly over the two tokens. A third is padding."""
    new, mask = t([[0.2, 0.4, NAN]]), torch.tensor([[1, 1, 0]])
    loss, grad, stats = gradient(new, torch.zeros(1, 3), t([-1.0]), mask, ratio="sequence")
    assert loss == pytest.approx(math.exp(0.3)) and stats.ratio_max == pytest.approx(math.exp(0.3))
    assert grad.tolist() == [pytest.approx([math.exp(0.3) / 2, math.exp(0.3) / 2, 0.0])]
    clipped, grad, stats = gradient(new, torch.zeros(1, 3), t([1.0]), mask, ratio="sequence", clip_high=4e-4)
    assert clipped == pytest.approx(-1.0004) and grad.abs().sum() == 0 and stats.clip_fraction_high == 1.0


def test_dual_clip_bounds_what_a_bad_completion_can_cost():
    """q = 5 and 2 with A = -1: ppo costs 5 and 2; dual clip (3) costs 3 without gradient, and 2."""
    q = t([5.0, 2.0, 5.0])
    a = t([-1.0, -1.0, 1.0])
    loss, grad, stats = gradient(q.log(), torch.zeros(3), a, clip="dual")
    assert loss == pytest.approx((3 + 2 - 1.2) / 3)
    assert grad.tolist() == pytest.approx([0, 2 / 3, 0]) and stats.clip_fraction_high == pytest.approx(2 / 3)
    loss, grad, _ = gradient(q.log(), torch.zeros(3), a)
    assert loss == pytest.approx((5 + 2 - 1.2) / 3) and grad.tolist() == pytest.approx([5 / 3, 2 / 3, 0])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    """q = 6, 2, 0.1 with weights 5, 2, 0.1: gradient -w A / 3 at each token."""
    q, a = t([6.0, 2.0, 0.1]), t([1.0, -1.0, 1.0])
    loss, grad, stats = gradient(q.log(), torch.zeros(3), a, clip="cispo", clip_low=1.0, clip_high=4.0)
    assert grad.tolist() == pytest.approx([-5 / 3, 2 / 3, -0.1 / 3])
    assert loss == pytest.approx(-(5 * math.log(6) - 2 * math.log(2) + 0.1 * math.log(0.1)) / 3)
    assert (stats.clip_fraction_low, stats.clip_fraction_high) == (0.0, pytest.approx(1 / 3))


def test_advantages_may_be_per_token():
    loss, grad, stats = gradient(torch.zeros(2, 2), torch.zeros(2, 2), t([[1, -2], [0, 0]]), aggregate="token")
    assert loss == pytest.approx(0.25) and grad.tolist() == [[-0.25, 0.5], [0, 0]]
    assert stats.zero_advantage_share == 0.5


# ---- the KL to the reference


def test_kl_value_direction_and_gradient():
    """p = softmax(1,0,0,0) against the uniform: KL(p||u) = 0.117993; gradients of KL(p||u) and KL(u||p) in z."""
    policy = Bandit((1.0, 0.0, 0.0, 0.0))
    p = torch.softmax(policy.z.detach(), -1)
    uniform = torch.full((1, 1), math.log(0.25), dtype=torch.float64)

    def kl_step(kl):
        value, moved = 0.0, torch.zeros(4, dtype=torch.float64)
        for k in range(4):
            logp, _ = policy.logp([[k]])
            loss, stats = clipped_objective(logp, logp.detach(), t([0.0]), beta=1.0, logp_ref=uniform, kl=kl)
            policy.z.grad = None
            loss.backward()
            value += p[k].item() * loss.item()
            moved -= p[k] * policy.z.grad
            assert stats.kl == pytest.approx(stats.kl_loss) and stats.policy_loss == 0
        return value, moved

    value, moved = kl_step("k3")
    assert value == pytest.approx(0.117993, abs=1e-6)
    assert (-moved).tolist() == pytest.approx([0.225367, -0.075122, -0.075122, -0.075122], abs=1e-6)
    _, moved_k2 = kl_step("k2")
    assert (-moved_k2).tolist() == pytest.approx([0.249393, -0.083131, -0.083131, -0.083131], abs=1e-6)
    for step in (moved, moved_k2):
        after = torch.log_softmax(policy.z.detach() + 0.5 * step, -1)
        assert (after.exp() * (after - math.log(0.25))).sum() < 0.117993


def test_k1_is_reported_and_refused_as_a_loss():
    new, ref = t([-1.0, -2.0]), t([-1.5, -1.0])
    loss, stats = clipped_objective(new, new, t([0.0, 0.0]), logp_ref=ref, kl="k1")
    assert loss == 0 and stats.kl == pytest.approx((0.5 - 1.0) / 2)
    with pytest.raises(ConfigError, match=r"beta is 0\.1 but k1"):
        clipped_objective(new, new, t([0.0, 0.0]), logp_ref=ref, kl="k1", beta=0.1)
    with pytest.raises(ConfigError, match="logp_ref is missing"):
        clipped_objective(new, new, t([0.0, 0.0]), beta=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [100.0, -100.0, 88.8, 20.0, 19.99, 20.01, 1.0, -1.0, 1000.0])
def test_a_huge_log_difference_stays_finite_and_leaves_its_neighbours_alone(far, dtype):
    new, ref = t([-2.0, -3.0, -1.0], dtype), t([-2.5, -3.0 + far, -1.2], dtype)
    loss, grad, _ = gradient(new, new, t([0.0] * 3, dtype), beta=1.0, logp_ref=ref, denominator=1)
    healthy, clean, _ = gradient(new, new, t([0.0] * 3, dtype), torch.tensor([1, 0, 1]), beta=1.0, logp_ref=ref)
    assert math.isfinite(loss) and loss > 0
    assert torch.isfinite(grad).all() and grad[1] != 0 and (grad[1] < 0) == (far > 0)
    assert torch.allclose(grad[[0, 2]], clean[[0, 2]] * 2, rtol=0, atol=1e-7)
    near = min(far, 20.0)
    slope = math.exp(near) - 1
    assert grad[1].item() == pytest.approx(-slope, rel=1e-5)
    assert kl_estimate(new, ref)[1].item() == pytest.approx(math.exp(near) - near - 1 + slope * (far - near), rel=1e-5)


def test_k3_is_never_negative_for_tiny_differences():
    d = torch.cat([torch.linspace(-1e-3, 1e-3, 20001), torch.randn(20000) * 1e-5])
    assert kl_estimate(torch.zeros_like(d), d).min() >= 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("far", [100.0, -100.0, 20.0])
def test_a_wild_ratio_stays_finite_in_value_and_gradient(far, sign):
    for clip in ("ppo", "dual", "cispo"):
        new = t([far, 0.1], torch.float32)
        loss, grad, stats = gradient(new, torch.zeros(2), t([sign, 1.0], torch.float32), clip=clip)
        assert math.isfinite(loss) and torch.isfinite(grad).all() and math.isfinite(stats.ratio_max)
        assert grad[1] == pytest.approx(-math.exp(0.1) / 2)


# ---- masks


def everything(aggregate):
    """Axes that switch every term on."""
    return {"aggregate": aggregate, "constant_length": 5, "beta": 0.3, "sampler_correction": "token"}


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_what_is_masked_may_hold_anything(bad, aggregate):
    """NaN in every argument at padding and in a wholly masked row: loss, gradient and stats of the clean run."""
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(3, 4, generator=generator, dtype=torch.float64) * 0.3 for _ in range(4)]
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    for ratio in ("token", "sequence"):
        results = []
        for filler in (0.0, bad):
            new, old, ref, sampler = (torch.where(mask.bool(), x, filler) for x in clean)
            a = torch.where(mask.bool(), t([[1.0], [0.0], [-0.5]]), filler)
            axes = everything(aggregate) | {"ratio": ratio, "logp_ref": ref, "logp_sampler": sampler}
            results.append(gradient(new, old, a, mask, **axes))
        (loss, grad, stats), (bad_loss, bad_grad, bad_stats) = results
        assert loss == bad_loss and torch.equal(grad, bad_grad) and stats == bad_stats
        assert stats.rows == 2 and stats.tokens == 5 and grad[~mask.bool()].abs().sum() == 0


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize("denominator", [None, 0, 7.0])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_everything_masked_gives_loss_zero_and_no_nan(aggregate, denominator, ratio):
    nan = torch.full((2, 3), NAN)
    for beta in (0.0, 0.5):
        axes = everything(aggregate) | {"beta": beta, "ratio": ratio, "denominator": denominator}
        loss, grad, stats = gradient(nan, nan, t([1.0, NAN]), torch.zeros(2, 3), logp_ref=nan, logp_sampler=nan, **axes)
        assert loss == 0 and grad.abs().sum() == 0
        numbers = [getattr(stats, name) for name in stats.__slots__] + [stats.ratio_mean, stats.clip_fraction_low]
        assert all(x == 0 for x in numbers) and stats.kl is None and stats.zero_advantage_share == 0


def test_an_unscored_row_is_masked_kl_included():
    logp, ref = t([[-1.0, -2.0], [-0.5, -0.7]]), t([[-1.5, -1.0], [-3.0, -3.0]])
    a = group_advantages(t([1.0, NAN]), torch.tensor([0, 0]))
    mask = torch.tensor([[True, True], [False, False]])
    loss, grad, stats = gradient(logp, logp, a, mask, beta=1.0, logp_ref=ref)
    alone, grad_alone, stats_alone = gradient(logp[:1], logp[:1], a[:1], beta=1.0, logp_ref=ref[:1])
    assert loss == alone and torch.equal(grad[:1], grad_alone) and grad[1].abs().sum() == 0 and stats == stats_alone


def test_kl_and_ratio_are_averaged_over_trained_tokens_whatever_the_padding():
    """Completions of 3 and 6 tokens of a uniform policy against another: the mean is over 9 tokens."""
    completions = [[0, 1, EOS], [0, 1, 2, 0, 1, EOS]]
    reference = torch.log_softmax(t([1.0, 0.0, 0.0, 0.0]), -1)
    expected = sum(math.exp(d := reference[k].item() - math.log(0.25)) - d - 1 for c in completions for k in c) / 9
    for width in (6, 13):
        logp, mask = Bandit().logp(completions, width)
        ref = torch.full_like(logp, NAN)
        for i, c in enumerate(completions):
            ref[i, : len(c)] = reference[c]
        _, stats = clipped_objective(logp, logp, t([1.0, -1.0]), mask, logp_ref=ref)
        assert stats.kl == pytest.approx(expected) and stats.ratio_mean == 1.0 and stats.tokens == 9


def test_the_stop_token_is_trained_and_padding_with_the_same_id_is_not():
    """A lone [EOS] of two: it gets exactly its share, and no gradient reaches the padding."""
    dz, _, stats = Bandit().step([[EOS]], [1.0], width=6)
    assert stats.tokens == 1 and dz == pytest.approx([-0.25, -0.25, -0.25, 0.75])


# ---- denominators of the whole step


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_the_step_does_not_depend_on_how_it_is_cut(aggregate, dtype, close):
    """Eight completions of different lengths, one of them excluded, in 1, 2, 4 and 8 parts (micro-batches or ranks)."""
    lengths = [1, 3, 6, 2, 5, 0, 4, 6]
    mask = torch.tensor([[i < n for i in range(6)] for n in lengths])
    generator = torch.Generator().manual_seed(1)
    new, old, ref = (torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype) * 0.2 - 2 for _ in range(3))
    a = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    axes = {"aggregate": aggregate, "constant_length": 9, "beta": 0.2}
    whole, grad, stats = gradient(new, old, a, mask, logp_ref=ref, **axes)
    denominator = step_denominator(mask, aggregate, 9)
    for parts in (2, 4, 8):
        rows = [slice(i, i + 8 // parts) for i in range(0, 8, 8 // parts)]
        assert sum(step_denominator(mask[r], aggregate, 9) for r in rows) == denominator
        cut = [gradient(new[r], old[r], a[r], mask[r], logp_ref=ref[r], denominator=denominator, **axes) for r in rows]
        assert sum(loss for loss, _, _ in cut) == pytest.approx(whole, rel=close, abs=close)
        assert torch.allclose(torch.cat([g for _, g, _ in cut]), grad, rtol=close, atol=close)
        merged = sum((s for _, _, s in cut), ObjectiveStats())
        for name in ("policy_loss", "kl_loss", "kl", "ratio_mean", "ratio_max", "zero_advantage_share"):
            assert getattr(merged, name) == pytest.approx(getattr(stats, name), rel=1e-5)
        assert (merged.tokens, merged.rows) == (27, 7)
        assert (merged.clipped_low, merged.clipped_high) == (stats.clipped_low, stats.clipped_high)


def test_a_masked_row_counts_the_same_in_every_micro_batch_size():
    """Losses 1, 1, 1 and a masked row: 1 over the completions that have a trained token."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    zero, a = torch.zeros(4, 2), -torch.ones(4)
    assert clipped_objective(zero, zero, a, mask)[0] == 1.0
    n = step_denominator(mask, "sequence")
    parts = [
        clipped_objective(zero[i : i + 1], zero[i : i + 1], a[i : i + 1], mask[i : i + 1], denominator=n)[0]
        for i in range(4)
    ]
    assert sum(parts) == pytest.approx(1.0)


def test_denominators():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert step_denominator(mask, "sequence") == 2
    assert step_denominator(mask, "token") == 3
    assert step_denominator(mask, "constant", 10) == 30
    assert step_denominator(torch.tensor([1, 0, 1]), "sequence") == 2
    with pytest.raises(ConfigError, match="constant_length is None"):
        step_denominator(mask, "constant")
    with pytest.raises(ConfigError, match="aggregate is 'mean'"):
        step_denominator(mask, "mean")


@pytest.mark.parametrize("denominator", [0, -1.0, NAN])
def test_a_denominator_that_cannot_be_right_is_refused(denominator):
    with pytest.raises(AssertionError, match="for 3 trained tokens"):
        clipped_objective(torch.zeros(3), torch.zeros(3), torch.ones(3), denominator=denominator)


# ---- sampler and trainer disagree


def test_the_trainer_scores_at_the_temperature_of_the_sampler():
    """z = [2, 1, 0, 0] at temperature 0.5. Scored at temperature 1 the gap shows at once; scored right it is 0."""
    z = t([2.0, 1.0, 0.0, 0.0])
    sampled = torch.log_softmax(z / 0.5, -1)[[0, 2]]
    assert sampled.tolist() == pytest.approx([-0.15868, -4.15868], abs=1e-5)
    right, wrong = (torch.log_softmax(z / temperature, -1)[[0, 2]] for temperature in (0.5, 1.0))
    _, stats = clipped_objective(right, right, t([1.0, -1.0]), logp_sampler=sampled)
    assert stats.sampler_gap == 0 and stats.sampler_equal_share == 1 and stats.sampler_weight == 1
    _, stats = clipped_objective(wrong, sampled, t([1.0, -1.0]), aggregate="token")
    assert stats.ratio_max == pytest.approx(5.285, abs=1e-3)
    assert stats.ratio_sum - stats.ratio_max == pytest.approx(0.7152, abs=1e-3)
    _, stats = clipped_objective(wrong, wrong, t([1.0, -1.0]), logp_sampler=sampled)
    assert stats.sampler_gap == pytest.approx((0.33513 + 1.66487) / 2, abs=1e-4) and stats.sampler_equal_share == 0


@pytest.mark.parametrize(
    ("correction", "mode", "weights"),
    [
        ("none", "truncate", [1, 1, 1, 1]),
        ("token", "truncate", [1.5, 2.0, 0.5, 1.0]),
        ("token", "mask", [1.5, 0.0, 0.5, 1.0]),
        ("sequence", "truncate", [2.0, 2.0, 0.5, 0.5]),
        ("sequence", "mask", [0.0, 0.0, 0.5, 0.5]),
    ],
)
def test_sampler_correction_by_hand(correction, mode, weights):
    """Token weights 1.5, 4 (product 6) and 0.5, 1 (product 0.5), cap 2; A = -1, so the loss is the mean weight."""
    old = t([[1.5, 4.0], [0.5, 1.0]]).log()
    axes = {"logp_sampler": torch.zeros(2, 2), "sampler_correction": correction, "sampler_mode": mode}
    loss, grad, stats = gradient(old, old, t([-1.0, -1.0]), beta=1.0, logp_ref=old, **axes)
    assert loss == pytest.approx(sum(weights) / 4) and stats.sampler_weight == pytest.approx(sum(weights) / 4)
    assert grad.flatten().tolist() == pytest.approx([w / 4 for w in weights])
    assert stats.gap_max == pytest.approx(math.log(4)) and stats.sampler_equal_share == 0.25
    assert stats.sampler_kl == pytest.approx(sum(w - 1 - math.log(w) for w in (1.5, 4.0, 0.5, 1.0)) / 4)


def test_a_gap_is_measured_where_the_mask_says_and_the_loss_is_not_touched():
    """Rows 0 and 1 differ from the sampler by ln 2 and ln 3; measured is row 1 alone, by row or by token."""
    new = torch.zeros(2, 2)
    sampler = torch.tensor([[math.log(2)] * 2, [math.log(3), 0.0]])
    whole, everywhere = clipped_objective(new, new, t([1.0, -1.0]), logp_sampler=sampler, sampler_correction="token")
    assert everywhere.gap_tokens == 4 and everywhere.gap_sum == pytest.approx(2 * math.log(2) + math.log(3))
    for gap_mask in (torch.tensor([0, 1]), torch.tensor([[0, 0], [1, 1]])):
        axes = {"logp_sampler": sampler, "sampler_correction": "token", "gap_mask": gap_mask}
        loss, stats = clipped_objective(new, new, t([1.0, -1.0]), **axes)
        assert loss == whole and (stats.gap_tokens, stats.gap_equal) == (2, 1)
        assert stats.gap_sum == stats.gap_max == pytest.approx(math.log(3))
        assert stats.weight_sum == pytest.approx(1 / 3 + 1) and stats.tokens == 4


# ---- table, types, arguments


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_and_learns_in_the_right_direction(name):
    axes = replace(PRESETS[name].axes, constant_length=8)
    a = group_advantages(t([1.0, 0.0]), torch.tensor([0, 0]), **axes.arguments("advantages"))
    logp, mask = Bandit().logp([[2, EOS], [0, 1, EOS]])
    ref = torch.full_like(logp, math.log(0.25)).detach()
    dz, _, stats = Bandit().step([[2, EOS], [0, 1, EOS]], a.tolist(), logp_ref=ref, **axes.arguments("loss"))
    assert dz[2] > 0 > dz[0] and dz[2] > dz[1] and stats.kl == 0 and mask.sum() == stats.tokens == 5
