"""SFT and DPO: the losses by hand and against slow twins, the rows they read, and whole runs of tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tiny
import torch
from given_rows import dpo_config, sft_config
from tiny import EOS, dense_logprobs, llama

import tinyllm
from tinyllm.callbacks import Callback
from tinyllm.config.io import make_config
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.engine.policy import Policy
from tinyllm.errors import ConfigError, DataError, RunError, TrainingStopped
from tinyllm.model.models import tokenizer_hash
from tinyllm.post import update
from tinyllm.post.build import build_run
from tinyllm.post.dpo import DPOObjective, DPOStats, dpo_loss
from tinyllm.post.examples import held_out_likelihood, held_out_preference
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.replay import replay
from tinyllm.post.run import resume, train
from tinyllm.post.sft import SFTObjective, sft_loss
from tinyllm.post.update import Updater, model_scorer
from tinyllm.record.rundir import RunDir
from tinyllm.records import Verdict
from tinyllm.tasks.examples import load_examples, pairs

# The losses


def test_hand_sft_loss():
    """Three tokens of probability 1/2, 1/4 and 1/8: (ln 2 + ln 4 + ln 8) / 3 = 2 ln 2."""
    logp = torch.tensor([[0.5, 0.25], [0.125, math.nan]]).log()
    mask = torch.tensor([[True, True], [True, False]])
    assert sft_loss(logp, mask).item() == pytest.approx(2 * math.log(2), rel=1e-6)
    assert sft_loss(logp, mask, denominator=6).item() == pytest.approx(math.log(2), rel=1e-6)
    assert sft_loss(logp, torch.zeros_like(mask)).item() == 0


def test_masked_tokens_have_no_gradient():
    logp = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    sft_loss(logp, torch.tensor([[True, False]])).backward()
    assert logp.grad is not None and logp.grad.tolist() == [[-1.0, 0.0]]


def test_hand_dpo_loss():
    """h = (-2 - -3) - (-4 - -3) = 2; at beta 1/2 the loss is ln(1 + e^-1), and smoothing mixes in ln(1 + e)."""
    row = [torch.tensor([x]) for x in (-2.0, -4.0, -3.0, -3.0)]
    loss, stats = dpo_loss(*row, beta=0.5)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1)), rel=1e-6)
    assert (stats.pairs, stats.wins, stats.margin_sum, stats.chosen_sum, stats.rejected_sum) == (1, 1, 1.0, 0.5, -0.5)
    smooth, _ = dpo_loss(*row, beta=0.5, label_smoothing=0.1)
    assert smooth.item() == pytest.approx(0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.exp(1)), rel=1e-6)
    normal, _ = dpo_loss(*row, beta=0.5, lengths=(torch.tensor([2.0]), torch.tensor([4.0])))
    assert normal.item() == pytest.approx(math.log1p(math.exp(-0.5 * (1 / 2 + 1 / 4))), rel=1e-6)


def test_dpo_at_the_reference_is_ln_2():
    same = torch.tensor([-3.25, -1.5])
    loss, stats = dpo_loss(same, same - 1, same, same - 1)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-7) and stats.wins == 1.0, "half of two pairs"


def test_dpo_gradient_by_hand():
    """d loss / d chosen = -beta sigma(-beta h) / P, and its negative for rejected."""
    chosen, rejected = torch.tensor([-2.0, -1.0], requires_grad=True), torch.tensor([-4.0, 3.0], requires_grad=True)
    zero = torch.zeros(2)
    dpo_loss(chosen, rejected, zero, zero, beta=0.5)[0].backward()
    expected = [-0.25 / (1 + math.exp(0.5 * h)) for h in (2.0, -4.0)]
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert rejected.grad.tolist() == pytest.approx([-x for x in expected], rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("beta", 0.0), ("beta", math.nan), ("label_smoothing", 0.5)])
def test_dpo_bounds(name, value):
    with pytest.raises(ConfigError, match=f"{name} = "):
        dpo_loss(*[torch.zeros(1)] * 4, **{name: value})


def test_dpo_stays_finite_far_out():
    far = torch.tensor([-5000.0], requires_grad=True)
    loss, _ = dpo_loss(far, torch.tensor([5000.0]), torch.zeros(1), torch.zeros(1), beta=1.0)
    loss.backward()
    assert loss.item() == 10000.0 and far.grad is not None and far.grad.item() == -1.0


# From rows to weights


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    lines = [{"prompt": f"{i}+{i % 3}=", "completion": str(i + i % 3)} for i in range(12)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    lines = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": f"{i}x{i}"} for i in range(12)]
    (folder / "dpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def one_step(config, groups, reference=None):
    policy = Policy(llama())
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    updater = Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config, reference)
    result = updater(updater.objective.batch(groups), 1.0)
    return {n: before[n] - p.detach() for n, p in policy.model.named_parameters()}, result


def dense_sft_gradient(groups):
    policy = Policy(llama())
    total, count = torch.zeros(()), 0
    for group in groups:
        for rollout in group.rollouts:
            total = total - dense_logprobs(policy, group.prompt.token_ids, rollout.completion.token_ids).sum()
            count += len(rollout.completion.token_ids)
    (total / count).backward()
    return {n: p.grad for n, p in policy.model.named_parameters()}, total.item() / count


def close(a, b, tolerance=2e-5):
    largest = max(float(x.abs().max()) for x in b.values())
    for name in b:
        torch.testing.assert_close(a[name], b[name], atol=tolerance * largest, rtol=1e-4)


@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_an_sft_step_is_the_dense_gradient_whatever_the_microbatch(home, rows, budget):
    config = sft_config(home / "model", rows / "sft.jsonl", train={"tokens_per_microbatch": budget})
    data = load_examples(config, tiny.tokenizer())
    groups = data.of(data.train)
    moved, result = one_step(config, groups)
    expected, loss = dense_sft_gradient(groups)
    close(moved, expected)
    assert result.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("normalized", [False, True])
def test_a_dpo_step_is_the_dense_gradient(home, rows, budget, normalized):
    options = {"train": {"tokens_per_microbatch": budget}, "objective": {"beta": 0.5, "label_smoothing": 0.1}}
    options["objective"]["length_normalized"] = normalized
    config = dpo_config(home / "model", rows / "dpo.jsonl", **options)
    data = load_examples(config, tiny.tokenizer())
    groups = data.of(data.train)
    other = Policy(llama(seed=1))
    moved, result = one_step(config, groups, model_scorer(other, 1.0, 64))
    policy, total = Policy(llama()), torch.zeros(())
    for group in groups:
        sides = []
        for rollout in group.rollouts:
            ids = rollout.completion.token_ids
            gain = dense_logprobs(policy, group.prompt.token_ids, ids).sum()
            gain = gain - dense_logprobs(other, group.prompt.token_ids, ids).sum().detach()
            sides.append(gain / len(ids) if normalized else gain)
        margin = 0.5 * (sides[0] - sides[1])
        total = total - 0.9 * torch.sigmoid(margin).log() - 0.1 * torch.sigmoid(-margin).log()
    (total / len(groups)).backward()
    close(moved, {n: p.grad for n, p in policy.model.named_parameters()})
    assert result.loss == pytest.approx(total.item() / len(groups), rel=1e-5)
    assert result.stats.pairs == len(groups)
    assert result.stats.tokens == sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)


def test_statistics_of_microbatches_add_up():
    assert DPOStats(1, 0.5, 2, 3, 4, 5) + DPOStats(2, 1, 1, -1, 2, 3) == DPOStats(3, 1.5, 3, 2, 6, 8)


def test_microbatches_hold_whole_pairs(home, rows):
    config = dpo_config(home / "model", rows / "dpo.jsonl", train={"tokens_per_microbatch": 16})
    data = load_examples(config, tiny.tokenizer())
    batch = DPOObjective(config).batch(data.of(data.train))
    assert len(batch.microbatches) > 1 and batch.denominator == len(data.train)
    assert all(part[0] % 2 == 0 and len(part) % 2 == 0 for part in batch.microbatches)


# Whole runs


def test_an_sft_run_learns_replays_and_resumes(home, rows, tmp_path, no_picture):
    options = {"train": {"steps": 6}, "eval": {"every": 3}, "run": {"checkpoint_every": 2}}
    result = train(sft_config(home / "model", rows / "sft.jsonl", tmp_path / "run", **options))
    assert result.before and result.after
    assert result.after["loss"] < result.before["loss"]
    assert result.before["loss_low"] < result.before["loss"] < result.before["loss_high"]
    data = load_examples(RunDir.read(result.run_dir).config, tiny.tokenizer())
    by_hand = held_out_likelihood(data.of(data.held_out), model_scorer(Policy(llama()), 1.0, 64))
    assert by_hand == {name: result.before[name] for name in by_hand}
    lines = tiny.metrics(result.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and "reward_mean" not in lines[0]
    played = replay(result.run_dir)
    assert played.divergence is None and len(played.steps) == 6
    with pytest.raises(ConfigError, match="--sample: a run of sft sampled nothing"):
        replay(result.run_dir, sample=True)


def test_a_stopped_sft_run_ends_as_it_would_have(home, rows, tmp_path, no_picture):
    class Stop(Callback):
        def on_step(self, metrics, timing, groups):
            if metrics["step"] == 3:
                raise RuntimeError("power cut")

    options = {"train": {"steps": 5}, "run": {"checkpoint_every": 2}}
    whole = train(sft_config(home / "model", rows / "sft.jsonl", tmp_path / "whole", **options))
    with pytest.raises(RuntimeError, match="power cut"):
        train(sft_config(home / "model", rows / "sft.jsonl", tmp_path / "cut", **options), callbacks=[Stop()])
    again = resume(tmp_path / "cut")
    assert tiny.equal(tiny.weights(whole.model_dir), tiny.weights(again.model_dir))
    assert tiny.rollouts(whole.run_dir) == tiny.rollouts(again.run_dir)
    assert (whole.run_dir / "metrics.jsonl").read_bytes() == (again.run_dir / "metrics.jsonl").read_bytes()


def test_a_dpo_run_prefers_and_replays(home, rows, tmp_path, no_picture):
    config = dpo_config(home / "model", rows / "dpo.jsonl", tmp_path / "run", train={"steps": 8})
    result = train(config)
    assert result.before and result.after
    assert result.before["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert result.before["preference_accuracy"] == 0.5, "policy and reference are the same, to the bit"
    assert result.after["loss"] < result.before["loss"]
    first, last = tiny.metrics(result.run_dir)[0], tiny.metrics(result.run_dir)[-1]
    assert first["margin"] == 0 and last["margin"] > 0 and last["chosen_reward"] > last["rejected_reward"]
    assert replay(result.run_dir).divergence is None


def test_dpo_with_lora_uses_the_adapters_off_as_reference(home, rows, tmp_path, no_picture):
    config = dpo_config(home / "model", rows / "dpo.jsonl", tmp_path / "run", lora={"rank": 2}, train={"steps": 4})
    result = train(config)
    assert result.before and result.after and result.before["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert result.after["loss"] < result.before["loss"]


def test_pairs_of_a_run_are_the_recorded_tokens(home, train, tmp_path, no_picture):
    sampled = train("sampled", train={"steps": 2})
    config = dpo_config(home / "model", home / "rows.jsonl", data={"file": None, "from_run": str(sampled.run_dir)})
    data = load_examples(config, tiny.tokenizer())
    recorded = {
        (g.prompt.token_ids, r.completion.token_ids)
        for step in (1, 2)
        for g in RunDir.read(sampled.run_dir).read_groups(step)
        for r in g.rollouts
    }
    rows = {json.dumps(p.row["prompt"]) for p in (*data.train, *data.held_out)}
    assert rows <= {json.dumps(json.loads(line)["prompt"]) for line in (home / "rows.jsonl").read_text().splitlines()}
    for group in data.of((*data.train, *data.held_out)):
        better, worse = group.rollouts
        assert better.reward > worse.reward and better.completion.logprobs
        assert {(group.prompt.token_ids, r.completion.token_ids) for r in group.rollouts} <= recorded


def test_pairs_by_hand():
    """Rewards 0.2, 0.9, none, 0.4, 0.9: best 0.9 with worst 0.2, then the other 0.9 with 0.4; what was cut is left out."""
    group = tiny.group("a", [0.2, 0.9, None, 0.4, 0.9, 1.0], reasons=["stop"] * 5 + ["length"])
    found = [(a.reward, b.reward) for a, b in pairs(group, 5)]
    assert found == [(0.9, 0.2), (0.9, 0.4)]
    assert [(a.completion.sample, b.completion.sample) for a, b in pairs(group, 1)] == [(1, 0)]
    assert not list(pairs(tiny.group("b", [1, 1, 1]), 2))
    same = tiny.group("c", [1, 0], ids=[(2, EOS), (2, EOS)])
    assert not list(pairs(same, 1)), "one text judged two ways is no preference"


def test_pairs_of_another_tokenizer_are_refused(home, train, tmp_path):
    sampled = train("sampled", train={"steps": 1})
    config = dpo_config(home / "model", home / "rows.jsonl", data={"file": None, "from_run": str(sampled.run_dir)})
    words = tiny.tokenizer()
    other = type(words)(tokenizer_object=words.backend_tokenizer, eos_token="<eos>", additional_special_tokens=["<x>"])
    assert tokenizer_hash(other) != tokenizer_hash(words)
    with pytest.raises(RunError, match="another tokenizer"):
        load_examples(config, other)


def test_steps_come_from_epochs(home, rows, tmp_path, no_picture):
    config = sft_config(home / "model", rows / "sft.jsonl", tmp_path / "run", train={"steps": 0, "epochs": 1.5})
    result = train(config)
    assert RunDir.read(result.run_dir).config.train.steps == 4, "9 rows x 1.5 / 4, rounded up"


def test_epochs_are_not_rounded_up_by_fp64(home, rows, tmp_path, no_picture):
    """1.1 epochs of 10 rows are 11 steps of 1 row; in fp64 1.1 * 10 is a bit more than 11."""
    lines = (rows / "sft.jsonl").read_text().splitlines(keepends=True)[:10]
    (tmp_path / "ten.jsonl").write_text("".join(lines))
    options = {"train": {"steps": 0, "epochs": 1.1, "batch_size": 1}, "data": {"held_out": 0.0}}
    run = build_run(sft_config(home / "model", tmp_path / "ten.jsonl", tmp_path / "run", **options), None, ())
    assert run.config.train.steps == 11


def test_fewer_rows_than_a_batch(home, rows, tmp_path):
    with pytest.raises(DataError, match=r"9 rows to train on, fewer than one batch \(train.batch_size = 16\)"):
        train(sft_config(home / "model", rows / "sft.jsonl", tmp_path / "run", train={"batch_size": 16}))


def test_no_rows(home, rows, tmp_path):
    for base, more in ((SFTConfig(), ""), (DPOConfig(), "--from-run")):
        with pytest.raises(DataError, match=f"no rows to train on; give --data FILE.jsonl.*{more}"):
            train(make_config(base, model=str(home / "model"), run={"dir": str(tmp_path / base.kind)}))


def test_sft_counts_every_token_once():
    groups = [tiny.group("a", [1, 1], ids=[(2, 3, EOS), (2, EOS)]), tiny.group("b", [1], ids=[(4, EOS)])]
    batch = SFTObjective(make_config(SFTConfig())).batch(groups)
    assert batch.denominator == 7 and sum(len(part) for part in batch.microbatches) == 3
    assert Verdict(1.0).value == 1.0


def test_runs_of_sft_and_dpo_are_evaluated_on_a_named_suite(home, rows, tmp_path, no_picture):
    """Their own rows are no suite; what they trained on is looked for in the one that is named, and left out."""
    run = train(sft_config(home / "model", rows / "sft.jsonl", tmp_path / "run")).run_dir
    with pytest.raises(ConfigError, match="no suite: name one with --task"):
        tinyllm.evaluate(run, out=str(tmp_path / "none"))
    suite = tmp_path / "suite.jsonl"
    trained = {g.prompt.row["prompt"] for step in (1, 2, 3) for g in RunDir.read(run).read_groups(step)}
    prompts = [sorted(trained)[0], "9+9=", "8+9="]
    suite.write_text("".join(json.dumps({"prompt": p, "answer": "18"}) + "\n" for p in prompts))
    options = {"data": {"file": str(suite), "prompt_rule": "raw"}, "verifier": "arithmetic:rule=last_number"}
    report = tinyllm.evaluate(run, out=str(tmp_path / "out"), machine={"threads": 1}, **options).report
    assert [found["prompt"] for found in report["overlap"]["found"]] == prompts[:1]
    assert report["results"][0]["prompts"] == 2


# Held-out rows and trouble


def test_held_out_likelihood_by_hand():
    """Prompts are the clusters: two answers to one, and two turns of a chat, are one cluster each.

    a: 1 + 2 over 1 + 1 tokens; b: 3 over 1; mean 6 / 3 = 2; se^2 = 2 / 1 ((3 - 4)^2 + (3 - 2)^2) / 9 = 4/9.
    """
    groups = [
        tiny.group("a", [1], ids=[(2,)], prompt_ids=(5, 6)),
        tiny.group("a-2", [1], ids=[(3,)], prompt_ids=(5, 6)),
        tiny.group("b", [1], ids=[(4,)], prompt_ids=(7,)),
    ]
    losses = iter([1.0, 2.0, 3.0])
    found = held_out_likelihood(groups, lambda rows: [torch.full((len(row.targets),), -next(losses)) for row in rows])
    half = 12.706205 * 2 / 3
    assert found["loss"] == 2.0 and found["prompts"] == 3 and found["tokens"] == 3
    assert (found["loss_low"], found["loss_high"]) == pytest.approx((0.0, 2 + half), rel=1e-6), "no loss is below 0"
    turns = [tiny.group("a", [1], ids=[(2,)]), tiny.group("a/1", [1], ids=[(3,)], prompt_ids=(8,)), groups[2]]
    losses = iter([1.0, 2.0, 3.0])
    again = held_out_likelihood(turns, lambda rows: [torch.full((len(row.targets),), -next(losses)) for row in rows])
    assert again == found | {"prompts": 2}


def test_held_out_preference_by_hand():
    """Two pairs of one prompt with margins 2 and -1, and one of another with 0; beta 1, reference 0.

    Losses ln(1 + e^-2), ln(1 + e), ln 2; the first two are one cluster.
    """
    groups = [
        tiny.group("a", [1, 0], prompt_ids=(5, 6)),
        tiny.group("a-2", [1, 0], prompt_ids=(5, 6)),
        tiny.group("b", [1, 0], prompt_ids=(7,)),
    ]
    sides = iter([(-1.0, -3.0), (-2.0, -1.0), (-1.0, -1.0)])
    objective = DPOObjective(make_config(DPOConfig(), objective={"beta": 1.0}))
    found = held_out_preference(
        groups,
        objective,
        lambda rows: [torch.tensor([x]) for x in next(sides)],
        lambda rows: [torch.zeros(1) for _ in rows],
    )
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log(2)]
    mean = sum(losses) / 3
    a, b = losses[0] + losses[1] - 2 * mean, losses[2] - mean
    half = 12.706205 * math.sqrt(2 * (a * a + b * b)) / 3
    assert found["prompts"] == 3 and found["loss"] == pytest.approx(mean, rel=1e-6)
    assert (found["loss_low"], found["loss_high"]) == pytest.approx((mean - half, mean + half), rel=1e-5)
    assert found["preference_accuracy"] == 0.5 and found["margin"] == pytest.approx(1 / 3)
    assert found["chosen_reward"] == pytest.approx(-4 / 3) and found["rejected_reward"] == pytest.approx(-5 / 3)


class Poisoned(Callback):
    """Log-probabilities of the chosen steps are not finite, whatever the weights."""

    def __init__(self, monkeypatch, *steps):
        self.seen = 0
        real = update.score

        def score(policy, targets, temperature):
            logp, entropy = real(policy, targets, temperature)
            bad = torch.is_grad_enabled() and self.seen + 1 in steps
            return (logp * math.nan if bad else logp), entropy

        monkeypatch.setattr(update, "score", score)

    def on_step(self, metrics, timing, groups):
        self.seen = metrics["step"]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_step_that_is_not_finite_changes_nothing_and_three_stop_the_run(
    home, rows, tmp_path, no_picture, monkeypatch, kind
):
    make = {"sft": sft_config, "dpo": dpo_config}[kind]
    options = {"train": {"steps": 6}, "optimizer": {"name": "adamw", "lr": 1e-3}}
    config = make(home / "model", rows / f"{kind}.jsonl", tmp_path / "run", **options)
    with pytest.raises(TrainingStopped, match="3 steps in a row .* log-probability of token 0 .* of row 0, prompt"):
        train(config, callbacks=[Poisoned(monkeypatch, 2, 4, 5, 6)])
    lines = tiny.metrics(tmp_path / "run")
    hashes = [line["hashes"]["weights"] for line in lines]
    assert hashes[0] == hashes[1] != hashes[2] and hashes[2:] == [hashes[2]] * 4
    assert [line["loss"] is None for line in lines] == [False, True, False, True, True, True]
    assert lines[1]["tokens"] == 0 and lines[1]["updates"] == 0 and "row 0" in lines[1]["non_finite"]


def test_a_held_out_loss_that_is_not_finite_stops_the_run_with_all_saved(home, rows, tmp_path, no_picture, monkeypatch):
    config = sft_config(home / "model", rows / "sft.jsonl", tmp_path / "run", eval={"every": 2})
    callback = Poisoned(monkeypatch)
    real = update.score

    def score(policy, targets, temperature):
        logp, entropy = real(policy, targets, temperature)
        return (logp if torch.is_grad_enabled() or callback.seen < 2 else logp * math.nan), entropy

    monkeypatch.setattr(update, "score", score)
    with pytest.raises(TrainingStopped, match="the held-out loss after step 2 is nan; lower optimizer.lr"):
        train(config, callbacks=[callback])
    assert RunDir.read(tmp_path / "run").checkpoints.steps() == [2]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_row_drawn_twice_in_a_step_replays_and_resumes(home, rows, tmp_path, no_picture, kind):
    """9 rows in batches of 8: from step 2 on a step takes the end of one epoch and the beginning of the next."""

    class Stop(Callback):
        def on_step(self, metrics, timing, groups):
            if metrics["step"] == 3:
                raise RuntimeError("power cut")

    make = {"sft": sft_config, "dpo": dpo_config}[kind]
    options = {"train": {"steps": 5, "batch_size": 8}, "run": {"checkpoint_every": 2}}
    whole = train(make(home / "model", rows / f"{kind}.jsonl", tmp_path / "whole", **options))
    draws = [g.prompt.draw for step in range(1, 6) for g in tiny.groups_of(whole, step)]
    assert 1 in draws
    assert replay(whole.run_dir).divergence is None
    with pytest.raises(RuntimeError, match="power cut"):
        train(make(home / "model", rows / f"{kind}.jsonl", tmp_path / "cut", **options), callbacks=[Stop()])
    again = resume(tmp_path / "cut")
    assert tiny.equal(tiny.weights(whole.model_dir), tiny.weights(again.model_dir))
    assert (whole.run_dir / "metrics.jsonl").read_bytes() == (again.run_dir / "metrics.jsonl").read_bytes()


def test_a_chosen_completion_that_is_a_prefix_of_the_rejected_one(home, tmp_path):
    """1 <end> against 1 2 <end>, and a pair twice: what they share is computed once, and changes no gradient."""
    rows = [{"prompt": "1+1=", "chosen": "1", "rejected": "12"}] * 2
    rows.append({"prompt": "1+1=", "chosen": "12", "rejected": "1"})
    file = tmp_path / "prefix.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    moves = []
    for budget in (8, 2048):
        options = {"train": {"tokens_per_microbatch": budget}, "data": {"held_out": 0.0}}
        config = dpo_config(home / "model", file, objective={"beta": 0.5}, **options)
        data = load_examples(config, tiny.tokenizer())
        moved, result = one_step(config, data.of(data.train), model_scorer(Policy(llama(seed=1)), 1.0, 64))
        moves.append(moved)
    close(moves[0], moves[1])
    policy, other, total = Policy(llama()), Policy(llama(seed=1)), torch.zeros(())
    for group in data.of(data.train):
        gains = [
            dense_logprobs(policy, group.prompt.token_ids, r.completion.token_ids).sum()
            - dense_logprobs(other, group.prompt.token_ids, r.completion.token_ids).sum().detach()
            for r in group.rollouts
        ]
        total = total - torch.sigmoid(0.5 * (gains[0] - gains[1])).log()
    (total / 3).backward()
    close(moves[1], {n: p.grad for n, p in policy.model.named_parameters()})
    assert result.loss == pytest.approx(total.item() / 3, rel=1e-5)
