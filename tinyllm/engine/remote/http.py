"""HTTP as clients of model servers need it: JSON in, JSON out, every wait bounded, one place that retries.

On asyncio rather than threads, because a deadline must hold whatever a server does: it cuts a request off while it
connects, waits or receives a body byte by byte, and cutting it off closes the connection, by which the server learns
that nobody waits for the response any more. A `Portal` runs such requests for plain functions, in a notebook too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tinyllm.errors import require_extra

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

RETRIED = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed; every other 4xx is final."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_LONGEST_PAUSE_S = 30.0
_IDLE_S = 3.0
"""How long an unused connection is kept: less than uvicorn's 5 s, so that no request meets one just being closed."""
_jitter = random.Random()  # of pauses alone; never the process's own stream


def api_key() -> str:
    """The key for sampling, from the environment alone: it stands in no configuration and no record."""
    return os.environ.get("TINYLLM_API_KEY", "")


def admin_key() -> str:
    """The key for changing weights; the other one where a server has only one."""
    return os.environ.get("TINYLLM_ADMIN_KEY", "") or api_key()


class FailureKind(StrEnum):
    """Why a request has no usable response. Code decides by these; the text is for people."""

    TIMED_OUT = "no answer in time"
    NO_CONNECTION = "no connection"
    BROKEN = "the connection broke"
    NOT_SENT = "no request"
    STATUS = "HTTP"
    NOT_JSON = "the answer is not JSON"
    WRONG_ID = "another request's answer"
    INVALID = "invalid"


class RequestFailed(Exception):
    """A request without a usable response. The message begins with `label`, or with the kind where there is none.

    retriable: whether the same request may succeed later; pause_s: how long the server asked to wait.
    """

    def __init__(
        self,
        kind: FailureKind,
        detail: str = "",
        *,
        label: str = "",
        status: int | None = None,
        retriable: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        label = label or (f"{kind} {status}" if kind is FailureKind.STATUS else str(kind))
        super().__init__(f"{label}: {detail}" if detail else label)
        self.kind, self.status, self.retriable, self.pause_s = kind, status, retriable, pause_s


class InvalidResponse(RequestFailed):
    """A response that came whole and cannot be used; the same request is not sent again."""

    def __init__(self, label: str, detail: str = "") -> None:
        super().__init__(FailureKind.INVALID, detail, label=label)


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often a request is tried. Nothing around it tries again, so the bounds are the whole ones."""

    attempts: int = 4
    deadline_s: float = 600.0
    """For all attempts together. One may take half of what is left, the last one all of it."""
    pause_s: float = 0.5
    """Before the second attempt; doubled before each further one, times a random number from 0.5 to 1."""


class Http:
    """Connections and locks of one event loop."""

    def __init__(self) -> None:
        require_extra("remote", "a model server")
        self._clients: dict[bool, httpx2.AsyncClient] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def request(self, method: str, url: str, body: Any = None, *, timeout_s: float, key: str = "") -> Any:
        """The JSON of the response. Raises RequestFailed, also when timeout_s is over."""
        import httpx2

        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client(url).request(method, url, json=body, headers=headers)
        except TimeoutError:
            raise RequestFailed(FailureKind.TIMED_OUT, f"none within {timeout_s:.3g} s", retriable=True) from None
        except httpx2.ConnectError as error:
            raise RequestFailed(FailureKind.NO_CONNECTION, _os_reason(error), retriable=True) from None
        except httpx2.TransportError as error:
            raise RequestFailed(FailureKind.BROKEN, type(error).__name__, retriable=True) from None
        except (httpx2.InvalidURL, httpx2.DecodingError, UnicodeError) as error:
            raise RequestFailed(FailureKind.NOT_SENT, f"{type(error).__name__}: {error}") from None
        status = response.status_code
        if not 200 <= status < 300:
            said = " ".join(_said(response, key)[:300].split())
            wait = _seconds(response.headers.get("Retry-After"))
            again = status in RETRIED
            raise RequestFailed(FailureKind.STATUS, said, status=status, retriable=again, pause_s=wait)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError):
            raise RequestFailed(FailureKind.NOT_JSON, repr(_said(response, key)[:60])) from None

    def lock(self, name: str) -> asyncio.Lock:
        """The lock of this name; it lives as long as the event loop."""
        return self._locks.setdefault(name, asyncio.Lock())

    def _client(self, url: str) -> httpx2.AsyncClient:
        """The client for TLS, whose certificates take time to load, or the one without. Loopback bypasses proxies."""
        import httpx2

        tls = url.startswith("https:")
        if tls not in self._clients:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
            direct: Any = {f"all://{host}": None for host in LOOPBACK}
            self._clients[tls] = httpx2.AsyncClient(verify=tls, timeout=None, limits=limits, mounts=direct)
        return self._clients[tls]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


async def retry(policy: RetryPolicy, attempt: Callable[[int, float], Awaitable[T]]) -> T:
    """attempt(number from 1, seconds it may take) until one succeeds. Raises the RequestFailed of the last."""
    clock = asyncio.get_running_loop().time
    end = clock() + policy.deadline_s
    pause = policy.pause_s
    for number in range(1, policy.attempts + 1):
        left = end - clock()
        last = number == policy.attempts
        try:
            return await attempt(number, left if last else left / 2)
        except RequestFailed as error:
            wait = max(error.pause_s, pause * _jitter.uniform(0.5, 1.0))
            if last or not error.retriable or clock() + wait >= end:
                raise
        await asyncio.sleep(wait)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    raise AssertionError("a retry policy has at least one attempt")


async def list_models(http: Http, url: str, *, timeout_s: float, key: str) -> list[dict[str, Any]]:
    """The entries of an OpenAI-compatible server's list of models, each with a text `id`; url ends with /v1."""
    body = await http.request("GET", f"{url}/models", timeout_s=timeout_s, key=key)
    try:
        return [{**entry, "id": str(entry["id"])} for entry in body["data"]]
    except (TypeError, KeyError):
        raise InvalidResponse("did not answer with a list of models") from None


async def gather(tasks: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first exception cancels the others."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Portal:
    """An event loop in a thread of its own, with its connections; plain functions call coroutines through it."""

    def __init__(self) -> None:
        self.http = Http()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinyllm-http", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[Http], Coroutine[Any, Any, T]]) -> Future[T]:
        """work(http), under way. Raises RuntimeError after `close`."""
        return asyncio.run_coroutine_threadsafe(work(self.http), self._loop)

    def run(self, work: Callable[[Http], Coroutine[Any, Any, T]]) -> T:
        """The result of work(http). An exception in this thread, Ctrl-C too, cancels the work."""
        future = self.begin(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what is under way, close the connections, end the thread; safe to call twice."""
        if self._loop.is_closed():
            return

        async def end(http: Http) -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await http.close()

        self.begin(end).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)
        self._loop.close()


class RunRequests(Protocol):
    """Runs work(http) to its result: the function `run`, or the method `run` of a portal that stays."""

    def __call__(self, work: Callable[[Http], Coroutine[Any, Any, T]], /) -> T: ...


def run(work: Callable[[Http], Coroutine[Any, Any, T]]) -> T:
    """The result of work(http), in an event loop that ends with this call."""
    portal = Portal()
    try:
        return portal.run(work)
    finally:
        portal.close()


def _said(response: httpx2.Response, key: str) -> str:
    """The text of a response, without the key, which some servers repeat."""
    return response.text.replace(key, "***") if key else response.text


def _os_reason(error: BaseException) -> str:
    """The operating system's reason behind an exception, where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is left to the pauses of our own."""
    try:
        return min(max(0.0, float(text or 0)), 86_400.0)
    except ValueError:
        return 0.0
