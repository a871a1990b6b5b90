"""Around the routes: bodies of bounded size, keys and counts for every request, responses that wait for the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tinyllm.serve.access import Access
from tinyllm.serve.fields import APIError, to_json
from tinyllm.serve.metrics import Metrics
from tinyllm.serve.responses import ResponseWriter, event
from tinyllm.serve.worker import DrawnToken, Finished, RequestHandle

if TYPE_CHECKING:
    from tinyllm.serve.app import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OPEN = ("/health",)
"""Routes that need no key."""
_BODY_S = 60.0
"""How long a client may take to send a request."""
_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


def json_response(obj: Any, status: int = 200) -> Response:
    return Response(to_json(obj), status, media_type="application/json")


def error_response(error: APIError) -> Response:
    """An error in the form of OpenAI's API."""
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return Response(to_json(error.body), error.status, headers, media_type="application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises APIError: too large (413), too slow (408)."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise APIError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
                parts.append(part)
    except TimeoutError:
        raise APIError(f"the body did not arrive within {_BODY_S:g} s", status=408, code="timeout") from None
    except ClientDisconnect:
        raise APIError("the client hung up", status=499, code="client_closed_request") from None
    return b"".join(parts)


class AuthMiddleware:
    """Checks the key of each request, and counts responses by route and status."""

    def __init__(self, app: Starlette, access: Access, metrics: Metrics, admin_paths: Collection[str]) -> None:
        self.app, self.access, self.metrics = app, access, metrics
        self.paths = {route.path for route in app.routes if isinstance(route, Route)}
        self.admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        route = path if path in self.paths else "other"
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id")

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(route, str(message["status"])).inc()
                given = message.setdefault("headers", [])
                if name is not None and not any(key == b"x-request-id" for key, _ in given):
                    message["headers"] = [*given, (b"x-request-id", name)]
            await send(message)

        if path not in OPEN:
            try:
                self.access.check(headers.get(b"authorization", b""), admin=path in self.admin_paths, path=path)
            except APIError as error:
                await error_response(error)(scope, receive, counted)
                return
        await self.app(scope, receive, counted)


class StreamingResponse:
    """The response to a request for completions, as an ASGI application: whole, or chunk by chunk.

    A client that hangs up is noticed at once, whether it waits for the whole or for the next chunk.
    """

    def __init__(self, service: Service, writer: ResponseWriter, prompts: Sequence[tuple[int, ...]]) -> None:
        self.service, self.writer = service, writer
        self.handle = service.admit(writer.asked, prompts)
        self.done: dict[int, Finished] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle
        watch = asyncio.create_task(_watch(receive, handle))
        try:
            if self.writer.asked.stream:
                await self._send_chunks(send)
            else:
                await self._send_whole(send)
            if handle.left and handle.open:
                self.service.metrics.dropped.inc()
        finally:
            self.service.release(handle)
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _send_whole(self, send: Send) -> None:
        while not self._over():
            await self._events()
        if self.handle.left:
            return
        if self.handle.failed is not None:
            raise self.handle.failed
        body = self.writer.whole(self.done)
        await self._start(send, _JSON, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _send_chunks(self, send: Send) -> None:
        """The status is sent with the first chunk, so that a failure before it has a status of its own."""
        begun = False
        while not self._over():
            drawn = await self._events()
            body = b"".join(self.writer.chunk(choice, d, self.done.get(choice)) for choice, d in drawn.items())
            if body and not self.handle.left:
                if not begun:
                    await self._start(send, *_EVENTS)
                    begun = True
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if self.handle.left:
            return
        failure = self.handle.failed
        if failure is not None and not begun:
            raise failure
        last = self.writer.last_chunks(self.done) if failure is None else event(failure.body)
        await send({"type": "http.response.body", "body": last})

    def _over(self) -> bool:
        handle = self.handle
        return handle.left or handle.failed is not None or len(self.done) == handle.choices

    async def _events(self) -> dict[int, list[DrawnToken]]:
        """Wait for the engine; returns the new tokens of each choice, and adds finished choices to `done`."""
        handle = self.handle
        await handle.wake.wait()
        handle.wake.clear()
        drawn: dict[int, list[DrawnToken]] = {}
        for choice, what in handle.events:
            tokens = drawn.setdefault(choice, [])
            if isinstance(what, Finished):
                self.done[choice] = what
            else:
                tokens.append(what)
        handle.events.clear()
        return drawn

    async def _start(self, send: Send, *fields: tuple[bytes, bytes]) -> None:
        headers = [*fields, (b"x-request-id", self.writer.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _watch(receive: Receive, handle: RequestHandle) -> None:
    """Mark the request as left when its client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    handle.left = True
    handle.wake.set()
