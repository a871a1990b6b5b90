"""A run that was killed, anywhere, ends as if it had not been: weights, rollouts and metrics are the same to the byte."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import config, llama, metrics, rollouts, save, weights, write_rows

from tinyllm.callbacks import Callback, Interrupted, RunResult
from tinyllm.config.io import to_dict, to_toml
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import RunError
from tinyllm.post.run import resume, train
from tinyllm.record.rundir import RunDir

pytestmark = pytest.mark.usefixtures("no_picture")

ROOT = Path(__file__).parent.parent
COMMON = {
    "sampling": {"max_new_tokens": 4},
    "optimizer": {"name": "adamw", "lr": 1e-2, "schedule": "cosine", "warmup_steps": 3},
    "train": {"steps": 6},
    "eval": {"every": 2},
    "run": {"checkpoint_every": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "updates": {"train": {"updates_per_batch": 2}, "model": {"dtype": "bfloat16"}},
    "dynamic": {"train": {"dynamic_sampling": True}, "stop": {"refills": 8}, "reward": "digits_after_odd_numbers"},
    "kl": {"objective": {"beta": 0.3}},
    "lora": {"lora": {"rank": 2}, "objective": {"beta": 0.3}, "optimizer": {"lr": 0.1}},
    # Three steps are an epoch, and every other step has nothing to learn from.
    "epoch": {"train": {"prompts_per_step": 3}, "run": {"checkpoint_every": 3}, "reward": "digits_in_odd_steps"},
}


@pytest.fixture(scope="module")
def crasher():
    """crasher(job) -> the exit code of the child that did it; minus the signal's number where one ended it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "crasher.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin and process.stdout
    assert json.loads(process.stdout.readline()) == "ready"

    def run(job: dict[str, Any]) -> int:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


class Runs:
    """Runs of one variant: whole ones, and ones that are ended early."""

    def __init__(self, home: Path, variant: str, crasher) -> None:
        options = dict(VARIANTS[variant])
        self.reward = options.pop("reward", "many_digits")
        merged = {name: {**COMMON.get(name, {}), **options.get(name, {})} for name in {**COMMON, **options}}
        self.home, self.variant, self.options, self.crasher = home, variant, merged, crasher
        # Of its own: a fixture of this file may be made twice in one process, for tests that another one left behind
        self.folder = Path(tempfile.mkdtemp(prefix=f"{variant}-", dir=home))
        self.path = self.folder / "run"
        self.points: list[str] = []

    def config(self, path: Path) -> GRPOConfig:
        return config(self.home / "model", self.home / "rows.jsonl", path, **self.options)

    def start(self, path: Path, due: dict[int, str]) -> int:
        job = {"config": to_dict(self.config(path)), "reward": self.reward, "due": due}
        return self.crasher({**job, "points": str(self.folder / "points.json")})

    def whole(self) -> Path:
        """The uninterrupted run; `points` are those it passed."""
        if not self.points:
            assert self.start(self.path, {}) == 0
            self.points = json.loads((self.folder / "points.json").read_text())
        return self.path

    def killed_at(self, point: int) -> Path:
        path = self.folder / f"run-{point}"
        assert self.start(path, {point: "KILL"}) == -signal.SIGKILL
        return path

    def go_on(self, path: Path) -> RunResult:
        """Resumes; a run killed before it had a manifest is started again in its folder."""
        reward = getattr(tiny, self.reward)
        if (path / "manifest.json").exists():
            return resume(path, reward=reward)
        return train(self.config(path), reward=reward)


@pytest.fixture(scope="module")
def runs(home, crasher):
    """runs(variant) -> Runs, one per variant."""
    made: dict[str, Runs] = {}
    return lambda variant: made.setdefault(variant, Runs(home, variant, crasher))


def assert_same(path: Path, whole: Path) -> None:
    """Two run directories hold the same run: record, metrics, model and last checkpoint."""
    assert (path / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert rollouts(path) == rollouts(whole)
    for name in ("model", "best"):
        assert (path / name).exists() == (whole / name).exists()
        if (whole / name).exists():
            a, b = weights(path / name), weights(whole / name)
            assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a), name
    (step, tensors, state), (last, expected, wanted) = (RunDir.read(p).load_checkpoint() for p in (path, whole))
    assert (step, state) == (last, wanted)
    for part in expected:
        assert tensors[part].keys() == expected[part].keys()
        assert all(torch.equal(tensors[part][n], expected[part][n]) for n in expected[part]), part
    assert not list(path.rglob("*.tmp")) and not list(path.rglob("*.old"))


def middle(points: list[str], name: str) -> int:
    places = [i for i, point in enumerate(points) if point == name]
    return places[len(places) // 2]


@pytest.mark.parametrize("doing", ["sample", "verify", "rollouts", "update", "checkpoints"])
def test_killed_while(runs, doing):
    plain = runs("plain")
    whole = plain.whole()
    path = plain.killed_at(middle(plain.points, doing))
    before = metrics(path)
    assert 0 < len(before) < 6
    plain.go_on(path)
    assert_same(path, whole)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
@pytest.mark.slow
def test_killed_in_a_run_with(runs, variant):
    """Cases J2, J5, J6, J9, H6: between the updates of a batch, after refills, with a KL, over the end of an epoch."""
    these = runs(variant)
    whole = these.whole()
    updates = [i for i, point in enumerate(these.points) if point == "update"]
    path = these.killed_at(updates[len(updates) * 2 // 3])
    these.go_on(path)
    assert_same(path, whole)
    assert len(metrics(whole)) == these.config(path).train.steps


def test_stopped_exactly_at_the_end_of_an_epoch(runs):
    """Case J2: three steps of an epoch are recorded, nothing of step 4 is; the resumed run ends as the whole one."""
    epoch = runs("epoch")
    whole = epoch.whole()
    done = [i for i, point in enumerate(epoch.points) if point == "checkpoints"]
    sampled = next(i for i in range(len(epoch.points) // 2, len(epoch.points)) if epoch.points[i] == "sample")
    assert done[0] < sampled
    path = epoch.killed_at(sampled)
    started = []

    class Watch(Callback):
        def on_start(self, info):
            started.append(info.first_step)

    steps, saved = len(metrics(path)), RunDir.read(path).checkpoints.steps()
    resume(path, reward=tiny.digits_in_odd_steps, callbacks=[Watch()])
    assert steps == 3
    assert saved in ([3], [])  # the disk may not have had the whole checkpoint yet: then all comes from the record
    assert started == [4 if saved else 1]
    assert_same(path, whole)
    ids = [g.prompt.id for step in range(1, 7) for g in RunDir.read(path).read_groups(step)]
    assert len(ids) == 18 and len(set(ids[:9])) == len(set(ids[9:])) == 9, "every prompt once in each epoch"


def pytest_generate_tests(metafunc):
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", range(metafunc.config.getoption("kill_points")))


@pytest.mark.slow
def test_killed_at_any_point(runs, kill):
    """Points drawn evenly from the first write to the last; the variants take turns. `make crash` tries 200."""
    these = runs(list(VARIANTS)[kill % len(VARIANTS)])
    whole = these.whole()
    path = these.killed_at(random.Random(kill).randrange(len(these.points)))
    these.go_on(path)
    assert_same(path, whole)
    shutil.rmtree(path)


@pytest.mark.slow
def test_killed_again_and_again(runs, crasher):
    """Ten deaths in one run, each while the run before goes on."""
    plain = runs("plain")
    whole = plain.whole()
    path = plain.killed_at(len(plain.points) // 12)
    for _ in range(9):
        output = path.parent / "again.txt"
        code = crasher(
            {
                "command": ["grpo", "--resume", str(path)],
                "due": {len(plain.points) // 12: "KILL"},
                "output": str(output),
            }
        )
        assert code in (-signal.SIGKILL, 0), output.read_text()
    plain.go_on(path)
    assert_same(path, whole)


# From the record


def test_recorded_steps_are_trained_from_the_record(runs, tmp_path):
    """Without its checkpoints a finished run trains again from what it recorded: nothing is sampled or judged anew."""
    plain = runs("plain")
    path = shutil.copytree(plain.whole(), tmp_path / "run-copy")
    shutil.rmtree(path / "checkpoints")
    judged = []

    def reward(completions, **_):
        judged.append(len(completions))
        return tiny.many_digits(completions)

    reward.__module__, reward.__qualname__, reward.__name__ = "light_rewards", "many_digits", "many_digits"
    resume(path, reward=reward)
    assert_same(path, plain.path)
    assert judged == [3] * 4, "the evaluations of steps 0, 2, 4 and 6"


def test_a_step_that_does_not_repeat_is_refused(runs, tmp_path):
    plain = runs("plain")
    path = shutil.copytree(plain.whole(), tmp_path / "run-copy")
    shutil.rmtree(path / "checkpoints")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 3)
    row = json.loads(lines[place])
    row["hashes"]["gradient"] = "0" * 32
    lines[place] = json.dumps(row, sort_keys=True, ensure_ascii=False)
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match="step 3 does not repeat: hashes"):
        resume(path, reward=tiny.many_digits)


@pytest.mark.parametrize(("count", "damage"), [(1, "flip"), (2, "truncate")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(runs, tmp_path, caplog, count, damage):
    """Case J7; with all of them damaged the run goes on from its start and its record."""
    plain = runs("plain")
    path = shutil.copytree(plain.whole(), tmp_path / "run-copy")
    kept = sorted((path / "checkpoints").iterdir())
    assert [p.name for p in kept] == ["000004", "000006"]
    for folder in kept[-count:]:
        file = folder / "weights.safetensors"
        data = bytearray(file.read_bytes())
        file.write_bytes(data[:-1] if damage == "truncate" else bytes([*data[:-1], data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, "tinyllm"):
        resume(path, reward=tiny.many_digits)
    said = [r.getMessage() for r in caplog.records if "passed over" in r.getMessage()]
    assert len(said) == count and "checkpoint of step 6" in said[0] and "weights.safetensors" in said[0]
    assert_same(path, plain.path)


def test_a_finished_run_is_left_as_it_is(runs, tmp_path):
    plain = runs("plain")
    path = shutil.copytree(plain.whole(), tmp_path / "run-copy")
    for _ in range(2):
        result = resume(path, reward=tiny.many_digits)
        assert result.after["step"] == 6 and result.model_dir == path / "model"
        assert_same(path, plain.path)


def test_another_start_is_refused(tmp_path):
    """The run goes on with the model, data and reward it was started with, or not at all."""
    save(llama(), tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl")
    train(config(tmp_path / "model", rows, tmp_path / "run", train={"steps": 1}), reward=tiny.many_digits)

    def refused(what, reward=tiny.many_digits):
        with pytest.raises(RunError, match=f"the {what} changed since the run was started"):
            resume(tmp_path / "run", reward=reward)

    refused("verifier", lambda completions, **_: tiny.many_digits(completions))
    write_rows(rows, count=13)
    refused("data")
    write_rows(rows)
    save(llama(1), tmp_path / "model")
    refused("weights")
    save(llama(), tmp_path / "model")
    assert resume(tmp_path / "run", reward=tiny.many_digits).after["step"] == 1


def test_another_reward_file_is_refused(tmp_path):
    """A reward given as file.py:function is hashed by its file: one changed character is another verifier."""
    save(llama(), tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl")
    source = "def score(completions, **_):\n    return [len(c) / {} for c in completions]\n"
    (tmp_path / "mine.py").write_text(source.format(10))
    reward = {"functions": (f"{tmp_path / 'mine.py'}:score",)}
    train(config(tmp_path / "model", rows, tmp_path / "run", train={"steps": 1}, reward=reward))
    (tmp_path / "mine.py").write_text(source.format(11))
    with pytest.raises(RunError, match="the verifier changed since the run was started"):
        resume(tmp_path / "run")
    (tmp_path / "mine.py").write_text(source.format(10))
    assert resume(tmp_path / "run").after["step"] == 1


# Signals


@pytest.mark.parametrize("look", range(4))
def test_a_run_that_stops_has_saved_the_step_it_names(runs, tmp_path, monkeypatch, look):
    """Whenever between two looks of the loop the signal comes: what Interrupted names is on disk, and can go on."""
    looks = iter(range(100))

    @contextlib.contextmanager
    def stop_signals(_):
        yield lambda: next(looks) >= look

    with monkeypatch.context() as patched:
        patched.setattr("tinyllm.post.run._stop_signals", stop_signals)
        with pytest.raises(Interrupted) as stopped:
            train(runs("plain").config(tmp_path / "run"), reward=tiny.many_digits)
    assert RunDir.read(tmp_path / "run").load_checkpoint()[0] == stopped.value.step
    resume(tmp_path / "run", reward=tiny.many_digits)
    assert_same(tmp_path / "run", runs("plain").whole())


@pytest.fixture
def command(runs, tmp_path, crasher):
    """command(words, due) -> (exit code, what was printed): the command line in a child, with a reward of its own."""
    (tmp_path / "digits.py").write_text(
        "def share(completions, **_):\n"
        "    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]\n"
    )
    plain = runs("plain")
    chosen = plain.config(tmp_path / "run-cli")
    toml = to_toml(chosen).replace("functions = []", f'functions = ["{tmp_path / "digits.py"}:share"]')
    (tmp_path / "run.toml").write_text(toml)

    def run(words: list[str], due: dict[int, str]) -> tuple[int, str]:
        output = tmp_path / "output.txt"
        code = crasher({"command": words, "due": due, "output": str(output)})
        return code, output.read_text()

    run.toml, run.path = tmp_path / "run.toml", tmp_path / "run-cli"
    return run


@pytest.mark.parametrize("name", ["INT", "TERM"])
@pytest.mark.slow
def test_a_signal_saves_and_says_how_to_go_on(command, runs, name):
    """The step is finished, all is saved, the exit code is 130, and the command that is printed goes on."""
    whole = runs("plain").whole()
    code, said = command(["grpo", "--config", str(command.toml)], {len(runs("plain").points) // 2: name})
    assert code == 130, said
    done = len(metrics(command.path))
    assert 1 <= done < 6 and RunDir.read(command.path).load_checkpoint()[0] == done
    assert f"tinyllm grpo --resume {command.path}" in said
    code, said = command(["grpo", "--resume", str(command.path)], {})
    assert code == 0, said
    assert_same_training(command.path, whole)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(command, runs):
    whole = runs("plain").whole()
    point = middle(runs("plain").points, "sample")
    code, said = command(["grpo", "--config", str(command.toml)], {point: "INT", point + 1: "INT"})
    assert code == 130, said
    assert f"tinyllm grpo --resume {command.path}" in said and "Traceback" not in said
    code, said = command(["grpo", "--resume", str(command.path)], {})
    assert code == 0, said
    assert_same_training(command.path, whole)


def assert_same_training(path: Path, whole: Path) -> None:
    """The same numbers under another name of the reward."""
    a, b = metrics(path), metrics(whole)
    assert [r["hashes"]["weights"] for r in a] == [r["hashes"]["weights"] for r in b]
    a, b = weights(path / "model"), weights(whole / "model")
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_lost_line_of_metrics_is_named_and_the_record_gives_it_back(train, no_picture):
    run = train("run", train={"steps": 3}, run={"checkpoint_every": 1}, eval={"every": 1}).run_dir
    whole = (run / "metrics.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    for left in ([], lines[:1] + lines[3:]):
        (run / "metrics.jsonl").write_text("".join(left))
        with pytest.raises(RunError, match="the line of step 1 is missing"):
            resume(run, reward=tiny.many_digits)
    (run / "metrics.jsonl").unlink()
    shutil.move(run / "checkpoints", run / "aside")  # the remedy it names
    resume(run, reward=tiny.many_digits)
    assert (run / "metrics.jsonl").read_text() == whole


def test_a_lost_folder_of_rollouts_is_one_line(train, no_picture):
    run = train("run").run_dir
    shutil.rmtree(run / "rollouts")
    with pytest.raises(RunError, match="rollouts: missing"):
        resume(run, reward=tiny.many_digits)
