"""The thread that owns the scheduler: between two decoding steps it submits, cancels and updates weights.

The event loop puts these actions into a queue. After each step the thread hands all new tokens and finished choices to
the event loop in one call. No other thread touches the scheduler.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tinyllm.engine.scheduler import SampleRequest, Scheduler
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, SamplingParams
from tinyllm.serve.fields import APIError
from tinyllm.serve.protocol import CompletionParams

Top = list[tuple[int, float]]


class DrawnToken(NamedTuple):
    """A token of a choice, as it is drawn."""

    token: int
    logprob: float
    top: Top


@dataclass(slots=True)
class Finished:
    """A choice that is finished."""

    completion: Completion
    top: list[Top]
    """The likeliest tokens at each position, where the request asks for them."""
    first_at: float
    """time.monotonic() of its first token."""
    last_at: float


Event = tuple[int, DrawnToken | Finished]
"""(choice, what happened)"""


@dataclass(eq=False)
class RequestHandle:
    """One request under way. Only the event loop changes its fields, but for `jobs`, which the engine thread sets."""

    asked: CompletionParams
    prompts: Sequence[tuple[int, ...]]
    params: Sequence[SamplingParams]
    """One per prompt."""
    arrived_at: float = field(default_factory=time.monotonic)
    events: deque[Event] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[int] = field(init=False)
    """Choices that are not finished."""
    failed: APIError | None = None
    left: bool = False
    """The client has hung up."""
    closed: bool = False
    """No response reads the events any more."""
    jobs: tuple[SampleRequest, ...] = ()

    def __post_init__(self) -> None:
        self.open = set(range(self.choices))

    @property
    def choices(self) -> int:
        return len(self.asked.keys)

    def fail(self, why: APIError) -> None:
        self.failed = why
        self.wake.set()


class _Sink:
    """The callbacks of one prompt's request to the scheduler; they fill the outbox, in the engine thread."""

    def __init__(self, worker: EngineThread, handle: RequestHandle, first: int) -> None:
        self.worker, self.handle, self.first = worker, handle, first
        self.top: list[list[Top]] = [[] for _ in range(handle.asked.n)]
        self.first_at = [0.0] * handle.asked.n
        self.left = handle.asked.n

    def on_token(self, sample: int, token: int, logprob: float, top: Top) -> None:
        if not self.first_at[sample]:
            self.first_at[sample] = time.monotonic()
        if self.handle.asked.top_logprobs:
            top = [(other, value) for other, value in top if value > -math.inf]  # top-k may leave fewer than asked for
            self.top[sample].append(top)
        if self.handle.asked.stream:
            self.worker.outbox.append((self.handle, (self.first + sample, DrawnToken(token, logprob, top))))

    def on_finish(self, completion: Completion) -> None:
        sample = completion.sample
        done = Finished(completion, self.top[sample], self.first_at[sample], time.monotonic())
        self.worker.outbox.append((self.handle, (self.first + sample, done)))
        self.left -= 1
        if not self.left:
            self.worker.forget(self.handle)


class EngineThread:
    """Runs a scheduler in a thread of its own. The event loop calls its methods, unless they name the engine thread."""

    def __init__(
        self,
        make_scheduler: Callable[[Revision], Scheduler],
        revision: Revision,
        deliver: Callable[[list[tuple[RequestHandle, Event]]], None],
        on_failure: Callable[[list[RequestHandle] | None, str], None],
        threads: int | None = None,
    ) -> None:
        self.make_scheduler, self.revision = make_scheduler, revision
        self.deliver, self.on_failure, self.threads = deliver, on_failure, threads
        self.scheduler = make_scheduler(revision)
        self.outbox: list[tuple[RequestHandle, Event]] = []
        self.died: str | None = None
        self.paused = False
        self.running = self.waiting = 0
        self.steps = 0
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._handles: dict[RequestHandle, int] = {}
        """Requests in the scheduler, each with the number of its unfinished prompts."""
        self._held: list[RequestHandle] = []
        """Requests that came during a pause; they enter the scheduler at `resume`."""
        self._asking: set[Future[Any]] = set()
        """Calls that have not returned."""
        self._draining: list[Future[None]] = []
        """Calls of `pause` that wait for the engine to be idle."""
        self._stop = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Called in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in."""
        self._stop = True
        self._actions.put(lambda: None)

    def submit(self, handle: RequestHandle) -> None:
        self._actions.put(lambda: self._submit(handle))

    def cancel(self, handle: RequestHandle) -> None:
        self._actions.put(lambda: self._cancel(handle))

    async def pause(self, mode: str) -> None:
        """Stop decoding: at once ("keep"), or when all running requests are finished ("wait")."""
        await self._ask(lambda future: self._pause(mode, future))

    async def resume(self) -> None:
        await self.call(self._resume)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine thread between two steps, paused or not, and return its result."""

        def act(future: Future[Any]) -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed on to the caller
                future.set_exception(error)

        return await self._ask(act)

    async def _ask(self, act: Callable[[Future[Any]], None]) -> Any:
        """The result of a future that act(future), called in the engine thread, sets now or later."""
        if self.died is not None:
            raise dead(self.died)
        future: Future[Any] = Future()
        self._asking.add(future)
        # A future that is running cannot be cancelled, so that the engine thread can always set it
        self._actions.put(lambda: act(future) if future.set_running_or_notify_cancel() else None)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._asking.discard(future)

    def _told_dead(self, why: str) -> None:
        """End all calls of a dead engine, and all requests."""
        for future in self._asking:
            if not future.done():
                future.set_exception(dead(why))
        self.on_failure(None, why)

    # -- engine thread --------------------------------------------------------------------------------------------

    def forget(self, handle: RequestHandle) -> None:
        """One prompt of the request is finished (engine thread)."""
        self._handles[handle] -= 1
        if not self._handles[handle]:
            del self._handles[handle]

    def publish(self, revision: Revision) -> None:
        """The weights were changed (engine thread, through call)."""
        self.revision = revision
        self.scheduler.publish(revision)

    def _run(self) -> None:
        try:
            if self.threads:
                torch.set_num_threads(self.threads)
            busy = False
            while not self._stop:
                self._act(block=not busy)
                busy = not self.paused and not self._stop and self._step()
                if self._draining and not busy:
                    self._now_paused()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the server has to say that it cannot serve
            self.died = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            self._tell(self._told_dead, self.died)

    def _act(self, block: bool) -> None:
        """Do all actions of the queue. block: wait for the first of them."""
        with suppress(queue.Empty):
            self._actions.get(block)()
            while True:
                self._actions.get_nowait()()

    def _step(self) -> bool:
        try:
            busy = self.scheduler.step()
        except (EngineError, MemoryError, RuntimeError) as error:
            if not _is_survivable(error):
                raise
            self._recover(str(error) or type(error).__name__)
            busy = self.scheduler.waiting > 0
        self.steps += 1
        self._count()
        if self.outbox:
            out, self.outbox = self.outbox, []
            self._tell(self.deliver, out)
        return busy

    def _recover(self, why: str) -> None:
        """After a failed step: fail the requests that took part in it, and start the others in a new scheduler."""
        not_begun = self.scheduler.not_begun
        concerned = [handle for handle in self._handles if any(job.id not in not_begun for job in handle.jobs)]
        rest = [handle for handle in self._handles if handle not in concerned]
        gone = set(map(id, concerned))
        self.outbox = [entry for entry in self.outbox if id(entry[0]) not in gone]
        self._handles.clear()
        self.scheduler = self.make_scheduler(self.revision)
        self._tell(self.on_failure, concerned, why)
        for handle in rest:
            self._submit(handle)

    def _submit(self, handle: RequestHandle) -> None:
        if self.paused or self._draining:
            self._held.append(handle)
            self._count()
            return
        asked, jobs = handle.asked, []
        for number, (ids, params) in enumerate(zip(handle.prompts, handle.params, strict=True)):
            first = number * asked.n
            sink = _Sink(self, handle, first)
            keys = dict(enumerate(asked.keys[first : first + asked.n]))
            name = f"{id(handle)}/{number}"
            prompt = Prompt(name, ids, "")
            jobs.append(SampleRequest(name, prompt, params, keys, sink.on_finish, sink.on_token, asked.top_logprobs))
        handle.jobs = tuple(jobs)
        self._handles[handle] = len(jobs)
        for job in jobs:
            self.scheduler.submit(job)
        self._count()

    def _cancel(self, handle: RequestHandle) -> None:
        if handle in self._held:
            self._held.remove(handle)
        if self._handles.pop(handle, None):
            for job in handle.jobs:
                self.scheduler.cancel(job.id)
        self._count()

    def _count(self) -> None:
        held = sum(handle.choices for handle in self._held)
        self.running, self.waiting = self.scheduler.running, self.scheduler.waiting + held

    def _pause(self, mode: str, future: Future[None]) -> None:
        if self.paused:
            future.set_result(None)
        else:
            self._draining.append(future)
            if mode == "keep":
                self._now_paused()

    def _now_paused(self) -> None:
        self.paused = True
        for future in self._draining:
            future.set_result(None)
        self._draining.clear()

    def _resume(self) -> None:
        self.paused = False
        held, self._held = self._held, []
        for future in self._draining:
            future.set_exception(APIError("resumed before the pause was reached", status=409))
        self._draining.clear()
        for handle in held:
            self._submit(handle)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._stop = True


def dead(why: str) -> APIError:
    """The error of every request once the engine has died."""
    return APIError(f"the engine has stopped working: {why}; restart the server", status=503, kind="server_error")


def _is_survivable(error: Exception) -> bool:
    """Whether an error ends only the running requests: logits that are not finite, or no memory left."""
    out_of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    return isinstance(error, EngineError) or out_of_memory or "can't allocate memory" in str(error)
