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


@pytest.mark.parametrize("name", ["plain", "lora"])
def test_an_old_run_is_replayed(copied, name):
    result = replay(name)
    assert len(result.steps) == 3 and result.divergence is None
    assert not [what for what, *_ in result.conditions if what.startswith("config.")]


def test_an_old_run_goes_on_to_the_same_end(copied):
    """As if it had been stopped after step 2 was saved and step 3 recorded.

    Verifiers have changed since, which ends a run for good; that they judge alike is what the replay shows.
    """
    manifest = read_json(copied / "plain" / "manifest.json")
    manifest["hashes"] |= {
        name.removeprefix("hashes."): now for name, _, now in replay("plain").conditions if "hashes" in name
    }
    write_json(copied / "plain" / "manifest.json", manifest)
    shutil.rmtree(copied / "plain" / "checkpoints" / "000003")
    shutil.rmtree(copied / "plain" / "model")
    lines = (copied / "plain" / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"step": 3' not in line and '"step":3' not in line]
    (copied / "plain" / "metrics.jsonl").write_text("".join(kept))
    assert len(kept) < len(lines)
    runs.resume("plain")
    whole = metrics(RECORDED / "plain")
    assert [row["hashes"] for row in metrics(copied / "plain")] == [row["hashes"] for row in whole]
    found = compare_runs(RunDir.read(RECORDED / "plain"), RunDir.read(copied / "plain"))
    assert found.equal and not [what for what, *_ in found.conditions if what.startswith("config.")]
