"""The table of metrics: what real runs log is in it, what is in it is logged, and the documentation is generated from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from given_rows import dpo_config, sft_config
from tiny import many_digits, metrics

from tinyllm.post.run import train as train_run
from tinyllm.record.metrics import CHARTS, HOPS, METRICS, flat, held_out_score, markdown, metric, score_kind

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


def reward(completions, log_metric, **_):
    """One completion has no reward, so that a reason is logged, and a number."""
    log_metric("longest", max(map(len, completions)))
    return [None, *many_digits(completions)[1:]]


@pytest.fixture
def logged(home, train, tmp_path, no_picture):
    """logged(kind) -> the run directory of a run of this kind with held-out rows and everything that can be measured."""

    def run(kind: str) -> Path:
        options = {"eval": {"every": 1}, "train": {"steps": 2}}
        if kind == "grpo":
            return train("grpo", reward, objective={"beta": 0.1}, **options).run_dir
        rows = [{"prompt": f"{i}+{i % 3}=", "completion": str(i + i % 3)} for i in range(12)]
        if kind == "dpo":
            rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": f"{i}x{i}"} for i in range(12)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        make = {"sft": sft_config, "dpo": dpo_config}[kind]
        return train_run(make(home / "model", tmp_path / "rows.jsonl", tmp_path / kind, **options)).run_dir

    return run


@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo"])
def test_the_table_is_what_runs_log(logged, kind):
    folder = logged(kind)
    for line in ("train", "eval"):
        seen = {key for row in metrics(folder, line) for key in flat(row)}
        assert seen, line
        unknown = {key for key in seen if (row := metric(key, line)) is None or kind not in row.kinds}
        assert not unknown, f"not in METRICS: {unknown}"
        found = {row.key for key in seen if (row := metric(key, line)) is not None}
        expected = {row.key for row in METRICS if row.line == line and kind in row.kinds}
        only_sometimes = {"ranks", "reward_parts.*"}  # on several ranks; of rewards with parts
        assert expected - found <= only_sometimes, f"never logged: {expected - found}"


def test_every_name_in_the_table_stands_for_something():
    titles = [chart.title for chart in CHARTS]
    assert len(set(titles)) == len(titles)
    assert len({(row.line, row.key) for row in METRICS}) == len(METRICS)
    assert {row.chart for row in METRICS if row.chart} == set(titles), "a chart without a metric, or the reverse"
    assert {row.hop for row in METRICS} <= set(HOPS)
    for kind in ("grpo", "sft", "dpo"):
        assert sum(kind in chart.panel for chart in CHARTS) == 6, "report.png has room for six"
    assert all(row.text.endswith(".") for row in METRICS)
    assert metric("reward_parts.correct") is metric("reward_parts.format") is not None
    assert metric("kl", "eval") is not metric("kl") and metric("surprise") is None


def test_the_documentation_is_the_table():
    """Written anew by: python -m tinyllm.record.metrics > docs/metrics.md"""
    assert PAGE.read_text() == markdown()


def test_score_of_an_evaluation():
    accuracy, low, high = held_out_score({"correct": 138, "prompts": 162, "reward_mean": 0.7})
    assert (round(accuracy, 3), round(low, 3), round(high, 3)) == (0.852, 0.789, 0.898)
    assert held_out_score({"correct": None, "prompts": 9, "reward_mean": -0.5}) == (-0.5, -0.5, -0.5)
    assert held_out_score({"correct": None, "prompts": 0, "reward_mean": None}) is None
    loss = {"prompts": 9, "loss": 2.0, "loss_low": 1.5, "loss_high": 2.5}
    assert held_out_score(loss) == (2.0, 1.5, 2.5) and score_kind(loss) == "loss"
