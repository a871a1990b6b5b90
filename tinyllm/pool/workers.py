"""Workers as the driver sees them: calls that return futures, and `kill`.

A worker is a process on Ray (ray_workers.py), the servers (served_workers.py) or a thread of the trainer (here). Each
has one method that does its work, `work(new, budget_s)`: it accepts new (id, payload) pairs, works until a group is
finished or the budget is over, and returns (id, result) pairs, each id at most once. One call runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

START_S = 900.0
"""Longest time a worker may take to start: its imports, its model."""


class WorkerDied(Exception):
    """The process of a worker ended; the text says how."""


class Worker(Protocol):
    """One worker."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """The first call is `start`. The future raises WorkerDied, or what the method raised."""
        ...

    def kill(self) -> None:
        """End the worker, whatever it is doing; open calls may end with WorkerDied, or never."""
        ...


@dataclass(frozen=True)
class WorkerGroup:
    """Workers of one kind."""

    name: str
    """engine or verifier."""
    count: int
    make: Callable[[], Worker]
    capacity: int
    """Groups that one worker has at a time."""
    deadline_s: float | None = None
    """Longest time for one group; None where the worker bounds its own work, or cannot be ended."""
    takes_weights: bool = False
    """Whether the driver hands it new weights, by `publish(revision, weights)`."""


class ThreadWorker:
    """A worker in a thread of this process. A thread cannot be killed: its call runs on, and nobody waits for it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(None if method == "start" else getattr(self._target, method)(*arguments))
            except BaseException as error:  # noqa: BLE001 - the driver's to judge
                outcome.set_exception(error)

        threading.Thread(target=run, name="tinyllm-worker", daemon=True).start()
        return outcome

    def kill(self) -> None:
        """Nothing to do: see the class."""
