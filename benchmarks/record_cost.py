"""What recording and hashing cost: their share of the main job's step time, without and with checkpoints.

Runs the main job for some steps and times, inside it, every hash and every write of the record: rollouts, metrics,
timings; hashes of verdicts, log-probabilities, advantages, gradient and weights. A checkpoint is saved after every
second step, so that steps with a checkpoint still being written behind them alternate with steps without; its cost is
the time the loop waits for it plus what the next step takes longer, spread over the job's checkpoint interval.

    python benchmarks/record_cost.py --out results.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import PartTimer, Spread, command, finish, parser, start, table
from tinyllm_side import RECORDING

from tinyllm.callbacks import Callback
from tinyllm.config.io import load_toml
from tinyllm.config.sections import GRPOConfig
from tinyllm.errors import ConfigError
from tinyllm.post.learner import Learner
from tinyllm.post.run import train
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group

MAIN_JOB = Path(__file__).parent.parent / "examples" / "arithmetic.toml"
TARGETS = (0.05, 0.08)
WARM_UP = 2
"""Steps that do not count; with a checkpoint after the second, the first that counts has one behind it."""


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, default=MAIN_JOB, help="the job (default: examples/arithmetic.toml)")
    options.add_argument(
        "--steps", type=int, default=12, metavar="N", help="steps that count, even (default: %(default)s)"
    )
    arguments = options.parse_args()
    if arguments.steps < 2 or arguments.steps % 2:
        raise ConfigError(f"--steps {arguments.steps}: give an even number, at least 2")
    if not arguments.config.is_file():
        raise ConfigError(f"--config {arguments.config}: no such file")
    job = load_toml(arguments.config)
    result = start(arguments)
    watch = Watch()
    places = [*RECORDING, (Learner, "weights_hash", "hash", ()), (RunDir, "save_checkpoint", "checkpoint", ())]
    with tempfile.TemporaryDirectory() as folder, watch.timer.wrapping(*places):
        train(short_job(job, arguments.steps, Path(folder) / "run"), callbacks=[watch])
    report(watch, job.run.checkpoint_every, result)
    finish(arguments, result)


def short_job(job: GRPOConfig, steps: int, folder: Path) -> GRPOConfig:
    """The job, as long as is needed, evaluated as little as possible."""
    run = replace(job.run, dir=str(folder), checkpoint_every=2, threads=torch.get_num_threads())
    return replace(
        job,
        run=run,
        train=replace(job.train, steps=WARM_UP + steps),
        eval=replace(job.eval, every=0, prompts=1),
    )


class Watch(Callback):
    """Collects the seconds by part of each step."""

    def __init__(self) -> None:
        self.timer = PartTimer()
        self.steps: list[dict[str, float]] = []
        self.checkpoints: list[float] = []

    def on_step(self, metrics: Mapping[str, Any], timing: Mapping[str, Any], groups: Sequence[Group]) -> None:
        parts = self.timer.take()
        if "checkpoint" in parts:
            self.checkpoints.append(parts["checkpoint"])
        self.steps.append(
            {"step": timing["step_s"], "hash": parts.get("hash", 0.0), "record": parts.get("record", 0.0)}
        )
        if len(self.steps) == 1:  # before the first step: the hash of the start weights
            self.steps[0]["hash"] = 0.0


def report(watch: Watch, interval: int, result: dict[str, Any]) -> None:
    steps = watch.steps[WARM_UP:]
    behind, free = steps[0::2], steps[1::2]
    recording = [s["hash"] + s["record"] for s in steps]
    plain = Spread.of([s["step"] for s in free])
    slower = Spread.of([s["step"] for s in behind]).median - plain.median
    saving = Spread.of(watch.checkpoints)
    cost = (saving.median + max(0.0, slower)) / interval
    recorded = Spread.of(recording)
    shares = (recorded.median / plain.median, (recorded.median + cost) / (plain.median + cost))
    table(
        f"Main job, {len(steps)} steps, a checkpoint after every second",
        ("", "seconds: median (min to max)"),
        [
            ("step with nothing being written behind it", plain),
            ("step right after a checkpoint", Spread.of([s["step"] for s in behind])),
            ("hashes in a step", Spread.of([s["hash"] for s in steps])),
            ("records in a step", Spread.of([s["record"] for s in steps])),
            ("saving a checkpoint, as the loop sees it", saving),
        ],
    )
    names = ("recording and hashing", f"the same with a checkpoint every {interval} steps")
    for name, share, target in zip(names, shares, TARGETS, strict=True):
        met = "met" if share <= target else "missed"
        print(f"  {name}: {100 * share:.1f}% of the step time (target: at most {100 * target:.0f}%: {met})")
    result |= {
        "steps": watch.steps,
        "checkpoints_s": watch.checkpoints,
        "interval": interval,
        "recording_share": shares[0],
        "recording_and_checkpoint_share": shares[1],
    }


if __name__ == "__main__":
    command(main)
