"""What the driver keeps its books in: groups, the workers' places, and the two stages that groups pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinyllm.pool.workers import START_S, Worker, WorkerGroup
from tinyllm.records import Completion, Prompt, Revision, SamplingParams


@dataclass(frozen=True)
class GroupRequest:
    """One group to sample and verify."""

    step: int
    number: int
    """Its place in the step."""
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Trace:
    """How a group went; what the ledger keeps of it."""

    revision: int
    """The newest weights when it was let in."""
    queued_s: float = 0.0
    sampling_s: float = 0.0
    verifying_s: float = 0.0
    """Seconds of the attempt that counted."""
    engine: str = ""
    verifier: str = ""
    faults: int = 0
    """Attempts that ended with a worker's death or at a deadline."""


@dataclass(frozen=True)
class GroupResult:
    """A group that has left the pool."""

    work: GroupRequest
    result: Any
    """What the verifier's work returned."""
    trace: Trace


@dataclass(eq=False)
class InFlight:
    """A group under way."""

    name: int
    work: GroupRequest
    trace: Trace
    entered: float
    since: float = 0.0
    """When the worker got it that has it."""
    faults: int = 0
    """In the stage where it is."""
    completions: list[Completion] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A call under way."""

    since: float


@dataclass(eq=False)
class WorkerSlot:
    """One worker's place; the worker changes when it had to be replaced."""

    name: str
    workers: WorkerGroup
    worker: Worker | None = None
    call: Call | None = None
    ready: bool = False
    revision: Revision | None = None
    items: list[InFlight] = field(default_factory=list)
    restarts: int = 0
    """In a row, without a group finished in between."""
    busy_s: float = 0.0
    busy_since: float | None = None

    def note_busy(self, now: float) -> None:
        """Closes the account of busy time, and opens it again where there is work."""
        if self.busy_since is not None:
            self.busy_s += now - self.busy_since
        self.busy_since = now if self.items else None

    def state(self) -> str:
        if not self.ready:
            return "restarting" if self.restarts else "starting"
        return f"{len(self.items)} running" if self.items else "idle"


@dataclass(eq=False)
class WorkerStage:
    """A queue of groups and the workers that take from it."""

    slots: list[WorkerSlot]
    payload: Callable[[InFlight], Any]
    finish: Callable[[InFlight, Any], None]
    give_up: Callable[[InFlight, str], None]
    """What becomes of a group that no worker could finish, with the reason."""
    waiting: deque[InFlight] = field(default_factory=deque)


def slots_of(workers: WorkerGroup) -> list[WorkerSlot]:
    return [WorkerSlot(f"{workers.name} {number}", workers) for number in range(1, workers.count + 1)]


def deadline(slot: WorkerSlot) -> float | None:
    """When this worker has to have done something, at the latest."""
    if slot.call is not None and not slot.ready:
        return slot.call.since + START_S
    limit = slot.workers.deadline_s
    if limit is None or slot.call is None:
        return None
    return min([slot.call.since + limit, *(item.since + limit for item in slot.items)])
