"""The thread that moves groups from prompt to verdict: queue, engine, queue, verifier, done.

    driver = Driver(engines, verifiers, group_of_failure, on_done, attempts=3)
    driver.publish(revision, weights)
    driver.submit([Work(step, 0, prompt, params), ...])
    driver.close()

All state belongs to this thread; everyone else, the workers' futures included, puts an action into its inbox. A worker
that dies, or is over its deadline, is ended and replaced, and its groups go back to the head of the queue: what a group
draws depends on its seed, step, prompt, draw and sample alone, so nothing is lost by asking again, and an answer that
nobody waits for any more is dropped. A group that has met too many such faults ends with the reason.
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
from dataclasses import replace
from typing import Any

from tinyllm.engine.seeds import seed_key
from tinyllm.errors import EngineError
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
from tinyllm.records import Completion, Revision

log = logging.getLogger("tinyllm")

BUDGET_S = 0.25
"""How long an engine works before it is asked for what is finished, and may take new weights and new groups."""


class Driver:
    """Engines and verifiers at work.

    without_verdict(work, completions, reason) gives the result of a group that could not be verified; on_done(Done) and
    on_error(exception) are called in the driver's thread.
    """

    def __init__(
        self,
        engines: WorkerGroup,
        verifiers: WorkerGroup,
        without_verdict: Callable[[GroupRequest, Sequence[Completion], str], Any],
        on_done: Callable[[GroupResult], None],
        on_error: Callable[[BaseException], None],
        *,
        attempts: int = 3,
    ) -> None:
        self.without_verdict, self.on_done, self.on_error, self.attempts = without_verdict, on_done, on_error, attempts
        self.worker_groups = (engines, verifiers)
        self.revision: Revision | None = None
        self.weights: Any = None
        self.sampling = WorkerStage(slots_of(engines), lambda item: item.work, self._sampled, self._not_sampled)
        self.verifying = WorkerStage(
            slots_of(verifiers), lambda item: (item.work, item.completions), self._verified, self._not_verified
        )
        self.stages = (self.sampling, self.verifying)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._names = itertools.count()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="tinyllm-pool", daemon=True)
        self._thread.start()

    # -- from other threads -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Let groups in; they are sampled in this order."""
        self._inbox.put(lambda: self._submit(requests))

    def publish(self, revision: Revision, weights: Any = None) -> None:
        """New weights: every engine gets them before it begins anything that is submitted later."""

        def act() -> None:
            self.revision, self.weights = revision, weights

        self._inbox.put(act)

    def close(self, timeout_s: float = 60.0) -> None:
        """End all workers; what is under way is dropped."""
        self._stop = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def states(self) -> dict[str, list[str]]:
        """What each worker is doing, in words, by kind of worker."""
        return {stage.slots[0].workers.name: [slot.state() for slot in stage.slots] for stage in self.stages}

    def busy_seconds(self) -> dict[str, float]:
        """By kind of worker, how long they have had work so far, all together."""
        now = time.monotonic()
        seconds: dict[str, float] = {}
        for slot in (slot for stage in self.stages for slot in stage.slots):
            since = slot.busy_since
            seconds[slot.workers.name] = (
                seconds.get(slot.workers.name, 0.0) + slot.busy_s + (now - since if since else 0.0)
            )
        return seconds

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for stage in self.stages:
                for slot in stage.slots:
                    self._start(slot)
            while not self._stop:
                for stage in self.stages:
                    self._dispatch(stage)
                self._act()
                self._check_deadlines()
        except BaseException as error:  # noqa: BLE001 - handed on: the trainer's thread raises it
            if not self._stop:
                self.on_error(error)
        finally:
            for slot in (slot for stage in self.stages for slot in stage.slots):
                if slot.worker is not None:
                    slot.worker.kill()

    def _act(self) -> None:
        """Everything that has come in; waits for the first until the next deadline."""
        moments = [moment for stage in self.stages for slot in stage.slots if (moment := deadline(slot)) is not None]
        pause = min(3600.0, max(0.01, min(moments) - time.monotonic())) if moments else None
        try:
            self._inbox.get(timeout=pause)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _submit(self, requests: Sequence[GroupRequest]) -> None:
        revision = -1 if self.revision is None else self.revision.step
        now = time.monotonic()
        items = [InFlight(next(self._names), work, Trace(revision), now) for work in requests]
        waiting = self.sampling.waiting  # a refill of an earlier step goes before the steps after it
        self.sampling.waiting = deque(sorted([*waiting, *items], key=lambda item: item.work.step))

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, slot: WorkerSlot, method: str, then: Callable[[Any], None], *arguments: Any) -> None:
        call = slot.call = Call(time.monotonic())

        def answered(future: Future[Any]) -> None:
            self._inbox.put(lambda: self._answered(slot, call, future, then))

        assert slot.worker is not None
        slot.worker.call(method, *arguments).add_done_callback(answered)

    def _answered(self, slot: WorkerSlot, call: Call, future: Future[Any], then: Callable[[Any], None]) -> None:
        if slot.call is not call:  # of a worker that was replaced
            return
        slot.call = None
        error = future.exception()
        if isinstance(error, WorkerDied):
            self._replace(slot, str(error), slot.items)
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
        """A new worker; its groups go back, and the suspects among them are a fault nearer to their end."""
        slot.restarts += 1
        log.warning("%s is replaced: %s; %d groups are tried again", slot.name, why, len(slot.items))
        assert slot.worker is not None
        slot.worker.kill()
        stage = next(stage for stage in self.stages if slot in stage.slots)
        back, slot.items = list(slot.items), []
        now = time.monotonic()
        slot.note_busy(now)
        for item in reversed(back):
            item.faults += item in suspects
            item.trace = replace(self._traced(stage, slot, item, now), faults=item.trace.faults + (item in suspects))
            if item.faults >= self.attempts:
                stage.give_up(item, why)
            else:
                stage.waiting.appendleft(item)
        if slot.restarts > 3 * self.attempts:
            raise EngineError(f"{slot.name} had to be replaced {slot.restarts} times in a row, the last because: {why}")
        self._start(slot)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for slot in (slot for stage in self.stages for slot in stage.slots):
            moment = deadline(slot)
            if moment is None or moment > now:
                continue
            limit = slot.workers.deadline_s if slot.ready else START_S
            late = [item for item in slot.items if limit is not None and item.since + limit <= now]
            slot.call = None
            self._replace(slot, f"nothing came of it within {limit:g} s", late)

    # -- work -------------------------------------------------------------------------------------------------------

    def _dispatch(self, stage: WorkerStage) -> None:
        for slot in stage.slots:
            if not slot.ready or slot.call is not None:
                continue
            if slot.workers.takes_weights and slot.revision != self.revision:
                assert self.revision is not None
                self._publish(slot, self.revision)
                continue
            new = self._take(stage, slot)
            if slot.items:
                pairs = [(item.name, stage.payload(item)) for item in new]

                def then(results: Any, stage: WorkerStage = stage, slot: WorkerSlot = slot) -> None:
                    self._finished(stage, slot, results)

                self._call(slot, "work", then, pairs, BUDGET_S)

    def _publish(self, slot: WorkerSlot, revision: Revision) -> None:
        def published(_: Any) -> None:
            slot.revision = revision

        self._call(slot, "publish", published, revision, self.weights)

    def _take(self, stage: WorkerStage, slot: WorkerSlot) -> list[InFlight]:
        """What this worker begins now: its share of all there is. A group in its last attempt is alone, so that it can
        take no other down with it."""
        if slot.workers.takes_weights and self.revision is None:
            return []
        now, new = time.monotonic(), []
        total = len(stage.waiting) + sum(len(s.items) for s in stage.slots)
        share = min(slot.workers.capacity, math.ceil(total / len(stage.slots)))
        while stage.waiting and len(slot.items) < share:
            last = [self.attempts > 1 and item.faults >= self.attempts - 1 for item in (stage.waiting[0], *slot.items)]
            if slot.items and any(last):
                break
            item = stage.waiting.popleft()
            item.since = now
            new.append(item)
            slot.items.append(item)
        slot.note_busy(now)
        return new

    def _finished(self, stage: WorkerStage, slot: WorkerSlot, results: Sequence[tuple[int, Any]]) -> None:
        now = time.monotonic()
        mine = {item.name: item for item in slot.items}
        for name, result in results:
            item = mine.pop(name, None)
            if item is None:  # doubled, or of a group that went elsewhere
                continue
            slot.items.remove(item)
            slot.restarts = 0
            item.trace = self._traced(stage, slot, item, now)
            item.faults = 0
            stage.finish(item, result)
        slot.note_busy(now)

    def _traced(self, stage: WorkerStage, slot: WorkerSlot, item: InFlight, now: float) -> Trace:
        """A group's trace with this attempt in it."""
        if stage is self.sampling:
            return replace(item.trace, sampling_s=now - item.since, engine=slot.name)
        return replace(item.trace, verifying_s=now - item.since, verifier=slot.name)

    def _sampled(self, item: InFlight, completions: list[Completion]) -> None:
        item.completions = completions
        if any(c.finish_reason != "error" for c in completions):
            self.verifying.waiting.append(item)
        else:
            self._not_verified(item, "no completion was sampled")

    def _not_sampled(self, item: InFlight, why: str) -> None:
        p, prompt = item.work.params, item.work.prompt
        keys = [seed_key(p.seed, p.step, prompt.id, prompt.draw, sample) for sample in range(p.n)]
        item.completions = [
            Completion(prompt.id, prompt.draw, sample, (), (), "error", key, Revision(-1, ""), "", error=why)
            for sample, key in enumerate(keys)
        ]
        self._not_verified(item, why)

    def _not_verified(self, item: InFlight, why: str) -> None:
        self._verified(item, self.without_verdict(item.work, item.completions, why))

    def _verified(self, item: InFlight, result: Any) -> None:
        trace = item.trace
        whole = time.monotonic() - item.entered
        queued = max(0.0, whole - trace.sampling_s - trace.verifying_s)
        self.on_done(GroupResult(item.work, result, replace(trace, queued_s=queued)))
