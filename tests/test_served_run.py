"""Training through a real `tinyllm serve` process: the same completions and the same weights as embedded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny

from tinyllm.callbacks import Callback
from tinyllm.errors import EngineError, RunError, TrainingStopped
from tinyllm.post import run as runs
from tinyllm.post.replay import replay
from tinyllm.record.rundir import RunDir

pytest.importorskip("tinyllm.serve.app", reason="there is no tinyllm serve", exc_type=ImportError)
pytest.importorskip("uvicorn")

KEY = "sesame"


@contextmanager
def served(model: Path):
    """(process, url); the process is ended, however the test ends."""
    words = [sys.executable, "-m", "tinyllm", "serve", str(model), "--port", "0", "--model-name", "tiny"]
    words += ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--admin-key", KEY]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), line + process.stderr.read()
        yield process, line.split()[-1].removesuffix("/v1")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=180)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The url of one for all that do not end it; each run begins by giving it its weights."""
    with served(tiny.save(tiny.llama(), tmp_path_factory.mktemp("server") / "model")) as (_, url):
        yield url


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYLLM_ADMIN_KEY", KEY)
    model = tiny.save(tiny.llama(), tmp_path / "model")
    return tmp_path, model, tiny.write_rows(tmp_path / "rows.jsonl")


def run(here, name, url=None, steps=3, **options):
    folder, model, rows = here
    engine = {"urls": (url,), "deadline_s": 60.0, **options.pop("engine", {})} if url else {}
    sections = {name: options.pop(name) for name in ("pool", "sampling") if name in options}
    train = {"steps": steps, "prompts_per_step": 4}
    config = tiny.config(model, rows, folder / name, train=train, engine=engine, **sections)
    return runs.train(config, reward=tiny.many_digits, **options)


def sampled(result, steps):
    """Everything of every completion, by step."""
    return [[r.completion for g in tiny.groups_of(result, step) for r in g.rollouts] for step in steps]


class At(Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, metrics, timing, groups):
        if metrics["step"] == self.step:
            self.action()


def test_a_run_through_a_server_is_the_embedded_run_bit_for_bit(here, server):
    embedded = run(here, "embedded")
    through = run(here, "served", server)
    assert sampled(through, (1, 2, 3)) == sampled(embedded, (1, 2, 3)), "ids, log-probabilities, text, revision"
    assert tiny.equal(tiny.weights(through.model_dir), tiny.weights(embedded.model_dir))
    assert [row["hashes"] for row in tiny.metrics(through.run_dir)] == [
        row["hashes"] for row in tiny.metrics(embedded.run_dir)
    ]
    rows = tiny.metrics(through.run_dir)
    assert all(
        (r["sampler_equal"], r["sampler_gap"], r["sampler_gap_max"], r["sampler_kl"]) == (1, 0, 0, 0) for r in rows
    )
    text = (through.run_dir / "manifest.json").read_text()
    assert '"server": "tinyllm"' in text and '"logprobs": "after temperature"' in text and KEY not in text
    assert replay(through.run_dir, sample=True).divergence is None, "without the server"


def test_runs_of_one_name_share_a_folder_for_weights_and_leave_each_others(here, server):
    shared = here[0] / "shared"
    for name in ("a/run", "b/run"):
        run(here, name, server, steps=1, engine={"folder": str(shared)})
    own = [sorted(path.name.partition("-")[0] for path in folder.iterdir()) for folder in shared.iterdir()]
    assert own == [["v0", "v1"]] * 2


@pytest.mark.slow
def test_a_run_ahead_on_a_server_is_replayed_to_the_bit(here, server):
    """The server takes updates while it samples; no pool process is needed. Without a lag it is the embedded run."""
    embedded = run(here, "embedded")
    level = run(here, "level", server, pool={"max_lag": 0}, engine={"max_concurrent": 4})
    long = {"steps": 5, "sampling": {"max_new_tokens": 40}}
    ahead = run(here, "ahead", server, pool={"max_lag": 2}, engine={"max_concurrent": 4}, **long)
    assert sampled(level, (1, 2, 3)) == sampled(embedded, (1, 2, 3))
    lags = [(row["lag_max"], row["step"]) for row in tiny.metrics(ahead.run_dir)]
    assert max(lags)[0] in (1, 2) and all(lag <= 2 for lag, _ in lags)
    assert replay(ahead.run_dir, sample=True).divergence is None
    assert len(RunDir.read(ahead.run_dir).ledger()) == 20


@pytest.mark.slow
def test_a_killed_server_stops_the_run_and_a_resumed_one_begins_with_an_update(here):
    whole = run(here, "embedded")
    with served(here[1]) as (process, url):
        with pytest.raises(EngineError, match="no server is left to sample on") as caught:
            run(here, "served", url, callbacks=[At(1, lambda: os.kill(process.pid, signal.SIGKILL))])
        assert url in str(caught.value)
        process.wait(180)
    with served(here[1]) as (_, elsewhere):  # it holds the start weights again
        with pytest.raises(EngineError, match="no connection"):
            runs.resume(here[0] / "served", reward=tiny.many_digits)
        with pytest.raises(RunError, match="come from tinyllm, and --engine.urls is this process"):
            runs.resume(here[0] / "served", reward=tiny.many_digits, engine={"urls": ()})
        resumed = runs.resume(here[0] / "served", reward=tiny.many_digits, engine={"urls": (elsewhere,)})
    assert sampled(resumed, (1, 2, 3)) == sampled(whole, (1, 2, 3))
    assert [c.revision.step for c in sampled(resumed, (2,))[0]] == [1] * 16
    assert tiny.equal(tiny.weights(resumed.model_dir), tiny.weights(whole.model_dir))


@pytest.mark.slow
def test_without_the_admin_key_the_run_does_not_start(here, server, monkeypatch):
    monkeypatch.setenv("TINYLLM_ADMIN_KEY", "other")
    with pytest.raises(EngineError, match="--admin-key and set TINYLLM_ADMIN_KEY"):
        run(here, "served", server)


@pytest.mark.slow
def test_a_gap_past_the_bound_stops_the_run_before_the_update(here, server, monkeypatch):
    """The server's log-probabilities are moved on their way: the canary would see it, so it is switched off here."""
    from tinyllm.engine.remote import client

    true = client.require_sound

    def moved(*arguments):
        response = true(*arguments)
        response.logprobs[:] = [x - 0.3 for x in response.logprobs]
        return response

    monkeypatch.setattr(client, "require_sound", moved)
    with pytest.raises(TrainingStopped, match="differ by 0.3 nats per token .* more than engine.max_gap = 0.2"):
        run(here, "served", server)
    monkeypatch.undo()
    monkeypatch.setenv("TINYLLM_ADMIN_KEY", KEY)
    run(here, "fine", server, steps=1)
    assert tiny.metrics(here[0] / "served") == [], "no step was trained"
