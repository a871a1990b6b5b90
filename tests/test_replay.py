"""A finished run is derived again; a change of one token, log-probability, reward or weight is found and located."""

import json
import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from tinyllm.commands import cli
from tinyllm.errors import ConfigError, RunError
from tinyllm.post import run as runs
from tinyllm.post.replay import replay
from tinyllm.record.files import write_json
from tinyllm.record.rollouts import write_table
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Rollout, Step


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    model = tiny.save(tiny.llama(), folder / "start")
    rows = tiny.write_rows(folder / "rows.jsonl")
    config = tiny.config(
        model, rows, folder / "run", train={"updates_per_batch": 2}, run={"checkpoint_every": 2}, objective={"beta": 0.05}
    )  # fmt: skip
    runs.train(replace(config, reward=replace(config.reward, functions=("light_rewards:many_digits",))))
    return folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def rewrite(path, step, change, row=5):
    """Writes a step's rollouts anew with one rollout changed and every checksum put right, as a forger would."""
    run = RunDir.read(path)
    groups, index, out = run.read_groups(step), 0, []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            rollouts.append(change(rollout) if index == row else rollout)
            index += 1
        out.append(Group(group.prompt, tuple(rollouts)))
    run.rollout_path(step).write_bytes(write_table(Step(step, out)))
    return out[1].rollouts[1]


def with_completion(**changes):
    def change(rollout):
        values = {name: value(getattr(rollout.completion, name)) for name, value in changes.items()}
        return Rollout(replace(rollout.completion, **values), rollout.verdict)

    return change


def test_every_hash_of_a_finished_run_is_derived_again(finished):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    result = replay(finished)
    assert (result.steps, result.divergence, result.conditions) == ((1, 2, 3), None, ())
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


def test_derived_numbers_are_rebuilt_to_the_byte(copied):
    """derived/ is what training computed, per token; without it replay writes the same files again."""
    files = {path.name: path.read_bytes() for path in (copied / "derived").iterdir()}
    assert sorted(files) == ["000001.parquet", "000002.parquet", "000003.parquet"]
    shutil.rmtree(copied / "derived")
    assert replay(copied).divergence is None
    assert {path.name: path.read_bytes() for path in (copied / "derived").iterdir()} == files
    derived, recorded = (
        pq.read_table(copied / kind / "000001.parquet").to_pylist() for kind in ("derived", "rollouts")
    )
    assert any(row["trainer_logprobs"] for row in derived)
    for ours, theirs in zip(derived, recorded, strict=True):
        assert (ours["group_id"], ours["sample"]) == (theirs["group_id"], theirs["sample"])
        assert ours["trainer_logprobs"] in (None, theirs["logprobs"])
    assert sum(row["advantage"] for row in derived) == pytest.approx(0, abs=1e-4)


def test_a_part_starts_from_the_nearest_checkpoint(finished):
    assert replay(finished, steps=(3, 3)).divergence is None
    assert replay(finished, steps=(2, 2)).divergence is None
    with pytest.raises(ConfigError, match="--steps 2:9: the run has steps 1 to 3"):
        replay(finished, steps=(2, 9))


def test_completions_are_drawn_again_token_by_token(finished):
    assert replay(finished, sample=True).divergence is None


def test_a_changed_token_is_found_at_its_row(copied):
    rewrite(copied, 2, with_completion(token_ids=lambda ids: (ids[0] ^ 1, *ids[1:])))
    found = replay(copied).divergence
    assert (found.step, found.hop) == (2, "log-probability")
    assert found.where.startswith("row 5 ") and found.where.endswith("token 0")


def test_a_changed_token_is_found_by_sampling_again(copied):
    changed = rewrite(copied, 2, with_completion(token_ids=lambda ids: (ids[0] ^ 1, *ids[1:])))
    found = replay(copied, sample=True).divergence
    assert (found.step, found.hop, found.recorded) == (2, "sample", changed.completion.token_ids[0])


def test_a_changed_log_probability_is_found_at_its_row(copied):
    changed = rewrite(copied, 1, with_completion(logprobs=lambda x: (*x[:-1], x[-1] - 1e-6)))
    found = replay(copied).divergence
    assert (found.step, found.hop, found.recorded) == (1, "log-probability", changed.completion.logprobs[-1])
    assert found.replayed == pytest.approx(found.recorded + 1e-6, abs=1e-7)


def test_a_changed_reward_is_found_at_its_row(copied):
    rewrite(copied, 3, lambda r: Rollout(r.completion, replace(r.verdict, value=r.verdict.value + 0.25)))
    found = replay(copied).divergence
    assert (found.step, found.hop) == (3, "verify")
    assert "sample 1" in found.where
    assert found.recorded != found.replayed


def test_a_row_changed_without_its_checksum_is_found(copied):
    path = RunDir.read(copied).rollout_path(2)
    table = pq.read_table(path)
    rewards = table.column("reward").to_pylist()
    rewards[3] += 0.5
    index = table.column_names.index("reward")
    pq.write_table(table.set_column(index, "reward", [rewards]).cast(table.schema), path)
    found = replay(copied).divergence
    assert (found.step, found.hop) == (2, "record")
    assert found.where.startswith("row 3 ")


def test_a_changed_checkpoint_is_found(copied):
    path = copied / "checkpoints" / "000002" / "weights.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"].view(-1)[0] += 1
    save_file(tensors, path)
    found = replay(copied).divergence
    assert (found.step, found.hop) == (2, "checkpoint")
    assert "weights.safetensors" in found.where


def test_a_changed_weight_of_the_model_is_found(copied):
    path = copied / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(-1)[7] = torch.nextafter(tensors[name].view(-1)[7], torch.tensor(9.0))
    save_file(tensors, path, metadata={"format": "pt"})
    found = replay(copied).divergence
    assert (found.step, found.hop, found.where) == (3, "update", f"model/ {name}")


@pytest.mark.parametrize(("key", "hop"), [("loss", "loss"), ("gradient", "gradient"), ("weights", "update")])
def test_a_changed_metric_is_found_at_its_hop(copied, key, hop):
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    row = next(x for x in lines if x.get("kind", "train") == "train" and x["step"] == 2)
    if key == "loss":
        row["loss"] += 1e-9
    else:
        row["hashes"][key] = "0" * 32
    (copied / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = replay(copied).divergence
    assert (found.step, found.hop) == (2, hop)


def test_what_if_compares_nothing_and_overwrites_nothing(copied):
    before = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()}
    result = replay(copied, objective="dr_grpo", reward="light_rewards:few_digits")
    assert result.divergence is None
    lines = [json.loads(line) for line in result.what_if.read_text().splitlines()]
    assert result.what_if.parent == copied / "derived"
    assert [x["step"] for x in lines] == [1, 2, 3]
    assert {json.dumps(x["what_if"]) for x in lines} == {
        '{"objective": "dr_grpo", "reward": "light_rewards:few_digits"}'
    }
    recorded = RunDir.read(copied).metrics("train")
    assert all(a["loss"] != b["loss"] for a, b in zip(lines, recorded, strict=True))
    assert {p: p.read_bytes() for p in copied.rglob("*") if p.is_file() and p != result.what_if} == before


def test_a_tolerance_compares_numbers(copied):
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        if row.get("kind", "train") == "train":
            row["hashes"]["gradient"] = "another processor"
            row["loss"] += 1e-7
    (copied / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert replay(copied).divergence.hop == "loss"
    assert replay(copied, tolerance=1e-3).divergence is None
    assert replay(copied, tolerance=1e-12).divergence.hop == "loss"


def test_conditions_that_differ_are_named(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    assert replay(copied).conditions == ()
    manifest["versions"]["torch"] = "1.0"
    del manifest["checksum"]
    write_json(copied / "manifest.json", manifest)
    assert [(name, was) for name, was, _ in replay(copied).conditions] == [("versions.torch", "1.0")]


def test_the_command_says_what_it_found(finished, copied, capsys):
    assert cli.main(["replay", str(finished)]) == 0
    assert "3 steps, every hash equal" in capsys.readouterr().out
    rewrite(copied, 2, with_completion(token_ids=lambda ids: (ids[0] ^ 1, *ids[1:])))
    assert cli.main(["replay", str(copied), "--steps", "2:3"]) == 1
    out = capsys.readouterr().out
    assert "step 2, log-probability, row 5" in out and "recorded" in out and "replayed" in out
    assert cli.main(["replay", str(copied), "--steps", "x"]) == 2
    assert "--steps" in capsys.readouterr().err
    assert cli.main(["replay", str(copied / "nowhere")]) == 2


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(finished, tolerance):
    with pytest.raises(ConfigError, match="--tolerance"):
        replay(finished, tolerance=tolerance)


def test_a_lost_or_damaged_line_of_metrics_is_named(copied):
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if json.loads(line).get("kind") is None and '"step": 2' in line)
    for instead in ("", '{"step": 2}\n'):
        (copied / "metrics.jsonl").write_text("".join([*lines[:place], instead, *lines[place + 1 :]]))
        with pytest.raises(RunError, match="the line of step 2 is missing or damaged"):
            replay(copied)


def test_a_number_that_is_there_only_once_is_outside_every_tolerance(copied):
    path = copied / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["step"] == 2 and row.get("kind") is None:
            row["entropy"] = None
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    found = replay(copied, tolerance=1e-4).divergence
    assert found is not None and (found.step, found.where, found.recorded) == (2, "entropy", None)
