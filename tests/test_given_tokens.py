"""Tokens of a completion that nobody sampled: read by the model, in no loss, length, statistic or denominator.

Slow twins: one dense pass per row, in which the given tokens are picked out by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_update import BEFORE, GROUPS, NOW, close, one_update, options
from tiny import EOS, dense_logprobs, group, llama

from tinyllm.axes import PRESETS
from tinyllm.config.io import make_config
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.engine.head import Scored, pack_targets
from tinyllm.engine.policy import Policy
from tinyllm.post.batch import BatchRules, make_batch
from tinyllm.post.grpo import kl_estimate
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Updater, model_scorer
from tinyllm.records import Group, Revision, RevisionSpan

# Sample 0 has given tokens in the middle, 1 none, 2 at both ends, 3 nothing but given ones.
IDS = [(2, 3, 8, 9, 4, EOS), (2, EOS), (7, 7, 5, 6, 8), (9, 9)]
SAMPLED = [(0, 1, 4, 5), (0, 1), (2, 3), ()]
REASONS = ["stop", "stop", "length", "length"]


def with_given(plain: Group, sampled=SAMPLED, revision: Revision | None = None) -> Group:
    """The group with every token that is not in `sampled` given by the environment, without a log-probability."""
    rollouts = []
    for rollout, places in zip(plain.rollouts, sampled, strict=True):
        done = rollout.completion
        spans: list[RevisionSpan] = []
        for t in range(len(done.token_ids)):
            who = (revision or done.revision) if t in places else None
            if spans and spans[-1].revision == who:
                spans[-1] = replace(spans[-1], end=t + 1)
            else:
                spans.append(RevisionSpan(who, t, t + 1))
        logprobs = tuple(x if t in places else None for t, x in enumerate(done.logprobs))
        rollouts.append(replace(rollout, completion=replace(done, spans=tuple(spans), logprobs=logprobs)))
    return replace(plain, rollouts=tuple(rollouts))


PLAIN = group("a", [1, 0, 0.5, 1], IDS, REASONS)
GIVEN = with_given(PLAIN)


def dense(policy: Policy) -> list[torch.Tensor]:
    """Log-probabilities of the sampled tokens of GIVEN's rows."""
    return [
        dense_logprobs(policy, GIVEN.prompt.token_ids, ids)[list(places)]
        for ids, places in zip(IDS, SAMPLED, strict=True)
    ]


def averaged(terms: list[torch.Tensor], aggregate: str) -> torch.Tensor:
    """The loss of rows 0 to 2 by hand: 3 completions, 4 + 2 + 2 sampled tokens, 4 rows of at most 8."""
    rows = [t.mean() if aggregate == "sequence" else t.sum() for t in terms]
    return torch.stack(rows).sum() / {"sequence": 3, "token": 8, "constant": 4 * 8}[aggregate]


def gradient(model) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(("aggregate", "expected"), [("sequence", 3), ("token", 8), ("constant", 4 * 8)])
def test_denominators_count_sampled_tokens(aggregate, expected):
    batch = make_batch([GIVEN], BatchRules.of(options(objective={"aggregate": aggregate})))
    assert batch.denominator == expected
    assert batch.trained.tolist() == [True, True, True, False]
    assert [batch.positions(row) for row in range(4)] == SAMPLED
    assert sorted(r for rows in batch.microbatches for r in rows) == [0, 1, 2]
    assert batch.spread(0, [1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, None, None, 3.0, 4.0]


@pytest.mark.parametrize("budget", [1, 4096])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_the_sampled_tokens_alone(preset, budget):
    config = options(
        objective={"preset": preset, "beta": 0.3}, train={"tokens_per_microbatch": budget, "updates_per_batch": 1}
    )
    other = Policy(llama(1))
    moved, result, batch = one_update([GIVEN], config, reference=model_scorer(other, 1.0, 4096))
    policy = Policy(llama())
    with torch.no_grad():
        reference = dense(other)
    logp = dense(policy)
    terms = [
        -float(batch.advantages[row]) * logp[row] + 0.3 * kl_estimate(logp[row], reference[row]) for row in range(3)
    ]
    loss = averaged(terms, BatchRules.of(config).axes.aggregate)
    loss.backward()
    close(moved, gradient(policy.model))
    kl = torch.cat([kl_estimate(a.detach(), b) for a, b in zip(logp, reference, strict=True)])
    assert result.stats.kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert (result.stats.tokens, result.stats.gap_tokens, result.stats.kl_tokens, result.stats.rows) == (8, 8, 8, 3)
    assert result.stats.ratio_max == 1.0
    gap = torch.cat([a.detach() - batch.recorded(row) for row, a in enumerate(logp[:3])])
    assert result.stats.sampler_gap == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    for row in range(3):
        torch.testing.assert_close(result.logprobs[row], logp[row].detach(), atol=1e-5, rtol=1e-5)


def test_entropy_is_that_of_the_sampled_tokens():
    _, result, _ = one_update([GIVEN], options())
    policy, prompt = Policy(llama()), GIVEN.prompt.token_ids
    policy.causal.set_attn_implementation("eager")
    found = []
    for ids, places in zip(IDS[:3], SAMPLED[:3], strict=True):
        with torch.no_grad():
            logits = policy.causal(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0].float()
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)[list(places)]
        found.append(-(logp.exp() * logp).sum(-1))
    assert result.entropy == pytest.approx(float(torch.cat(found).mean()), rel=1e-4)


def test_a_record_where_everything_was_sampled_is_as_before():
    """Spans that say so change no bit of loss, gradient, statistics or log-probabilities."""
    everything = [tuple(range(len(r.completion.token_ids))) for r in GROUPS[0].rollouts]
    said = with_given(GROUPS[0], everything)
    assert all(r.completion.spans for r in said.rollouts)
    (moved, a, _), (plain, b, _) = one_update([said], options()), one_update(GROUPS[:1], options())
    assert all(torch.equal(moved[n], plain[n]) for n in plain)
    assert (a.stats, a.loss, a.entropy, a.hashes) == (b.stats, b.loss, b.entropy, b.hashes)


def test_older_and_given_tokens_of_one_completion():
    """Of older weights: the ratio is over the record, and only the other rows show a gap; given tokens are neither."""
    old = with_given(PLAIN, revision=BEFORE).rollouts
    now = with_given(PLAIN, revision=NOW).rollouts
    mixed = replace(PLAIN, rollouts=(old[0], *now[1:]))
    config, policy = options(objective={"clip_low": 0.9, "clip_high": 9.0}), Policy(llama())
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    updater = Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config)
    batch = updater.objective.batch([mixed], NOW)
    assert [batch.is_current(row) for row in range(4)] == [False, True, True, True]
    result = updater(batch, 1.0)
    twin = Policy(llama())
    logp = dense(twin)
    terms = []
    for row in range(3):
        start = batch.recorded(row) if row == 0 else logp[row].detach()
        q, a = (logp[row] - start).exp(), float(batch.advantages[row])
        terms.append(-torch.minimum(q * a, q.clamp(0.1, 10.0) * a))
    averaged(terms, "sequence").backward()
    close({n: before[n] - p.detach() for n, p in policy.model.named_parameters()}, gradient(twin.model), 1e-4)
    assert (result.stats.gap_tokens, result.stats.tokens) == (4, 8)
    numbers = updater.objective.metrics(batch.groups, batch, result.stats, {})
    assert (numbers["lag_mean"], numbers["lag_max"]) == (2 * 4 / 8, 2)


def test_the_overlong_penalty_counts_sampled_tokens():
    """A buffer of 4 of 8 tokens begins after 4: six tokens of which two are given are not too long."""
    rules = BatchRules.of(options(train={"overlong": 0.5}))
    assert make_batch([GIVEN], rules).rewards.tolist() == [1, 0, 0.5, 1]
    assert make_batch([PLAIN], rules).rewards.tolist() == [0.5, 0, 0.25, 1]


def test_scoring_some_positions_gives_the_bits_of_scoring_all():
    policy, prompt = Policy(llama()), (5, 6, 7)
    scorer = model_scorer(policy, 1.0, 4096)
    (whole,) = scorer([(prompt, IDS[0])])
    part, none = scorer([Scored(prompt, IDS[0], (0, 1, 4, 5)), Scored(prompt, IDS[3], ())])
    assert torch.equal(part, whole[[0, 1, 4, 5]]) and len(none) == 0
    assert [Scored.of(GIVEN.prompt, r.completion).positions for r in GIVEN.rollouts] == SAMPLED
    assert pack_targets([Scored(prompt, IDS[0], (1, 4)), (prompt, IDS[1])], "cpu").lengths == (2, 2)


# SFT and DPO

SGD = {"name": "sgd", "lr": 1.0, "clip_norm": 0.0}


def given_update(kind, groups, reference=None, **more):
    config, policy = make_config(kind, optimizer=SGD, **more), Policy(llama())
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    updater = Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config, reference)
    batch = updater.objective.batch(groups)
    result = updater(batch, 1.0)
    return {n: before[n] - p.detach() for n, p in policy.model.named_parameters()}, result, batch


def test_an_sft_step_trains_what_was_not_given():
    moved, result, batch = given_update(SFTConfig(), [GIVEN])
    policy = Policy(llama())
    loss = -torch.cat(dense(policy)).sum() / 8
    loss.backward()
    close(moved, gradient(policy.model))
    assert batch.denominator == 8 and result.stats.tokens == 8
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("normalized", [False, True])
def test_a_dpo_step_weighs_what_was_not_given(normalized):
    pair = replace(GIVEN, rollouts=GIVEN.rollouts[:2])
    other, policy = Policy(llama(1)), Policy(llama())
    chosen = {"beta": 0.5, "length_normalized": normalized}
    moved, result, _ = given_update(DPOConfig(), [pair], model_scorer(other, 1.0, 64), objective=chosen)
    with torch.no_grad():
        reference = dense(other)
    sides = [a.sum() - b.sum() for a, b in zip(dense(policy)[:2], reference[:2], strict=True)]
    lengths = (4, 2) if normalized else (1, 1)
    loss = -torch.sigmoid(0.5 * (sides[0] / lengths[0] - sides[1] / lengths[1])).log()
    loss.backward()
    close(moved, gradient(policy.model))
    assert result.loss == pytest.approx(loss.item(), rel=1e-4) and result.stats.tokens == 6
