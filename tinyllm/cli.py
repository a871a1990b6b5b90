"""The `tinyllm` command. Exit codes: 0 done, 1 failed (or: differs), 2 the user's mistake, 130 interrupted.

Help, errors of the configuration, `runs`, `show` and `diff` do without torch, so they answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tinyllm
from tinyllm.config import SHORTCUTS, GRPOConfig
from tinyllm.errors import ConfigError, TinyLLMError


@dataclass(frozen=True)
class Command:
    """One command: what it does, in a line; its arguments; the function that runs it and returns the exit code."""

    about: str
    example: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code; expected failures are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if logging.lastResort is not None:  # the handler of a program that sets up none; it finds a redirected stderr
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))
    try:
        return _dispatch(words)
    except TinyLLMError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has gone, as in `tinyllm runs | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _fail("out of memory; lower sampling.max_batch or train.tokens_per_microbatch", 1)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"tinyllm {tinyllm.__version__}")
        return 0
    if words[0] not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean `tinyllm {close[0]}`?" if close else f"there is: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {words[0]!r}; {hint}")
    return COMMANDS[words[0]].run(words[1:])


def _fail(message: str, code: int) -> int:
    lead = "error:" if code != 130 else "stopped:"
    if sys.stderr.isatty():
        lead = f"\033[1;31m{lead}\033[0m"
    line = message if code != 130 else message.removeprefix("stopped ")
    print(f"{lead} {line}", file=sys.stderr)
    return code


class Arguments(argparse.ArgumentParser):
    """An argument parser that fails as everything else here does."""

    def __init__(self, name: str):
        command = COMMANDS[name]
        super().__init__(
            prog=f"tinyllm {name}", description=command.about, epilog=f"example: {command.example}", add_help=True
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (see: {self.prog} --help)")


# Training


def _grpo(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(_grpo_help())
        return 0
    from tinyllm.configio import load_toml, overlay, parse_overrides

    rest, special = _take(words, ("config", "resume"))
    if "resume" in special and (rest or "config" in special):
        raise ConfigError("--resume goes on with the run's own configuration; leave out the other options")
    resumed = special.get("resume")
    if resumed is not None:
        from tinyllm.rundir import RunDir

        config = RunDir.read(resumed).config
    else:
        config = load_toml(special["config"]) if "config" in special else GRPOConfig()
        config = overlay(config, parse_overrides(rest))

    from tinyllm.progress import show_progress
    from tinyllm.trackers import make_trackers

    callbacks = [show_progress(), *make_trackers(config.run.trackers)]
    callbacks[0].on_phase("starting")  # importing torch and transformers takes seconds
    from tinyllm.post.run import grpo, resume

    try:
        if resumed is not None:
            resume(resumed, callbacks=callbacks)
        else:
            grpo(config, callbacks=callbacks)
    finally:
        callbacks[0].on_end(None)  # gives the terminal back, whatever happened
    return 0


def _take(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Words without the options of these names, and those options' values."""
    rest: list[str] = []
    found: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in names:
            rest.append(word)
            continue
        if not equals and (not queue or queue[0].startswith("--")):
            raise ConfigError(f"--{name} needs a path")
        found[name] = value if equals else queue.pop(0)
    return rest, found


# Looking around


def _models(words: Sequence[str]) -> int:
    Arguments("models").parse_args(words)
    from tinyllm.models import list_models

    rows = []
    for model in list_models():
        where = str(model.folder) if model.folder else f"fetched when first used ({model.download_bytes / 1e6:.0f} MB)"
        rows.append((model.name, f"{model.parameters / 1e6:.0f}M", model.license, f"{model.about}; {where}"))
    print(_table(rows))
    print("\nAlso: any folder with a model in Hugging Face format, or any hub id, as --model.")
    return 0


def _tasks(words: Sequence[str]) -> int:
    Arguments("tasks").parse_args(words)
    from tinyllm.tasks import list_tasks

    print(_table(list_tasks()))
    print("\nYour own rows: --data FILE.jsonl, FILE.parquet or a `datasets` name, and --reward module:function.")
    return 0


def _doctor(words: Sequence[str]) -> int:
    Arguments("doctor").parse_args(words)
    from tinyllm.doctor import examine

    findings = examine()
    for finding in findings:
        print(_table([(finding.mark, finding.name, finding.detail)], widths=(4, 26)))
        if finding.remedy:
            print(textwrap.fill(f"→ {finding.remedy}", _width(), initial_indent=" " * 34, subsequent_indent=" " * 36))
    broken = [finding for finding in findings if finding.mark == "FAIL"]
    print(f"\n{len(broken)} of {len(findings)} checks failed" if broken else "\nready")
    return 1 if broken else 0


def _report(words: Sequence[str]) -> int:
    parser = Arguments("report")
    parser.add_argument("run", help="run directory")
    from tinyllm.rundir import RunDir

    run = RunDir.read(parser.parse_args(words).run)
    from tinyllm.report import write_report

    print(write_report(run))
    return 0


def _runs(words: Sequence[str]) -> int:
    parser = Arguments("runs")
    parser.add_argument("folder", nargs="?", default="runs", help="folder of run directories (default: runs)")
    from tinyllm.runview import list_runs

    print(_table(list_runs(parser.parse_args(words).folder)))
    return 0


def _show(words: Sequence[str]) -> int:
    parser = Arguments("show")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--step", type=int, help="show the rollouts of this step instead")
    given = parser.parse_args(words)
    from tinyllm.rundir import RunDir
    from tinyllm.runview import describe_run, describe_step

    run = RunDir.read(given.run)
    print("\n".join(describe_run(run) if given.step is None else describe_step(run, given.step, _width())))
    return 0


def _diff(words: Sequence[str]) -> int:
    parser = Arguments("diff")
    parser.add_argument("first", help="run directory")
    parser.add_argument("second", help="run directory")
    given = parser.parse_args(words)
    from tinyllm.rundiff import compare_runs
    from tinyllm.rundir import RunDir

    comparison = compare_runs(RunDir.read(given.first), RunDir.read(given.second))
    print("\n".join(comparison.lines()))
    return 0 if comparison.equal else 1


COMMANDS = {
    "grpo": Command(
        "Train a model with Group Relative Policy Optimization on a verifiable reward.",
        "tinyllm grpo --data rows.jsonl --reward rewards.py:score --steps 100",
        _grpo,
    ),
    "models": Command("List the models that come with tinyllm.", "tinyllm models", _models),
    "tasks": Command("List the tasks and data recipes.", "tinyllm tasks", _tasks),
    "doctor": Command("Check this machine: numeric properties, memory, packages.", "tinyllm doctor", _doctor),
    "runs": Command("List the runs in a folder, with their results.", "tinyllm runs runs/", _runs),
    "show": Command("Show what a run was, how far it got, what it sampled.", "tinyllm show RUN --step 20", _show),
    "report": Command("Draw a run's curves again: report.png.", "tinyllm report RUN", _report),
    "diff": Command("Find the first step, hop and row where two runs part, and why.", "tinyllm diff RUN1 RUN2", _diff),
}


# Help and tables


def _overview() -> str:
    rows = [(name, command.about) for name, command in COMMANDS.items()]
    examples = [command.example for command in COMMANDS.values() if "--" in command.example]
    return "\n".join(
        [
            "tinyllm: train language models with GRPO on verifiable rewards; every number can be derived again.",
            "",
            _bold("Commands"),
            _table(rows, indent=2),
            "",
            _bold("Examples"),
            "  tinyllm grpo                          the bundled model on arithmetic, a few minutes on two cores",
            *(f"  {example}" for example in examples),
            "",
            "Each command explains itself: tinyllm COMMAND --help",
        ]
    )


def _grpo_help() -> str:
    from tinyllm.configio import describe_type, options, to_text

    command = COMMANDS["grpo"]
    short = ", ".join(f"--{name}" for name in ("data", *SHORTCUTS))
    lines = [
        command.about,
        "",
        "  tinyllm grpo [--config FILE.toml] [--section.option VALUE ...]",
        "  tinyllm grpo --resume RUN",
        "",
        textwrap.fill(
            f"A section may be left out where only one has the option: --group-size 4. Shorter still: {short}. "
            "Lists are a,b,c; a true|false option alone means true; none unsets. "
            "A TOML file has the same sections and names; the command line wins over it.",
            _width(),
        ),
    ]
    section = None
    rows: list[tuple[str, ...]] = []
    for name, option in options(GRPOConfig).items():
        part, _, leaf = name.rpartition(".")
        if part != section:
            lines += [_table(rows, indent=2, widths=WIDTHS)] if rows else []
            lines += ["", _bold(part or "general") + f"  {_section_help(part)}"]
            section, rows = part, []
        kind = describe_type(option.type)
        telling = "|" in kind or (option.default is None and kind != "text")
        rows.append((leaf, to_text(option.default), option.help + (f" ({kind})" if telling else "")))
    return "\n".join([*lines, _table(rows, indent=2, widths=WIDTHS)])


WIDTHS = (22, 21)


def _section_help(section: str) -> str:
    kind: Any = GRPOConfig()
    for part in section.split(".") if section else ():
        kind = getattr(kind, part)
    return type(kind).__doc__ or ""


def _table(rows: Sequence[Sequence[str]], *, indent: int = 0, widths: Sequence[int] = ()) -> str:
    """Columns aligned, the last one wrapped to the terminal."""
    if not rows:
        return ""
    count = len(rows[0])
    sizes = list(widths) or [max(len(row[i]) for row in rows) for i in range(count - 1)]
    lines = []
    for row in rows:
        lead = " " * indent + "".join(f"{cell:<{size}}  " for cell, size in zip(row, sizes, strict=False))
        column = " " * (indent + sum(sizes) + 2 * len(sizes))
        room = max(_width() - len(column), 30)
        wrapped = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [(lead + wrapped[0]).rstrip(), *(column + line for line in wrapped[1:])]
    return "\n".join(lines)


def _width() -> int:
    return min(shutil.get_terminal_size((120, 24)).columns, 130)


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


if __name__ == "__main__":
    sys.exit(main())
