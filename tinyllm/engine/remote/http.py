"""HTTP as clients of model servers need it: JSON in, JSON out, every wait bounded, one place that tries again.

On asyncio rather than threads, because a deadline must hold whatever a server does: it cuts a request off while it
connects, waits or receives a body byte by byte, and cutting it off closes the connection, by which the server learns
that nobody waits for the answer any more. `run` keeps the event loop in a thread of its own for the length of one call,
so that callers are plain functions, in a notebook too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tinyllm.errors import require_extra

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed; every other 4xx is final."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_LONGEST_PAUSE_S = 30.0
_jitter = random.Random()  # of pauses alone; never the process's own stream


class RequestFailed(Exception):
    """A request without a usable answer: `kind` is a few words to count by, the text says more.

    again: whether the same request may succeed later; pause_s: how long the server asked to wait.
    """

    def __init__(
        self, kind: str, detail: str = "", *, status: int | None = None, again: bool = False, pause_s: float = 0.0
    ) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.status, self.again, self.pause_s = kind, status, again, pause_s


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often a request is tried. Nothing around it tries again, so the bounds are the whole ones."""

    attempts: int = 4
    deadline_s: float = 600.0
    """For all attempts together. One may take half of what is left, the last one all of it."""
    pause_s: float = 0.5
    """Before the second attempt; doubled before each further one, times a random number from 0.5 to 1."""


class Http:
    """Connections of one event loop."""

    def __init__(self) -> None:
        require_extra("remote", "a model server")
        self._clients: dict[bool, httpx2.AsyncClient] = {}

    async def ask(self, method: str, url: str, body: Any = None, *, timeout_s: float, key: str = "") -> Any:
        """The JSON that the server answers with. Raises Failed, also when timeout_s is over."""
        import httpx2

        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client(url).request(method, url, json=body, headers=headers)
        except TimeoutError:
            raise RequestFailed("no answer in time", f"none within {timeout_s:.3g} s", again=True) from None
        except httpx2.ConnectError as error:
            raise RequestFailed("no connection", _os_reason(error), again=True) from None
        except httpx2.TransportError as error:
            raise RequestFailed("the connection broke", type(error).__name__, again=True) from None
        except (httpx2.InvalidURL, httpx2.DecodingError, UnicodeError) as error:
            raise RequestFailed("no request", f"{type(error).__name__}: {error}") from None
        status = response.status_code
        if not 200 <= status < 300:
            said = " ".join(_said(response, key)[:300].split())
            wait = _seconds(response.headers.get("Retry-After"))
            raise RequestFailed(f"HTTP {status}", said, status=status, again=status in AGAIN, pause_s=wait)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError):
            raise RequestFailed("the answer is not JSON", repr(_said(response, key)[:60])) from None

    def _client(self, url: str) -> httpx2.AsyncClient:
        """One for TLS, whose certificates take time to load, and one without. Loopback never goes through a proxy."""
        import httpx2

        tls = url.startswith("https:")
        if tls not in self._clients:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            direct: Any = {f"all://{host}": None for host in LOOPBACK}
            self._clients[tls] = httpx2.AsyncClient(verify=tls, timeout=None, limits=limits, mounts=direct)
        return self._clients[tls]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


async def retry(patience: RetryPolicy, attempt: Callable[[int, float], Awaitable[T]]) -> T:
    """attempt(number from 1, seconds it may take) until it succeeds, or fails for good. Raises its last Failed."""
    clock = asyncio.get_running_loop().time
    end = clock() + patience.deadline_s
    pause = patience.pause_s
    for number in range(1, patience.attempts + 1):
        left = end - clock()
        last = number == patience.attempts
        try:
            return await attempt(number, left if last else left / 2)
        except RequestFailed as error:
            wait = max(error.pause_s, pause * _jitter.uniform(0.5, 1.0))
            if last or not error.again or clock() + wait >= end:
                raise
        await asyncio.sleep(wait)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    raise AssertionError("patience has at least one attempt")


def run(work: Callable[[Http], Coroutine[Any, Any, T]]) -> T:
    """The result of work(http). An exception here, Ctrl-C too, cancels it and closes its connections."""
    outcome: Future[T] = Future()
    loop = asyncio.new_event_loop()

    async def whole() -> T:
        http = Http()
        try:
            return await work(http)
        finally:
            await http.close()

    def thread_main() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                outcome.set_result(runner.run(whole()))
            except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                outcome.set_exception(error)

    thread = threading.Thread(target=thread_main, name="tinyllm-http", daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:
        if not outcome.done():
            with contextlib.suppress(RuntimeError):  # it ended just now
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join()


async def gather(tasks: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first exception cancels the others."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _said(response: httpx2.Response, key: str) -> str:
    """The text of an answer, without the key, which some repeat."""
    return response.text.replace(key, "***") if key else response.text


def _os_reason(error: BaseException) -> str:
    """The system's own words at the end of a chain of exceptions, where there are some."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        following = error.__cause__ or error.__context__
        if following is None:
            return str(error) or type(error).__name__
        error = following
    raise AssertionError("unreachable")


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is left to the pauses of our own."""
    try:
        return min(max(0.0, float(text or 0)), 86_400.0)
    except ValueError:
        return 0.0
