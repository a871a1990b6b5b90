"""The routes that pause the engine and change its weights, in the words of vLLM and SGLang.

GET  /weight_info                {"weight_version", "weight_hash", "paused"}; for every client
GET  /is_paused                  {"is_paused"}
POST /pause?mode=keep|wait       stop decoding: at once, or when all running requests are finished
POST /resume
POST /update_weights_from_disk   {"model_path", "weight_version"}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinyllm.engine.policy import Policy
from tinyllm.errors import TinyLLMError
from tinyllm.model.memory import in_brief_thread
from tinyllm.records import Revision
from tinyllm.serve import fields, weights
from tinyllm.serve.asgi import json_response, read_body
from tinyllm.serve.fields import APIError, checked, one_of, parse_object, text
from tinyllm.serve.metrics import Metrics
from tinyllm.serve.worker import EngineThread

ADMIN_PATHS = frozenset({"/is_paused", "/pause", "/resume", "/update_weights_from_disk"})
"""What needs the admin key."""
_BODY_BYTES = 1 << 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # SGLang's fields, with the values that this server follows in any case
    "load_format": ("auto", "safetensors"),
    "abort_all_requests": (False,),
    "is_async": (False,),
    "torch_empty_cache": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (False,),
    "flush_cache": (True,),
}


_label = checked(text, lambda s: 0 < len(s) <= 200 and s.isprintable(), "1 to 200 printable characters")
_path = checked(text, lambda s: s and "\0" not in s, "a folder on the server's disk")


class AdminRoutes:
    """Routes that report and change the weights; one update at a time."""

    def __init__(self, policy: Policy, worker: EngineThread, metrics: Metrics) -> None:
        self.policy, self.worker, self.metrics = policy, worker, metrics
        self.started = int(time.time())
        self._labels: dict[Revision, str] = {}
        self._one = asyncio.Lock()
        metrics.revision(self.label(worker.revision), worker.revision.hash)

    def label(self, revision: Revision) -> str:
        """The name of a revision: the label of its update, else step:hash."""
        return self._labels.get(revision, str(revision))

    def routes(self) -> list[Route]:
        return [
            Route("/weight_info", self.weight_info),
            Route("/is_paused", self.is_paused),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/update_weights_from_disk", self.update, methods=["POST"]),
        ]

    async def weight_info(self, _: Request) -> Response:
        return json_response({**self._weights(), "paused": self.worker.paused})

    def _weights(self) -> dict[str, Any]:
        revision = self.worker.revision
        return {"weight_version": self.label(revision), "weight_hash": revision.hash}

    async def is_paused(self, _: Request) -> Response:
        return json_response({"is_paused": self.worker.paused})

    async def pause(self, request: Request) -> Response:
        given = dict(request.query_params)
        got = fields.read(given, {"mode": one_of("keep", "wait")}, {"clear_cache": ("true", "false")})
        await self.worker.pause(got.get("mode", "keep"))
        return json_response({"status": "paused", "is_paused": True})

    async def resume(self, _: Request) -> Response:
        await self.worker.resume()
        return json_response({"status": "resumed", "is_paused": False})

    async def update(self, request: Request) -> Response:
        body = parse_object(await read_body(request, _BODY_BYTES))
        got = fields.read(body, {"model_path": _path, "weight_version": _label}, _NEUTRAL)
        if "model_path" not in got:
            raise APIError(
                "model_path is missing: a folder with *.safetensors on the server's disk", param="model_path"
            )
        async with self._one:
            # An update that has begun is finished, also when its caller hangs up
            await asyncio.shield(asyncio.ensure_future(self._update(got)))
            return json_response({"success": True, "message": "weights updated", **self._weights()})

    async def _update(self, got: Mapping[str, Any]) -> None:
        try:
            read = partial(weights.read_update, got["model_path"], self.policy)
            new = await asyncio.to_thread(in_brief_thread, read)
        except TinyLLMError as error:
            self.metrics.updates.labels("refused").inc()
            raise APIError(str(error), param="model_path", code="weights_refused") from None
        label = got.get("weight_version")

        def write() -> None:  # between two decoding steps, so that no pause is needed
            content = weights.write_update(self.policy, new)
            revision, name = weights.revision_of(label, content, self.worker.revision)
            self._labels[revision] = name
            self.worker.publish(revision)

        await self.worker.call(write)
        self.metrics.updates.labels("done").inc()
        self.metrics.revision(self.label(self.worker.revision), self.worker.revision.hash)
