"""The command: what it prints, how it fails, with which exit code. Training itself is a stand-in here."""

import os
import re
import subprocess
import sys
import types
from dataclasses import replace

import pytest
from rich.console import Console
from run_samples import CONFIG, make_groups, manifest

from tinyllm.callbacks import Callback, Interrupted, RunInfo, RunResult
from tinyllm.commands.cli import COMMANDS, main, out_of_memory
from tinyllm.config.options import options
from tinyllm.config.sections import CONFIGS, GRPOConfig
from tinyllm.config.words import own_options
from tinyllm.errors import ConfigError, TrainingStopped
from tinyllm.pool.source import doing
from tinyllm.record.rundir import RunDir
from tinyllm.records import Step, Verdict
from tinyllm.view.progress import (
    LiveProgress,
    PlainProgress,
    accuracy,
    clip,
    duration,
    sample_line,
    samples,
    score_name,
    sparkline,
)
from tinyllm.view.trackers import Tracker, numbers_of

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*words: str, **options) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "tinyllm.commands.cli", *words]
    return subprocess.run(line, capture_output=True, text=True, env=ONE_THREAD, **options)


# Help


def test_help_is_short_and_names_every_command():
    result = command("--help")
    assert result.returncode == 0 and result.stderr == ""
    assert all(f"  {name}" in result.stdout for name in COMMANDS)
    assert len(result.stdout.splitlines()) < 38
    assert command().stdout == result.stdout


@pytest.mark.parametrize("kind", CONFIGS)
def test_help_of_training_tells_every_option_with_its_default(kind, capsys):
    assert main([kind, "--help"]) == 0
    out = capsys.readouterr().out
    for name, option in options(CONFIGS[kind]).items():
        section, _, leaf = name.rpartition(".")
        assert leaf in out and section in out
        assert option.help.split()[0] in out
    assert "smollm2-135m-instruct" in out and "auto|bfloat16|float32" in out
    assert max(map(len, out.splitlines())) <= 130


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    command = COMMANDS[name]
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert " ".join(out.split()).startswith(command.about) and f"example: {command.example}" in out
    assert f"\n  tinyllm {name}" in out and max(map(len, out.splitlines())) <= 100
    for option in own_options(command.own).values():
        assert option.name in out and 5 < len(option.help) < 101


def test_help_and_mistakes_do_not_wait_for_torch():
    quick = ((["--help"], 0), (["grpo", "--help"], 0), (["grpo", "--group_size", "1"], 2), (["runs", "/proc/self"], 2))
    quick += ((["eval", "--help"], 0), (["eval", "x", "--samples", "0"], 2), (["plan", "--gpus", "0"], 2))
    code = "import sys, tinyllm.commands.cli as c\n"
    code += f"for words, n in {quick}: assert (c.main(words), 'torch' in sys.modules) == (n, False), words"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grop"], "unknown command 'grop'; did you mean `tinyllm grpo`?"),
        (["grpo", "--sampling.grup_size", "4"], "did you mean 'sampling.group_size'?"),
        (["grpo", "--group_size", "1"], "sampling.group_size = 1: must be at least 2; set it to 8, the default"),
        (["grpo", "--clip_high", "-1"], "objective.clip_high = -1.0: must be at least 0"),
        (["grpo", "--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory; give a TOML file"),
        (["grpo", "--config"], "--config needs a value (FILE.toml)"),
        (["grpo", "--resume", "x", "--steps", "3"], "leave out the other options"),
        (["grpo", "--resume", ""], '--resume = "": must not be empty; give a value or leave it out'),
        (["grpo", "--config="], '--config = "": must not be empty'),
        (["show", "a", "b"], "unexpected 'b'"),
        (["show", "a", "--stepp", "3"], "tinyllm show: unknown option '--stepp'; did you mean '--step'?"),
        (["show", "a", "--step", "x"], "--step x: expected whole number"),
        (["replay", "nowhere", "--steps", "²:3"], "--steps ²:3: write the first and the last step"),
        (["show", "nowhere"], "nowhere: no run here"),
        (["show"], "tinyllm show: RUN is missing (see: tinyllm show --help)"),
        (["diff", "a"], "tinyllm diff: SECOND is missing"),
        (["runs", "/proc/self"], "/proc/self: no runs here; start one with: tinyllm grpo"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_mistake_from_the_shell_has_no_traceback():
    result = command("grpo", "--lr", "fast")
    assert result.returncode == 2
    assert result.stderr == 'error: optimizer.lr = "fast": expected number\n'


# Training, with a stand-in for the trainer


class Trainer(types.ModuleType):
    """Stands in for tinyllm.post.run: calls back like a run of two steps, or fails as told."""

    def __init__(self, path, failure: BaseException | None = None):
        super().__init__("tinyllm.post.run")
        self.path, self.failure, self.config, self.callbacks = path, failure, None, None

    def train(self, config: GRPOConfig, *, callbacks: list[Callback]) -> RunResult:
        self.config, self.callbacks = config, callbacks
        path = self.path
        result = RunResult(path, evaluation(0, 23), evaluation(2, 138), path / "model")
        for callback in callbacks:
            play(callback, self.path, config)
            if self.failure is not None:
                raise self.failure
            callback.on_end(result)
        return result

    def resume(self, path: str, *, engine: dict, callbacks: list[Callback]) -> RunResult:
        self.resumed, self.engine = path, engine
        return self.train(CONFIG, callbacks=callbacks)


FACTS = {"parameters": 134_515_008, "dtype": "float32", "device": "cpu", "train_prompts": 519, "held_out_prompts": 162}


def evaluation(step: int, correct: int) -> dict:
    return {"kind": "eval", "step": step, "correct": correct, "prompts": 162}


def play(callback: Callback, path, config: GRPOConfig, steps: int = 2) -> None:
    callback.on_phase("loading the model")
    callback.on_start(RunInfo(path, config, 1, FACTS))
    callback.on_eval(evaluation(0, 23))
    for step in range(1, steps + 1):
        callback.on_phase("sampling")
        metrics = {"step": step, "reward_mean": step / 2, "accuracy": step / 2, "kl": None, "sampler_equal": 1.0}
        callback.on_step(metrics, {"step_s": 2.0, "sampled_tokens": 3000}, make_groups(step))
    callback.on_eval(evaluation(steps, 138))


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    fake = Trainer(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "tinyllm.post.run", fake)

    def draw(self: Callback, result: RunResult | None) -> None:
        if result is not None:
            result.run_dir.mkdir(exist_ok=True)
            (result.run_dir / "report.png").touch()

    monkeypatch.setattr("tinyllm.view.plot.PlotAtEnd.on_end", draw)
    return fake


def test_grpo_passes_the_configuration_and_ends_with_the_summary(trainer, tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[train]\nsteps = 2\nprompts_per_step = 4\n")
    assert main(["grpo", "--config", str(tmp_path / "run.toml"), "--prompts-per-step", "8"]) == 0
    assert (trainer.config.train.steps, trainer.config.train.prompts_per_step) == (2, 8)
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["starting", "loading the model"]
    assert out[2:5] == [
        "smollm2-135m-instruct on arithmetic, grpo with beta 0, seed 0",
        "134.5M parameters trained in float32 on cpu; 519 prompts to train on, 162 held out",
        f"run directory {tmp_path / 'run'}",
    ]
    assert out[5] == "step 0  held-out accuracy 0.14 [0.10, 0.20]  (23 of 162 prompts)"
    assert out[6].startswith("step 1/2  reward 0.50  sampler = trainer 100%  1,500 tokens/s  2.0 s  0:0")
    assert out[-5:] == [
        "held-out accuracy before  0.14 [0.10, 0.20]",
        "held-out accuracy after   0.85 [0.79, 0.90]   (162 prompts, 95% intervals)",
        f"run    {tmp_path / 'run'}",
        f"plot   {tmp_path / 'run' / 'report.png'}",
        f"model  {tmp_path / 'run' / 'model'}",
    ]


def test_resume_goes_on_with_a_run(trainer, capsys):
    assert main(["grpo", "--resume", "runs/nothing"]) == 2
    assert "runs/nothing: no run here" in capsys.readouterr().err
    RunDir.create(trainer.path, manifest()).close()
    assert main(["grpo", "--resume", str(trainer.path)]) == 0
    assert (trainer.resumed, trainer.engine) == (str(trainer.path), {})
    assert main(["grpo", "--resume", str(trainer.path), "--engine.urls", "http://b:1"]) == 0
    assert trainer.engine == {"urls": ("http://b:1",)}, "servers that moved"


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (TrainingStopped("three non-finite steps in a row"), 1, "error: three non-finite steps in a row"),
        (ConfigError("data.file = x: empty"), 2, "error: data.file = x: empty"),
        (Interrupted("runs/x", 7, "grpo"), 130, "stopped: after step 7; go on with: tinyllm grpo --resume runs/x"),
        (KeyboardInterrupt(), 130, "stopped: interrupted"),
        (MemoryError(), 1, "error: out of memory; lower sampling.max_batch or train.tokens_per_microbatch"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
            1,
            "error: out of memory; lower sampling.max_batch or train.tokens_per_microbatch",
        ),
        (OSError(28, "No space left on device", "x/y"), 1, "error: x/y: No space left on device; free some room"),
    ],
)
def test_a_run_that_fails(trainer, failure, code, line, capsys):
    trainer.failure = failure
    trainer.path = trainer.path.parent
    assert main(["grpo", "--steps", "2"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_a_failed_allocation_is_told_from_other_faults():
    import torch

    def outcome(allocate):
        try:
            allocate()
        except (RuntimeError, MemoryError) as error:
            return out_of_memory(error)

    assert outcome(lambda: torch.empty(1 << 50))
    assert not outcome(lambda: torch.empty(2) @ torch.empty(3))


def test_a_fault_of_ours_keeps_its_traceback(trainer):
    trainer.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["grpo"])


def test_trackers_that_are_missing_are_named(trainer, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["grpo", "--trackers", "wandb"]) == 2
    assert "run.trackers = wandb needs wandb; pip install 'tinyllm[track]'" in capsys.readouterr().err


def test_a_tracker_gets_the_numbers(monkeypatch, tmp_path):
    sent = []
    run = types.SimpleNamespace(log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("end"))
    module = types.ModuleType("trackio")
    module.init = lambda **given: sent.append(given["name"]) or run
    monkeypatch.setitem(sys.modules, "trackio", module)
    tracker = Tracker("trackio")
    play(tracker, tmp_path / "run", CONFIG, steps=1)
    tracker.on_end(None)
    assert sent[0] == "run" and sent[-1] == "end"
    assert sent[1] == (0, {"eval/correct": 23.0, "eval/prompts": 162.0, "eval/accuracy": 23 / 162})
    assert sent[2][1]["train/reward_mean"] == 0.5 and sent[2][1]["timing/step_s"] == 2.0
    assert numbers_of("train", {"step": 1, "hash": "ab", "kl": None, "flag": True}) == {}


# The display


def test_live_display_in_a_terminal(tmp_path):
    """What a terminal shows after two steps; at the end the terminal is given back."""
    console = Console(force_terminal=True, width=100, height=30)
    live = LiveProgress(console)
    config = replace(CONFIG, train=replace(CONFIG.train, steps=4))
    try:
        play(live, tmp_path / "run", config)
        with console.capture() as captured:
            console.print(live.draw())
    finally:
        live.on_end(None)
    assert live.live is None
    live.on_end(None)  # a second time does no harm
    shown = captured.get()
    assert "step 2/4" in shown and "held-out" not in shown
    assert "sampled in step 2" in shown and "0 + 1 →" in shown


def test_workers_of_a_pool_have_lines_of_their_own(tmp_path):
    """A narrow terminal shows every worker's state whole, not folded into the corner beside the bar."""
    console = Console(force_terminal=True, width=80, height=30)
    live = LiveProgress(console)
    states = {"engine": ["3 running", "starting"], "verifier": ["1 running", "idle", "restarting", "idle"]}
    try:
        play(live, tmp_path / "run", replace(CONFIG, train=replace(CONFIG.train, steps=4)))
        live.on_phase(doing("7 of 16 there, 4 of later steps", states))
        with console.capture() as captured:
            console.print(live.draw())
    finally:
        live.on_end(None)
    shown = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()]
    assert "groups     7 of 16 there, 4 of later steps" in shown
    assert "engines    1: 3 running   2: starting" in shown
    assert "verifiers  1: 1 running   2: idle   3: restarting   4: idle" in shown
    (head,) = [line for line in shown if line.startswith("step 2/4")]
    assert head.endswith("sampling")


def test_plain_lines_without_a_terminal(tmp_path):
    console = Console(width=80, record=True, file=open(os.devnull, "w"))
    plain = PlainProgress(console)
    play(plain, tmp_path / "run", CONFIG)
    text = console.export_text()
    console.file.close()
    assert text.count("\nstep 1/40") == 1
    assert "\x1b" not in text


def test_a_reward_without_a_notion_of_correct():
    row = {"step": 3, "correct": None, "prompts": 9, "reward_mean": -0.25}
    assert (score_name(row), accuracy(row)) == ("held-out reward", "-0.25")
    assert accuracy({"correct": None, "prompts": 0, "reward_mean": None}) == "nothing scored"


def test_words_and_numbers():
    assert [duration(s) for s in (None, 0.4, 59.6, 3723)] == ["?", "0:00", "1:00", "1:02:03"]
    assert sparkline([0, 1, 2, 3], 3) == "▃▆█"
    assert sparkline([1, 1], 9) == "▁▁"
    assert clip("a\n\tb\x1b[31m" + "x" * 50, 10) == "a⏎ b [31m…"
    group = make_groups(prompts=1)[0]
    assert sample_line(group.prompt, group.rollouts[0], 60) == " 0.00  <s>0 + 1 → it is 0"
    assert sample_line(group.prompt, group.rollouts[1], 60) == "    –  <s>0 + 1 → (timed out)"


def test_samples_prefer_groups_that_tell_good_from_bad():
    mixed, flat = make_groups()
    flat = replace(flat, rollouts=tuple(replace(r, verdict=Verdict(1.0)) for r in flat.rollouts))
    shown = samples([flat, mixed], step=0)
    assert [prompt.id for prompt, _ in shown] == ["row-0", "row-0"]
    assert shown[0][1].reward > (shown[1][1].verdict.value or 0.0)
    assert len(samples([flat], step=5)) == 2 and samples([], step=1) == []


# Looking at runs


@pytest.fixture
def two_runs(tmp_path):
    for name, seed in (("one", 0), ("two", 1)):
        with RunDir.create(tmp_path / name, manifest(replace(CONFIG, seed=seed))) as run:
            run.log(evaluation(0, 23))
            for step in (1, 2):
                run.record(Step(step, make_groups(step + (seed if step == 2 else 0))))
                run.log({"step": step, "reward_mean": 0.5, "weights_hash": "ab"})
                run.log_timing({"step": step, "step_s": 61.5})
            run.log(evaluation(2, 138))
    return tmp_path


def test_runs_show_report_and_diff(two_runs, capsys):
    assert main(["runs", str(two_runs)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("run kind model data steps held out")
    assert out.count("grpo smollm2-135m-instruct arithmetic 2/40 accuracy 0.14 [0.10, 0.20] → 0.85 [0.79, 0.90]") == 2

    assert main(["show", str(two_runs / "two")]) == 0
    out = capsys.readouterr().out
    assert "  seed = 1" in out and "2 of 40, 2:03 in all" in out and "reward_mean            0.5" in out

    assert main(["show", str(two_runs / "one"), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "group row-0#0, sampled by revision 1:cdcdcdcdcdcd" in out and "it is 2" in out
    assert main(["show", str(two_runs / "one"), "--step", "9"]) == 2
    assert "no rollouts of step 9; there is: steps 1 to 2" in capsys.readouterr().err

    assert main(["diff", str(two_runs / "one"), str(two_runs / "one")]) == 0
    assert "equal to the last bit" in capsys.readouterr().out
    assert main(["diff", str(two_runs / "one"), str(two_runs / "two")]) == 1
    out = capsys.readouterr().out
    assert "config.seed: 0 | 1" in out and "first difference: step 2, hop sample, row 0" in out

    assert main(["report", str(two_runs / "one")]) == 0
    assert (two_runs / "one" / "report.png").stat().st_size > 10_000


def test_a_damaged_run_does_not_hide_the_others(two_runs, capsys):
    (two_runs / "one" / "manifest.json").write_text("{")
    assert main(["runs", str(two_runs)]) == 0
    out = capsys.readouterr().out
    assert "damaged" in out and "2/40" in out


def test_models_and_tasks(capsys):
    assert main(["models"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out
    assert main(["tasks"]) == 0
    assert "arithmetic" in capsys.readouterr().out


def test_output_into_a_closed_pipe_is_no_error():
    line = f"{sys.executable} -m tinyllm.commands.cli grpo --help | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_report_without_metrics_says_so(tmp_path, capsys):
    with RunDir.create(tmp_path / "run", manifest()):
        pass
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "metrics.jsonl is missing or empty, so there is nothing to draw" in capsys.readouterr().err
