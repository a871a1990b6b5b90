"""The HTTP routes: a request is checked, admitted to the engine, and answered as its completions are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import tinyllm
from tinyllm.engine.build import make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import Scheduler
from tinyllm.errors import TinyLLMError
from tinyllm.model import models
from tinyllm.records import Revision
from tinyllm.serve import protocol
from tinyllm.serve.access import Access
from tinyllm.serve.admin import ADMIN_PATHS, AdminRoutes
from tinyllm.serve.asgi import AuthMiddleware, StreamingResponse, error_response, json_response, read_body
from tinyllm.serve.fields import APIError, parse_object
from tinyllm.serve.metrics import CONTENT_TYPE, Metrics
from tinyllm.serve.protocol import CompletionParams
from tinyllm.serve.responses import ResponseWriter, TokenNames
from tinyllm.serve.worker import EngineThread, Event, Finished, RequestHandle, dead

LOGPROBS = "after temperature, top-k, top-p, min-p"
"""The distribution of log-probabilities: the one that a token was drawn from; of greedy decoding, temperature 1's."""
_LONG_TEXT = 20_000
"""Characters of prompts above which a thread tokenizes them, so that the event loop stays free."""
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class Settings:
    """Name, limits and keys of one server."""

    model_name: str
    max_length: int
    """Prompt and completion together, in tokens."""
    max_batch: int = 64
    max_queue: int = 1024
    """Samples that may wait for a slot."""
    max_body_bytes: int = 4 << 20
    drain_s: float = 30.0
    api_key: str | None = None
    admin_key: str | None = None
    threads: int | None = None

    @property
    def most(self) -> int:
        """Samples that may run and wait together."""
        return self.max_batch + self.max_queue


class Service:
    """One model, served. `app` is the ASGI application; start and close are called in its event loop."""

    def __init__(self, policy: Policy, tokenizer: Any, revision: Revision, settings: Settings) -> None:
        self.policy, self.tokenizer, self.settings = policy, tokenizer, settings
        self.stop_ids = models.stop_token_ids(tokenizer, policy.causal)
        self.names = TokenNames(tokenizer)
        self.access = Access(settings.api_key, settings.admin_key)
        self.worker = EngineThread(self._scheduler, revision, self._deliver, self._failed, settings.threads)
        self.metrics = Metrics(lambda: self.worker.running, lambda: self.worker.waiting)
        self.admin = AdminRoutes(policy, self.worker, self.metrics)
        self.handles: set[RequestHandle] = set()
        self.outstanding = 0
        """Choices that were admitted and are not finished."""
        self.draining = False
        self.app = AuthMiddleware(self._routes(), self.access, self.metrics, ADMIN_PATHS)

    def _scheduler(self, revision: Revision) -> Scheduler:
        return make_scheduler(self.policy, self.tokenizer, max_batch=self.settings.max_batch, revision=revision)

    def _routes(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.show_metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            *self.admin.routes(),
        ]
        handlers: dict[Any, Any] = {APIError: _refused, HTTPException: _no_route, Exception: _crashed}
        return Starlette(routes=routes, exception_handlers=handlers)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.worker.start()

    async def drain(self) -> int:
        """Accept no more requests and wait up to drain_s for those under way; returns how many were cut off."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_s):
                while self.handles:
                    if self.worker.paused and self.worker.died is None:
                        await self.worker.resume()  # what runs could not finish otherwise; a pause may come late
                    await asyncio.sleep(0.02)
        except (TimeoutError, APIError):  # APIError: the engine died meanwhile, and every request was told
            pass
        cut = list(self.handles)
        for handle in cut:
            handle.fail(APIError("the server stops", status=503, kind="server_error", code="shutting_down"))
        return len(cut)

    def close(self) -> None:
        self.worker.stop()
        self.worker.thread.join(10)

    # -- between the engine and requests --------------------------------------------------------------------------

    def admit(self, asked: CompletionParams, prompts: Sequence[tuple[int, ...]]) -> RequestHandle:
        """Queue the choices of a request. Raises APIError: too long (400), queue full (429), not serving (503)."""
        if self.draining:
            raise APIError(
                "the server is shutting down", status=503, kind="server_error", code="shutting_down", retry_after_s=5
            )
        if self.worker.died is not None:
            raise dead(self.worker.died)
        most = self.settings.most
        params = [asked.params(self._length(asked, len(ids), i), self.stop_ids) for i, ids in enumerate(prompts)]
        if self.outstanding + len(asked.keys) > most:
            raise APIError(
                f"the queue is full ({self.outstanding} completions of {most}); try again",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        handle = RequestHandle(asked, prompts, params)
        self.outstanding += handle.choices
        self.handles.add(handle)
        self.metrics.prompt_tokens.inc(sum(map(len, prompts)))
        self.worker.submit(handle)
        return handle

    def _length(self, asked: CompletionParams, prompt: int, number: int) -> int:
        """Tokens that a completion may have."""
        room = self.settings.max_length - prompt
        default = room if asked.chat else min(protocol.COMPLETION_TOKENS, room)
        length = default if asked.max_tokens is None else asked.max_tokens
        if room < 1 or length > room:
            which = f"prompt {number}" if len(asked.prompts) > 1 else "the prompt"
            wants = f" and max_tokens is {length}" if asked.max_tokens is not None else ""
            raise APIError(
                f"{which} has {prompt} tokens{wants}; together with the completion {self.settings.max_length} fit",
                param="messages" if asked.chat else "prompt",
                code="context_length_exceeded",
            )
        return length

    def release(self, handle: RequestHandle) -> None:
        """Free the slots of a request that nobody waits for any more."""
        handle.closed = True
        self.handles.discard(handle)
        if handle.open:
            self.worker.cancel(handle)
            self.outstanding -= len(handle.open)
            handle.open.clear()

    def _deliver(self, entries: list[tuple[RequestHandle, Event]]) -> None:
        for handle, (choice, what) in entries:
            if handle.closed:
                continue
            if isinstance(what, Finished):
                handle.open.discard(choice)
                self.outstanding -= 1
                self._observe(handle, what)
            handle.events.append((choice, what))
            handle.wake.set()

    def _observe(self, handle: RequestHandle, done: Finished) -> None:
        count = len(done.completion.token_ids)
        self.metrics.completion_tokens.inc(count)
        self.metrics.first_token_s.observe(done.first_at - handle.arrived_at)
        if count > 1:
            self.metrics.token_s.observe((done.last_at - done.first_at) / (count - 1))

    def _failed(self, handles: list[RequestHandle] | None, why: str) -> None:
        """Fail the requests that the engine could not finish: all of them (None) when the engine died."""
        for handle in list(self.handles) if handles is None else handles:
            self.metrics.failed.inc()
            handle.fail(APIError(f"the engine failed: {why}", status=500, kind="server_error", code="engine_error"))

    # -- routes ---------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Any:
        """POST /v1/completions"""
        return await self._generate(request, protocol.read_completion)

    async def chat(self, request: Request) -> Any:
        """POST /v1/chat/completions"""
        return await self._generate(request, protocol.read_chat)

    async def _generate(self, request: Request, reader: Any) -> Any:
        body = parse_object(await read_body(request, self.settings.max_body_bytes))
        name = request.headers.get("x-request-id")
        if name is not None and body.get("request_id") is None:
            body["request_id"] = protocol.request_id("X-Request-Id", name)
        asked: CompletionParams = reader(body, self.policy.vocab_size, self.settings.most)
        self._require_model(asked.model)
        if sum(len(p) for p in asked.prompts if isinstance(p, str)) > _LONG_TEXT or asked.chat:
            prompts = await asyncio.to_thread(self._render, asked)
        else:
            prompts = self._render(asked)
        writer = ResponseWriter(asked, prompts, self.settings.model_name, self.names, self.admin.label)
        return StreamingResponse(self, writer, prompts)

    def _render(self, asked: CompletionParams) -> list[tuple[int, ...]]:
        """Every prompt as token ids, rendered by the same function as in training. Raises APIError."""
        rendered: list[tuple[int, ...]] = []
        for prompt in asked.prompts:
            if isinstance(prompt, str) or asked.chat:
                rule = "chat" if asked.chat else "raw"
                try:
                    rendered.append(models.render(self.tokenizer, prompt, rule)[1])  # type: ignore[arg-type]
                except TinyLLMError as error:
                    raise APIError(str(error), param="messages" if asked.chat else "prompt") from None
            else:
                rendered.append(prompt)  # type: ignore[arg-type]
        return rendered

    def _require_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            raise APIError(
                f"there is no model {name[:200]!r}; this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.admin.started,
            "owned_by": "tinyllm",
            "max_model_len": self.settings.max_length,
        }

    async def list_models(self, _: Request) -> Response:
        """GET /v1/models"""
        return json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        self._require_model(request.path_params["name"])
        return json_response(self._card())

    async def health(self, _: Request) -> Response:
        """GET /health: 200 when requests are taken, else 503 with the reason."""
        if self.worker.died is not None:
            return json_response({"status": "failed", "reason": self.worker.died}, 503)
        if self.draining:
            return json_response({"status": "draining", "reason": "the server is shutting down"}, 503)
        return json_response({"status": "ok", "paused": self.worker.paused})

    async def version(self, _: Request) -> Response:
        """GET /version: the version, model, dtype and limits, which a client asks for before it samples."""
        settings = self.settings
        return json_response(
            {
                "server": "tinyllm",
                "version": tinyllm.__version__,
                "model": settings.model_name,
                "dtype": str(self.policy.head_weight.dtype).removeprefix("torch."),
                "device": str(self.policy.device),
                "vocabulary": self.policy.vocab_size,
                "logprobs": LOGPROBS,
                "token_ids": True,
                "seeds": True,
                "seed_keys": True,
                "revision_spans": True,
                "limits": {
                    "max_length": settings.max_length,
                    "max_batch": settings.max_batch,
                    "max_queue": settings.max_queue,
                    "max_body_bytes": settings.max_body_bytes,
                    "max_logprobs": protocol.MAX_LOGPROBS,
                },
            }
        )

    async def show_metrics(self, _: Request) -> Response:
        """GET /metrics"""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)


async def _refused(_: Request, error: Any) -> Response:
    return error_response(error)


async def _no_route(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path}"[:200]
    reasons = {404: f"{what}: no such route", 405: f"{what}: this route takes another method"}
    return error_response(APIError(reasons.get(error.status_code, str(error.detail)), status=error.status_code))


async def _crashed(_: Request, error: Any) -> Response:
    kind = type(error).__name__
    told = APIError(f"the server made a mistake ({kind}); its log has more", status=500, kind="server_error")
    return error_response(told)
