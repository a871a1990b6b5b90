"""Servers as the engines of a pool: one worker stands for all of them and requests each group as it is submitted.

The client (engine/remote/client.py) chooses servers, retries and keeps deadlines, so the driver sets no deadline here.
An update goes through the same event loop while requests are under way; each response names the weights that drew its
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import Http, Portal
from tinyllm.engine.remote.served import ServedEngine
from tinyllm.pool.state import GroupRequest
from tinyllm.pool.workers import WorkerGroup
from tinyllm.records import Completion


def served_group(engine: ServedEngine, groups: int) -> WorkerGroup:
    """The servers of an engine as the engines of a pool, with at most so many groups under way."""
    return WorkerGroup("servers", 1, lambda: ServedWorker(engine.client, engine.portal), groups)


class ServedWorker:
    """All servers together as one worker; see workers.py."""

    def __init__(self, client: HTTPRolloutClient, portal: Portal) -> None:
        self.client, self.portal = client, portal
        self._slots: asyncio.Semaphore | None = None
        self._running: dict[asyncio.Task[list[Completion]], int] = {}

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self.portal.begin(lambda http: getattr(self, "_" + method)(http, *arguments))

    def kill(self) -> None:
        """Cut off its requests."""

        async def cancel(_: Http) -> None:
            for task in self._running:
                task.cancel()

        try:
            self.portal.begin(cancel)
        except RuntimeError:
            pass  # the loop has ended, and the requests with it

    async def _start(self, http: Http) -> None:
        self._slots = asyncio.Semaphore(self.client.max_concurrent)

    async def _work(
        self, http: Http, new: Sequence[tuple[int, GroupRequest]], budget_s: float
    ) -> list[tuple[int, list[Completion]]]:
        assert self._slots is not None
        for name, group in new:
            work = self.client.sample_within(http, self._slots, [group.prompt], group.params)
            self._running[asyncio.ensure_future(work)] = name
        if self._running:
            await asyncio.wait(self._running, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in self._running if task.done()]
        return [(self._running.pop(task), task.result()) for task in ended]
