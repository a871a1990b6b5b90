"""Masters, schedules, clipping, sums that do not depend on threads, saving and loading to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tinyllm.config.sections import OptimizerConfig
from tinyllm.post.optimizer import Optimizer, learning_rate, sum_of_squares
from tinyllm.record.checkpoint import Checkpoints

SGD = OptimizerConfig(name="sgd", lr=1.0, clip_norm=0.0)


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False)).to(dtype)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator).to(dtype)
    return model


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, steps: range, lr: float = 1e-2) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step(lr, optimizer.gradient_norm())


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Learning rate


def test_constant_schedule_with_warmup():
    config = OptimizerConfig(lr=8.0, schedule="constant", warmup_steps=4)
    assert [learning_rate(config, s, 8) for s in range(1, 9)] == [2, 4, 6, 8, 8, 8, 8, 8]


def test_linear_schedule_reaches_zero_after_the_last_step():
    config = OptimizerConfig(lr=8.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(config, s, 6) for s in range(1, 8)] == [4, 8, 8, 6, 4, 2, 0]


def test_cosine_schedule():
    config = OptimizerConfig(lr=2.0, schedule="cosine")
    expected = [1 + math.cos(math.pi * i / 4) for i in range(5)]
    assert [learning_rate(config, s, 4) for s in range(1, 6)] == pytest.approx(expected)
    assert learning_rate(config, 1, 4) == 2.0


def test_learning_rate_is_a_function_of_the_step_alone():
    """Case J6: nothing is counted, so a resumed run cannot start the schedule again."""
    config = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=4)
    alone = [learning_rate(config, step, 10) for step in (8, 3, 8)]
    assert alone == pytest.approx([0.5, 0.75, 0.5])
    assert all(0 < learning_rate(config, step, 10) <= 1 for step in range(1, 11))


def test_warmup_over_every_step():
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=3)
    assert [learning_rate(config, s, 3) for s in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1])


# Steps


def test_sgd_step_is_weight_minus_rate_times_gradient():
    model = small_model()
    before = copies(model)
    optimizer = Optimizer(model.named_parameters(), SGD)
    backward(model, 0)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step(0.5, optimizer.gradient_norm())
    assert equal(copies(model), {n: before[n] - 0.5 * gradients[n] for n in before})


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_clipping_bounds_the_norm_of_the_whole_gradient(clip):
    model = small_model()
    before = copies(model)
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig(name="sgd", lr=1.0, clip_norm=clip))
    backward(model, 0)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = optimizer.gradient_norm()
    assert 0.5 < norm < 100 and norm == pytest.approx(
        math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    )
    optimizer.step(1.0, norm)
    moved = {n: before[n] - p.detach() for n, p in model.named_parameters()}
    length = math.sqrt(sum(float(m.double().square().sum()) for m in moved.values()))
    assert length == pytest.approx(min(clip, norm), rel=1e-4)
    for name, g in gradients.items():
        torch.testing.assert_close(moved[name], g * min(1.0, clip / norm), atol=1e-5, rtol=1e-4)


def test_adamw_is_that_of_the_paper(monkeypatch):
    """Two steps by hand: m, v with bias correction; decoupled decay (arXiv 1711.05101, algorithm 2)."""
    monkeypatch.setattr("tinyllm.post.optimizer.EPS", 1e-3)  # large enough to be seen
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, clip_norm=0.0)
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Optimizer([("w", weight)], config)
    w, m, v = weight.detach().double().clone(), torch.zeros(3).double(), torch.zeros(3).double()
    for t, (gradient, lr) in enumerate([([0.5, -1.0, 0.0], 0.1), ([2.0, 1.0, -1.0], 0.05)], start=1):
        weight.grad = torch.tensor(gradient)
        optimizer.step(lr, 1.0)
        g = torch.tensor(gradient).double()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        w = w * (1 - lr * 0.5) - lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        torch.testing.assert_close(weight.detach().double(), w, atol=1e-6, rtol=1e-6)


def test_weight_decay_pulls_to_zero_without_a_gradient_signal():
    model = small_model()
    before = copies(model)
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1, 0.0)
    for name, p in copies(model).items():
        torch.testing.assert_close(p, before[name] * 0.95)


def test_frozen_parameters_are_left_alone():
    model = small_model()
    model[0].weight.requires_grad_(False)
    before = copies(model)
    optimizer = Optimizer(model.named_parameters(), SGD)
    assert "0.weight" not in optimizer.parameters
    train(model, optimizer, range(1))
    assert torch.equal(model[0].weight, before["0.weight"]) and not torch.equal(model[1].weight, before["1.weight"])


# Masters


def test_bf16_weights_have_fp32_masters_that_keep_small_steps():
    """A step below the spacing of bf16 at 1 (1/128) is lost on the weight, not on its master."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([("w", weight)], SGD)
    for count in range(1, 9):
        weight.grad = torch.full((4,), 1 / 1024)
        optimizer.step(1.0, 1.0)
        assert optimizer.masters["w"][0].item() == 1 - count / 1024
        assert torch.equal(weight.detach(), optimizer.masters["w"].bfloat16())
    assert weight[0].item() < 1 and optimizer.has_masters


def test_bf16_gradients_accumulate_in_fp32():
    """512 + 1 + 1 is 514 in fp32 and 512 in bf16."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = Optimizer([("w", weight)], SGD)
    for value in (512.0, 1.0, 1.0):
        (weight * torch.tensor(value, dtype=torch.bfloat16)).sum().backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.tolist() == [514.0, 514.0]
    assert optimizer.gradient_norm() == pytest.approx(514 * math.sqrt(2))


def test_fp32_weights_are_their_own_masters():
    model = small_model()
    optimizer = Optimizer(model.named_parameters(), SGD)
    assert not optimizer.has_masters and optimizer.masters["0.weight"] is model[0].weight
    assert set(optimizer.tensors()) == {"weights", "optimizer"}


# Norm


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_003, 5_000_000])
def test_sum_of_squares_against_fp64(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    exact = float(x.double().square().sum())
    assert float(sum_of_squares(x)) == pytest.approx(exact, rel=1e-6)
    assert float(sum_of_squares(x.bfloat16())) == pytest.approx(float(x.bfloat16().double().square().sum()), rel=1e-6)
    assert sum_of_squares(x).dtype == torch.float64


def test_sum_of_squares_is_the_same_at_one_and_two_threads():
    x = torch.randn(3_000_017, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        sums = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.add(sum_of_squares(x).item())
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


def test_a_gradient_that_is_not_finite_is_named():
    model = small_model()
    optimizer = Optimizer(model.named_parameters(), SGD)
    backward(model, 0)
    assert optimizer.non_finite_gradient() is None
    model[1].weight.grad[0, 0] = math.nan
    assert optimizer.non_finite_gradient() == "1.weight" and math.isnan(optimizer.gradient_norm())


# Saving


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_to_the_bit(tmp_path, name, dtype):
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1)
    whole, first, second = small_model(dtype), small_model(dtype), small_model(dtype)
    optimizer = Optimizer(whole.named_parameters(), config)
    train(whole, optimizer, range(7))
    before = Optimizer(first.named_parameters(), config)
    train(first, before, range(4))
    store = Checkpoints(tmp_path)
    store.save(4, before.tensors(), {}, keep=1)
    after = Optimizer(second.named_parameters(), config)
    after.load(store.load()[1])
    assert equal(copies(first), copies(second))
    train(second, after, range(4, 7))
    assert equal(copies(whole), copies(second))
    for group, tensors in optimizer.tensors().items():
        assert equal(tensors, after.tensors()[group]), group
