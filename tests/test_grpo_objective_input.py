"""What the objective takes: types, shapes, settings, threads; what is refused, and how."""

import math

import pytest
import torch
from objective import NAN, gradient, t

from tinyllm.errors import ConfigError
from tinyllm.post.grpo import (
    clipped_objective,
    kl_estimate,
    step_denominator,
)


def test_bf16_is_computed_in_fp32_and_integer_masks_are_read():
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = clipped_objective(new, new, torch.tensor([1.0]), torch.tensor([[2, 0]]), aggregate="token")
    loss.backward()
    assert loss.dtype == torch.float32 and new.grad.tolist() == [[-1.0, 0.0]]


def test_no_argument_is_written_to_and_only_logp_new_gets_a_gradient():
    tensors = {k: torch.randn(3, 2, requires_grad=True) for k in ("logp_new", "logp_old", "logp_ref", "logp_sampler")}
    tensors |= {"advantages": torch.randn(3, requires_grad=True), "mask": torch.ones(3, 2)}
    before = {k: x.detach().clone() for k, x in tensors.items()}
    loss, _ = clipped_objective(**tensors, beta=0.1, sampler_correction="token", denominator=torch.tensor(3.0))
    loss.backward()
    assert all(x._version == 0 and torch.equal(x, before[k]) for k, x in tensors.items())
    assert [k for k, x in tensors.items() if x.grad is not None] == ["logp_new"]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low is -0\.1: use a finite number of at least 0"),
        ({"clip_high": NAN}, "clip_high is nan"),
        ({"clip_high": math.inf}, "clip_high is inf"),
        ({"beta": -1.0}, r"beta is -1\.0"),
        ({"dual_clip": 1.0}, r"dual_clip is 1\.0: use a finite number above 1"),
        ({"clip": "both"}, "clip is 'both': use 'ppo' or 'dual' or 'cispo'"),
        ({"kl": "k4"}, "kl is 'k4'"),
        ({"ratio": "row"}, "ratio is 'row'"),
        ({"aggregate": "sum"}, "aggregate is 'sum'"),
        ({"aggregate": "constant"}, "constant_length is None"),
        ({"sampler_correction": "token"}, "logp_sampler is missing"),
        ({"sampler_mode": "cut"}, "sampler_mode is 'cut'"),
        ({"sampler_cap": 0.0}, r"sampler_cap is 0\.0: use a finite number above 0"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_field_value_and_remedy(axes, message):
    with pytest.raises(ConfigError, match=message) as error:
        clipped_objective(torch.zeros(2), torch.zeros(2), torch.zeros(2), **axes)
    assert "\n" not in str(error.value)


def test_shapes_that_do_not_fit_are_refused_instead_of_broadcast():
    for args in (
        (torch.zeros(2, 3), torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2)),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 1)),
        (torch.zeros(2), torch.zeros(2), torch.zeros(1)),
    ):
        with pytest.raises(AssertionError):
            clipped_objective(*args)


def test_one_and_two_threads_give_the_same_bits():
    """Large enough that torch would split a sum over the whole tensor between threads."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = (torch.randn(96, 1024, generator=generator) * 0.3 - 2 for _ in range(3))
    a, mask = torch.randn(96, generator=generator), torch.rand(96, 1024, generator=generator) < 0.8
    threads = torch.get_num_threads()
    results = []
    for n in (1, 2):
        torch.set_num_threads(n)
        results.append(gradient(new, old, a, mask, aggregate="token", beta=0.1, logp_ref=ref, logp_sampler=old))
    torch.set_num_threads(threads)
    (loss, grad, stats), (other_loss, other_grad, other_stats) = results
    assert loss == other_loss and torch.equal(grad, other_grad) and stats == other_stats


@pytest.mark.parametrize("name", ["logp_old", "logp_ref", "logp_sampler"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 3), (3,)])
def test_a_log_probability_is_never_spread_over_other_tokens(name, shape):
    given = {"logp_old": torch.zeros(2, 3), name: torch.zeros(shape)}
    with pytest.raises(AssertionError, match="does not fit"):
        clipped_objective(torch.zeros(2, 3), advantages=torch.ones(2), **given)


@pytest.mark.parametrize("name", ["logp_old", "advantages", "logp_ref"])
def test_the_loss_has_the_type_of_the_policy_whatever_is_beside_it(name):
    given = {"logp_old": torch.zeros(2, 3), "advantages": torch.ones(2), "logp_ref": torch.zeros(2, 3)}
    given[name] = given[name].double()
    assert clipped_objective(torch.zeros(2, 3), **given, beta=1.0)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kl_of_narrow_types_is_computed_in_fp32(dtype):
    for d in (12.0, 20.0, 25.0, 100.0):
        value = kl_estimate(torch.zeros(1, dtype=dtype), torch.full((1,), d, dtype=dtype))
        assert value.dtype == torch.float32 and value.isfinite().all()
    small = torch.tensor([0.01], dtype=dtype)
    exact = kl_estimate(t([0.0]), small.double())
    assert kl_estimate(torch.zeros(1, dtype=dtype), small).item() == pytest.approx(exact.item(), rel=1e-3)


def test_kl_estimate_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="kl is 'k4'"):
        kl_estimate(t([0.0]), t([0.0]), "k4")
    with pytest.raises(AssertionError, match="reference"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.parametrize("length", [0, -1, NAN, math.inf])
def test_a_constant_length_that_is_no_length_is_refused(length):
    with pytest.raises(ConfigError, match="at least 1"):
        step_denominator(torch.ones(2, 3), "constant", length)
