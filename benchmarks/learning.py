"""Time and steps to 80% held-out accuracy: the main job in tinyllm, several seeds, and one run of TRL's GRPOTrainer.

Each run is a fresh process; its time runs from the start of the process, so imports, loading, evaluations, checkpoints
and saving count. Both sides train on the same prompts with the same verifier, sampling settings, optimizer and number
of completions, and both are evaluated alike: greedy completions of tinyllm's engine for every held-out prompt, judged
by tinyllm's verifier, before training, every few steps and at the end. TRL trains with fp32 weights, in bf16 autocast
where the CPU multiplies bf16 natively (pure bf16 weights lose updates at these learning rates), without gradient
checkpointing.

    python benchmarks/learning.py --out results.json
    python benchmarks/learning.py --seeds 0 --no-trl      one run of the main job as `make run` has it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import against, command, finish, parser, start, table

from tinyllm.callbacks import Callback
from tinyllm.config.io import load_toml, to_toml
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import ConfigError, TinyLLMError
from tinyllm.stats import wilson

TARGET = 0.8
MAIN_JOB = Path(__file__).parent.parent / "examples" / "arithmetic.toml"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, default=MAIN_JOB, help="the job (default: examples/arithmetic.toml)")
    options.add_argument(
        "--seeds", default="0,1,2", help="seeds of tinyllm's runs; empty for none (default: %(default)s)"
    )
    options.add_argument(
        "--every", type=int, metavar="STEPS", help="between evaluations; 0: only before and after (default: the job's)"
    )
    options.add_argument("--no-trl", action="store_true", help="leave TRL out")
    options.add_argument(
        "--trl-batch", type=int, default=16, metavar="N", help="TRL's device batch (default: %(default)s)"
    )
    options.add_argument("--trl-steps", type=int, metavar="N", help="TRL's steps at most (default: the job's)")
    options.add_argument(
        "--trl-minutes", type=float, default=60.0, metavar="MIN", help="TRL's time at most (default: 60)"
    )
    options.add_argument("--child", choices=("tinyllm", "trl"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        child(arguments)
        return
    if not arguments.config.is_file():
        raise ConfigError(f"--config {arguments.config}: no such file")
    config = load_toml(arguments.config)
    result = start(arguments) | {"config": to_toml(config, sparse=True), "target": TARGET, "runs": []}
    jobs = [("tinyllm", int(seed)) for seed in arguments.seeds.split(",") if seed]
    if not arguments.no_trl:
        from trl_side import require_trl

        result["trl"] = require_trl()
        jobs.append(("trl", config.seed))
    for side, seed in jobs:
        result["runs"].append(one_run(side, seed, config, arguments))
        finish(arguments, result)
    report(result["runs"], config)


def one_run(side: str, seed: int, config: GRPOConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a child process and turns what it tells into a row."""
    steps = config.train.steps if side == "tinyllm" else arguments.trl_steps or config.train.steps
    with tempfile.TemporaryDirectory() as folder:
        run = replace(config.run, dir=str(Path(folder) / "run"), threads=arguments.threads or config.run.threads)
        config = replace(
            config,
            seed=seed,
            run=run,
            eval=config.eval if arguments.every is None else replace(config.eval, every=arguments.every),
            train=replace(config.train, steps=steps),
        )
        file = Path(folder) / "job.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        line = [sys.executable, __file__, "--child", side, "--config", str(file)]
        line += ["--trl-batch", str(arguments.trl_batch), "--trl-minutes", str(arguments.trl_minutes)]
        print(f"\n{side}, seed {seed}: {steps} steps", flush=True)
        begin = time.time()
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        evals: list[dict[str, Any]] = []
        for text in process.stdout:
            if text.startswith("{"):
                evals.append(json.loads(text))
                evals[-1]["seconds"] = evals[-1].pop("time") - begin
                e = evals[-1]
                print(
                    f"  step {e['step']}: {e['correct']} of {e['prompts']} right after {e['seconds']:.0f} s", flush=True
                )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.time() - begin
    if process.returncode or not evals:
        raise TinyLLMError(
            f"the {side} run with seed {seed} failed (exit code {process.returncode}); see its message above"
        )
    reached = next((e for e in evals if e["correct"] >= TARGET * e["prompts"]), None)
    last = evals[-1]
    return {
        "side": side,
        "seed": seed,
        "steps": last["step"],
        "seconds": seconds,
        "accuracy": last["correct"] / last["prompts"],
        "interval": wilson(last["correct"], last["prompts"]),
        "before": evals[0]["correct"] / evals[0]["prompts"],
        "seconds_to_target": reached and reached["seconds"],
        "steps_to_target": reached and reached["step"],
        "evaluating_s": sum(e["took"] for e in evals),
        "peak_memory_gib": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30,
        "evaluations": evals,
    }


def report(runs: list[dict[str, Any]], config: GRPOConfig) -> None:
    def target(run: dict[str, Any], what: str, form: str) -> str:
        return "not reached" if run[what] is None else format(run[what], form)

    rows = [
        (
            f"{run['side']}, seed {run['seed']}",
            target(run, "steps_to_target", "d"),
            target(run, "seconds_to_target", ".0f"),
            str(run["steps"]),
            f"{run['seconds']:.0f}",
            f"{run['evaluating_s']:.0f}",
            f"{run['before']:.3f}",
            f"{run['accuracy']:.3f} ({run['interval'][0]:.3f} to {run['interval'][1]:.3f})",
            f"{run['peak_memory_gib']:.2f}",
        )
        for run in runs
    ]
    header = (
        "",
        "steps to 80%",
        "seconds to 80%",
        "steps",
        "seconds",
        "evaluating",
        "before",
        "after (95%)",
        "peak GiB",
    )
    table("Held-out accuracy (greedy); seconds from the start of the process", header, rows)
    ours = [run for run in runs if run["side"] == "tinyllm"]
    if ours:
        print("  worst of tinyllm's seeds:")
        print("  " + against("accuracy after", min(run["accuracy"] for run in ours), TARGET, least=True))
        print("  " + against("seconds of the whole run", max(run["seconds"] for run in ours), 300, least=False))
        print("  " + against("peak memory in GiB", max(run["peak_memory_gib"] for run in ours), 5, least=False))
    theirs = next((run for run in runs if run["side"] == "trl"), None)
    if ours and theirs and all(run["seconds_to_target"] for run in ours):
        slowest = max(run["seconds_to_target"] for run in ours)
        time_trl, sign = theirs["seconds_to_target"], ""
        if time_trl is None:
            time_trl, sign = theirs["seconds"], "more than "
        print(f"  seconds to 80%, TRL / slowest tinyllm seed: {sign}{time_trl / slowest:.1f}")


# The runs, each in its own process: a line of JSON per evaluation


def tell(row: dict[str, Any], took: float) -> None:
    line = {
        "step": row["step"],
        "correct": row["correct"],
        "prompts": row["prompts"],
        "time": time.time(),
        "took": took,
    }
    print("\n" + json.dumps(line), flush=True)


def child(arguments: argparse.Namespace) -> None:
    config = load_toml(arguments.config)
    if arguments.child == "tinyllm":
        import tinyllm

        tinyllm.grpo(config, callbacks=[Evaluations()])
    else:
        train_trl(config, arguments.trl_batch, 60 * arguments.trl_minutes)


class Evaluations(Callback):
    def __init__(self) -> None:
        self._begin = 0.0

    def on_phase(self, phase: str) -> None:
        if phase == "evaluating":
            self._begin = time.perf_counter()

    def on_eval(self, row: Any) -> None:
        tell(row, time.perf_counter() - self._begin)


def train_trl(config: GRPOConfig, batch: int, limit_s: float) -> None:
    """TRL on the job's prompts, judged by the job's verifier, until 80% held out, the last step, or the time limit."""
    import torch
    from trl_side import TRLSetup, TRLSide

    from tinyllm import rewards, tasks
    from tinyllm.engine.engine import EmbeddedEngine
    from tinyllm.engine.policy import Policy
    from tinyllm.model import models
    from tinyllm.model.memory import native_bf16
    from tinyllm.post.evaluation import evaluator
    from tinyllm.records import Completion, Revision, SamplingParams

    begin = time.perf_counter()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    tokenizer = models.load_tokenizer(config.model.name)
    data = tasks.load(config, tokenizer)
    by_id = {p.id: p for p in data.train}
    judge = rewards.make_judge(config.reward, data)
    # Evaluated by a second copy of the model, in tinyllm's engine.
    copy = models.load_model(config.model.name, "float32", "cpu")
    stop = models.stop_token_ids(tokenizer, copy)
    policy = Policy(copy)
    greedy = SamplingParams(max_new_tokens=config.sampling.max_new_tokens, temperature=0.0, stop_token_ids=stop)
    held_out = data.held_out[: config.eval.prompts or None]
    evaluate = evaluator(
        EmbeddedEngine(policy, tokenizer, max_batch=config.sampling.max_batch), held_out, greedy, judge, lambda: None
    )

    def reward(prompts: Any, completions: Any, completion_ids: Any, id: Any, **_: Any) -> list[float]:
        drawn = []
        for number, (name, ids, text) in enumerate(zip(id, completion_ids, completions, strict=True)):
            reason: Any = "stop" if ids[-1] in stop else "length"
            drawn.append(Completion(name, 0, number, tuple(ids), (), reason, 0, Revision(0, ""), text))
        return [
            0.0 if v.value is None else v.value
            for v in judge([by_id[name] for name in dict.fromkeys(id)], drawn, 0).verdicts
        ]

    setup = TRLSetup("autocast" if native_bf16() else "fp32", batch)
    with tempfile.TemporaryDirectory() as folder:
        side = TRLSide(setup, config, data.train, reward, stop, Path(folder), config.train.steps)

        def measure(step: int) -> float:
            started = time.perf_counter()
            policy.model.load_state_dict(side.model.state_dict())
            row = evaluate(step, ())
            assert row is not None
            tell(row, time.perf_counter() - started)
            return row["correct"] / row["prompts"]

        def between(step: int, step_s: float) -> bool:
            over = time.perf_counter() - begin > limit_s
            due = step == config.train.steps or (config.eval.every and step % config.eval.every == 0)
            return not ((due or over) and (measure(step) >= TARGET or over))

        measure(0)
        side.train(between)
    judge.close()


if __name__ == "__main__":
    command(main)
