"""The display of a run: live in a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tinyllm.callbacks import Callback, RunInfo, RunResult
from tinyllm.config.sections import Config, GRPOConfig
from tinyllm.record.metrics import METRICS, held_out_score, score_kind
from tinyllm.records import Group, Prompt, Rollout

SPARKS = "▁▂▃▄▅▆▇█"
LAST_STEPS = 10
"""Steps over which the time that is left is estimated."""


def show_progress(console: Console | None = None) -> Callback:
    """The display that suits the output: live in a terminal, one line per step otherwise."""
    console = console or Console(file=sys.stdout, highlight=False)
    return LiveProgress(console) if console.is_terminal and not console.is_dumb_terminal else PlainProgress(console)


class PlainProgress(Callback):
    """One line per event; the base of the live display."""

    def __init__(self, console: Console):
        self.console = console
        self.info: RunInfo | None = None
        self.phase = ""
        self.steps_done = 0
        self.last = time.monotonic()
        self.seconds: deque[float] = deque(maxlen=LAST_STEPS)

    def say(self, line: str) -> None:
        """Print a line as it is, whatever its length."""
        self.console.print(line, soft_wrap=True, markup=False)

    def on_phase(self, phase: str) -> None:
        if self.info is None:
            self.say(phase)

    def on_start(self, info: RunInfo) -> None:
        self.info, self.last = info, time.monotonic()
        self.steps_done = info.first_step - 1
        self.say(headline(info))

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.advance(metrics["step"])
        assert self.info is not None
        total = self.info.config.train.steps
        parts = [f"step {metrics['step']}/{total}", *numbers(metrics, timing), f"{timing.get('step_s', 0):.1f} s"]
        self.say("  ".join([*parts, f"{duration(self.time_left())} left"]))
        for prompt, rollout in samples(groups, metrics["step"]):
            self.say(f"    {sample_line(prompt, rollout, 100)}")

    def on_eval(self, row: Mapping[str, Any]) -> None:
        right = f"{row['correct']} of " if row.get("correct") is not None else ""
        rows = "rows" if score_kind(row) == "loss" else "prompts"
        self.say(f"step {row['step']}  {score_name(row)} {accuracy(row)}  ({right}{row['prompts']} {rows})")
        if not self.seconds:
            self.last = time.monotonic()  # the evaluation before training is no part of a step

    def on_end(self, result: RunResult | None) -> None:
        if result is not None:
            for line in summary(result):
                self.say(line)

    def advance(self, step: int) -> None:
        """Note the seconds since the step before, an evaluation between the two included."""
        now = time.monotonic()
        self.seconds.append(now - self.last)
        self.last, self.steps_done = now, step

    def time_left(self) -> float | None:
        """Seconds, from the last steps and the evaluations among them; None before the first step."""
        if not self.seconds or self.info is None:
            return None
        return (self.info.config.train.steps - self.steps_done) * sum(self.seconds) / len(self.seconds)


class LiveProgress(PlainProgress):
    """A few lines at the bottom of the terminal, drawn again as things change; evaluations scroll up above them."""

    def __init__(self, console: Console):
        super().__init__(console)
        self.live: Live | None = None
        self.started = time.monotonic()
        self.numbers: list[str] = []
        self.rewards: list[float] = []
        self.shown: list[tuple[Prompt, Rollout]] = []

    def on_phase(self, phase: str) -> None:
        self.phase = phase
        if self.live is None:
            self.live = Live(get_renderable=self.draw, console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def on_start(self, info: RunInfo) -> None:
        super().on_start(info)
        self.started = time.monotonic()
        if self.live is None:
            self.on_phase("starting")

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.advance(metrics["step"])
        assert self.info is not None
        self.numbers = numbers(metrics, timing)
        if metrics.get("reward_mean") is not None:
            self.rewards.append(metrics["reward_mean"])
        self.shown = samples(groups, metrics["step"])

    def on_end(self, result: RunResult | None) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
        super().on_end(result)

    def draw(self) -> Stack:
        """The whole display."""
        if self.info is None:
            return Stack(Text(f"{self.phase} …", style="dim"))
        total = self.info.config.train.steps
        phase, *workers = self.phase.splitlines()
        head = Table.grid(padding=(0, 2))
        elapsed = duration(time.monotonic() - self.started)
        left = f"{duration(self.time_left())} left" if self.seconds else ""
        head.add_row(
            Text(f"step {self.steps_done}/{total}", style="bold"),
            ProgressBar(total=max(total, 1), completed=self.steps_done, width=36, complete_style="green"),
            Text(f"{elapsed}  {left}"),
            Text(phase, style="dim"),
        )
        lines: list[Any] = [Text(""), head, *(Text(line, style="dim") for line in workers)]
        if self.numbers:
            lines.append(Text("  ".join(self.numbers), overflow="ellipsis", no_wrap=True))
        if self.rewards:
            lines.append(Text.assemble("reward ", (sparkline(self.rewards, 40), "cyan")))
        width = self.console.width - 2
        if self.shown:
            lines.append(Text(f"sampled in step {self.steps_done}, with rewards:", style="dim"))
        lines += [Text(sample_line(*pair, width), no_wrap=True, overflow="ellipsis") for pair in self.shown]
        return Stack(*lines)


class ReplayProgress(Callback):
    """A status line for replays and evaluations; shows nothing where the output is no terminal."""

    def __init__(self) -> None:
        console = Console(file=sys.stdout)
        self.status = console.status("") if console.is_terminal else None

    def on_phase(self, phase: str) -> None:
        if self.status is not None:
            self.status.update(f"{phase} …")
            self.status.start()

    def on_replayed(self, done: int, total: int) -> None:
        """A step was replayed."""
        self.on_phase(f"step {done} of {total} replayed")

    def close(self) -> None:
        """Remove the status line."""
        if self.status is not None:
            self.status.stop()


# Words and numbers


def headline(info: RunInfo) -> str:
    """The first lines of a run: model, data, objective, sizes and run directory."""
    config, facts = info.config, info.facts
    how = _objective(config) if isinstance(config, GRPOConfig) else config.kind
    what = f"{Path(config.model.name).name} on {source_name(config)}, {how}, seed {config.seed}"
    if info.first_step > 1:
        what += f", going on with step {info.first_step}"
    told = []
    if "parameters" in facts:
        where = f"{facts['ranks']} ranks ({facts['device']})" if "ranks" in facts else facts["device"]
        told.append(f"{facts['parameters'] / 1e6:,.1f}M parameters trained in {facts['dtype']} on {where}")
    if "train_prompts" in facts:
        rows = {"grpo": "prompts", "sft": "rows", "dpo": "pairs"}[config.kind]
        told.append(f"{facts['train_prompts']:,} {rows} to train on, {facts['held_out_prompts']:,} held out")
    if facts.get("skipped_rows"):
        told.append(f"{facts['skipped_rows']:,} bad rows skipped")
    return "\n".join(line for line in (what, "; ".join(told), f"run directory {info.path}") if line)


def _objective(config: GRPOConfig) -> str:
    """The preset and beta, and whether beta is the preset's own."""
    beta = config.objective.axes.beta
    by_preset = config.objective.preset is not None and config.objective.beta is None
    return f"{config.objective.name} with beta {beta:g}" + (" (the preset's)" if by_preset else "")


def source_name(config: Config) -> str:
    """Name of the file, data set, run or task that the prompts come from."""
    data = config.data
    otherwise = str(getattr(data, "from_run", None) or getattr(data, "task", "?"))
    return Path(data.file or data.dataset or otherwise).name


def numbers(metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> list[str]:
    """The numbers of a step that METRICS has a `glance` format for, and tokens per second."""
    shown = []
    given = "reward_mean" not in metrics  # SFT and DPO, whose loss is shown in place of a reward
    for row in METRICS:
        value = metrics.get(row.key) if row.line == "train" and row.glance else None
        if value is None or (row.key == "loss" and not given) or (row.unit == "count" and not value):
            continue
        if row.key != "accuracy" or value != metrics.get("reward_mean"):
            shown.append(row.glance.format(value=value, percent=100 * value))
    tokens = metrics.get("tokens") if given else timing.get("sampled_tokens")
    if tokens and timing.get("step_s"):
        shown.append(f"{tokens / timing['step_s']:,.0f} tokens/s")
    return shown


def console() -> Console:
    """Where results are printed: as wide as the terminal, or 200 columns where there is none."""
    plain = Console(file=sys.stdout, highlight=False)
    return plain if plain.is_terminal else Console(file=sys.stdout, highlight=False, width=200)


def accuracy(row: Mapping[str, Any]) -> str:
    """0.85 [0.79, 0.90] from an evaluation's counts, or its loss; the mean reward where nothing is called correct."""
    score = held_out_score(row)
    if score is None:
        return "nothing scored"
    digits = 3 if score_kind(row) == "loss" else 2
    interval = f" [{score[1]:.{digits}f}, {score[2]:.{digits}f}]" if score_kind(row) != "reward" else ""
    return f"{score[0]:.{digits}f}{interval}"


def score_name(row: Mapping[str, Any]) -> str:
    """The name of the score that `accuracy` formats."""
    return f"held-out {score_kind(row)}"


def samples(groups: Sequence[Group], step: int) -> list[tuple[Prompt, Rollout]]:
    """The best and the worst rollout of one group, if there is one whose rewards differ; another group each step."""
    mixed = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1] or list(groups)
    if not mixed:
        return []
    group = mixed[step % len(mixed)]
    ranked = sorted(group.rollouts, key=lambda rollout: -(rollout.verdict.value or 0.0))
    return [(group.prompt, ranked[0]), (group.prompt, ranked[-1])]


def sample_line(prompt: Prompt, rollout: Rollout, width: int) -> str:
    """reward, prompt → completion, cut to a width."""
    value = rollout.verdict.value
    reward = f"{value:5.2f}" if value is not None else "    –"
    question = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    answer = rollout.completion.text if rollout.verdict.value is not None else f"({rollout.verdict.reason})"
    room = max(width - 10, 20)
    question = clip(question, room // 2)
    return f"{reward}  {question} → {clip(answer, room - len(question))}"


def clip(text: str, width: int) -> str:
    """A text in one line of at most `width` characters; control characters become visible or go."""
    line = "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in text.strip())
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights between their smallest and largest, the newest `width` of them."""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(SPARKS[min(int((value - low) / span * 8), 7)] for value in values[-width:])


def duration(seconds: float | None) -> str:
    """1:02:03 or 2:03; ? when unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary(result: RunResult) -> list[str]:
    """The last lines of a run: accuracy before and after, and where everything is."""
    lines = [""]
    if result.before is not None and result.after is not None:
        name = score_name(result.after)
        rows = "rows" if "loss" in name else "prompts"
        note = f"({result.after['prompts']} {rows}" + (")" if "reward" in name else ", 95% intervals)")
        lines += [f"{name} before  {accuracy(result.before)}", f"{name} after   {accuracy(result.after)}   {note}"]
    lines.append(f"run    {result.run_dir}")
    if result.plot is not None:
        lines.append(f"plot   {result.plot}")
    lines.append(f"model  {result.model_dir}")
    if result.after is not None and result.best_step not in (None, result.after["step"]):
        lines.append(f"best   {result.run_dir / 'best'} (step {result.best_step})")
    return lines
