"""The run directory: exact, whole after a crash anywhere, honest about damage, for one writer at a time."""

import json
import math
import os
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import assert_tensors_equal, make_groups, make_tensors, manifest

from tinyllm.errors import RewardError, RunError
from tinyllm.record.files import new_folder, read_json, read_tensors, recover_folders, write_json, write_tensors
from tinyllm.record.rollouts import SCHEMA, read_table, write_table
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Logged, Prompt, Revision, RevisionSpan, Rollout, Step, Verdict


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", manifest()) as run:
        yield run


# Rollouts

words = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
floats = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


any_spans = st.builds(
    RevisionSpan,
    st.none() | st.builds(Revision, st.integers(0, 2**40), words),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)


@st.composite
def any_groups(draw):
    groups = []
    for number in range(draw(st.integers(1, 3))):
        messages = draw(st.none() | st.lists(st.dictionaries(words, words, max_size=2), max_size=2).map(tuple))
        ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)))
        row = draw(st.dictionaries(words, json_values, max_size=3))
        prompt = Prompt(draw(words), ids, draw(words), row, messages, number)
        rollouts = []
        for sample in range(draw(st.integers(1, 3))):
            count = draw(st.integers(0, 4))
            completion = Completion(
                prompt.id,
                prompt.draw,
                sample,
                tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))),
                tuple(draw(st.lists(st.none() | floats, min_size=count, max_size=count))),
                draw(st.sampled_from(["stop", "length", "error"])),
                draw(st.integers(0, 2**64 - 1)),
                Revision(draw(st.integers(0, 2**40)), draw(words)),
                draw(words),
                draw(st.none() | words),
                tuple(draw(st.lists(any_spans, max_size=2))),
            )
            finite = st.floats(allow_nan=False, allow_infinity=False)
            parts = tuple(draw(st.lists(st.tuples(words, finite), max_size=2)))
            value = draw(st.none() | finite)
            rollouts.append(Rollout(completion, Verdict(value, "why" if value is None else None, draw(words), parts)))
        groups.append(Group(prompt, tuple(rollouts)))
    return groups


@settings(deadline=None, max_examples=60)
@given(any_groups())
def test_round_trip_is_exact(tmp_path_factory, groups):
    path = tmp_path_factory.mktemp("rollouts") / "x.parquet"
    path.write_bytes(write_table(Step(7, groups)))
    found = read_table(path)
    assert repr(found.groups) == repr(groups), "repr tells -0.0 from 0.0 and shows every bit of a float"
    assert (found.step, found.changed) == (7, [])


def test_record_reads_back_and_any_parquet_reader_reads_it(run):
    groups = make_groups()
    run.record(Step(1, groups, Logged(extras={"length": [3, 4, 5, 6, 7, 8]})))
    assert run.read_groups(1) == groups
    import pandas

    table = pandas.read_parquet(run.rollout_path(1))
    assert list(table.columns) == SCHEMA.names
    assert table.group_id.tolist() == ["row-0#0"] * 3 + ["row-1#1"] * 3
    assert table.seed_key[0] == 2**64 - 1
    assert math.isnan(table.reward[1]) and table.reason[1] == "timed out"
    assert table.logprobs[2].tolist() == list(groups[0].rollouts[2].completion.logprobs)
    assert [json.loads(text)["length"] for text in table.extra] == [3, 4, 5, 6, 7, 8]


def test_a_column_of_a_user_never_replaces_ours(run):
    with pytest.raises(RewardError, match="'prompt': the name is taken"):
        run.record(Step(1, make_groups(), Logged(extras={"prompt": ["x"] * 6})))
    with pytest.raises(RewardError, match="5 values for 6 completions"):
        run.record(Step(1, make_groups(), Logged(extras={"mine": [0] * 5})))
    assert run.steps() == []
    group = make_groups(prompts=1)[0]
    row = {"reward": 99, "prompt": "mine", "completion": "mine"}
    run.record(Step(1, [replace(group, prompt=replace(group.prompt, row=row))]))
    (back,) = run.read_groups(1)
    assert back.prompt.row == row
    assert back.prompt.text == group.prompt.text
    assert back.rollouts == group.rollouts


def test_spans_are_kept_and_a_record_without_them_is_as_before(run):
    """Records from before spans were kept have no such column; rows without spans hash to the same."""
    group = make_groups(prompts=1)[0]
    first = group.rollouts[0].completion
    spans = (RevisionSpan(Revision(0, "a"), 0, 1), RevisionSpan(Revision(2, "b"), 1, 4))
    across = replace(group.rollouts[0], completion=replace(first, spans=spans))
    run.record(Step(1, [replace(group, rollouts=(across, *group.rollouts[1:]))]))
    run.record(Step(2, [group]))
    assert run.read_groups(1)[0].rollouts[0].completion.all_spans == spans
    assert first.all_spans == (RevisionSpan(first.revision, 0, 4),)
    table = pq.read_table(run.rollout_path(2))
    pq.write_table(table.drop_columns("spans"), run.rollout_path(2))
    assert run.read_groups(2) == [group]
    table = pq.read_table(run.rollout_path(1))
    rows = table.to_pylist()
    rows[0]["spans"][1]["start"] = 2
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run.rollout_path(1))
    with pytest.raises(RunError, match=r"row 0 \(group row-0#0, sample 0\)"):
        run.read_groups(1)


def test_tokens_that_the_environment_gave_are_kept_without_a_log_probability(run):
    group = make_groups(prompts=1)[0]
    first = group.rollouts[0].completion
    spans = (RevisionSpan(first.revision, 0, 1), RevisionSpan(None, 1, 3), RevisionSpan(first.revision, 3, 4))
    logprobs = (first.logprobs[0], None, None, first.logprobs[3])
    given = replace(group.rollouts[0], completion=replace(first, spans=spans, logprobs=logprobs))
    run.record(Step(1, [replace(group, rollouts=(given, *group.rollouts[1:]))]))
    back = run.read_groups(1)[0].rollouts
    assert back == (given, *group.rollouts[1:]) and back[0].completion.sampled == (True, False, False, True)
    table = pq.read_table(run.rollout_path(1))
    rows = table.to_pylist()
    rows[0]["spans"][1] |= {"policy_step": 0, "policy_hash": "a"}
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run.rollout_path(1))
    with pytest.raises(RunError, match=r"row 0 \(group row-0#0, sample 0\)"):
        run.read_groups(1)


def test_the_ledger_is_read_back_up_to_its_last_whole_line(run):
    assert run.ledger() == []
    run.log_ledger([{"step": 1, "group": "a#0"}, {"step": 1, "group": "b#0"}])
    run.log_ledger([])
    run.log_ledger([{"step": 2, "group": "c#0"}])
    assert [line["group"] for line in run.ledger()] == ["a#0", "b#0", "c#0"]
    run.close()
    with open(run.path / "ledger.jsonl", "a") as file:
        file.write('{"step": 3, "gro')
    with RunDir.open(run.path) as again:
        again.log_ledger([{"step": 3, "group": "d#0"}])
        assert [line["group"] for line in again.ledger()] == ["a#0", "b#0", "c#0", "d#0"]


def test_what_json_cannot_hold_is_refused_by_name(run):
    group = make_groups(prompts=1)[0]
    with pytest.raises(RunError, match="the row of prompt row-0 cannot be recorded"):
        run.record(Step(1, [replace(group, prompt=replace(group.prompt, row={"x": object()}))]))


@pytest.mark.parametrize("column", ["completion_token_ids", "logprobs", "reward", "policy_hash", "seed_key", "prompt"])
def test_a_changed_value_is_noticed_and_its_row_named(run, column):
    run.record(Step(1, make_groups()))
    path = run.rollout_path(1)
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[4] = {
        "completion_token_ids": [5, 6, 7, 9],
        "logprobs": [math.nextafter(value, 0) for value in values[4]] if column == "logprobs" else None,
        "reward": 1.0,
        "policy_hash": "ee" * 16,
        "seed_key": 1,
        "prompt": "other",
    }[column]
    field = SCHEMA.field(column)
    changed = table.set_column(SCHEMA.get_field_index(column), field, pa.array(values, field.type))
    pq.write_table(changed, path)
    with pytest.raises(RunError, match=r"000001.parquet: changed since it was recorded: row 4 \(group row-1#1, samp"):
        run.read_groups(1)
    pq.write_table(table.slice(0, 5), path)
    with pytest.raises(RunError, match="rows were added, left out"):
        run.read_groups(1)


def test_a_damaged_file_is_one_line(run):
    run.record(Step(1, make_groups()))
    path = run.rollout_path(1)
    data = path.read_bytes()
    for bad in (data[:100], b"", data[: len(data) // 2] + b"\0" * 200 + data[len(data) // 2 + 200 :]):
        path.write_bytes(bad)
        with pytest.raises(RunError, match="000001.parquet: ") as caught:
            run.read_groups(1)
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(RunError, match="missing"):
        run.read_groups(1)


def test_resume_takes_complete_steps_and_puts_the_rest_aside(run, caplog):
    for step in (1, 2, 3):
        run.record(Step(step, make_groups(step)))
    run.record(Step(4, make_groups(4)))
    run.rollout_path(4).write_bytes(run.rollout_path(4).read_bytes()[:-40])
    assert run.take_recorded(1) == [2, 3]
    assert run.steps() == [1, 2, 3]
    assert [path.name for path in (run.path / "superseded").iterdir()] == ["000004.1.parquet"]

    run.rollout_path(2).write_bytes(run.rollout_path(2).read_bytes()[:50])
    assert run.take_recorded(0) == [1]
    assert "000002.parquet" in caplog.text and "step 2 is sampled again" in caplog.text
    run.record(Step(2, make_groups(2)))
    run.record(Step(4, make_groups(4)))
    assert run.take_recorded(1) == [2], "step 3 is missing, so step 4 waits for nothing"


# Metrics


def test_metrics_are_deterministic_and_repeat_or_fail(tmp_path):
    path = tmp_path / "run"
    with RunDir.create(path, manifest()) as run:
        run.log({"step": 1, "reward": 0.1 + 0.2, "hashes": {"loss": "aa"}})
        run.log({"step": 1, "kind": "eval", "accuracy": 0.5})
        run.log_timing({"step": 1, "sample_s": 1.5})
    text = (path / "metrics.jsonl").read_text()
    assert text == (
        '{"hashes": {"loss": "aa"}, "reward": 0.30000000000000004, "step": 1}\n{"accuracy": 0.5, "kind": "eval", "step": 1}\n'
    )
    with RunDir.open(path) as run:
        run.log({"hashes": {"loss": "aa"}, "step": 1, "reward": 0.1 + 0.2})
        assert (path / "metrics.jsonl").read_text() == text, "a line that is there is not written twice"
        with pytest.raises(RunError, match=r"step 1 does not repeat: accuracy is 0.6 and was 0.5"):
            run.log({"step": 1, "kind": "eval", "accuracy": 0.6})
        run.log({"step": 2})
        assert [row["step"] for row in run.metrics("train")] == [1, 2]
        assert run.timings() == [{"step": 1, "sample_s": 1.5}]


def test_a_missing_value_is_null_never_nan(run):
    run.log({"step": 1, "kl": None})
    with pytest.raises(RunError, match="log None"):
        run.log({"step": 2, "kl": math.nan})


def test_a_torn_last_line_is_cut_and_a_broken_one_inside_is_named(tmp_path):
    path = tmp_path / "run"
    with RunDir.create(path, manifest()) as run:
        run.log({"step": 1})
    file = path / "metrics.jsonl"
    for torn in (b'{"step": 2, "rew', b"\0" * 40, b'{"step": 2}'):
        with open(file, "ab") as stream:
            stream.write(torn)
        assert RunDir.read(path).metrics() == [{"step": 1}]
        RunDir.open(path).close()
        assert file.read_bytes() == b'{"step": 1}\n'
    file.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match="metrics.jsonl, line 2: damaged"):
        RunDir.open(path)


# Checkpoints


def test_checkpoint_round_trip_and_keep(run):
    state = {"lr": 0.1 + 0.2, "position": [3, 4], "seen": {"a": None}}
    for step in (10, 20, 30):
        tensors = make_tensors(step)
        run.save_checkpoint(step, tensors, state)
        for group in tensors.values():
            for tensor in group.values():
                tensor.zero_()  # the trainer goes on at once
    step, tensors, found = run.load_checkpoint()
    assert (step, found) == (30, state)
    assert_tensors_equal(tensors, make_tensors(30))
    assert run.checkpoints.steps() == [20, 30]
    assert_tensors_equal(run.load_checkpoint(20)[1], make_tensors(20))
    with pytest.raises(RunError, match="no checkpoint of step 10; there is: 20, 30"):
        run.load_checkpoint(10)


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path):
    weight = torch.randn(100, 10)
    fd = os.open(tmp_path / "t.safetensors", os.O_WRONLY | os.O_CREAT)
    facts = write_tensors(fd, {"embed": weight, "head": weight, "other": weight.clone()})
    os.close(fd)
    found = read_tensors(tmp_path / "t.safetensors")
    assert facts["bytes"] == (tmp_path / "t.safetensors").stat().st_size < 9000
    assert found["embed"].data_ptr() == found["head"].data_ptr() != found["other"].data_ptr()
    assert torch.equal(found["head"], weight)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "state", "empty_state", "no_state"])
def test_a_damaged_checkpoint_is_passed_over_by_name(run, caplog, damage):
    run.save_checkpoint(10, make_tensors(10), {})
    run.save_checkpoint(20, make_tensors(20), {}, wait=True)
    folder = run.checkpoints.path(20)
    file = folder / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "state":
        (folder / "state.json").write_text((folder / "state.json").read_text().replace("20", "21", 1))
    elif damage == "empty_state":
        (folder / "state.json").write_bytes(b"")
    else:
        (folder / "state.json").unlink()
    step, tensors, _ = run.load_checkpoint()
    assert step == 10
    assert_tensors_equal(tensors, make_tensors(10))
    assert "checkpoint of step 20 is passed over" in caplog.text
    with pytest.raises(RunError, match="000020"):
        run.load_checkpoint(20)
    run.save_checkpoint(20, make_tensors(20), {})
    assert run.load_checkpoint()[0] == 20, "a damaged one is replaced when its step comes round again"


# Folders


def test_new_folder_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model"
    for text in ("old", "new"):
        with new_folder(path) as folder:
            (folder / "weights").write_text(text)
    assert (path / "weights").read_text() == "new"
    with pytest.raises(ValueError), new_folder(path) as folder:
        (folder / "weights").write_text("half")
        raise ValueError
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    path.rename(tmp_path / ".model.old")  # killed between the two renames
    (tmp_path / ".model.tmp").mkdir()
    recover_folders(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_json_with_checksum(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"b": [1, 0.1], "a": None})
    assert read_json(path) == {"b": [1, 0.1], "a": None}
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.raises(RunError, match="checksum"):
        read_json(path)
    with pytest.raises(RunError, match="missing"):
        read_json(tmp_path / "y.json")


@pytest.mark.parametrize("text", ["[1]", "{}", '{"checksum": 1}', "1", "", '"checksum"'])
def test_a_foreign_manifest_is_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest.json: (damaged|changed)"):
        RunDir.read(tmp_path)


def test_a_manifest_without_or_with_an_unknown_configuration_is_one_line(tmp_path):
    wrong = {"kind": "grpo", "config": {"train": {"stepz": 1}}}
    for config, says in (
        ({}, "no config"),
        ({"kind": "x", "config": {}}, "no config"),
        (wrong, "option 'train.stepz'"),
    ):
        write_json(tmp_path / "manifest.json", config)
        with pytest.raises(RunError, match=says):
            RunDir.read(tmp_path)


def test_metrics_that_are_no_file_or_have_no_step_are_one_line(tmp_path):
    with RunDir.create(tmp_path / "run", manifest()) as made:
        path = made.path / "metrics.jsonl"
    path.write_text("{}\n")
    for says in ("line 1: has no step", "Is a directory"):
        for use in (lambda: RunDir.open(path.parent), lambda: RunDir.read(path.parent).metrics()):
            with pytest.raises(RunError, match=says):
                use()
        path.unlink() if path.is_file() else None
        path.mkdir(exist_ok=True)
