"""What the driver keeps its books in: groups, the workers' places, and the two stages that groups pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinyllm.pool.workers import START_S, Staff, Worker
from tinyllm.records import Completion, Prompt, Revision, SamplingParams


@dataclass(frozen=True)
class Work:
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
class Done:
    """A group that has left the pool."""

    work: Work
    result: Any
    """What the verifier's work returned."""
    trace: Trace


@dataclass(eq=False)
class Item:
    """A group under way."""

    name: int
    work: Work
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
class Seat:
    """One worker's place; the worker changes when it had to be replaced."""

    name: str
    staff: Staff
    worker: Worker | None = None
    call: Call | None = None
    ready: bool = False
    revision: Revision | None = None
    items: list[Item] = field(default_factory=list)
    deaths: int = 0
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
            return "restarting" if self.deaths else "starting"
        return f"{len(self.items)} running" if self.items else "idle"


@dataclass(eq=False)
class Stage:
    """A queue of groups and the workers that take from it."""

    seats: list[Seat]
    payload: Callable[[Item], Any]
    finish: Callable[[Item, Any], None]
    give_up: Callable[[Item, str], None]
    """What becomes of a group that no worker could finish, with the reason."""
    waiting: deque[Item] = field(default_factory=deque)


def seats_of(staff: Staff) -> list[Seat]:
    return [Seat(f"{staff.name} {number}", staff) for number in range(1, staff.count + 1)]


def due(seat: Seat) -> float | None:
    """When this worker has to have done something, at the latest."""
    if seat.call is not None and not seat.ready:
        return seat.call.since + START_S
    limit = seat.staff.deadline_s
    if limit is None or seat.call is None:
        return None
    return min([seat.call.since + limit, *(item.since + limit for item in seat.items)])
