"""Servers as the engines of a pool: one event loop that stays, in which groups are asked for as they come.

Deadlines, second attempts and which server is asked are the client's own (client.py), so the driver sets no others. An
update goes through the same loop while requests are under way; a server says which weights drew which tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import Http
from tinyllm.records import Completion

T = TypeVar("T")


class Loop:
    """An event loop in a thread of its own, with its connections."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.http = Http()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinyllm-http", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[Http], Coroutine[Any, Any, T]]) -> Future[T]:
        """work(http), under way."""
        return asyncio.run_coroutine_threadsafe(work(self.http), self._loop)

    def run(self, work: Callable[[Http], Coroutine[Any, Any, T]]) -> T:
        """The result of work(http); an exception here, Ctrl-C too, cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cut off what is under way, and end the thread."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.http.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)
        self._loop.close()


class ServedWorker:
    """All servers together as one worker; see workers.py."""

    def __init__(self, client: HTTPRolloutClient, loop: Loop) -> None:
        self.client, self.loop = client, loop
        self._slots: asyncio.Semaphore | None = None
        self._running: dict[asyncio.Task[list[Completion]], int] = {}

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self.loop.begin(lambda http: getattr(self, "_" + method)(http, *arguments))

    def kill(self) -> None:
        """Cut off its requests."""

        async def cancel(_: Http) -> None:
            for task in self._running:
                task.cancel()

        try:
            self.loop.begin(cancel)
        except RuntimeError:
            pass  # the loop has ended, and they with it

    async def _start(self, http: Http) -> None:
        self._slots = asyncio.Semaphore(self.client.max_concurrent)

    async def _work(
        self, http: Http, new: Sequence[tuple[int, Any]], budget_s: float
    ) -> list[tuple[int, list[Completion]]]:
        assert self._slots is not None
        for name, work in new:
            task = asyncio.ensure_future(self.client.sample_within(http, self._slots, work.prompt, work.params))
            self._running[task] = name
        if self._running:
            await asyncio.wait(self._running, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in self._running if task.done()]
        return [(self._running.pop(task), task.result()) for task in ended]
