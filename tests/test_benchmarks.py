"""The benchmarks run to the end on tiny models, and what they compute from their measurements is right. No time is judged."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
HAS_TRL = importlib.util.find_spec("trl") is not None
SCRIPTS = ("vs_trl", "learning", "scaling", "record_cost", "allocator", "losses", "serve", "engine", "async", "ranks")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tiny.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model, tmp_path) -> Path:
    """The main job, as small as it can be."""
    file = tmp_path / "job.toml"
    file.write_text(
        f'[model]\nname = "{model}"\n[data]\ntask = "arithmetic:held_out=150"\n[eval]\nprompts = 4\n'
        "[sampling]\ngroup_size = 2\nmax_new_tokens = 3\n[train]\nsteps = 2\nprompts_per_step = 2\nupdates_per_batch = 2\n"
    )
    return file


def script(name: str, *words: object) -> subprocess.CompletedProcess:
    """A benchmark in its own process, as a user starts it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=900)


def here(name: str, monkeypatch, *words: object) -> None:
    """A benchmark in this process (it has loaded the libraries already)."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
    module = importlib.import_module(name)
    module.command(module.main)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_is_measured(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        here(name, monkeypatch, "--help")
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "--out FILE" in out and f"python benchmarks/{name}.py --out" in out


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("vs_trl", ["--tables", "longer"], "--tables 'longer' is unknown; there are: short, long, kl"),
        ("vs_trl", ["--configurations", "fp16:8"], "TRL configuration 'fp16:8'; write kind:batch"),
        ("learning", ["--config", "none.toml"], "--config none.toml: no such file"),
        ("scaling", ["--group-sizes", "4,x"], "--group-sizes '4,x': write numbers with commas"),
        ("scaling", ["--max-tokens", "1"], "0 grid points cannot fix three coefficients"),
        ("record_cost", ["--steps", "3"], "--steps 3: give an even number"),
        ("serve", ["--concurrency", "1,x"], "--concurrency '1,x': write numbers from 1 to 1024 with commas"),
        ("async", ["--lags", "1,x"], "--lags '1,x': write numbers with commas"),
        ("serve", ["--rounds", "0"], "--rounds 0: give at least 1"),
        ("ranks", ["--ranks", "1"], "--ranks 1 --steps 10: give at least 2 ranks and 1 step"),
        ("engine", ["--sides", "engine,vlm"], "--sides: there is no 'vlm'; choose from engine,served,transformers"),
    ],
)
def test_a_wrong_option_is_one_line(name, words, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        here(name, monkeypatch, *words)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.slow
def test_against_trl(model, tmp_path):
    out = tmp_path / "vs.json"
    words = ["--model", model, "--tables", "short", "--configurations", "fp32:64", "--repetitions", 1, "--out", out]
    done = script("vs_trl", *words)
    if not HAS_TRL:
        assert done.returncode == 2 and "install the extra" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    for heading in ("TRL fp32:64 (its best) and tinyllm in turn", "Budget of tinyllm's step"):
        assert heading in done.stdout
    short = json.loads(out.read_text())["tables"]["short"]
    pair = short["against"]["fp32:64"]
    assert pair["sampler_equal"] == 1.0
    assert pair["ratio"] == pytest.approx(pair["trl_s"][0] / pair["tinyllm_s"][0])
    assert sum(part["median"] for part in short["budget_s"].values()) == pytest.approx(short["step_s"]["median"])
    assert short["step_s"]["median"] == pytest.approx(pair["tinyllm_s"][0])
    assert short["times_floor"] == pytest.approx(short["step_s"]["median"] / short["floor_total_s"])


@pytest.mark.slow
def test_learning(job, tmp_path):
    out = tmp_path / "learning.json"
    trl = ["--trl-batch", 4] if HAS_TRL else ["--no-trl"]
    done = script("learning", "--config", job, "--seeds", 3, "--every", 1, *trl, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "steps to 80%" in done.stdout and "peak memory in GiB" in done.stdout
    runs = json.loads(out.read_text())["runs"]
    assert [(run["side"], run["seed"]) for run in runs] == [("tinyllm", 3), ("trl", 0)][: 1 + HAS_TRL]
    for run in runs:
        assert [e["step"] for e in run["evaluations"]] == [0, 1, 2]
        assert all(e["prompts"] == 4 for e in run["evaluations"])
        assert run["peak_memory_gib"] > 0.1 and run["seconds"] >= run["evaluations"][-1]["seconds"]
    # The same weights, prompts and verifier: both sides see the same accuracy before training.
    assert len({run["before"] for run in runs}) == 1


def test_every_part_of_a_step_is_seen(tmp_path, monkeypatch):
    scaling, common, side_module = (importlib.import_module(name) for name in ("scaling", "common", "tinyllm_side"))
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=scaling.VOCABULARY, num_hidden_layers=1, **sizes)).eval()
    timer = common.PartTimer()
    with scaling._side(model, scaling.Point(1, 2, 2, 4), tmp_path / "run") as side, side.timed(timer):
        side.step()
    assert set(timer.take()) == set(side_module.PARTS) - {"reference", "rest"}


def test_scaling(tmp_path, monkeypatch, capsys):
    out = tmp_path / "scaling.json"
    sizes = ["--group-sizes", "2,3", "--completion-lengths", "2,4", "--prompt-lengths", "4,70", "--max-tokens", 8]
    here(
        "scaling", monkeypatch, "--hidden", 64, "--layers", 1, "--prompts", 1, *sizes, "--repetitions", 1, "--out", out
    )
    assert "worst deviation" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [(p["group"], p["completion"]) for p in result["points"][::2]] == [
        (2, 2),
        (2, 4),
        (3, 2),
    ]  # 3 x 4 is too many
    assert set(result["coefficients"]) == {"a", "b", "c"}


@pytest.mark.slow
def test_ranks(model, tmp_path):
    out = tmp_path / "ranks.json"
    done = script("ranks", "--model", model, "--steps", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    sgd, adamw, bf16 = json.loads(out.read_text())["differences"]
    assert max(sgd.values()) < 1e-6 and max(adamw.values()) < 1e-4 and max(bf16.values()) < 0.1


def test_scaling_finds_the_coefficients_it_was_given(capsys):
    from scaling import Point, report

    points = [Point(8, g, c, p) for g in (4, 16) for c in (32, 128) for p in (64, 256)]
    true = (2e-4, 3e-3, 5e-7)
    result: dict = {}
    report(points, [[sum(k * x for k, x in zip(true, p.terms, strict=True))] for p in points], result)
    assert [result["coefficients"][k] for k in "abc"] == pytest.approx(true)
    assert result["worst_deviation"] < 1e-9 and "0.0% (target: at most 25%: met)" in capsys.readouterr().out


@pytest.mark.slow
def test_record_cost(job, tmp_path, monkeypatch, capsys):
    out = tmp_path / "cost.json"
    here("record_cost", monkeypatch, "--config", job, "--steps", 2, "--out", out)
    assert "recording and hashing:" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert len(result["steps"]) == 4 and result["interval"] == 20
    assert all(0 < s["record"] < s["step"] and 0 <= s["hash"] < s["step"] for s in result["steps"])
    assert 0 < result["recording_share"] < 1


@pytest.mark.slow
def test_serve(tmp_path):
    out = tmp_path / "serve.json"
    sizes = ["--streams", 12, "--batch", 4, "--prompt-tokens", 5, "--tokens", 4, "--concurrency", "1,3", "--rounds", 1]
    done = script("serve", "--tiny", "--dtype", "float32", *sizes, "--threads", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "answers that are not the engine's, token for token: 0" in done.stdout
    result = json.loads(out.read_text())
    assert set(result["throughput"]["tokens_per_s"]) == {"engine", "served, not streamed", "served, streamed"}
    assert [line["concurrency"] for line in result["latency"]] == [1, 3]
    assert all(0 < line["first_s"][0] <= line["first_s"][1] for line in result["latency"])


def test_parts_count_their_own_time_only(monkeypatch):
    import common

    clock = iter(range(100))
    monkeypatch.setattr(common.time, "perf_counter", lambda: float(next(clock)))

    class Work:
        def outer(self):
            return self.inner() + self.elsewhere()

        def inner(self):
            return 1

        @staticmethod
        def elsewhere():
            return 2

    timer = common.PartTimer()
    places = [(Work, "outer", "a", ()), (Work, "inner", "b", ("a",)), (Work, "elsewhere", "c", ("b",))]
    with timer.wrapping(*places):
        assert Work().outer() == 3
        Work().inner()  # counts inside "a" only
    assert timer.take() == {"a": 2.0, "b": 1.0}
    assert Work().outer() == 3 and timer.take() == {}


def test_floor_by_hand():
    from tinyllm_side import floor_flops, parameter_counts

    from tinyllm.engine.policy import Policy

    policy = Policy(tiny.llama())
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32  # q, k and v of 2 of 4 heads, o
    layer = attention + 3 * 32 * 48 + 2 * 32  # gate, up, down; two norms
    trunk, head = 2 * layer + 32, tiny.VOCABULARY * 32
    assert parameter_counts(policy) == (trunk, head)
    groups = [tiny.group("p", [0.0, 1.0], ids=[(5, 6, 0), (7, 0)])]
    flops = floor_flops(policy, groups, prompt_tokens=3, reference=False)
    assert sum(flops.values()) == (2 + 6) * (trunk * (3 + 5) + head * 5)
    more = floor_flops(policy, groups, prompt_tokens=3, reference=True)
    assert sum(more.values()) - sum(flops.values()) == 2 * (trunk * (3 + 5) + head * 5)


def test_gemm_rate_keeps_the_best(monkeypatch):
    import common

    rate = common.GemmRate(torch.float32, size=8)
    clock = iter([0.0, 2.0, 0.0, 1.0, 0.0, 4.0])
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    rate.measure(3)
    assert rate.best == 2 * 8**3 / 1.0


def test_the_coverage_table_has_every_design(monkeypatch, capsys):
    """Six designs and two for comparison over eight accuracies, six designs of differences over four gains."""
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--draws", "3"])
    importlib.import_module("coverage_of_intervals").main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line]
    assert [len(row) for row in rows] == [9] * 10 + [5] * 8
    assert all(0 <= float(cell) <= 100 for row in (*rows[2:10], *rows[12:]) for cell in row[1:])


@pytest.mark.slow
def test_engine(tmp_path):
    out = tmp_path / "engine.json"
    sizes = ("--batch", 4, "--group", 2, "--prompt-tokens", 5, "--tokens", 4, "--rounds", 2)
    sides = ("engine", "served", "transformers")
    done = script(
        "engine", "--tiny", "--dtype", "float32", "--sides", ",".join(sides), *sizes, "--threads", 1, "--out", out
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(out.read_text())["tokens_per_s"]
    assert set(rates) == set(sides) and all(rate["count"] == 2 and rate["min"] > 0 for rate in rates.values())


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_async(job, tmp_path):
    out = tmp_path / "async.json"
    pool = ["--engines", 1, "--verifiers", 1, "--lags", 1, "--verify-s", 0.01]
    done = script("async", "--config", job, *pool, "--steps", 2, "--rounds", 1, "--threads", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "seconds a step" in done.stdout and "engine idle" in done.stdout
    result = json.loads(out.read_text())
    assert set(result["step_s"]) == {"without a pool", "pool, lag 1"}
    assert all(side["count"] == 2 and side["min"] > 0 for side in result["step_s"].values())
    assert result["times_as_fast"]["without a pool"] == 1 and set(result["idle"]["pool, lag 1"]) == {
        "trainer",
        "engine",
        "verifier",
    }
