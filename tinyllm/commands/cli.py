"""The `tinyllm` command. Exit codes: 0 done, 1 failed (or: differs), 2 the user's mistake, 130 interrupted.

Help, errors of the configuration, `runs`, `show` and `diff` do without torch, so they answer at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tinyllm
from tinyllm.commands.arguments import (
    EVAL_USAGE,
    PLAN_USAGE,
    CapstoneArguments,
    DiffArguments,
    EvalArguments,
    PlanArguments,
    ProbeArguments,
    ReplayArguments,
    ReportArguments,
    RunsArguments,
    ScoreArguments,
    ServeArguments,
    ShowArguments,
    TrainArguments,
)
from tinyllm.commands.text import Command, command_help, overview, table, width
from tinyllm.config.sections import CONFIGS, DPOConfig, GRPOConfig, SFTConfig
from tinyllm.config.words import NoArguments, parse_words
from tinyllm.distributed.ranks import claim_report, current_ranks, is_peer_failure, several
from tinyllm.errors import ConfigError, RunError, TinyLLMError, closest
from tinyllm.evals.config import SuiteConfig
from tinyllm.record.files import FULL


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code; expected failures are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not several():
        return _main(words)
    try:
        return _main(words)
    except Exception as error:
        if not claim_report():  # the ranks that fail because another did say nothing
            return 1
        if not is_peer_failure(error):
            raise
        text = str(error).splitlines()[0]
        return _fail(f"another rank has gone ({text}); look for its last words, then go on with --resume", 1, told=True)


def _main(words: list[str]) -> int:
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
    except OSError as error:
        if error.errno not in FULL:
            raise
        return _fail(f"{error.filename or 'disk'}: {error.strerror}; free some room", 1)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail("out of memory; lower sampling.max_batch or train.tokens_per_microbatch", 1)


def out_of_memory(error: Exception) -> bool:
    """Whether this is a failed allocation, which torch reports in several ways."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(COMMANDS))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"tinyllm {tinyllm.__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        close = closest(name, COMMANDS)
        hint = f"did you mean `tinyllm {close}`?" if close else f"there is: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    command = COMMANDS[name]
    if {"-h", "--help"} & set(rest):
        print(command_help(name, command))
        return 0
    return command.run(*parse_words(rest, command.own, command.kind, f"tinyllm {name}"))


def _fail(message: str, code: int, *, told: bool = False) -> int:
    """The exit code, after one line on stderr; of several ranks the first to fail says it. told: that is settled."""
    if not told and not claim_report():
        return code
    lead = "error:" if code != 130 else "stopped:"
    if sys.stderr.isatty():
        lead = f"\033[1;31m{lead}\033[0m"
    line = message if code != 130 else message.removeprefix("stopped ")
    print(f"{lead} {line}", file=sys.stderr)
    return code


# Training


Options = Mapping[str, Any]
"""Options of a configuration, by dotted name."""


def _train(kind: str, given: TrainArguments, options: Options) -> int:
    from tinyllm.config.io import load_toml, overlay

    resumed = given.resume
    if resumed is not None:
        if given.config is not None or any(not name.startswith("engine.") for name in options):
            raise ConfigError(
                "--resume goes on with the run's own configuration (only servers may have moved: --engine.urls); "
                "leave out the other options"
            )
        from tinyllm.record.rundir import RunDir

        config = RunDir.read(resumed).config
    else:
        config = load_toml(given.config, CONFIGS[kind]()) if given.config is not None else CONFIGS[kind]()
        config = overlay(config, options)

    from tinyllm.callbacks import Callback
    from tinyllm.view.callbacks import run_callbacks
    from tinyllm.view.progress import show_progress

    watched = current_ranks().is_main
    display = show_progress() if watched else Callback()
    callbacks = run_callbacks([display], config.run.trackers) if watched else []
    display.on_phase("starting")  # importing torch and transformers takes seconds
    from tinyllm.post.run import resume, train

    try:
        if resumed is not None:
            resume(
                resumed, engine={name.removeprefix("engine."): x for name, x in options.items()}, callbacks=callbacks
            )
        else:
            train(config, callbacks=callbacks)
    finally:
        display.on_end(None)  # gives the terminal back, whatever happened
    return 0


# Looking around


def _models(given: NoArguments, options: Options) -> int:
    from tinyllm.model.bundled import BUNDLED, cached

    rows = []
    for model in BUNDLED.values():
        folder = cached(model)
        where = str(folder) if folder else f"fetched when first used ({model.download_bytes / 1e6:.0f} MB)"
        rows.append((model.name, f"{model.parameters / 1e6:.0f}M", model.license, f"{model.about}; {where}"))
    print(table(rows))
    print("\nAlso: any folder with a model in Hugging Face format, or any hub id, as --model.")
    return 0


def _tasks(given: NoArguments, options: Options) -> int:
    from tinyllm.tasks import list_tasks

    print(table(list_tasks()))
    print("\nYour own rows: --data FILE.jsonl, FILE.parquet or a `datasets` name, and --reward module:function.")
    return 0


def _report(given: ReportArguments, options: Options) -> int:
    from tinyllm.record.rundir import RunDir

    runs = [RunDir.read(path) for path in (given.run, given.other) if path is not None]
    for run in runs:
        if not run.metrics():
            raise RunError(f"{run.path}: metrics.jsonl is missing or empty, so there is nothing to draw")
    from tinyllm.view.html import write_html
    from tinyllm.view.plot import write_report

    if len(runs) == 1:
        print(write_report(runs[0]))
    print(write_html(given.output or runs[0].path / "report.html", runs))
    return 0


def _runs(given: RunsArguments, options: Options) -> int:
    from tinyllm.view.run import list_runs

    print(table(list_runs(given.folder)))
    return 0


def _show(given: ShowArguments, options: Options) -> int:
    from tinyllm.record.rundir import RunDir
    from tinyllm.view.run import describe_run, describe_step

    run = RunDir.read(given.run)
    print("\n".join(describe_run(run) if given.step is None else describe_step(run, given.step, width())))
    return 0


def _diff(given: DiffArguments, options: Options) -> int:
    from tinyllm.record.diff import compare_runs
    from tinyllm.record.rundir import RunDir

    comparison = compare_runs(RunDir.read(given.first), RunDir.read(given.second))
    print("\n".join(comparison.lines()))
    return 0 if comparison.equal else 1


def _replay(given: ReplayArguments, options: Options) -> int:
    steps = _span(given.steps)
    from tinyllm.record.rundir import RunDir
    from tinyllm.view.progress import ReplayProgress

    RunDir.read(given.run)  # a mistake here should not wait for torch
    display = ReplayProgress() if current_ranks().is_main else None
    if display:
        display.on_phase("starting")
    from tinyllm.post.replay import replay

    try:
        result = replay(
            given.run,
            steps=steps,
            sample=given.sample,
            objective=given.objective,
            reward=given.reward,
            tolerance=given.tolerance,
            on_step=display.on_replayed if display else lambda done, total: None,
            callbacks=[display] if display else [],
        )
    finally:
        if display:
            display.close()
    if display:
        print("\n".join(_replay_lines(result, given)))
    return 1 if result.divergence else 0


def _span(text: str | None) -> tuple[int, int] | None:
    """3:7 as (3, 7), 3 as (3, 3)."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not first.isdecimal() or not (last.isdecimal() or not colon):
        raise ConfigError(f"--steps {text}: write the first and the last step, as in 3:7")
    return int(first), int(last if colon else first)


def _replay_lines(result: Any, given: ReplayArguments) -> list[str]:
    count = len(result.steps)
    lines = []
    if result.conditions:
        lines.append("recorded conditions that are different here:")
        lines += [f"  {name}: {was} then, {now} now" for name, was, now in result.conditions]
    if result.what_if is not None:
        return [*lines, f"{count} steps computed on the recorded rollouts; what they would have been: {result.what_if}"]
    if result.divergence is not None:
        lines.append(f"first divergence: {result.divergence}")
        if given.tolerance is None and result.conditions:
            lines.append("where conditions differ, bits may: compare numbers instead with --tolerance 1e-4")
        return lines
    what = "every hash equal" if given.tolerance is None else f"every number within {given.tolerance:g}"
    return [*lines, f"{count} steps, {what}" + (", sampled again too" if given.sample else "")]


def _imported(name: str) -> Callable[[Any, Options], int]:
    """The function "module:function" of this package, imported only when the command is run."""
    module, _, function = name.partition(":")

    def run(given: Any, options: Options) -> int:
        return getattr(importlib.import_module(f"tinyllm.commands.{module}"), function)(given, options)

    return run


COMMANDS = {
    "grpo": Command(
        "Train a model with Group Relative Policy Optimization on a verifiable reward.",
        "tinyllm grpo --data rows.jsonl --reward rewards.py:score --steps 100",
        partial(_train, "grpo"),
        TrainArguments,
        GRPOConfig,
    ),
    "sft": Command(
        "Train a model on completions that are given (supervised fine-tuning).",
        "tinyllm sft --data rows.jsonl --epochs 2",
        partial(_train, "sft"),
        TrainArguments,
        SFTConfig,
    ),
    "dpo": Command(
        "Train a model on pairs of a better and a worse completion (Direct Preference Optimization).",
        "tinyllm dpo --from-run runs/20260101-120000 --model MODEL",
        partial(_train, "dpo"),
        TrainArguments,
        DPOConfig,
    ),
    "eval": Command(
        "Evaluate models on a frozen suite: accuracy with intervals, paired comparisons.",
        "tinyllm eval smollm2-135m-instruct RUN --task arithmetic",
        _imported("eval:main"),
        EvalArguments,
        SuiteConfig,
        EVAL_USAGE,
    ),
    "serve": Command(
        "Serve a model over HTTP, as OpenAI's API: token ids, log-probabilities, seeds, weight updates.",
        "tinyllm serve smollm2-135m-instruct --port 8000",
        _imported("serve:main"),
        ServeArguments,
    ),
    "capstone": Command(
        "Take the bundled model from base over SFT and DPO to GRPO, evaluate every stage, write one report.",
        "tinyllm capstone --seed 0",
        _imported("capstone:main"),
        CapstoneArguments,
    ),
    "plan": Command(
        "Work out memory and step time of a configuration on a number of GPUs, hop by hop, before it runs.",
        "tinyllm plan --model MODEL --gpus 8 --run RUN",
        _imported("plan:main"),
        PlanArguments,
        GRPOConfig,
        PLAN_USAGE,
    ),
    "models": Command("List the models that come with tinyllm.", "tinyllm models", _models, NoArguments),
    "tasks": Command("List the tasks and data recipes.", "tinyllm tasks", _tasks, NoArguments),
    "doctor": Command(
        "Check this machine: numeric properties, memory, packages.",
        "tinyllm doctor",
        _imported("doctor:main"),
        NoArguments,
    ),
    "runs": Command("List the runs in a folder, with their results.", "tinyllm runs runs/", _runs, RunsArguments),
    "show": Command(
        "Show what a run was, how far it got, what it sampled.", "tinyllm show RUN --step 20", _show, ShowArguments
    ),
    "report": Command(
        "Write what a run recorded as one page: report.html (and its curves as report.png); two runs are compared.",
        "tinyllm report RUN OTHER_RUN -o report.html",
        _report,
        ReportArguments,
    ),
    "replay": Command(
        "Compute a run again from its record and compare every step to the last bit.",
        "tinyllm replay RUN --steps 10:20 --sample",
        _replay,
        ReplayArguments,
    ),
    "diff": Command(
        "Find the first step, hop and row where two runs part, and why.", "tinyllm diff RUN1 RUN2", _diff, DiffArguments
    ),
    "score": Command(
        "Score completions in a file with a verifier.",
        "tinyllm score FILE.jsonl --verifier arithmetic --explain",
        _imported("score:main"),
        ScoreArguments,
    ),
    "probe": Command(
        "Attack a verifier, before training does.",
        "tinyllm probe --verifier arithmetic --data rows.jsonl",
        _imported("score:probe_main"),
        ProbeArguments,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
