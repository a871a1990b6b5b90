"""The thread that moves groups from prompt to verdict: a queue, the engines, a queue, the verifiers.

    driver = Driver(engines, verifiers, on_error, attempts=3)
    driver.publish(revision, weights)
    driver.submit([GroupRequest(step, 0, prompt, params), ...], on_done)
    driver.close()

All state belongs to this thread; other threads, the callbacks of the workers' futures included, put an action into its
inbox. A worker that dies or misses its deadline is killed and replaced, and its groups go back to the head of the
queue: what a group draws depends on its seed, step, prompt, draw and sample alone, so nothing is lost by sampling it
again, and a result that nobody waits for any more is dropped. A group that has met too many faults ends with a reason.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tinyllm.engine.seeds import seed_key
from tinyllm.errors import EngineError
from tinyllm.pool.judging import unjudged
from tinyllm.pool.state import (
    Call,
    GroupRequest,
    GroupResult,
    InFlight,
    Trace,
    WorkerSlot,
    WorkerStage,
    deadline,
    slots_of,
)
from tinyllm.pool.workers import START_S, WorkerDied, WorkerGroup
from tinyllm.post.source import JudgedGroups
from tinyllm.records import Completion, Revision

log = logging.getLogger("tinyllm")

BUDGET_S = 0.25
"""How long one call of `work` lasts, after which an engine returns finished groups and takes new weights and groups."""


class Driver:
    """Engines and verifiers at work. on_done of `submit` and on_error are called in the driver's thread."""

    def __init__(
        self,
        engines: WorkerGroup,
        verifiers: WorkerGroup,
        on_error: Callable[[BaseException], None],
        *,
        attempts: int = 3,
    ) -> None:
        self.on_error, self.attempts = on_error, attempts
        self.worker_groups = (engines, verifiers)
        self.revision: Revision | None = None
        self.weights: object = None
        self.sampling = WorkerStage(slots_of(engines), lambda group: group.request, self._sampled, self._not_sampled)
        self.verifying = WorkerStage(
            slots_of(verifiers), lambda group: (group.request, group.completions), self._verified, self._not_verified
        )
        self.stages = (self.sampling, self.verifying)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="tinyllm-pool", daemon=True)
        self._thread.start()

    # -- from other threads -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest], on_done: Callable[[GroupResult], None]) -> None:
        """Add groups to the queue; they are sampled in this order, and on_done is called with each result."""
        self._inbox.put(lambda: self._submit(requests, on_done))

    def publish(self, revision: Revision, weights: object = None) -> None:
        """New weights, as the engines' `publish` takes them: each gets them before any group submitted later."""

        def act() -> None:
            self.revision, self.weights = revision, weights

        self._inbox.put(act)

    def close(self, timeout_s: float = 60.0) -> None:
        """Kill all workers; groups in flight are dropped."""
        self._stop = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def states(self) -> dict[str, list[str]]:
        """By kind of worker: what each is doing, in words."""
        return {stage.slots[0].workers.name: [slot.state() for slot in stage.slots] for stage in self.stages}

    def busy_seconds(self) -> dict[str, float]:
        """By kind of worker: how long its workers have had groups so far, summed."""
        now = time.monotonic()
        return {
            workers.name: sum(s.busy_until(now) for s in self._slots() if s.workers is workers)
            for workers in self.worker_groups
        }

    def _slots(self) -> list[WorkerSlot]:
        return [slot for stage in self.stages for slot in stage.slots]

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for slot in self._slots():
                self._start(slot)
            while not self._stop:
                for stage in self.stages:
                    self._dispatch(stage)
                self._process_inbox()
                self._check_deadlines()
        except BaseException as error:  # noqa: BLE001 - handed on: the trainer's thread raises it
            if not self._stop:
                self.on_error(error)
        finally:
            for slot in self._slots():
                if slot.worker is not None:
                    slot.worker.kill()

    def _process_inbox(self) -> None:
        """Wait for an action until the next deadline, then do all that are there."""
        moments = [moment for slot in self._slots() if (moment := deadline(slot)) is not None]
        pause = min(3600.0, max(0.01, min(moments) - time.monotonic())) if moments else None
        with suppress(queue.Empty):
            self._inbox.get(timeout=pause)()
            while True:
                self._inbox.get_nowait()()

    def _submit(self, requests: Sequence[GroupRequest], on_done: Callable[[GroupResult], None]) -> None:
        revision = -1 if self.revision is None else self.revision.step
        now = time.monotonic()
        groups = [InFlight(next(self._ids), request, on_done, Trace(revision), now) for request in requests]
        waiting = self.sampling.waiting  # a refill of an earlier step goes before the steps after it
        self.sampling.waiting = deque(sorted([*waiting, *groups], key=lambda group: group.request.step))

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, slot: WorkerSlot, method: str, then: Callable[[Any], None], *arguments: Any) -> None:
        call = slot.call = Call(time.monotonic())

        def returned(future: Future[Any]) -> None:
            self._inbox.put(lambda: self._returned(slot, call, future, then))

        assert slot.worker is not None
        slot.worker.call(method, *arguments).add_done_callback(returned)

    def _returned(self, slot: WorkerSlot, call: Call, future: Future[Any], then: Callable[[Any], None]) -> None:
        if slot.call is not call:  # the worker was replaced
            return
        slot.call = None
        error = future.exception()
        if isinstance(error, WorkerDied):
            self._replace(slot, str(error), slot.groups)
        elif error is not None:
            raise error
        else:
            then(future.result())

    def _start(self, slot: WorkerSlot) -> None:
        slot.ready, slot.revision, slot.worker = False, None, slot.workers.make()

        def started(_: Any) -> None:
            slot.ready = True

        self._call(slot, "start", started)

    def _replace(self, slot: WorkerSlot, why: str, suspects: Sequence[InFlight]) -> None:
        """Replace the worker, requeue its groups, count a failed attempt for those that may have caused it."""
        slot.restarts += 1
        log.warning("%s is replaced: %s; %d groups are tried again", slot.name, why, len(slot.groups))
        assert slot.worker is not None
        slot.worker.kill()
        stage = next(stage for stage in self.stages if slot in stage.slots)
        back, slot.groups = list(slot.groups), []
        now = time.monotonic()
        slot.note_busy(now)
        for group in reversed(back):
            fault = group in suspects
            group.faults += fault
            group.trace = replace(self._traced(stage, slot, group, now), faults=group.trace.faults + fault)
            if group.faults >= self.attempts:
                stage.give_up(group, why)
            else:
                stage.waiting.appendleft(group)
        if slot.restarts > 3 * self.attempts:
            raise EngineError(f"{slot.name} had to be replaced {slot.restarts} times in a row, the last because: {why}")
        self._start(slot)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for slot in self._slots():
            moment = deadline(slot)
            if moment is None or moment > now:
                continue
            limit = slot.workers.deadline_s if slot.ready else START_S
            late = [group for group in slot.groups if limit is not None and group.received + limit <= now]
            slot.call = None
            self._replace(slot, f"nothing came of it within {limit:g} s", late)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _dispatch(self, stage: WorkerStage) -> None:
        for slot in stage.slots:
            if not slot.ready or slot.call is not None:
                continue
            if slot.workers.takes_weights and slot.revision != self.revision:
                assert self.revision is not None
                self._publish(slot, self.revision)
                continue
            new = self._take(stage, slot)
            if slot.groups:
                pairs = [(group.id, stage.payload(group)) for group in new]
                self._call(slot, "work", partial(self._finished, stage, slot), pairs, BUDGET_S)

    def _publish(self, slot: WorkerSlot, revision: Revision) -> None:
        def published(_: Any) -> None:
            slot.revision = revision

        self._call(slot, "publish", published, revision, self.weights)

    def _take(self, stage: WorkerStage, slot: WorkerSlot) -> list[InFlight]:
        """Groups that this worker begins now: up to a fair share of all groups of the stage.

        A group on its last attempt runs alone, so that a crash affects no other.
        """
        if slot.workers.takes_weights and self.revision is None:
            return []
        now, new = time.monotonic(), []
        total = len(stage.waiting) + sum(len(s.groups) for s in stage.slots)
        share = min(slot.workers.capacity, math.ceil(total / len(stage.slots)))
        while stage.waiting and len(slot.groups) < share:
            on_last = (group.faults >= self.attempts - 1 for group in (stage.waiting[0], *slot.groups))
            if slot.groups and self.attempts > 1 and any(on_last):
                break
            group = stage.waiting.popleft()
            group.received = now
            new.append(group)
            slot.groups.append(group)
        slot.note_busy(now)
        return new

    def _finished(self, stage: WorkerStage, slot: WorkerSlot, results: Sequence[tuple[int, Any]]) -> None:
        now = time.monotonic()
        mine = {group.id: group for group in slot.groups}
        for number, result in results:
            group = mine.pop(number, None)
            if group is None:  # doubled, or of a group that went elsewhere
                continue
            slot.groups.remove(group)
            slot.restarts = 0
            group.trace = self._traced(stage, slot, group, now)
            group.faults = 0
            stage.finish(group, result)
        slot.note_busy(now)

    def _traced(self, stage: WorkerStage, slot: WorkerSlot, group: InFlight, now: float) -> Trace:
        """The group's trace with this attempt in it."""
        if stage is self.sampling:
            return replace(group.trace, sampling_s=now - group.received, engine=slot.name)
        return replace(group.trace, verifying_s=now - group.received, verifier=slot.name)

    def _sampled(self, group: InFlight, completions: list[Completion]) -> None:
        group.completions = completions
        if any(c.finish_reason != "error" for c in completions):
            self.verifying.waiting.append(group)
        else:
            self._not_verified(group, "no completion was sampled")

    def _not_sampled(self, group: InFlight, why: str) -> None:
        p, prompt = group.request.params, group.request.prompt
        keys = [seed_key(p.seed, p.step, prompt.id, prompt.draw, sample) for sample in range(p.n)]
        group.completions = [Completion.failed(prompt, sample, key, why) for sample, key in enumerate(keys)]
        self._not_verified(group, why)

    def _not_verified(self, group: InFlight, why: str) -> None:
        self._verified(group, unjudged(group.request, group.completions, why))

    def _verified(self, group: InFlight, judged: JudgedGroups) -> None:
        trace = group.trace
        whole = time.monotonic() - group.submitted
        queued = max(0.0, whole - trace.sampling_s - trace.verifying_s)
        group.on_done(GroupResult(group.request, judged, replace(trace, queued_s=queued)))
