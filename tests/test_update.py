"""From a batch to new weights: what one update does, however it is cut, and what it refuses to do.

Everywhere plain SGD with learning rate 1 and no clipping: weights move by the gradient itself, so a wrong scale shows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny import EOS, dense_logprobs, gpt2, group, llama

from tinyllm.axes import PRESETS
from tinyllm.config.io import make_config
from tinyllm.engine.policy import Policy
from tinyllm.errors import TrainingStopped
from tinyllm.post import update
from tinyllm.post.batch import Batch, BatchRules, make_batch
from tinyllm.post.grpo import kl_estimate
from tinyllm.post.objectives import GRPOObjective
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Updater, UpdateResult, model_scorer
from tinyllm.records import Revision, RevisionSpan

PLAIN = {
    "sampling": {"max_new_tokens": 8},
    "optimizer": {"name": "sgd", "lr": 1.0, "clip_norm": 0.0},
    "train": {"dynamic_sampling": False, "overlong": 0.0},
}
GROUPS = [
    group("a", [1, 0, 0, 1], ids=[(2, 3, EOS), (2, EOS), (4, 5, 6, 7, EOS), (2, 3, EOS)]),
    group("b", [0.2, 0.9, None, 0.4], ids=[(8, 9), (EOS,), (2, EOS), (7, 7, 7)], prompt_ids=(9,)),
    group("c", [1, 1, 1, 1], prompt_ids=(5, 6, 8)),
]
Weights = dict[str, torch.Tensor]


def options(**more):
    merged = {name: dict(value) for name, value in PLAIN.items()}
    for name, value in more.items():
        merged[name] = {**merged.get(name, {}), **value}
    return make_config(**merged)


def one_update(groups, config, model=None, reference=None, lr=1.0) -> tuple[Weights, UpdateResult, Batch]:
    """How far each weight moved against its gradient, what the updater says, and the batch."""
    policy = Policy(llama() if model is None else model)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    batch = make_batch(groups, BatchRules.of(config))
    updater = Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config, reference)
    result = updater(batch, lr)
    assert all(p.grad is None for p in policy.model.parameters())
    return {n: before[n] - p.detach() for n, p in policy.model.named_parameters()}, result, batch


def close(a: Weights, b: Weights, tolerance: float = 1e-5) -> None:
    largest = max(float(x.abs().max()) for x in b.values())
    for name in b:
        torch.testing.assert_close(
            a[name], b[name], atol=tolerance * largest, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def aggregated(terms: list[torch.Tensor], aggregate: str, batch: Batch) -> torch.Tensor:
    """Plain loops: per-row sums or means over the whole step's divisor."""
    rows = [t.mean() if aggregate == "sequence" else t.sum() for t in terms]
    tokens = sum(len(batch.rollouts[r].completion.token_ids) for r in range(len(batch.rollouts)) if batch.trained[r])
    divisor = {"sequence": int(batch.trained.sum()), "token": tokens, "constant": len(batch.rollouts) * 8}[aggregate]
    return torch.stack(rows).sum() / divisor


def dense_gradient(model, batch: Batch, loss_of_row, aggregate: str) -> Weights:
    """The gradient of the whole step by autograd over one dense pass per row; loss_of_row(row, logp) -> [T]."""
    policy = Policy(model)
    rows = [r for r in range(len(batch.rollouts)) if batch.trained[r]]
    logp = {r: dense_logprobs(policy, batch.prompts[r], batch.rollouts[r].completion.token_ids) for r in rows}
    aggregated([loss_of_row(r, logp[r]) for r in rows], aggregate, batch).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in policy.model.named_parameters()}


# One update


@pytest.mark.parametrize("preset", PRESETS)
def test_an_update_is_the_gradient_of_the_written_objective(preset):
    """On policy every preset's gradient is that of -A logp, aggregated its own way."""
    config = options(objective={"preset": preset, "beta": 0.0})
    moved, result, batch = one_update(GROUPS, config)
    expected = dense_gradient(
        llama(), batch, lambda r, logp: -float(batch.advantages[r]) * logp, BatchRules.of(config).axes.aggregate
    )
    close(moved, expected)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-4) and norm > 0.01
    assert result.stats.ratio_max == 1.0 and result.updates == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_the_microbatch_cut_changes_nothing_but_rounding(preset):
    """Case A2: from one row at a time to all at once, with the KL term too; losses and statistics agree as well."""
    reference = model_scorer(Policy(llama(1)), 1.0, 4096)
    extra = {"beta": 0.3} if preset in ("grpo", "dr_grpo") else {}
    found = []
    for budget in (1, 11, 4096):
        config = options(objective={"preset": preset, **extra}, train={"tokens_per_microbatch": budget})
        found.append(one_update(GROUPS, config, reference=reference))
    assert [len(batch.microbatches) for *_, batch in found] == sorted(
        (len(b.microbatches) for *_, b in found), reverse=True
    )
    assert len(found[0][2].microbatches) >= 5 and len(found[-1][2].microbatches) == 1
    for moved, result, _ in found[:-1]:
        close(moved, found[-1][0])
        assert result.loss == pytest.approx(found[-1][1].loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(found[-1][1].grad_norm, rel=1e-5)
        assert result.entropy == pytest.approx(found[-1][1].entropy, rel=1e-6)
        assert result.hashes["logprobs"] == found[-1][1].hashes["logprobs"], "every row is scored with the same bits"
        assert result.hashes["advantages"] == found[-1][1].hashes["advantages"]


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize("budget", [8, 4096])
def test_a_masked_row_does_not_count(aggregate, budget):
    """Case A5: of four, one is wholly masked; the step is that of the other three (by constant length: of four)."""
    ids = [(2, EOS), (3, EOS), (4, EOS), (5, 6)]
    config = options(objective={"aggregate": aggregate}, train={"overlong": "mask", "tokens_per_microbatch": budget})
    moved, result, batch = one_update([group("a", [1, 0, 0, 1], ids, ["stop"] * 3 + ["length"])], config)
    expected = dense_gradient(llama(), batch, lambda r, logp: -float(batch.advantages[r]) * logp, aggregate)
    close(moved, expected)
    assert result.stats.rows == 3 and batch.denominator == {"sequence": 3, "token": 6, "constant": 32}[aggregate]


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_step_with_everything_masked_moves_nothing(aggregate, beta):
    """Case C7."""
    config = options(objective={"aggregate": aggregate, "beta": beta}, train={"overlong": "mask"})
    groups = [group("a", [1, 0], ids=[(2, 3), (4, 5)], reasons=["length"] * 2)]
    moved, result, _ = one_update(groups, config, reference=model_scorer(Policy(llama(1)), 1.0, 4096))
    assert all((m == 0).all() for m in moved.values())
    assert (result.loss, result.grad_norm, result.updates, result.non_finite, result.entropy) == (
        0.0,
        0.0,
        0,
        None,
        None,
    )


def test_dropout_in_the_configuration_stays_off():
    first, second = (one_update(GROUPS, options(), model=gpt2())[0] for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    batch = make_batch(GROUPS, BatchRules.of(options()))
    close(first, dense_gradient(gpt2(), batch, lambda r, logp: -float(batch.advantages[r]) * logp, "sequence"))


def test_a_kl_term_pulls_to_the_reference():
    """beta k3 by autograd, rows without advantage included, and its value per token."""
    config = options(objective={"beta": 0.7})
    reference = model_scorer(Policy(llama(1)), 1.0, 4096)
    moved, result, batch = one_update(GROUPS, config, reference=reference)
    assert len([r for rows in batch.microbatches for r in rows]) == 11, "all but the unscored one"
    other = Policy(llama(1))
    with torch.no_grad():
        ref = [dense_logprobs(other, batch.prompts[r], batch.rollouts[r].completion.token_ids) for r in range(12)]
    seen = []

    def loss(r, logp):
        seen.append(kl_estimate(logp.detach(), ref[r]))
        return -float(batch.advantages[r]) * logp + 0.7 * kl_estimate(logp, ref[r])

    close(moved, dense_gradient(llama(), batch, loss, "sequence"))
    assert result.stats.kl == pytest.approx(float(torch.cat(seen).mean()), rel=1e-4)


# Several updates on one batch


@pytest.mark.parametrize("clip", ["ppo", "cispo"])
def test_further_updates_use_the_first_log_probabilities(clip):
    """Case A3: the second and third update by hand, with the ratio to the first pass; it moves and is clipped."""
    config = options(train={"updates_per_batch": 3}, objective={"clip": clip, "clip_low": 0.05, "clip_high": 0.05})
    lr = 0.05
    moved, result, batch = one_update(GROUPS, config, lr=lr)
    model, old = llama(), {}
    for _ in range(3):

        def loss(r, logp):
            old.setdefault(r, logp.detach())
            q, a = (logp - old[r]).exp(), float(batch.advantages[r])
            clipped = q.clamp(0.95, 1.05)
            return -clipped.detach() * a * logp if clip == "cispo" else -torch.minimum(q * a, clipped * a)

        model.zero_grad()
        gradient = dense_gradient(model, batch, loss, "sequence")
        for name, p in model.named_parameters():
            p.data -= lr * gradient[name]
    start = dict(llama().named_parameters())
    close(moved, {n: start[n].detach() - p.detach() for n, p in model.named_parameters()}, tolerance=1e-4)
    assert result.updates == 3 and result.stats.ratio_max > 1.05
    assert result.stats.clipped_low > 0 and result.stats.clipped_high > 0
    assert result.stats.gap_tokens == result.stats.tokens


NOW, BEFORE = Revision(5, "now"), Revision(3, "before")


def drawn_from(spans_of):
    """GROUPS[0] with the revisions of its tokens: spans_of(sample, length) -> ((revision, start, end), ...)."""
    rollouts = []
    for rollout in GROUPS[0].rollouts:
        spans = tuple(RevisionSpan(*s) for s in spans_of(rollout.completion.sample, len(rollout.completion.token_ids)))
        changed = replace(rollout.completion, revision=spans[0].revision, spans=spans if len(spans) > 1 else ())
        rollouts.append(replace(rollout, completion=changed))
    return [replace(GROUPS[0], rollouts=tuple(rollouts))]


def lagging_update(spans_of, **more):
    """An update of weights of revision NOW on such a group, with how far each weight moved."""
    config, policy = options(**more), Policy(llama())
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    batch = make_batch(drawn_from(spans_of), BatchRules.of(config), NOW)
    updater = Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config)
    result = updater(batch, 1.0)
    return {n: before[n] - p.detach() for n, p in policy.model.named_parameters()}, result, batch, updater


def test_tokens_of_the_trained_weights_are_measured_against_the_first_pass():
    """So a run without a lag does not depend on what was recorded, and is as it was before lags were known."""
    moved, result, batch, _ = lagging_update(lambda sample, length: [(NOW, 0, length)])
    plain, as_before, _ = one_update(GROUPS[:1], options())
    assert all(torch.equal(moved[n], plain[n]) for n in plain) and result.stats == as_before.stats
    assert result.stats.ratio_max == 1.0 and result.stats.gap_tokens == result.stats.tokens == 13
    numbers = GRPOObjective(options()).metrics(batch.groups, batch, result.stats, {})
    assert (numbers["lag_mean"], numbers["lag_max"]) == (0.0, 0)


def test_older_tokens_are_measured_against_what_was_recorded():
    """Slow twin: the ratio is over the probability a token was drawn with, never computed again. After an update within
    a completion that is not the new weights' own: keys and values are older."""
    older = {0: 2, 2: 5}  # sample -> how many of its first tokens

    def spans_of(sample, length):
        cut = older.get(sample, 0)
        return [s for s in ((BEFORE, 0, cut), (NOW, cut, length)) if s[1] < s[2]]

    moved, result, batch, updater = lagging_update(spans_of, objective={"clip_low": 0.9, "clip_high": 5.0})
    model = llama()
    logps = {
        r: dense_logprobs(Policy(model), batch.prompts[r], batch.rollouts[r].completion.token_ids) for r in range(4)
    }

    def loss(r, logp):
        done = batch.rollouts[r].completion
        old = torch.tensor(done.logprobs) if done.sample in older else logps[r].detach()
        q, a = (logp - old).exp(), float(batch.advantages[r])
        return -torch.minimum(q * a, q.clamp(0.1, 6.0) * a)

    close(moved, dense_gradient(model, batch, loss, "sequence"), tolerance=1e-4)
    assert result.stats.ratio_mean != 1.0
    assert result.stats.gap_tokens == 2 + 3, "the gap is measured where the weights are the sampler's"
    assert result.stats.tokens == 13
    first = result.logprobs[0]
    torch.testing.assert_close(first, logps[0].detach(), atol=1e-5, rtol=1e-5)
    assert updater.objective.old(batch, 0, first).tolist() == pytest.approx(batch.rollouts[0].completion.logprobs)
    assert updater.objective.old(batch, 1, result.logprobs[1]) is result.logprobs[1]
    numbers = updater.objective.metrics(batch.groups, batch, result.stats, {})
    assert (numbers["lag_mean"], numbers["lag_max"]) == (7 * 2 / 13, 2)


@pytest.mark.parametrize(("cap", "mode"), [(1.2, "truncate"), (1.2, "mask"), (0.9, "truncate"), (0.9, "mask")])
def test_the_mean_weight_of_the_correction_is_of_the_trained_weights_own_tokens(cap, mode):
    """By hand over the two rows without older tokens."""
    correction = {"sampler_correction": "token", "sampler_cap": cap, "sampler_mode": mode}

    def spans_of(sample, length):
        return [(BEFORE if sample in (0, 2) else NOW, 0, length)]

    _, result, batch, _ = lagging_update(spans_of, objective=correction)
    weights = []
    for row in (r for r in range(4) if batch.rollouts[r].completion.sample in (1, 3)):
        sampler = torch.tensor(batch.rollouts[row].completion.logprobs)
        for weight in (result.logprobs[row] - sampler).exp().tolist():
            weights.append(weight if weight <= cap else cap if mode == "truncate" else 0.0)
    assert len(weights) == result.stats.gap_tokens
    assert result.stats.sampler_weight == pytest.approx(sum(weights) / len(weights), abs=1e-6)


def test_a_batch_of_older_tokens_alone_has_no_sampler_gap():
    _, result, batch, updater = lagging_update(lambda sample, length: [(BEFORE, 0, length)])
    numbers = updater.objective.metrics(batch.groups, batch, result.stats, {})
    assert result.stats.gap_tokens == 0 and result.stats.gap_sum == 0
    names = ("sampler_equal", "sampler_gap", "sampler_gap_max", "sampler_kl")
    assert [numbers[name] for name in names] == [None] * 4 and numbers["lag_mean"] == 2.0


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("budget", [8, 4096])
def test_every_row_is_trained_exactly_as_often_as_asked(monkeypatch, updates, budget):
    """Case D11."""
    count: Counter = Counter()
    real = update.pack_targets

    def counting(sequences, device):
        count.update((s.prompt, s.completion) for s in sequences)
        return real(sequences, device)

    monkeypatch.setattr(update, "pack_targets", counting)
    ids = [[(s, t, EOS) for t in (2, 3, 4)] for s in (5, 6)]
    groups = [group(f"g{i}", [0, 1, 3], ids=rows) for i, rows in enumerate(ids)]
    _, result, batch = one_update(
        groups, options(train={"updates_per_batch": updates, "tokens_per_microbatch": budget}), lr=0.01
    )
    assert result.updates == updates
    assert count == {(batch.prompts[r], batch.rollouts[r].completion.token_ids): updates for r in range(6)}


def test_updates_stop_at_the_first_that_is_not_finite(monkeypatch):
    """The first update of three stands, the others are left out."""
    real, calls = update.score, []

    def score(*arguments):
        logp, entropy = real(*arguments)
        calls.append(1)
        return logp * (math.nan if len(calls) == 2 else 1.0), entropy

    monkeypatch.setattr(update, "score", score)
    moved, result, _ = one_update(GROUPS, options(train={"updates_per_batch": 3}), lr=0.1)
    assert result.updates == 1 and "log-probability" in result.non_finite and len(calls) == 2
    monkeypatch.undo()
    once, *_ = one_update(GROUPS, options(), lr=0.1)
    assert all(torch.equal(moved[n], once[n]) for n in once)


# What is not finite


@pytest.mark.parametrize("where", ["log-probability", "gradient"])
def test_a_step_that_is_not_finite_moves_nothing_and_is_located(monkeypatch, where):
    """Case F1: one token's number is NaN; the message names token, row, prompt and sample, or the parameter."""
    real = update.score

    def score(policy, targets, temperature):
        logp, entropy = real(policy, targets, temperature)
        if where == "log-probability":
            spoiled = torch.ones_like(logp)
            spoiled[4] = math.nan  # row 0 has 3 tokens, row 1 has 2: its second
            return logp * spoiled, entropy
        logp.register_hook(lambda g: g * math.inf)
        return logp, entropy

    monkeypatch.setattr(update, "score", score)
    config = options(optimizer={"name": "adamw", "weight_decay": 0.1})
    moved, result, _ = one_update(GROUPS, config)
    assert all((m == 0).all() for m in moved.values()) and result.updates == 0
    if where == "gradient":
        assert result.non_finite.startswith("gradient of ") and ".weight" in result.non_finite
    else:
        assert result.non_finite == "log-probability of token 1 (id 0) of row 1, prompt 'a' sample 1"


def test_a_gradient_too_large_for_its_norm_is_located_too(monkeypatch):
    """Every element is finite, the sum of their squares is not."""
    real = update.score

    def score(*arguments):
        logp, entropy = real(*arguments)
        logp.register_hook(lambda g: g * 1e30)
        return logp, entropy

    monkeypatch.setattr(update, "score", score)
    moved, result, _ = one_update(GROUPS, options())
    assert all((m == 0).all() for m in moved.values())
    assert result.non_finite.startswith("gradient of ") and ".weight" in result.non_finite


def test_a_gap_to_the_servers_past_the_bound_stops_before_the_update():
    """The groups' log-probabilities are made up, far from the model's; without servers that is measured, not refused."""
    model = llama()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    served = options(engine={"urls": ("http://127.0.0.1:1",), "max_gap": 0.2})
    with pytest.raises(
        TrainingStopped, match=r"nats per token .*, more than engine.max_gap = 0.2; the weights are those"
    ):
        one_update(GROUPS, served, model)
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())
    for engine in ({"urls": ("http://127.0.0.1:1",), "max_gap": 0.0}, {"urls": (), "max_gap": 0.2}):
        _, result, _ = one_update(GROUPS, options(engine=engine))
        assert result.updates == 1 and result.stats.sampler_gap > 0.2 and result.stats.sampler_kl > 0
