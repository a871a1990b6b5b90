"""Fixtures for tests that train: a tiny model on disk, and whole runs of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--kill-points", type=int, default=25, help="points at which test_resume.py kills runs")


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A folder with a tiny model (model/) and twelve prompts (rows.jsonl), of which three are held out."""
    from tiny import llama, save, write_rows

    folder = tmp_path_factory.mktemp("tiny")
    save(llama(), folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


@functools.cache
def probed(dtype, device, threads):
    from tinyllm.engine.probe import probe

    return probe(dtype, device)


@pytest.fixture
def no_picture(monkeypatch) -> None:
    """Drawing report.png takes longer than training here, and has tests of its own; so does probing the machine."""
    import torch

    monkeypatch.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
    monkeypatch.setattr("tinyllm.post.learner.probe", lambda *given: probed(*given, torch.get_num_threads()))


@pytest.fixture
def train(home, tmp_path, no_picture):
    """train(name, reward, **options) -> the result of a run in a folder of that name."""
    from tiny import config, many_digits

    from tinyllm.post import run as runs

    def run(name="run", reward=many_digits, callbacks=(), model="model", **options):
        given = config(home / model, home / "rows.jsonl", tmp_path / name, **options)
        return runs.train(given, reward=reward, callbacks=callbacks)

    return run
