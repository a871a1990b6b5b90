"""Every example runs as a user runs it: as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import metrics

from tinyllm.config.io import load_toml
from tinyllm.config.sections import GRPOConfig

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_at_most_sixty_lines(path):
    assert len(path.read_text().splitlines()) <= 60


def test_core():
    """By hand: group 7 has mean 2/3 and deviation sqrt(2)/3, so -1.4142, 0.7071, 0.7071; group 9 agrees.

    Ratios are exp(0.2), exp(0.3), exp(-0.3): 1.2214, 1.3499, 0.7408. Terms: min(-1.7273, -1.6971) = -1.7273 (no clip:
    the advantage is negative), min(0.9545, 0.8485) = 0.8485 (clipped), 0.5238. Loss -(-0.3550) / 5 = 0.0710.
    """
    advantages, loss, gradient = run(EXAMPLES / "core.py").splitlines()
    assert advantages == "advantages [-1.4142, 0.7071, 0.7071, 0.0, 0.0]"
    assert loss.startswith("loss 0.071 ")
    assert json.loads(gradient.removeprefix("gradient ")) == [0.3455, 0.0, -0.1048, 0.0, 0.0]


@pytest.mark.slow
def test_own_reward_then_inspect_run(home, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    output = run(EXAMPLES / "own_reward.py", 2, home / "model")
    (path,) = tmp_path.glob("*/run")
    assert f"model in {path / 'model'}" in output
    assert len(metrics(path)) == 2
    seen = run(EXAMPLES / "inspect_run.py", path)
    assert seen.startswith("16 rollouts of 2 steps\n")


def test_the_main_job_departs_from_the_defaults_where_it_says_so():
    default = GRPOConfig()
    assert load_toml(EXAMPLES / "arithmetic.toml") == replace(
        default,
        sampling=replace(default.sampling, max_new_tokens=20, temperature=0.8),
        objective=replace(default.objective, preset="grpo", beta=0.0),
        optimizer=replace(default.optimizer, lr=2e-5),
        train=replace(default.train, steps=18, updates_per_batch=2),
        eval=replace(default.eval, every=9),
    )


@pytest.mark.slow
def test_the_main_job_on_the_bundled_model(tmp_path):
    """One small step of the real thing: sampler and trainer agree bit for bit, and what is saved loads elsewhere."""
    path = tmp_path / "run"
    small = {"train.steps": 1, "train.prompts_per_step": 4, "eval.prompts": 4, "seed": 1}  # two groups with signal
    command = ["grpo", "--config", EXAMPLES / "arithmetic.toml", "--run.dir", path]
    output = run("-m", "tinyllm", *command, *(x for name, value in small.items() for x in (f"--{name}", value)))
    assert "held-out accuracy after" in output
    (row,) = metrics(path)
    assert row["updates"] == 2 and row["sampler_equal"] == 1.0
    assert [row["prompts"] for row in metrics(path, "eval")] == [4, 4]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert model.num_parameters() == 134_515_008
