"""Runs with a pool on Ray: without a lag the run as it is, ahead of it within the bound, through deaths and hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import tiny
from pool_rewards import HangsOnce, SleepsForLong, logging_share, odd_share, share
from tiny import metrics, rollouts, weights

from tinyllm.callbacks import Callback
from tinyllm.config.io import to_toml
from tinyllm.errors import ConfigError
from tinyllm.health.checks import check
from tinyllm.health.history import History
from tinyllm.health.ledger import selection
from tinyllm.pool import source as pooled
from tinyllm.pool.ray_workers import RayCluster
from tinyllm.post import run as runs
from tinyllm.post.replay import replay
from tinyllm.post.source import PromptOrder
from tinyllm.record.rundir import RunDir

pytest.importorskip("ray", reason="pools need the extra `cluster`")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("no_picture")]

ROOT = Path(__file__).parent.parent
PATIENCE_S = 600.0
LONG = {"max_new_tokens": 40, "max_batch": 4}
"""One group at a time in each engine, for many steps: updates come while it is sampled."""


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of this file; every worker process is gone after each run."""
    cluster = RayCluster(None, 2, 1 << 20)
    yield cluster
    cluster.close()


@pytest.fixture
def pools(monkeypatch, ray):
    """The pools that runs of this test make, the newest last."""
    made = []
    init = pooled.Pool.__init__

    def kept(self, *arguments):
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(pooled.Pool, "__init__", kept)
    yield made
    for pool in made:
        for pid in pids(pool):
            assert gone(pid), f"worker {pid} is still there"


def pids(pool, kind=None):
    """Processes of a pool's workers that are known by now."""
    slots = [s for stage in pool.driver.stages for s in stage.slots if kind in (None, s.workers.name)]
    known = [s.worker._identity for s in slots if hasattr(s.worker, "_identity")]
    return [identity.result()[1] for identity in known if identity.done() and not identity.exception()]


def gone(pid):
    """Whether a process ends within the patience of this file."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def train(home, tmp_path):
    """train(name, reward, **options) -> the result of a run in a folder of that name."""

    def run(name, reward, callbacks=(), **options):
        config = tiny.config(home / "model", home / "rows.jsonl", tmp_path / name, **options)
        return runs.train(config, reward=reward, callbacks=callbacks)

    return run


class At(Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, metrics, timing, groups):
        if metrics["step"] == self.step:
            self.action()


def same_run(a, b):
    assert (a.run_dir / "metrics.jsonl").read_text() == (b.run_dir / "metrics.jsonl").read_text()
    assert rollouts(a.run_dir) == rollouts(b.run_dir)
    assert tiny.equal(weights(a.model_dir), weights(b.model_dir))


def completions(run_dir):
    run = RunDir.read(run_dir)
    return [(step, r.completion) for step in run.steps() for g in run.read_groups(step) for r in g.rollouts]


# Without a lag


@pytest.mark.parametrize("kind", ["plain", "dynamic", "lora"])
def test_without_a_lag_it_is_the_run_without_a_pool_bit_for_bit(train, pools, kind):
    """Case M7: metrics, record, what reward functions logged, weights."""
    reward = odd_share if kind == "dynamic" else logging_share
    options = {
        "plain": {"eval": {"every": 2}, "model": {"dtype": "bfloat16"}, "train": {"steps": 4}},
        "dynamic": {"train": {"steps": 3, "dynamic_sampling": True}, "stop": {"refills": 8}},
        "lora": {"lora": {"rank": 2}, "objective": {"beta": 0.1}},
    }[kind]
    workers = {"engines": 2, "verifiers": 1} if kind == "plain" else {"engines": 1}
    alone = train("alone", reward, **options)
    with_pool = train("pool", reward, pool=workers, **options)
    same_run(alone, with_pool)
    rows = metrics(with_pool.run_dir)
    assert all((row["lag_mean"], row["lag_max"]) == (0.0, 0) for row in rows)
    lines = RunDir.read(with_pool.run_dir).ledger()
    drawn = [(step, g.id) for step in RunDir.read(with_pool.run_dir).steps() for g in tiny.groups_of(with_pool, step)]
    assert sorted((line["step"], line["group"]) for line in lines) == sorted(drawn)
    assert {line["revision"] for line in lines if line["step"] == 2} == {1}
    assert all(line["dropped"] == 0 and line["tokens_mean"] > 0 for line in lines)
    timing = RunDir.read(with_pool.run_dir).timings()
    assert all(0 <= row[name] <= 1 for row in timing for name in ("trainer_idle", "engine_idle", "verifier_idle"))


# Ahead


@pytest.fixture(scope="module")
def ahead(ray, tmp_path_factory):
    """A finished run with a lag of 2."""
    folder = tmp_path_factory.mktemp("ahead")
    tiny.save(tiny.llama(), folder / "model")
    tiny.write_rows(folder / "rows.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
        patch.setattr("tinyllm.pool.driver.BUDGET_S", 0.0)  # a token a call: updates come in between
        return runs.train(lag_config(folder, folder / "run"))


def lag_config(folder, out, **options):
    given = {
        "pool": {"engines": 1, "max_lag": 2},
        "train": {"steps": 6},
        "sampling": LONG,
        "run": {"checkpoint_every": 2},
    }
    given["reward"] = {"functions": ("pool_rewards:share",)}
    given = {name: {**given.get(name, {}), **options.get(name, {})} for name in {**given, **options}}
    return tiny.config(folder / "model", folder / "rows.jsonl", out, **given)


def test_a_run_ahead_says_which_weights_drew_each_token(ahead):
    """Cases M2, M3: the lag is that of the oldest token, and within the bound."""
    found = completions(ahead.run_dir)
    assert any(c.spans for _, c in found), "an update came while a completion was sampled"
    for step, c in found:
        assert [s.start for s in c.all_spans] == [0, *(s.end for s in c.all_spans[:-1])]
        assert c.all_spans[-1].end == len(c.token_ids) and c.all_spans[0].revision == c.revision
        assert [s.revision.step for s in c.all_spans] == sorted({s.revision.step for s in c.all_spans})
        assert all(0 <= step - 1 - s.revision.step <= 2 for s in c.all_spans)
    known = {row["step"]: row["hashes"]["weights"] for row in metrics(ahead.run_dir)}
    assert all(known[s.revision.step] == s.revision.hash for _, c in found for s in c.all_spans if s.revision.step)
    for row in metrics(ahead.run_dir):
        lags = [row["step"] - 1 - s.revision.step for step, c in found if step == row["step"] for s in c.all_spans]
        assert row["lag_max"] == max(lags) and 0 <= row["lag_mean"] <= row["lag_max"]
    assert max(row["lag_max"] for row in metrics(ahead.run_dir)) in (1, 2)


def test_every_step_trains_the_prompts_of_its_place_in_the_order(ahead):
    """Asynchrony changes when groups are sampled, never which."""
    run = RunDir.read(ahead.run_dir)
    trained = [[g.prompt.id for g in run.read_groups(step)] for step in run.steps()]
    assert trained == in_order(run, len(trained))


def in_order(run, steps):
    """The prompts of each step, as the order has them."""
    from tinyllm import tasks
    from tinyllm.model import models

    data = tasks.load(run.config, models.load_tokenizer(run.config.model.name))
    order = PromptOrder(data.train, run.config.seed)
    return [[p.id for p in order.take(run.config.train.prompts_per_step, {})] for _ in range(steps)]


def test_a_run_ahead_is_replayed_to_the_bit(ahead):
    result = replay(ahead.run_dir)
    assert (result.steps, result.divergence) == ((1, 2, 3, 4, 5, 6), None)


def test_completions_across_updates_are_drawn_again(ahead):
    assert replay(ahead.run_dir, sample=True).divergence is None
    assert replay(ahead.run_dir, sample=True, steps=(5, 6)).divergence is None, "from a checkpoint before the lag"


def test_old_log_probabilities_of_older_tokens_are_the_recorded_ones(ahead):
    """So the ratio is measured against the policy that drew the token, and is not 1."""
    rows = metrics(ahead.run_dir)
    first, rest = rows[0], rows[1:]
    assert (first["ratio_max"], first["sampler_equal"]) == (1.0, 1.0)
    assert any(row["ratio_max"] != 1.0 for row in rest)
    assert all(row["sampler_equal"] in (None, 1.0) and row["sampler_gap"] in (None, 0.0) for row in rest)


# Killed, and resumed


def start(config, folder, mark, commands=()):
    """The command line in a process of its own, with a Ray of its own; every process of it carries the mark."""
    (folder / "run.toml").write_text(to_toml(config))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TINYLLM_TEST_MARK": mark}
    environment.pop("RAY_ADDRESS", None)
    words = [sys.executable, "-m", "tinyllm", "grpo", "--config", str(folder / "run.toml"), *commands]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TINYLLM_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def assert_none_left(mark):
    end = time.monotonic() + PATIENCE_S
    while left := marked(mark):
        assert time.monotonic() < end, [" ".join(p.cmdline())[:80] for p in left]
        time.sleep(0.5)


def until_step(run_dir, step, process):
    """Until a step is logged."""
    end = time.monotonic() + PATIENCE_S
    path = run_dir / "metrics.jsonl"
    while not (path.exists() and sum('"kind"' not in line for line in path.read_text().splitlines()) >= step):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_killed_run_goes_on_and_loses_no_prompt(home, tmp_path, pools, dynamic):
    """Cases J3, M1: SIGKILL with groups in flight; none of its processes outlives it."""
    options = {"train": {"steps": 6, "dynamic_sampling": dynamic}, "stop": {"refills": 20}}
    if dynamic:
        options["reward"] = {"functions": ("pool_rewards:odd_share",)}
    config = lag_config(home, tmp_path / "run", **options)
    process = start(config, tmp_path, mark := uuid.uuid4().hex)
    try:
        until_step(tmp_path / "run", 3, process)
    finally:
        process.kill()
        process.communicate()
    assert_none_left(mark)
    before = rollouts(tmp_path / "run")
    result = runs.resume(tmp_path / "run")
    run = RunDir.read(result.run_dir)
    assert [row["step"] for row in metrics(result.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert {name: rollouts(result.run_dir)[name] for name in list(before)[:3]} == dict(list(before.items())[:3])
    groups = [[g.prompt.id for g in run.read_groups(step)] for step in run.steps()]
    drawn = [name for step in groups for name in step]
    if dynamic:  # refills of a step come after the prompts of the steps that were let in before them
        epoch = [name for step in in_order(run, 3) for name in step][:9]
        whole = len(drawn) // 9
        assert all(drawn.count(name) in (whole, whole + 1) for name in epoch) and set(drawn) <= set(epoch)
    else:
        assert groups == in_order(run, 6)
    for step, c in completions(result.run_dir):
        assert all(0 <= step - 1 - s.revision.step <= 2 for s in c.all_spans if c.token_ids)
    assert replay(result.run_dir, sample=True).divergence is None


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_that_is_asked_to_stop_leaves_no_process(home, tmp_path, step):
    """SIGTERM with groups sampled ahead: the step that runs is trained, what is ahead is dropped."""
    mark = uuid.uuid4().hex
    pool = {"engines": 1, "verifiers": 1, "max_lag": 2}
    process = start(lag_config(home, tmp_path / "run", pool=pool, train={"steps": 500}), tmp_path, mark)
    try:
        until_step(tmp_path / "run", step, process)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130 and "tinyllm grpo --resume" in said and "Traceback" not in said, said
    assert "(raylet)" not in said, said
    assert_none_left(mark)
    assert RunDir.read(tmp_path / "run").load_checkpoint()[0] >= step


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_run_with_a_long_lag_ends_by_itself(home, tmp_path, pools, steps):
    """Case M6: fewer steps than may be let in."""
    result = runs.train(lag_config(home, tmp_path / "run", pool={"max_lag": 5}, train={"steps": steps}))
    assert [row["step"] for row in metrics(result.run_dir)] == list(range(1, steps + 1))
    assert all(c.revision.step == 0 for step, c in completions(result.run_dir) if step == 1)


# Faults


def test_a_reward_that_cannot_be_copied_is_refused_before_anything_runs(train, pools, tmp_path):
    lock = threading.Lock()

    def locked(completions, **_):
        with lock:
            return share(completions)

    with pytest.raises(ConfigError, match="cannot be sent to another process.*leave out pool.verifiers"):
        train("run", locked, pool={"engines": 1, "verifiers": 1})
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("kind", ["engine", "verifier"])
def test_a_killed_worker_is_replaced_and_the_run_is_the_same(train, pools, kind, caplog, monkeypatch):
    monkeypatch.setattr(pooled, "GROUP_ATTEMPTS", 10)
    workers = {"engines": 1, "verifiers": 1}
    whole = train("whole", share, sampling=LONG)

    def kill():
        for pid in pids(pools[-1], kind):
            os.kill(pid, signal.SIGKILL)

    result = train("killed", share, callbacks=[At(1, kill)], pool=workers, sampling=LONG)
    same_run(whole, result)
    assert f"{kind} 1 is replaced" in caplog.text


def test_a_stopped_engine_is_replaced_and_the_run_is_the_same(train, pools, caplog, monkeypatch):
    whole = train("whole", share, sampling=LONG)

    def stop():
        for pid in pids(pools[-1], "engine"):
            os.kill(pid, signal.SIGSTOP)

    monkeypatch.setattr(pooled, "GROUP_ATTEMPTS", 20)
    options = {"pool": {"engines": 1}, "engine": {"deadline_s": 30.0}}
    result = train("stopped", share, callbacks=[At(1, stop)], sampling=LONG, **options)
    same_run(whole, result)
    assert "nothing came of it within 30 s" in caplog.text


def test_a_verifier_that_hangs_is_replaced(train, pools, tmp_path, monkeypatch):
    reward = HangsOnce(tmp_path / "mark")
    monkeypatch.setattr(pooled, "GROUP_ATTEMPTS", 20)
    options = {"pool": {"engines": 1, "verifiers": 1}, "engine": {"deadline_s": 30.0}}
    result = train("hung", reward, train={"steps": 2}, **options)
    assert (tmp_path / "mark").exists()
    assert [row["unscored"] for row in metrics(result.run_dir)] == [0, 0]
    assert max(line["faults"] for line in RunDir.read(result.run_dir).ledger()) >= 1


def test_the_ledger_tells_of_long_work_that_was_dropped(train, pools, caplog, monkeypatch):
    """Case M4: a deadline that ends long work makes training lean towards short answers, and the run says so."""
    monkeypatch.setattr(pooled, "GROUP_ATTEMPTS", 1)
    options = {"pool": {"engines": 1, "verifiers": 2}, "engine": {"deadline_s": 20.0}}
    result = train("dropped", SleepsForLong(20), **options, sampling={"max_new_tokens": 40}, train={"steps": 2})
    run = RunDir.read(result.run_dir)
    found = selection(run.ledger(), 2)
    assert found.requested == 32 and 0 < found.dropped < 32 and found.trained == 32 - found.dropped
    assert any(w.startswith("dropped groups were longer") and "leans towards short" in w for w in found.warnings)
    assert any("slower" in w for w in found.warnings) and "nothing came of it within 20 s" in found.warnings[0]
    longest = [q for q in found.quartiles if q.axis == "length"][-1]
    assert longest.dropped > 0
    assert "training leans towards short completions" in caplog.text
    assert any(f.level == "problem" and "towards short completions" in f.text for f in check(History.of(run)))
    assert json.loads((result.run_dir / "ledger.jsonl").read_text().splitlines()[0])["engine"] == "engine 1"
