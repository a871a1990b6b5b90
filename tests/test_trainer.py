"""Whole runs of tiny models: what is trained, recorded, skipped, stopped, saved."""

from __future__ import annotations

import math
import shutil

import pytest
import tiny
import torch
from tiny import (
    VOCABULARY,
    config,
    digits_after_odd_numbers,
    equal,
    groups_of,
    llama,
    many_digits,
    metrics,
    only_in_steps,
    rollouts,
    save,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinyllm
from tinyllm.callbacks import Callback
from tinyllm.errors import ConfigError, DataError, RewardError, RunError, TinyLLMError, TrainingStopped
from tinyllm.model import models
from tinyllm.post import update
from tinyllm.post.evaluation import start_kl
from tinyllm.post.run import resume
from tinyllm.record.rundir import RunDir

TRAINED, HELD_OUT = 9, 3
"""Prompts of the 12 rows."""


# What a run is


def test_from_python(home, tmp_path, capsys):
    """tinyllm.grpo with plain keywords: trains, shows progress, draws, saves a model that transformers loads."""
    result = tinyllm.grpo(
        model=str(home / "model"), data=str(home / "rows.jsonl"), reward=many_digits, prompt_rule="raw", steps=2,
        prompts_per_step=4, sampling={"group_size": 4, "max_new_tokens": 6}, lr=1e-3, held_out=0.25,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    assert result.run_dir == tmp_path / "run" and result.plot.stat().st_size > 10_000
    assert result.before["step"] == 0 and result.after["step"] == 2 and result.after["prompts"] == HELD_OUT
    rows = metrics(result.run_dir)
    assert [row["step"] for row in rows] == [1, 2] and all(row["sampler_equal"] == 1.0 for row in rows)
    assert capsys.readouterr().out
    assert tinyllm.resume(result.run_dir, reward=many_digits).after == result.after


def test_the_saved_model_is_the_trained_one_to_the_bit(train, home):
    result = train(optimizer={"lr": 1.0})
    loaded = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert models.content_hash(loaded) == metrics(result.run_dir)[-1]["hashes"]["weights"]
    assert AutoTokenizer.from_pretrained(result.model_dir)("12+3").input_ids == [3, 4, 12, 5]
    assert not equal(weights(result.model_dir), weights(home / "model"))


def test_what_is_logged_per_step(train):
    result = train(train={"steps": 2}, optimizer={"schedule": "linear"})
    for row in metrics(result.run_dir):
        groups = groups_of(result, row["step"])
        rolled = [r for g in groups for r in g.rollouts]
        lengths = [len(r.completion.token_ids) for r in rolled]
        assert row["reward_mean"] == pytest.approx(sum(r.reward for r in rolled) / 16)
        assert row["completion_length"] == sum(lengths) / 16 and min(lengths) < max(lengths) == 6
        assert row["truncated"] == sum(r.completion.finish_reason == "length" for r in rolled) / 16
        assert row["lr"] == {1: 0.1, 2: 0.05}[row["step"]]
        assert 0 < row["entropy"] < math.log(VOCABULARY) and row["grad_norm"] > 0
        assert row["ratio_max"] == row["ratio_mean"] == 1.0 and row["clip_fraction_high"] == 0.0
        assert row["sampler_equal"] == 1.0 and row["tokens"] <= sum(lengths)
        assert {g.rollouts[0].completion.revision.step for g in groups} == {row["step"] - 1}
    first, second = metrics(result.run_dir)
    assert groups_of(result, 2)[0].rollouts[0].completion.revision.hash == first["hashes"]["weights"]
    assert second["revision"].startswith("2:") and first["hashes"]["weights"] != second["hashes"]["weights"]


def test_callbacks_are_told_in_order(train):
    told = []

    class Watch(Callback):
        def on_phase(self, phase):
            told.append(phase)

        def on_start(self, info):
            told.append(("start", info.first_step, info.facts["train_prompts"]))

        def on_step(self, row, timing, groups):
            told.append(("step", row["step"], timing["step"], len(groups)))
            assert row["loss"] is not None and timing["sampled_tokens"] > 0 and timing["update_s"] > 0

        def on_eval(self, row):
            told.append(("eval", row["step"], row["prompts"]))

        def on_end(self, result):
            told.append(("end", result.after["step"]))

    train(train={"steps": 2}, eval={"every": 1}, callbacks=[Watch()])
    assert [t for t in told if isinstance(t, tuple)] == [
        ("start", 1, TRAINED), ("eval", 0, HELD_OUT), ("step", 1, 1, 4), ("eval", 1, HELD_OUT), ("step", 2, 2, 4),
        ("eval", 2, HELD_OUT), ("end", 2),
    ]  # fmt: skip
    phases = [t for t in told if isinstance(t, str)]
    assert phases[:2] == ["reading the data", "loading the model"] and phases[-1] == "saving the model"
    assert {"sampling", "verifying", "training", "evaluating", "saving"} <= set(phases)


def test_a_callback_that_fails_stops_the_run_and_lets_go_of_it(train, tmp_path):
    class Fails(Callback):
        def on_step(self, row, timing, groups):
            raise ValueError("no display")

    with pytest.raises(ValueError, match="no display"):
        train(callbacks=[Fails()])
    assert len(metrics(tmp_path / "run")) == 1
    assert resume(tmp_path / "run", reward=many_digits).after["step"] == 3


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"train": {"prompts_per_step": 10}}, DataError, "9 prompts .*train.prompts_per_step = 10"),
        ({"train": {"tokens_per_microbatch": 8}}, ConfigError, "train.tokens_per_microbatch = 8 .* at least 10"),
        ({"sampling": {"top_k": 5}}, ConfigError, "sampling.top_k.*is gone"),
        ({"sampling": {"top_p": 0.9}}, ConfigError, "sampling.top_p.*is gone"),
    ],
)
def test_what_cannot_be_right_is_refused_before_any_work(train, tmp_path, options, error, says):
    with pytest.raises(error, match=says):
        train(**options)
    assert not (tmp_path / "run" / "manifest.json").exists()


# Seeds, evaluation, threads


def test_one_seed_is_one_run_and_another_is_another(train):
    """Case I1."""
    first, again, other = train("a", seed=1), train("b", seed=1), train("c", seed=2)
    assert (first.run_dir / "metrics.jsonl").read_bytes() == (again.run_dir / "metrics.jsonl").read_bytes()
    assert rollouts(first.run_dir) == rollouts(again.run_dir)
    assert equal(weights(first.model_dir), weights(again.model_dir))
    tokens = [[r.completion.token_ids for g in groups_of(x, 1) for r in g.rollouts] for x in (first, other)]
    assert tokens[0] != tokens[1]


def test_the_data_seed_changes_the_order_alone(train):
    """Case I1: in a step that holds every prompt, each keeps its completions."""
    whole = {"train": {"steps": 1, "prompts_per_step": TRAINED}}
    one, two = (groups_of(train(f"{seed}", data={"seed": seed}, **whole), 1) for seed in (1, 2))
    assert [g.prompt.id for g in one] != [g.prompt.id for g in two]
    assert sorted(one, key=lambda g: g.id) == sorted(two, key=lambda g: g.id)


def test_evaluation_changes_nothing_in_training(train):
    """Case I3."""
    always, never = train("always", eval={"every": 1}), train("never", eval={"every": 0})
    assert [row["step"] for row in metrics(always.run_dir, "eval")] == [0, 1, 2, 3]
    assert [row["step"] for row in metrics(never.run_dir, "eval")] == [0, 3]
    assert metrics(always.run_dir) == metrics(never.run_dir)
    assert rollouts(always.run_dir) == rollouts(never.run_dir)
    assert equal(weights(always.model_dir), weights(never.model_dir))


def test_kl_to_the_start_by_hand():
    """k3 = e^d - 1 - d of d = start - policy: 0 for equal tokens, e^-1 for d = -1. Two completions of a: e^-1 and 0 over
    2 tokens; one of b: 0 over 1; mean e^-1 / 3. Groups are the clusters: se^2 = 2 / 1 x 2 (e^-1 / 3)^2 / 9, t(1) = 12.706.
    """
    groups = [tiny.group("a", [1, 0], ids=[(2,), (3,)]), tiny.group("b", [1], ids=[(4,)])]
    policy = [r.completion.logprobs[0] for g in groups for r in g.rollouts]
    start = [torch.tensor([policy[0] - 1]), torch.tensor([policy[1]]), torch.tensor([policy[2]])]
    found = start_kl(groups, lambda sequences: start)
    mean = math.exp(-1) / 3
    assert found["kl"] == pytest.approx(mean, rel=1e-6)
    assert found["kl_high"] == pytest.approx(mean + 12.706205 * 2 * mean / 3, rel=1e-5) and found["kl_low"] == 0.0


def test_evaluation_measures_the_kl_to_the_start(train):
    rows = metrics(train(eval={"every": 1}, optimizer={"lr": 0.5}).run_dir, "eval")
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] == 0.0, "step 1 was sampled by the start policy"
    assert rows[2]["kl"] > 1e-4 and rows[3]["kl"] > 1e-4
    assert all(row["kl_low"] < row["kl"] < row["kl_high"] for row in rows[2:])
    assert rows[1]["kl_low"] == rows[1]["kl_high"] == 0.0


def test_one_and_two_threads_give_the_same_run(train, home):
    """Large enough that work is really split; sums over whole tensors are where threads would show."""
    save(llama(vocab_size=1500, hidden_size=64, intermediate_size=256), home / "wide")
    before = torch.get_num_threads()
    options = {"train": {"steps": 2, "prompts_per_step": 8}, "sampling": {"group_size": 8, "max_new_tokens": 4}}
    try:
        one, two = (train(f"{n}", model="wide", run={"threads": n}, optimizer={"name": "adamw", "clip_norm": 0.1}, **options)
                    for n in (1, 2))  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert (one.run_dir / "metrics.jsonl").read_bytes() == (two.run_dir / "metrics.jsonl").read_bytes()
    assert rollouts(one.run_dir) == rollouts(two.run_dir)
    assert equal(weights(one.model_dir), weights(two.model_dir))


# Rewards


def test_the_verifier_is_called_exactly_once_per_rollout(train):
    """Case G8: with evaluation, dynamic sampling and logging on."""
    seen = []

    def counting(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, len(completions)))
        return many_digits(completions)

    result = train(reward=counting, eval={"every": 1}, train={"dynamic_sampling": True})
    groups = sum(len(groups_of(result, step)) for step in (1, 2, 3))
    assert sum(n for _, n in seen) == groups * 4 + 4 * HELD_OUT
    assert all(row["groups_drawn"] == len(groups_of(result, row["step"])) for row in metrics(result.run_dir))


def test_a_reward_that_is_no_number_leaves_its_completion_unscored(train):
    """Case F2: by name, and the others train; one of each group of four here."""
    wild = [math.nan, math.inf, -math.inf, None]

    def reward(completions, **_):
        values = many_digits(completions)
        return [wild[i // 4] if i % 4 == 1 else v for i, v in enumerate(values)]

    result = train(reward=reward, train={"steps": 2})
    for row in metrics(result.run_dir):
        assert row["unscored"] == 4 and row["updates"] == 1 and row["grad_norm"] > 0
        assert all("reward returned" in reason for reason in row["unscored_reasons"])
        assert row["denominator"] == 12 and not [r for part in row["microbatches"] for r in part if r % 4 == 1]
    verdicts = [g.rollouts[1].verdict for g in groups_of(result, 1)]
    assert all(v.value is None for v in verdicts)
    assert [v.reason.split()[2] for v in verdicts] == ["nan", "inf", "-inf", "None"]


def test_a_step_without_any_score_trains_nothing(train, home):
    """Cases C7, N3: no mean of nothing is NaN."""
    result = train(reward=lambda completions, **_: [None] * len(completions), eval={"every": 1}, train={"steps": 2})
    for row in metrics(result.run_dir):
        assert row["updates"] == 0 and row["reward_mean"] is None and row["reward_std"] is None and row["loss"] == 0.0
    assert equal(weights(result.model_dir), weights(home / "model"))


def test_a_reward_function_that_breaks_its_contract_is_an_error(train):
    """Case G2."""
    with pytest.raises(RewardError, match="1 rewards for 12|1 rewards for 3 completions"):
        train(reward=lambda completions, **_: [1.0])


# Steps that train nothing


def test_a_step_of_constant_groups_advances_without_training(train):
    """Case H6."""
    result = train(reward=only_in_steps(1, 3), optimizer={"schedule": "linear"})
    one, two, three = metrics(result.run_dir)
    assert two["updates"] == 0 and two["zero_advantage"] == 1.0 and two["loss"] == 0.0 and two["microbatches"] == []
    assert two["hashes"]["weights"] == one["hashes"]["weights"] != three["hashes"]["weights"]
    assert [row["lr"] for row in (one, two, three)] == pytest.approx([0.1, 0.1 * 2 / 3, 0.1 / 3])
    ids = [g.prompt.id for step in (1, 2, 3) for g in groups_of(result, step)]
    assert len(set(ids[:TRAINED])) == TRAINED, "an epoch holds every prompt once, trained on or not"
    assert three["updates"] == 1


def test_dynamic_sampling_stops_with_everything_saved(train, tmp_path):
    """Case H1."""
    calls = []

    def reward(completions, trainer_state, **_):
        calls.append(trainer_state.global_step)
        return only_in_steps(1, 2)(completions, trainer_state)

    with pytest.raises(TrainingStopped, match=r"step 3: none of 12 groups in 3 draws"):
        train(reward=reward, train={"dynamic_sampling": True, "steps": 5}, stop={"refills": 2})
    assert calls.count(3) == 3
    run = RunDir.read(tmp_path / "run")
    assert [row["step"] for row in run.metrics()] == [0, 1, 2] and run.steps() == [1, 2]
    step, tensors, _ = run.load_checkpoint()
    assert step == 2 and tensors["weights"].keys() == dict(llama().named_parameters()).keys()


def test_dynamic_sampling_trains_on_groups_with_signal_only(train):
    """Case H2 in a run: what was drawn is recorded, what is trained has signal."""
    options = {"dynamic_sampling": True, "steps": 2}
    result = train(reward=digits_after_odd_numbers, train=options, stop={"refills": 8})
    drawn = 0
    for row in metrics(result.run_dir):
        groups = groups_of(result, row["step"])
        useful = [g for g in groups if len({r.reward for r in g.rollouts}) > 1]
        drawn += len(groups)
        assert row["groups_drawn"] == len(groups) > row["groups_trained"] == len(useful) == 4
        assert row["denominator"] == 16 and row["zero_advantage"] == 0.0
    _, _, state = RunDir.read(result.run_dir).load_checkpoint()
    assert state["progress"]["position"] == drawn


# Non-finite numbers


def spoil(monkeypatch, *calls: int, what: str = "logits") -> None:
    """The given forward passes (one per step here) give NaN log-probabilities, or pass a NaN gradient on."""
    real, count = update.score, []

    def score(*arguments):
        logp, entropy = real(*arguments)
        count.append(1)
        if len(count) not in calls:
            return logp, entropy
        if what == "logits":
            return logp * math.nan, entropy
        logp.register_hook(lambda g: g * math.nan)
        return logp, entropy

    monkeypatch.setattr(update, "score", score)


@pytest.mark.parametrize("what", ["logits", "gradient"])
def test_one_bad_step_is_skipped_and_the_run_recovers(train, monkeypatch, what):
    """Case F1: the weights keep their bits, the optimizer too, and training goes on."""
    spoil(monkeypatch, 2, what=what)
    result = train(train={"steps": 4}, optimizer={"name": "adamw", "lr": 1e-2})
    rows = metrics(result.run_dir)
    assert [row["updates"] for row in rows] == [1, 0, 1, 1]
    bad = rows[1]
    assert bad["non_finite"] and bad["loss"] is None and bad["grad_norm"] is None and bad["entropy"] is None
    assert ("prompt" in bad["non_finite"]) == (what == "logits")
    assert bad["hashes"]["weights"] == rows[0]["hashes"]["weights"] != rows[2]["hashes"]["weights"]
    assert all(row["non_finite"] is None and row["sampler_equal"] == 1.0 for i, row in enumerate(rows) if i != 1)
    _, tensors, _ = RunDir.read(result.run_dir).load_checkpoint()
    assert all(t.isfinite().all() for part in tensors.values() for t in part.values())
    assert tensors["optimizer"]["step:lm_head.weight"] == 3


def test_what_reward_functions_log_is_recorded_and_shown(train):
    """log_extra stands beside each completion, log_metric in the step's line, also when steps come from the record."""

    def reward(completions, log_extra, log_metric, **_):
        log_extra("letters", [len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        return many_digits(completions)

    result = train(reward=reward)
    lines = metrics(result.run_dir)
    for row in lines:
        file = RunDir.read(result.run_dir).read_rollouts(row["step"])
        lengths = [len(r.completion.text) for g in file.groups for r in g.rollouts]
        assert file.logged.extras == {"letters": lengths}
        assert list(row["reward_logged"].values()) == [max(lengths)]
        assert next(iter(row["reward_logged"])).endswith("/longest")
    shutil.rmtree(result.run_dir / "checkpoints")
    resume(result.run_dir, reward=reward)
    assert metrics(result.run_dir) == lines


def test_three_bad_steps_in_a_row_stop_the_run(train, monkeypatch, home, tmp_path):
    spoil(monkeypatch, 1, 3, 4, 5)
    with pytest.raises(TrainingStopped, match="3 steps in a row had a non-finite loss or gradient"):
        train(train={"steps": 9})
    rows = metrics(tmp_path / "run")
    assert [row["updates"] for row in rows] == [0, 1, 0, 0, 0]
    run = RunDir.read(tmp_path / "run")
    step, tensors, state = run.load_checkpoint()
    assert step == 5
    assert all(t.isfinite().all() for t in tensors["weights"].values())
    monkeypatch.undo()
    monkeypatch.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
    resume(tmp_path / "run", reward=many_digits)
    assert [row["updates"] for row in metrics(tmp_path / "run")][5:] == [1] * 4


def test_a_start_model_that_was_replaced_is_not_measured_against(train, home, tmp_path, caplog):
    """Its KL would be that to another policy: None, with a warning, and training goes on."""
    save(llama(), home / "replaced")

    class Replace(Callback):
        def on_step(self, metrics, timing, groups):
            save(llama(1), home / "replaced")

    result = train(model="replaced", callbacks=[Replace()], eval={"every": 1})
    assert [row["kl"] for row in metrics(result.run_dir, "eval")] == [0.0, None, None, None]
    assert "is not what the run started from any more" in caplog.text


def test_three_steps_with_nothing_scored_stop_the_run(train, tmp_path):
    """A reward that fails for every completion must not look like a long run without signal."""

    def broken(completions, trainer_state, **_):
        return many_digits(completions) if trainer_state.global_step == 2 else [None] * len(completions)

    with pytest.raises(
        TrainingStopped, match=r"no completion of 3 steps in a row was scored, the last because: .*None"
    ):
        train(reward=broken, train={"steps": 9})
    rows = metrics(tmp_path / "run")
    assert [row["unscored"] for row in rows] == [16, 0, 16, 16, 16]
    assert RunDir.read(tmp_path / "run").load_checkpoint()[0] == 5


@pytest.mark.slow
def test_nothing_grows_over_300_steps(home, tmp_path, no_picture):
    """Memory after step 100 within 5 MB; open files, threads and child processes constant."""
    import psutil

    from tinyllm.post import run as runs

    process, seen = psutil.Process(), {}

    class Watch(Callback):
        def on_step(self, metrics, timing, groups):
            counts = process.num_fds(), process.num_threads(), len(process.children(recursive=True))
            seen[metrics["step"]] = (process.memory_info().rss, *counts)

    options = {"train": {"steps": 300}, "eval": {"every": 50}, "run": {"checkpoint_every": 20, "threads": 1}}
    reward = {"functions": ("light_rewards:many_digits",)}
    given = config(home / "model", home / "rows.jsonl", tmp_path / "run", reward=reward, **options)
    runs.train(given, callbacks=[Watch()])
    quiet = [step for step in range(100, 301) if step % 20 > 10]  # away from checkpoints, which are written beside
    assert max(seen[s][0] for s in quiet if s > 250) - max(seen[s][0] for s in quiet if s < 150) < 5e6
    assert len({seen[s][1:] for s in quiet}) == 1, sorted({seen[s][1:] for s in quiet})


def test_a_wild_reward_and_a_metric_that_is_no_number_do_not_end_a_run(train):
    def reward(completions, log_metric, trainer_state, **_):
        log_metric("x", float("nan"))
        log_metric("y", float("nan") if trainer_state.global_step == 1 else 0.5)
        return [1e200, *many_digits(completions)[1:]]

    result = train("run", reward)
    rows = metrics(result.run_dir)
    assert [row["unscored"] for row in rows] == [1, 1, 1]
    assert all("beyond 1e+100" in reason for row in rows for reason in row["unscored_reasons"])
    assert [{k.rpartition("/")[2]: v for k, v in row["reward_logged"].items()} for row in rows] == [
        {},
        {"y": 0.5},
        {"y": 0.5},
    ]


@pytest.mark.parametrize("optimizer", [{"lr": 1e38}, {"name": "adamw", "lr": 1e38}, {"lr": 1e30}])
def test_weights_that_blow_up_are_an_error_and_are_not_saved(train, tmp_path, optimizer):
    with pytest.raises(TinyLLMError, match=r"not finite.*lower optimizer.lr"):
        train("run", optimizer=optimizer, train={"steps": 4})
    assert not (tmp_path / "run" / "model").exists()
    assert not RunDir.read(tmp_path / "run").checkpoints.steps()


def test_a_step_that_ruins_the_weights_is_not_saved(train, tmp_path):
    """Adam's first step is lr itself: 1e39 is infinite in fp32, though loss and gradient were finite."""
    with pytest.raises(TinyLLMError, match="step 1 left .* with weights that are not finite, and was not saved"):
        train(optimizer={"name": "adamw", "lr": 1e39}, run={"checkpoint_every": 1})
    assert not RunDir.read(tmp_path / "run").checkpoints.steps() and metrics(tmp_path / "run") == []


def test_a_taken_folder_is_refused_before_anything_is_loaded(train, tmp_path, monkeypatch):
    train("run")
    monkeypatch.setattr("tinyllm.post.run.build_run", None)
    with pytest.raises(RunError, match="already holds a run"):
        train("run")
