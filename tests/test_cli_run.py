"""Whole runs from the shell: a tiny model is trained, stopped, resumed, replayed, compared; bad input is one line."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import tiny
from transformers import AutoModelForCausalLM

from tinyllm.commands.cli import main

SIZES = "--prompts-per-step 4 --group-size 4 --max-new-tokens 6 --steps 4 --eval.every 2 --checkpoint-every 2 --lr 0.01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, rows, and a reward to train on."""
    folder = tmp_path_factory.mktemp("cli")
    tiny.save(tiny.llama(), folder / "model")
    tiny.write_rows(folder / "rows.jsonl", 20)
    (folder / "judge.py").write_text(
        "def digits(completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]\n"
        "def one(completions, **columns):\n"
        "    return [1.0]\n"
    )
    return folder


def words(folder: Path, out: str, *more: str) -> list[str]:
    line = ["grpo", "--model", "model", "--data", "rows.jsonl", "--reward", "judge:digits", *SIZES.split()]
    return [*line, "--out", out, *more]


def start(folder: Path, *line: str, **streams) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent), "COLUMNS": "100"}
    return subprocess.Popen([sys.executable, "-m", "tinyllm.commands.cli", *line], cwd=folder, env=env, **streams)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


@pytest.fixture
def here(folder, monkeypatch):
    """Commands run in this process, in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def first(here, capfd):
    """The finished run that the others are held against."""
    if not (here / "first").exists():
        assert main(words(here, "first")) == 0
        out, err = capfd.readouterr()
        assert err == ""
        (here / "first.txt").write_text(out)
    return here / "first"


def test_a_run_ends_with_the_paths_of_its_results(here, first):
    out = (here / "first.txt").read_text()
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[-4:] if line.startswith(("run", "plot", "model"))] == [
        "first",
        "first/report.png",
        "first/model",
    ]
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == 4
    assert "sampler = trainer 100%" in out and "held-out reward before" in out
    assert (first / "report.png").stat().st_size > 10_000
    AutoModelForCausalLM.from_pretrained(first / "model")


def test_the_same_command_gives_the_same_run(here, first, capfd):
    assert main(words(here, "second")) == 0
    capfd.readouterr()
    assert main(["diff", "first", "second"]) == 0
    assert "4 steps, rollouts and metrics equal to the last bit\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_terminated_run_says_how_to_go_on_and_ends_the_same(here, first, capfd):
    with start(here, *words(here, "stopped"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(here / "stopped" / "rollouts" / "000001.parquet", process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert err.startswith("stopped: after step ") and "go on with: tinyllm grpo --resume stopped" in err
    assert err.count("\n") == 1
    assert main(["grpo", "--resume", "stopped"]) == 0
    capfd.readouterr()
    assert main(["diff", "first", "stopped"]) == 0, capfd.readouterr().out


@pytest.mark.slow
def test_control_c_in_a_terminal(here, first, capfd):
    """A pseudo-terminal: control sequences draw the bar; Ctrl-C is typed, and the run goes on to the same end."""
    leader, follower = pty.openpty()
    process = start(
        here,
        *words(here, "live"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # the pseudo-terminal is its terminal
    os.close(follower)
    wait_for(here / "live" / "rollouts" / "000001.parquet", process)
    os.write(leader, b"\x03")
    seen = b""
    with contextlib.suppress(OSError):  # the other side has closed
        while data := os.read(leader, 4096):
            seen += data
    os.close(leader)
    with process:
        assert process.wait(60) == 130
    text = seen.decode(errors="replace")  # Ctrl-C empties the queue of the terminal, in the middle of a character
    assert "\x1b[" in text and "/4" in text and "sampled in step" in text
    assert "go on with: tinyllm grpo --resume live" in text
    assert main(["grpo", "--resume", "live"]) == 0
    capfd.readouterr()
    assert main(["diff", "first", "live"]) == 0, capfd.readouterr().out


def test_replay_from_the_shell(here, first, capfd):
    assert main(["replay", "first", "--sample"]) == 0
    assert capfd.readouterr().out == "4 steps, every hash equal, sampled again too\n"
    assert main(["replay", "first", "--steps", "3", "--objective", "dr_grpo"]) == 0
    assert "1 steps computed on the recorded rollouts" in capfd.readouterr().out
    assert main(["replay", "first", "--steps", "x:y"]) == 2


# Bad input


def bad(name: str, *rows: object) -> object:
    """A data file with these rows, as an edit of the folder."""
    return lambda folder: (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


MISTAKES = {
    "unknown model": (["--model", "no/such-folder/here"], None, ["no/such-folder/here"]),
    "missing file": (["--data", "absent.jsonl"], None, ["absent.jsonl"]),
    "empty data": (["--data", "empty.jsonl"], bad("empty.jsonl"), ["empty.jsonl"]),
    "a row without a prompt": (
        ["--data", "bare.jsonl"],
        bad("bare.jsonl", {"prompt": "1+1=", "answer": "2"}, {"answer": "3"}),
        ["bare.jsonl", "2", "prompt"],
    ),
    "group size 1": (["--group-size", "1"], None, ["sampling.group_size = 1"]),
    "a prompt longer than the limit": (["--max-prompt-tokens", "3"], None, ["max_prompt_tokens", "3"]),
    "a batch the budget cannot hold": (["--tokens-per-microbatch", "8"], None, ["train.tokens_per_microbatch = 8"]),
    "negative clip": (["--clip-low", "-0.2"], None, ["objective.clip_low = -0.2"]),
    "data smaller than a batch": (["--prompts-per-step", "64"], None, ["64", "prompts_per_step"]),
    "an unwritable folder": (["--out", "rows.jsonl/run"], None, ["rows.jsonl/run", "folder you can write to"]),
    "the wrong number of rewards": (
        ["--reward", "judge:one"],
        None,
        ["one", "returned 1 rewards for", "return one each"],
    ),
    "no such reward function": (["--reward", "judge:absent"], None, ["judge", "absent"]),
    "top-k": (["--top-k", "5"], None, ["sampling.top_k", "is gone", "sampling.temperature"]),
    "a folder that holds something": (["--out", "model"], None, ["model", "--run.dir"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input_is_one_line(here, name, capfd):
    more, prepare, parts = MISTAKES[name]
    if prepare is not None:
        prepare(here)
    assert main(words(here, "bad-" + name.replace(" ", "-"), *more)) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err
