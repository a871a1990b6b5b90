"""What sampling and verifying beside the training gains: seconds per step without a pool, with one, and ahead by a lag.

The main job, shortened, whose reward takes a fixed time per rollout (--verify-s, a sleep, as of a judge that is asked
over a network), is trained in turn without a pool and with one at each lag, so that all see the same machine. Every
run's first step does not count. Idle shares are of the time of a step: the trainer waits for groups, workers for work.

    python benchmarks/async.py --out results.json
    python benchmarks/async.py --verify-s 0 --engines 2        # two engine processes, verification that takes no time
    python benchmarks/async.py --tiny                          # a random model: what verification alone brings
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Spread, command, finish, parser, start, table
from serve import make_tiny

from tinyllm.callbacks import Callback
from tinyllm.config.io import load_toml, make_config
from tinyllm.config.sections import GRPOConfig, PoolConfig
from tinyllm.errors import ConfigError
from tinyllm.post.run import train
from tinyllm.records import Group

MAIN_JOB = Path(__file__).parent.parent / "examples" / "arithmetic.toml"
WARM_UP = 1
SHARES = ("trainer", "engine", "verifier")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, default=MAIN_JOB, help="the job (default: examples/arithmetic.toml)")
    options.add_argument("--tiny", action="store_true", help="a tiny random model and 4 x 4 completions of 8 tokens")
    options.add_argument("--verify-s", type=float, default=0.2, metavar="S", help="per rollout (default: %(default)s)")
    options.add_argument("--engines", type=int, default=1, metavar="N", help="engine processes (default: %(default)s)")
    options.add_argument("--verifiers", type=int, default=4, metavar="N", help="verifiers (default: %(default)s)")
    options.add_argument("--lags", default="0,1", metavar="N,...", help="of the pool's sides (default: %(default)s)")
    options.add_argument("--steps", type=int, default=3, metavar="N", help="that count, per run (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=2, metavar="N", help="of all sides (default: %(default)s)")
    arguments = options.parse_args()
    lags = _lags(arguments.lags)
    if arguments.steps < 1 or arguments.rounds < 1:
        raise ConfigError(f"--steps {arguments.steps} --rounds {arguments.rounds}: give at least 1 of each")
    if not arguments.config.is_file():
        raise ConfigError(f"--config {arguments.config}: no such file")
    result = start(arguments)
    pool = PoolConfig(engines=arguments.engines, verifiers=arguments.verifiers)
    sides = {"without a pool": PoolConfig(), **{f"pool, lag {lag}": replace(pool, max_lag=lag) for lag in lags}}
    steps: dict[str, list[Mapping[str, Any]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        job = tiny_job(Path(folder)) if arguments.tiny else load_toml(arguments.config)
        for _ in range(arguments.rounds):
            for name, chosen in sides.items():
                steps[name] += one_run(job, chosen, arguments.steps, arguments.verify_s)
    report(steps, result)
    finish(arguments, result)


def _lags(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--lags {text!r}: write numbers with commas between them")
    return [int(part) for part in parts]


def tiny_job(folder: Path) -> GRPOConfig:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": chr(35 + i), "answer": ""}) + "\n" for i in range(40)))
    return make_config(
        GRPOConfig(),
        model=str(make_tiny(folder / "model")),
        data={"file": str(rows), "prompt_rule": "raw", "held_out": 0.25},
        sampling={"group_size": 4, "max_new_tokens": 8},
        train={"prompts_per_step": 4},
    )


def one_run(job: GRPOConfig, pool: PoolConfig, steps: int, verify_s: float) -> list[Mapping[str, Any]]:
    """The timings of the steps that count."""
    watch = Watch()

    def slow(completions: Sequence[str], **_: Any) -> list[float]:
        time.sleep(verify_s * len(completions))
        return [float(len(text) % 2) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        run = replace(job.run, dir=f"{folder}/run", checkpoint_every=10_000, threads=torch.get_num_threads())
        short = replace(
            job,
            pool=pool,
            run=run,
            train=replace(job.train, steps=WARM_UP + steps),
            eval=replace(job.eval, every=0, prompts=1),
        )
        train(short, reward=slow, callbacks=[watch])
    return watch.steps[WARM_UP:]


class Watch(Callback):
    """Collects the timing of each step."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.steps.append(dict(timing))


def report(steps: Mapping[str, Sequence[Mapping[str, Any]]], result: dict[str, Any]) -> None:
    """The table, and how much faster each side is than the first."""
    seconds = {name: Spread.of([step["step_s"] for step in rows]) for name, rows in steps.items()}
    idle = {
        name: {part: Spread.of([step[f"{part}_idle"] for step in rows]) for part in SHARES if f"{part}_idle" in rows[0]}
        for name, rows in steps.items()
    }
    first = next(iter(seconds.values())).median
    table(
        f"{len(next(iter(steps.values())))} steps a side, in turn",
        ("", "seconds a step: median (min to max)", "times as fast", *(f"{part} idle" for part in SHARES)),
        [
            (name, str(spread), first / spread.median, *(_share(idle[name].get(part)) for part in SHARES))
            for name, spread in seconds.items()
        ],
    )
    result |= {"step_s": seconds, "idle": idle, "times_as_fast": {n: first / s.median for n, s in seconds.items()}}


def _share(spread: Spread | None) -> str:
    return "-" if spread is None else f"{100 * spread.median:.0f}%"


if __name__ == "__main__":
    command(main)
