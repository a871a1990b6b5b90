"""What can be trained and how: objectives, several updates, KL, masks, adapters, checkpointing, the best model."""

from __future__ import annotations

import pytest
import torch
from tiny import EOS, STOPS, equal, gpt2, groups_of, llama, many_digits, metrics, only_in_steps, save, weights
from transformers import AutoModelForCausalLM

from tinyllm.axes import PRESETS
from tinyllm.model import models
from tinyllm.model.refs import find_subject
from tinyllm.post.run import resume

TRAINED, HELD_OUT = 9, 3
"""Prompts of the 12 rows."""


# Objectives


def test_several_updates_per_batch_move_the_ratio_and_clip(train):
    result = train(train={"updates_per_batch": 3}, optimizer={"lr": 0.3}, objective={"clip_low": 0.1, "clip_high": 0.1})
    for row in metrics(result.run_dir):
        assert row["updates"] == 3 and row["ratio_max"] > 1.1 and row["sampler_equal"] == 1.0
        assert row["clip_fraction_low"] > 0 and row["clip_fraction_high"] > 0
        assert all(
            r.completion.revision.step == row["step"] - 1 for g in groups_of(result, row["step"]) for r in g.rollouts
        )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(train, preset):
    rows = metrics(train(objective={"preset": preset}, train={"steps": 2}, stop={"refills": 8}).run_dir)
    assert all(row["updates"] == 1 and row["grad_norm"] > 0 and row["sampler_equal"] == 1.0 for row in rows)
    assert all((row["kl"] is not None) == (PRESETS[preset].axes.beta > 0) for row in rows), "as the preset says"


def test_the_kl_is_to_the_frozen_start(train):
    """Without a reward the start policy has no gradient; with one the KL grows from exactly 0, and less under beta."""
    still = metrics(train("still", reward=only_in_steps(), objective={"beta": 0.5}).run_dir)
    assert [row["kl"] for row in still] == [0.0] * 3 and all(row["grad_norm"] < 1e-6 for row in still)
    free, held = (
        [row["kl"] for row in metrics(train(f"{beta}", objective={"beta": beta}, train={"steps": 6}).run_dir)]
        for beta in (1e-9, 1.0)
    )
    assert free[0] == held[0] == 0.0 and free[1] > 1e-4
    assert 0 < held[-1] < free[-1]


def test_the_kl_can_be_to_another_model(train, home):
    save(llama(1), home / "other")
    options = {"reference": str(home / "other"), "optimizer": {"lr": 0.5}}
    whole = {"steps": 8, "prompts_per_step": TRAINED}
    rows = metrics(train(reward=only_in_steps(), objective={"beta": 1.0, "kl": "k2"}, train=whole, **options).run_dir)
    assert rows[0]["kl"] > 1 and rows[-1]["kl"] < 0.7 * rows[0]["kl"], "without rewards it falls"


def test_masked_truncated_completions_are_not_trained(train):
    result = train(train={"overlong": "mask", "steps": 2})
    for row in metrics(result.run_dir):
        rolled = [r for g in groups_of(result, row["step"]) for r in g.rollouts]
        stopped = [r.completion.finish_reason == "stop" for r in rolled]
        used = [i for part in row["microbatches"] for i in part]
        assert row["denominator"] == sum(stopped) < 16 and used and all(stopped[i] for i in used)
        assert row["tokens"] == sum(len(rolled[i].completion.token_ids) for i in used)


def test_stop_tokens_end_a_completion_and_are_trained(train):
    rolled = [r.completion for g in groups_of(train(train={"steps": 1}), 1) for r in g.rollouts]
    for done in rolled:
        inside = set(done.token_ids[:-1]) & {EOS, *STOPS}
        assert not inside and (done.token_ids[-1] in (EOS, *STOPS)) == (done.finish_reason == "stop")
    assert {done.finish_reason for done in rolled} == {"stop", "length"}


# Adapters and memory


def test_adapters_are_trained_sampled_and_saved(train, home):
    """Cases E3, K1: the reference is the base with adapters off; what is sampled is what is trained, every step."""
    options = {"lora": {"rank": 2, "alpha": 8.0}, "objective": {"beta": 0.1}, "optimizer": {"lr": 1.0}}
    result, still = train("moving", **options), train("still", **{**options, "optimizer": {"lr": 0.0}})
    rows = metrics(result.run_dir)
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 1e-4
    assert all(row["sampler_equal"] == 1.0 for row in rows)
    assert len({row["hashes"]["weights"] for row in rows}) == 3
    assert metrics(still.run_dir)[0]["hashes"]["verdicts"] == rows[0]["hashes"]["verdicts"]
    assert [r.completion.logprobs for g in groups_of(result, 2) for r in g.rollouts] != [
        r.completion.logprobs for g in groups_of(still, 2) for r in g.rollouts
    ], "the engine sees the adapters"
    assert equal(weights(still.model_dir), weights(home / "model"))
    merged = AutoModelForCausalLM.from_pretrained(result.model_dir)
    import peft

    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(home / "model"), result.model_dir / "adapter"
    )
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    assert (merged(ids).logits - base(ids).logits).abs().max() > 0.01


def test_gradient_checkpointing_changes_memory_only(train, home):
    """A model with dropout in its configuration: it stays off, also where layers run again in backward."""
    save(gpt2(), home / "gpt2")
    plain, checkpointed = (
        train(f"{on}", model="gpt2", gradient_checkpointing=on, train={"steps": 2}) for on in (False, True)
    )
    assert (plain.run_dir / "metrics.jsonl").read_bytes() == (checkpointed.run_dir / "metrics.jsonl").read_bytes()
    assert equal(weights(plain.model_dir), weights(checkpointed.model_dir))
    assert all(row["sampler_equal"] == 1.0 for row in metrics(plain.run_dir))


# Best model, early stop


def test_the_best_model_is_kept_and_training_stops_when_nothing_gets_better(train, tmp_path):
    scores = {0: 0.1, 1: 0.3, 2: 0.6, 3: 0.5, 4: 0.6, 5: 0.9}

    def reward(completions, trainer_state, **_):
        evaluating = len(completions) == HELD_OUT
        return [scores[trainer_state.global_step]] * HELD_OUT if evaluating else many_digits(completions)

    result = train(reward=reward, train={"steps": 9}, stop={"evals_without_best": 2}, eval={"every": 1})
    rows = metrics(result.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and result.best_step == 2 and result.after["step"] == 4
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best")
    assert models.content_hash(best) == rows[1]["hashes"]["weights"] != rows[3]["hashes"]["weights"]
    again = resume(tmp_path / "run", reward=reward)
    assert again.best_step == 2 and len(metrics(tmp_path / "run")) == 4
    assert find_subject(f"{tmp_path / 'run'}@best").source == str(tmp_path / "run" / "best")


def test_where_the_last_model_is_the_best_no_older_one_is_kept(train, tmp_path):
    def reward(completions, trainer_state, **_):
        evaluating = len(completions) == HELD_OUT
        return [trainer_state.global_step / 10] * HELD_OUT if evaluating else many_digits(completions)

    result = train(reward=reward, train={"steps": 3}, eval={"every": 1})
    assert result.best_step == 3 and not (tmp_path / "run" / "best").exists()
    assert find_subject(f"{tmp_path / 'run'}@best").source == str(tmp_path / "run" / "model")
