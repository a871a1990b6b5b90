"""`tinyllm diff`: the first step, hop and row where two runs part. Each kind of change is made in a copy of a run."""

from dataclasses import replace

import pytest
from run_samples import CONFIG, make_groups, manifest

from tinyllm.record.diff import compare_runs
from tinyllm.record.rundir import RunDir
from tinyllm.records import Step, Verdict

HASHES = ("verdicts", "advantages", "logprobs", "gradient", "weights")


def make_run(path, steps=3, change=None, metrics=None, config=CONFIG, evals=True):
    """A run whose step 2 has one rollout changed by `change` or its metrics updated."""
    with RunDir.create(path, manifest(config)) as run:
        if evals:
            run.log({"step": 0, "kind": "eval", "correct": 1, "prompts": 9})
        for step in range(1, steps + 1):
            groups = make_groups(step)
            if change and step == 2:
                rollouts = list(groups[1].rollouts)
                rollouts[0] = change(rollouts[0])
                groups[1] = replace(groups[1], rollouts=tuple(rollouts))
            run.record(Step(step, groups))
            row = {"step": step, "loss": 0.1, "lr": 1e-5, "hashes": {name: f"{step} {name}" for name in HASHES}}
            for name, value in (metrics or {}).items() if step == 2 else ():
                (row["hashes"] if name in HASHES else row)[name] = value
            run.log(row)
    return RunDir.read(path)


def completion(**changes):
    return lambda rollout: replace(rollout, completion=replace(rollout.completion, **changes))


def test_equal_runs(tmp_path):
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", evals=False))
    assert found.equal
    assert found.lines() == [
        "every recorded condition is the same",
        "3 steps, rollouts and metrics equal to the last bit",
    ]


def test_one_goes_on(tmp_path):
    found = compare_runs(make_run(tmp_path / "a", 2), make_run(tmp_path / "b"))
    assert not found.equal and found.difference is None
    assert found.lines()[-1] == f"{tmp_path / 'b'} goes on to step 3"


@pytest.mark.parametrize(
    ("change", "hop", "what", "values"),
    [
        (completion(token_ids=(5, 6, 8, 0)), "sample", "row 3 (group row-1#1, sample 0), token 2", (7, 8)),
        (completion(text="other"), "sample", "row 3 (group row-1#1, sample 0), text", ("it is 0\n", "other")),
        (completion(finish_reason="length"), "sample", "sample 0), finish_reason", ("stop", "length")),
        (completion(seed_key=3), "sample", "sample 0), seed key", (2**64 - 1, 3)),
        (lambda r: replace(r, verdict=Verdict(1.0)), "verify", "row 3 (group row-1#1, sample 0)", None),
    ],
)
def test_a_changed_rollout_is_located(tmp_path, change, hop, what, values):
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", change=change))
    assert (found.difference.step, found.difference.hop) == (2, hop)
    assert found.difference.what.endswith(what)
    assert values is None or (found.difference.first, found.difference.second) == values
    assert "first difference: step 2" in "\n".join(found.lines())


def test_a_logprob_off_by_one_bit_is_located(tmp_path):
    import math

    def nudge(rollout):
        values = list(rollout.completion.logprobs)
        values[3] = math.nextafter(values[3], 0)
        return completion(logprobs=tuple(values))(rollout)

    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", change=nudge))
    assert found.difference.what == "row 3 (group row-1#1, sample 0), log-probability 3"


@pytest.mark.parametrize(
    ("metrics", "hop", "what"),
    [
        ({"verdicts": "x", "loss": 0.2}, "verify", "hashes.verdicts"),
        ({"advantages": "x", "loss": 0.2}, "advantage", "hashes.advantages"),
        ({"logprobs": "x", "weights": "y"}, "log-probability", "hashes.logprobs"),
        ({"loss": 0.1 + 2e-17, "gradient": "x"}, "loss", "loss"),
        ({"gradient": "x", "weights": "y"}, "gradient", "hashes.gradient"),
        ({"weights": "y"}, "update", "hashes.weights"),
        ({"lr": 2e-5, "weights": "y"}, "update", "hashes.weights"),
        ({"lr": 2e-5, "grad_norm": 1.0}, "gradient", "grad_norm"),
        ({"lr": 2e-5}, "update", "lr"),
        ({"reward_parts": {"correct": 1.0}, "verdicts": "x"}, "verify", "hashes.verdicts"),
        ({"reward_parts": {"correct": 1.0}, "loss": 0.2}, "verify", "reward_parts.correct"),
        ({"a key of another version": 1}, "metrics", "a key of another version"),
    ],
)
def test_the_first_hop_that_differs_is_named(tmp_path, metrics, hop, what):
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", metrics=metrics))
    assert (found.difference.step, found.difference.hop, found.difference.what) == (2, hop, what)


def test_the_condition_that_differs_is_named(tmp_path):
    other = replace(CONFIG, seed=1, run=replace(CONFIG.run, dir="elsewhere"))
    found = compare_runs(make_run(tmp_path / "a"), make_run(tmp_path / "b", config=other))
    assert found.conditions == [("config.seed", 0, 1)]
    assert "  config.seed: 0 | 1" in found.lines()


@pytest.mark.parametrize("lost", ["rollouts/000002.parquet", "metrics.jsonl", "a line"])
def test_a_lost_record_is_a_difference(tmp_path, lost):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    if lost == "a line":
        lines = (second.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (second.path / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    else:
        (second.path / lost).unlink()
    found = compare_runs(first, second)
    assert not found.equal
    if lost == "metrics.jsonl":
        assert found.steps == (3, 0)
    else:
        hop = "metrics, line" if lost == "a line" else "record, rollouts"
        assert str(found.difference) == f"first difference: step 2, hop {hop}\n  there\n  missing"


def test_a_step_that_one_run_only_sampled_is_no_difference(tmp_path):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    lines = (second.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (second.path / "metrics.jsonl").write_text("".join(lines[:-1]))
    found = compare_runs(first, second)
    assert found.difference is None and found.steps == (3, 2)
    assert found.lines()[-1] == f"{first.path} goes on to step 3"
