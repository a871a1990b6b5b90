"""Section 2 of post/grpo.py against a slow twin in plain Python, over random batches and all combinations of axes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.post.grpo import ObjectiveStats, clipped_objective, step_denominator

LENGTH = 7  # constant_length


def slow_twin(new, old, advantages, mask, ref, sampler, axes):
    """The definition on lists of lists, one token at a time. Returns the loss and the numbers of the stats."""
    low, high = axes["clip_low"], axes["clip_high"]
    loss = kl_sum = ratio_sum = capped_sum = 0.0
    ratio_max, n_low, n_high, rows, zero_rows, tokens = 0.0, 0, 0, 0, 0, 0
    for i in range(len(new)):
        trained = [j for j in range(len(new[i])) if mask[i][j]]
        if not trained:
            continue
        rows, zero_rows, tokens = rows + 1, zero_rows + (advantages[i] == 0), tokens + len(trained)
        log_ratios = {j: new[i][j] - old[i][j] for j in trained}
        log_weights = {j: old[i][j] - sampler[i][j] for j in trained}
        row = 0.0
        for j in trained:
            a = advantages[i]
            log_q = log_ratios[j] if axes["ratio"] == "token" else sum(log_ratios.values()) / len(trained)
            q = math.exp(log_q)
            clipped_q = min(max(q, 1 - low), 1 + high)
            term = min(q * a, clipped_q * a)
            hits_low, hits_high = a < 0 and q < 1 - low, a > 0 and q > 1 + high
            if axes["clip"] == "dual" and a < 0:
                term = max(term, axes["dual_clip"] * a)
                hits_high = q > axes["dual_clip"]
            if axes["clip"] == "cispo":
                term = clipped_q * a * new[i][j]
                hits_low, hits_high = a != 0 and q < 1 - low, a != 0 and q > 1 + high
            w = 1.0
            if axes["sampler_correction"] != "none":
                level = {"token": log_weights[j], "sequence": sum(log_weights.values())}[axes["sampler_correction"]]
                w = math.exp(level)
                if w > axes["sampler_cap"]:
                    w = axes["sampler_cap"] if axes["sampler_mode"] == "truncate" else 0.0
            d = ref[i][j] - new[i][j]
            kl = math.exp(d) - d - 1 if axes["kl"] == "k3" else d * d / 2
            row += -w * term + axes["beta"] * kl
            n_low, n_high = n_low + hits_low, n_high + hits_high
            kl_sum, ratio_sum, ratio_max, capped_sum = kl_sum + kl, ratio_sum + q, max(ratio_max, q), capped_sum + w
        loss += row / len(trained) if axes["aggregate"] == "sequence" else row
    loss /= {"sequence": rows or 1, "token": tokens or 1, "constant": len(new) * LENGTH}[axes["aggregate"]]
    return loss, (n_low, n_high, rows, zero_rows, tokens, kl_sum, ratio_sum, ratio_max, capped_sum)


@st.composite
def batches(draw):
    """Random log-probabilities, a mask with empty rows and holes, advantages with zeros, in fp64."""
    b, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.05, 0.3, 1.5]))

    def near(x):
        return x + spread * torch.randn(b, width, generator=generator, dtype=torch.float64)

    old = near(torch.full((b, width), -3.0, dtype=torch.float64))
    advantages = torch.tensor(draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), min_size=b, max_size=b)))
    mask = torch.rand(b, width, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    return {
        "new": near(old),
        "old": old,
        "a": advantages.double(),
        "mask": mask,
        "ref": near(old),
        "sampler": near(old),
    }


AXES = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(["token", "sequence"]),
        "clip": st.sampled_from(["ppo", "dual", "cispo"]),
        "clip_low": st.sampled_from([0.2, 3e-4, 1.0]),
        "clip_high": st.sampled_from([0.2, 0.28, 4e-4]),
        "dual_clip": st.sampled_from([3.0, 1.5]),
        "kl": st.sampled_from(["k3", "k2"]),
        "beta": st.sampled_from([0.0, 0.04, 1.0]),
        "aggregate": st.sampled_from(["sequence", "token", "constant"]),
        "sampler_correction": st.sampled_from(["none", "token", "sequence"]),
        "sampler_mode": st.sampled_from(["truncate", "mask"]),
        "sampler_cap": st.sampled_from([2.0, 1.0]),
    }
)


def evaluate(x, axes, dtype=torch.float64, **more):
    """Loss, gradient and stats of a batch."""
    new = x["new"].detach().clone().to(dtype).requires_grad_()
    loss, stats = clipped_objective(
        new, x["old"].to(dtype), x["a"].to(dtype), x["mask"], logp_ref=x["ref"].to(dtype),
        logp_sampler=x["sampler"].to(dtype), constant_length=LENGTH, **axes, **more,
    )  # fmt: skip
    loss.backward()
    return loss.item(), new.grad, stats


def numbers(stats):
    names = (
        "clipped_low",
        "clipped_high",
        "rows",
        "zero_rows",
        "tokens",
        "kl_sum",
        "ratio_sum",
        "ratio_max",
        "weight_sum",
    )
    return tuple(getattr(stats, name) for name in names)


@given(batches(), AXES)
@settings(max_examples=150, deadline=None)
def test_equals_the_slow_twin(x, axes):
    loss, _, stats = evaluate(x, axes)
    twin, twin_numbers = slow_twin(*(x[k].tolist() for k in ("new", "old", "a", "mask", "ref", "sampler")), axes)
    assert loss == pytest.approx(twin, rel=1e-9, abs=1e-12)
    assert numbers(stats) == pytest.approx(twin_numbers, rel=1e-9, abs=1e-12)
    assert stats.policy_loss + stats.kl_loss == pytest.approx(twin, rel=1e-9, abs=1e-12)


@given(batches(), AXES)
@settings(max_examples=60, deadline=None)
def test_gradient_equals_finite_differences(x, axes):
    """Central differences, away from the kinks; CISPO's weight is held constant by definition, so it is left out."""
    axes = axes | {"clip": "ppo" if axes["clip"] == "cispo" else axes["clip"]}
    _, grad, stats = evaluate(x, axes)
    h = 1e-6
    for i, j in torch.nonzero(x["mask"]).tolist()[:4]:
        losses = []
        for sign in (1, -1):
            moved = x["new"].clone()
            moved[i, j] += sign * h
            loss, _, seen = evaluate(x | {"new": moved}, axes)
            losses.append(loss)
            if numbers(seen)[:2] != numbers(stats)[:2]:
                break  # the step crossed a bound
        else:
            assert grad[i, j].item() == pytest.approx((losses[0] - losses[1]) / (2 * h), rel=1e-4, abs=1e-6)
    assert grad[~x["mask"]].abs().sum() == 0


@given(batches(), AXES, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_of_rows_does_not_matter(x, axes, random):
    order = list(range(len(x["a"])))
    random.shuffle(order)
    loss, grad, stats = evaluate(x, axes)
    shuffled, shuffled_grad, shuffled_stats = evaluate({k: v[order] for k, v in x.items()}, axes)
    assert shuffled == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert torch.allclose(shuffled_grad, grad[order], rtol=1e-12, atol=1e-14)
    assert numbers(shuffled_stats) == pytest.approx(numbers(stats), rel=1e-12)


@given(batches(), AXES, st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_padding_columns_and_rows_do_not_matter(x, axes, columns, rows):
    """Padding is NaN; rows are added only where B is not part of the definition ("constant" counts all rows)."""
    rows = 0 if axes["aggregate"] == "constant" else rows
    b, width = x["mask"].shape
    padded = {k: torch.full((b + rows, width + columns), math.nan, dtype=v.dtype) for k, v in x.items() if v.ndim == 2}
    padded["mask"] = torch.zeros(b + rows, width + columns, dtype=torch.bool)
    for k, v in padded.items():
        v[:b, :width] = x[k]
    padded["a"] = torch.cat([x["a"], torch.full((rows,), math.nan, dtype=torch.float64)])
    loss, grad, stats = evaluate(x, axes)
    padded_loss, padded_grad, padded_stats = evaluate(padded, axes)
    assert padded_loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert torch.allclose(padded_grad[:b, :width], grad, rtol=1e-12, atol=1e-14)
    assert padded_grad.abs().sum() == pytest.approx(grad.abs().sum().item())
    assert numbers(padded_stats) == pytest.approx(numbers(stats), rel=1e-12)


@given(batches(), AXES, st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-4)]), st.data())
@settings(max_examples=60, deadline=None)
def test_micro_batches_do_not_matter(x, axes, precision, data):
    dtype, close = precision
    b = len(x["a"])
    cuts = sorted(data.draw(st.sets(st.integers(1, max(b - 1, 1)), max_size=3)) & set(range(1, b)))
    parts = [slice(i, j) for i, j in zip([0, *cuts], [*cuts, b], strict=True)]
    loss, grad, stats = evaluate(x, axes, dtype)
    n = step_denominator(x["mask"], axes["aggregate"], LENGTH)
    results = [evaluate({k: v[p] for k, v in x.items()}, axes, dtype, denominator=n) for p in parts]
    scale = max(grad.abs().max().item(), abs(loss), 1.0)
    assert sum(r[0] for r in results) == pytest.approx(loss, abs=close * scale)
    assert torch.allclose(torch.cat([r[1] for r in results]), grad, rtol=0, atol=close * scale)
    merged = sum((r[2] for r in results), ObjectiveStats())
    assert numbers(merged) == pytest.approx(numbers(stats), rel=1e-5, abs=1e-5)
