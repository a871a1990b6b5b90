"""A process that trains tiny models in children of its own and ends them at a chosen point. Used by test_resume.py.

One job per line of standard input, one answer per line of standard output; importing torch once is enough that way.
A child counts the points it passes: every forward pass, call of the reward, optimizer step, and every write, fsync and
rename of a file, each named by what the run was doing. At the point asked for it gets the signal; a write is then half done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import tiny
import torch

from tinyllm.config.io import from_dict
from tinyllm.engine.policy import Policy
from tinyllm.post import run
from tinyllm.post.optimizer import Optimizer

SIGNALS = {"KILL": signal.SIGKILL, "INT": signal.SIGINT, "TERM": signal.SIGTERM}


class Points:
    """Counts points and sends the signals that are due: point number -> name of a signal."""

    def __init__(self, due: dict[int, str]) -> None:
        self.due, self.passed, self.lock = due, [], threading.Lock()

    def pass_by(self, name: str) -> bool:
        """Whether a signal was due here (one that this process outlives)."""
        with self.lock:
            number = len(self.passed)
            self.passed.append(name)
        if number in self.due:
            os.kill(os.getpid(), SIGNALS[self.due[number]])
        return number in self.due

    def is_next_fatal(self) -> bool:
        return self.due.get(len(self.passed)) == "KILL"

    def watch(self) -> None:
        """From now on every point is counted."""
        self._watch_files()
        hidden, step = Policy.hidden, Optimizer.step

        def counted_hidden(policy: Policy, *arguments: Any) -> Any:
            self.pass_by("update" if torch.is_grad_enabled() else "sample")
            return hidden(policy, *arguments)

        def counted_step(optimizer: Optimizer, *arguments: Any) -> None:
            self.pass_by("update")
            step(optimizer, *arguments)
            self.pass_by("update")

        Policy.hidden, Optimizer.step = counted_hidden, counted_step  # type: ignore[method-assign]

    def _watch_files(self) -> None:
        fsync, replace, rename, write = os.fsync, os.replace, os.rename, os.write

        def counted_fsync(fd: int) -> None:
            self.pass_by(where(os.readlink(f"/proc/self/fd/{fd}")))
            fsync(fd)

        def counted_replace(source: Any, target: Any) -> None:
            self.pass_by(where(str(target)))
            replace(source, target)
            self.pass_by(where(str(target)))

        def counted_rename(source: Any, target: Any) -> None:
            self.pass_by(where(str(target)))
            rename(source, target)
            self.pass_by(where(str(target)))

        def counted_write(fd: int, data: Any) -> int:
            if self.is_next_fatal():
                write(fd, memoryview(data)[: len(data) // 2])
            self.pass_by(where(os.readlink(f"/proc/self/fd/{fd}")))
            return write(fd, data)

        os.fsync, os.replace, os.rename, os.write = counted_fsync, counted_replace, counted_rename, counted_write


def where(path: str) -> str:
    """What is written, by its path."""
    for name in ("checkpoints", "rollouts", "metrics.jsonl", "timing.jsonl", "model", "best", "superseded"):
        if name in path.rpartition("/run-")[2]:
            return name
    return "start"


def train(job: dict[str, Any]) -> None:
    """In the child: a whole run, unless something is due."""
    torch.set_num_threads(1)
    points = Points({int(number): name for number, name in job.get("due", {}).items()})
    points.watch()
    function = getattr(tiny, job["reward"])

    def reward(**given: Any) -> list[float]:
        points.pass_by("verify")
        return function(**given)

    reward.__module__, reward.__qualname__, reward.__name__ = function.__module__, job["reward"], job["reward"]
    run.train(from_dict(job["config"]), reward=reward)
    with open(job["points"], "w") as file:
        json.dump(points.passed, file)


def command(job: dict[str, Any]) -> int:
    """In the child: the command line, what it prints going to a file."""
    from tinyllm.commands.cli import main

    out = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    points = Points({int(number): name for number, name in job.get("due", {}).items()})
    points.watch()
    return main(job["command"])


def main() -> None:
    # What runs import when they get there; once, before the forks
    import pandas  # noqa: F401
    import peft  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import tinyllm.record.rollouts
    import tinyllm.view.plot
    import tinyllm.view.progress
    import tinyllm.view.trackers

    tinyllm.view.plot.write_report = lambda run: run.path / "report.png"  # type: ignore[assignment]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = command(job) if "command" in job else train(job) or 0
            except BaseException:  # noqa: BLE001  told by the exit code, and seen on standard error
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
