"""State of the driver: groups in flight, worker slots, and the two stages that groups pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinyllm.pool.workers import START_S, Worker, WorkerGroup
from tinyllm.post.source import JudgedGroups
from tinyllm.records import Completion, Prompt, Revision, SamplingParams


@dataclass(frozen=True)
class GroupRequest:
    """One group to sample and verify."""

    step: int
    number: int
    """Position of the group in its step."""
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Trace:
    """Times, workers and faults of a group on its way through the pool, for the ledger."""

    revision: int
    """Step of the newest weights when the group was submitted."""
    queued_s: float = 0.0
    sampling_s: float = 0.0
    verifying_s: float = 0.0
    """Seconds of the attempt that counted."""
    engine: str = ""
    verifier: str = ""
    faults: int = 0
    """Attempts that ended with the death of a worker or at a deadline, in both stages."""


@dataclass(frozen=True)
class GroupResult:
    """A group that has left the pool."""

    request: GroupRequest
    judged: JudgedGroups
    trace: Trace


@dataclass(eq=False)
class InFlight:
    """A group in the pool."""

    id: int
    request: GroupRequest
    on_done: Callable[[GroupResult], None]
    trace: Trace
    submitted: float
    """All times are of time.monotonic()."""
    received: float = 0.0
    """Time the current worker received it."""
    faults: int = 0
    """Failed attempts in this stage."""
    completions: list[Completion] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A call of a worker that has not returned."""

    since: float


@dataclass(eq=False)
class WorkerSlot:
    """The place of one worker; a worker that died or hung is replaced by another in the same slot."""

    name: str
    workers: WorkerGroup
    worker: Worker | None = None
    call: Call | None = None
    ready: bool = False
    revision: Revision | None = None
    """Of the weights that the worker was given last."""
    groups: list[InFlight] = field(default_factory=list)
    restarts: int = 0
    """In a row, without a group finished in between."""
    busy_s: float = 0.0
    busy_since: float | None = None

    def note_busy(self, now: float) -> None:
        """Add the busy time up to now, and begin a new busy span where the slot has groups."""
        self.busy_s, self.busy_since = self.busy_until(now), now if self.groups else None

    def busy_until(self, now: float) -> float:
        """Seconds in which the slot has had groups."""
        return self.busy_s + (0.0 if self.busy_since is None else now - self.busy_since)

    def state(self) -> str:
        if not self.ready:
            return "restarting" if self.restarts else "starting"
        return f"{len(self.groups)} running" if self.groups else "idle"


@dataclass(eq=False)
class WorkerStage:
    """A queue of groups and the workers that take from it."""

    slots: list[WorkerSlot]
    payload: Callable[[InFlight], Any]
    finish: Callable[[InFlight, Any], None]
    give_up: Callable[[InFlight, str], None]
    """Called for a group that no worker could finish, with the reason."""
    waiting: deque[InFlight] = field(default_factory=deque)


def slots_of(workers: WorkerGroup) -> list[WorkerSlot]:
    return [WorkerSlot(f"{workers.name} {number}", workers) for number in range(1, workers.count + 1)]


def deadline(slot: WorkerSlot) -> float | None:
    """Deadline of the current call; None where there is none."""
    if slot.call is not None and not slot.ready:
        return slot.call.since + START_S
    limit = slot.workers.deadline_s
    if limit is None or slot.call is None:
        return None
    return min([slot.call.since + limit, *(group.received + limit for group in slot.groups)])
