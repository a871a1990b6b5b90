"""Runs recorded by an earlier version, with options that are no more, are replayed and resumed to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny import metrics

from tinyllm.post import run as runs
from tinyllm.post.replay import replay
from tinyllm.record.diff import compare_runs
from tinyllm.record.files import read_json, write_json
from tinyllm.record.rundir import RunDir

RECORDED = Path(__file__).parent / "data" / "recorded"


@pytest.fixture
def copied(tmp_path, monkeypatch, no_picture):
    """A folder with the runs, their model and their rows, and this process in it."""
    folder = tmp_path / "recorded"
    shutil.copytree(RECORDED, folder)
    monkeypatch.chdir(folder)
    return folder


def same_bits(conditions) -> bool:
    """Whether bits are promised to be those of the record: one kind of machine, one set of versions."""
    return not [what for what, *_ in conditions if what.partition(".")[0] in ("machine", "versions", "probe")]


@pytest.mark.parametrize(("name", "steps"), [("plain", 3), ("lora", 3), ("pooled", 4)])
def test_an_old_run_is_replayed(copied, name, steps):
    """pooled has a lag of 1, and completions during which the weights changed."""
    result = replay(name, tolerance=1e-4)
    assert len(result.steps) == steps and result.divergence is None
    assert not [what for what, *_ in result.conditions if what.startswith("config.")]
    if same_bits(result.conditions):
        assert replay(name, sample=True).divergence is None


def test_an_old_run_goes_on_to_the_same_end(copied):
    """As if it had been stopped after step 2 was saved and step 3 recorded.

    Verifiers have changed since, which ends a run for good; that they judge alike is what the replay shows.
    """
    manifest = read_json(copied / "plain" / "manifest.json")
    conditions = replay("plain", tolerance=1e-4).conditions
    manifest["hashes"] |= {name.removeprefix("hashes."): now for name, _, now in conditions if "hashes" in name}
    write_json(copied / "plain" / "manifest.json", manifest)
    shutil.rmtree(copied / "plain" / "checkpoints" / "000003")
    shutil.rmtree(copied / "plain" / "model")
    lines = (copied / "plain" / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"step": 3' not in line and '"step":3' not in line]
    (copied / "plain" / "metrics.jsonl").write_text("".join(kept))
    assert len(kept) < len(lines)
    runs.resume("plain")
    whole = metrics(RECORDED / "plain")
    assert [row["loss"] for row in metrics(copied / "plain")] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
    if not same_bits(conditions):
        return
    assert [row["hashes"] for row in metrics(copied / "plain")] == [row["hashes"] for row in whole]
    found = compare_runs(RunDir.read(RECORDED / "plain"), RunDir.read(copied / "plain"))
    assert found.equal and not [what for what, *_ in found.conditions if what.startswith("config.")]
