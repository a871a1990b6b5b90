"""New weights for servers: written once, taken by each server in its own way, read back, and proved by the canary.

    publisher = Publisher(servers, TinyllmDisk(), folder, canary)
    publisher.publish(Revision(12, hash), policy)

A server that did not take the update is fenced off with a warning and asked again at the next one; when none is left,
EngineError names each and its reason. What was written stays until every server has confirmed it and one update longer,
so that a slow load never finds its files gone.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tinyllm.engine.remote.canary import Canary, CanaryOutput
from tinyllm.engine.remote.capabilities import alive
from tinyllm.engine.remote.dialects import InvalidResponse
from tinyllm.engine.remote.http import Http, RequestFailed, RetryPolicy, gather, retry, run
from tinyllm.engine.remote.servers import Server, Servers, admin_key
from tinyllm.errors import EngineError
from tinyllm.model import models
from tinyllm.record.files import new_folder, recover_folders, write_errors
from tinyllm.records import Revision

log = logging.getLogger("tinyllm")

KEPT_ADAPTERS = 3
"""LoRA adapters loaded at a time: the newest, the one before, and one for requests that are late."""


@dataclass(frozen=True)
class WeightUpdate:
    """One update."""

    revision: Revision
    folder: Path
    content_hash: str | None = None
    """Of the whole model, where a server that loads it must come to the same; None where it is merged or adapters."""

    @property
    def label(self) -> str:
        """What servers call it: step and the start of the hash."""
        return str(self.revision)

    @property
    def name(self) -> str:
        """The same, fit for a file or an adapter."""
        return f"v{self.revision.step}-{self.revision.hash[:12]}"

    @property
    def path(self) -> Path:
        """What servers load."""
        return self.folder / self.name


class WeightTransfer(Protocol):
    """How weights get to a server."""

    kept: int
    """How many updates stay loaded, the newest among them."""

    def write(self, publication: WeightUpdate, policy: Any) -> None:
        """Put on disk what servers load, whole or not at all."""
        ...

    async def update(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        """Make the server load it. Raises Failed and Bad."""
        ...

    async def read_back(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        """Ask the server what it runs now. Raises Failed and Bad."""
        ...

    async def forget(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        """The server needs this older one no more."""
        ...


@dataclass(frozen=True)
class ServerAdmin:
    """One server's routes for changing weights, during one update."""

    http: Http
    server: Server
    patience: RetryPolicy

    async def post(self, path: str, body: Any = None, *, attempts: int | None = None) -> Any:
        """The JSON answer. attempts: fewer than usual, where a second try would not be the same."""
        patience = self.patience if attempts is None else RetryPolicy(attempts, self.patience.deadline_s)
        return await retry(patience, lambda _, seconds: self._ask("POST", path, body, seconds))

    async def get(self, path: str) -> Mapping[str, Any]:
        answer = await retry(self.patience, lambda _, seconds: self._ask("GET", path, None, seconds))
        return answer if isinstance(answer, Mapping) else {}

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> Any:
        try:
            return await self.http.ask(method, self.server.url + path, body, timeout_s=seconds, key=admin_key())
        except RequestFailed as error:
            if error.kind == "the answer is not JSON":
                return None  # routes such as vLLM's /resume answer with an empty body
            if error.status in (401, 403, 404):
                why = f"{path} is not open to us; {_OPENING[self.server.facts.server]}"
                raise RequestFailed(f"HTTP {error.status}", why, status=error.status) from None
            raise


_OPENING = {
    "tinyllm": "start the server with --admin-key and set TINYLLM_ADMIN_KEY to the same",
    "vllm": "start vLLM with VLLM_SERVER_DEV_MODE=1 (weight transfer) or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
    "--enable-lora (adapters)",
    "sglang": "set TINYLLM_ADMIN_KEY to the key of SGLang's --admin-api-key",
}


class Publisher:
    """Publishes to all servers, and proves it."""

    def __init__(
        self,
        servers: Servers,
        way: WeightTransfer,
        folder: Path,
        canary: Canary | None,
        patience: RetryPolicy | None = None,
    ) -> None:
        self.servers, self.way, self.folder, self.canary = servers, way, folder, canary
        self.patience = patience or RetryPolicy()
        self.run: Callable[[Callable[[Http], Coroutine[Any, Any, Any]]], Any] = run
        """Runs what talks to the servers; a pool puts its own event loop here, where its requests are under way."""
        self.gaps: dict[str, float] = {}
        """By server: the canary's difference after the last update, in nats."""
        self._published: list[WeightUpdate] = []
        self._leftover: list[Path] = []

    def publish(self, revision: Revision, policy: Any, content_hash: str | None = None) -> None:
        """Every server that works runs these weights when this returns. Raises EngineError when none does.

        policy: with the weights in `.model`; content_hash: of the whole model, where servers can come to the same.
        """
        publication = WeightUpdate(revision, self.folder, content_hash)
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._published:  # of a process before us; a server may still hold the last of it
                recover_folders(self.folder)
                self._leftover = [path for path in self.folder.glob("v*-*") if path != publication.path]
        self.way.write(publication, policy)
        try:
            sung = self.run(lambda http: self._give(http, publication))
            for server, answer in sung:
                self._judge(server, answer, publication)
        finally:
            for server in self.servers.all:
                server.updating = False
        self.servers.require_live()
        if publication not in self._published:
            self._published.append(publication)
        self._tidy()

    async def _give(self, http: Http, publication: WeightUpdate) -> list[tuple[Server, CanaryOutput | None]]:
        self.servers.enter_loop()
        answers = await gather([self._give_one(http, server, publication) for server in self.servers.all])
        return [answer for answer in answers if answer is not None]

    async def _give_one(
        self, http: Http, server: Server, publication: WeightUpdate
    ) -> tuple[Server, CanaryOutput | None] | None:
        """The server and its canary's answer, or None when it did not take the update."""
        if server.quarantined is not None and not await alive(http, server.url, admin_key()):
            return None
        before = (server.label, server.revision, server.model)
        admin = ServerAdmin(http, server, self.patience)
        server.updating = True
        try:
            await self.way.update(admin, publication)
            await self.way.read_back(admin, publication)
            server.label, server.revision = publication.label, publication.revision
            sung = await self._listen(http, server)
        except (RequestFailed, InvalidResponse) as error:
            server.label, server.revision, server.model = before
            server.quarantine(f"it did not take revision {publication.label} ({error})")
            return None
        return server, sung

    async def _listen(self, http: Http, server: Server) -> CanaryOutput | None:
        canary = self.canary
        if canary is None:
            return None
        return await retry(self.patience, lambda _, seconds: canary.sample_canary(http, server, seconds))

    def _judge(self, server: Server, sung: CanaryOutput | None, publication: WeightUpdate) -> None:
        try:
            if self.canary is not None and sung is not None:
                self.gaps[server.url] = self.canary.judge(server, sung)
        except InvalidResponse as error:
            server.quarantine(f"it did not take revision {publication.label} ({error})")
            return
        server.confirm(publication.revision, publication.label)

    def _tidy(self) -> None:
        """Servers let go of what they need no more; its files go one update later, for a load that hangs."""
        kept = self.way.kept
        if len(self._published) > kept:
            old = self._published[-kept - 1]
            self.run(lambda http: self._forget(http, old))
        while len(self._published) > kept + 1:
            shutil.rmtree(self._published.pop(0).path, ignore_errors=True)
        if len(self._published) > 1:
            while self._leftover:
                shutil.rmtree(self._leftover.pop(), ignore_errors=True)

    async def _forget(self, http: Http, old: WeightUpdate) -> None:
        async def one(server: Server) -> None:
            try:
                await self.way.forget(ServerAdmin(http, server, RetryPolicy(1, self.patience.deadline_s)), old)
            except (RequestFailed, InvalidResponse) as error:
                log.warning("%s still holds %s: %s", server.url, old.name, error)

        await gather([one(server) for server in self.servers.live])


# Whole models on disk


@dataclass
class _OnDisk:
    """safetensors in a folder that the servers see too."""

    kept: int = 1

    def write(self, publication: WeightUpdate, policy: Any) -> None:
        if not publication.path.exists():  # its name has its hash
            models.save_model(policy.model, None, publication.path)

    async def forget(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        """It was replaced."""


class TinyllmDisk(_OnDisk):
    """tinyllm serve: pauses by itself, and comes to the content hash of what it loaded."""

    async def update(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        body = {"model_path": str(publication.path.resolve()), "weight_version": publication.label}
        _require_success(await admin.post("/update_weights_from_disk", body))

    async def read_back(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        info = await admin.get("/weight_info")
        _require_label(info.get("weight_version"), publication)
        digest = info.get("weight_hash")
        if digest is not None and publication.content_hash is not None and digest != publication.content_hash:
            raise InvalidResponse(
                "other weights", f"content hash {digest}, the trainer's is {publication.content_hash}"
            )


class SGLangDisk(_OnDisk):
    """SGLang: pause, update, flush, continue."""

    async def update(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        body = {
            "model_path": str(publication.path.resolve()),
            "weight_version": publication.label,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        await admin.post("/pause_generation", {"mode": "abort"})  # of ours nothing runs during an update
        try:
            _require_success(await admin.post("/update_weights_from_disk", body))
        finally:
            await admin.post("/continue_generation", {})

    async def read_back(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        _require_label((await admin.get("/model_info")).get("weight_version"), publication)


# LoRA adapters


@dataclass
class VLLMLora:
    """vLLM: a new adapter name for each revision, so that requests name the weights that answer them."""

    kept: int = KEPT_ADAPTERS

    def write(self, publication: WeightUpdate, policy: Any) -> None:
        if not hasattr(policy.model, "peft_config"):
            raise EngineError("vLLM takes weights as adapters, and there are none to publish; set lora.rank")
        if not publication.path.exists():
            with new_folder(publication.path) as folder:
                policy.model.save_pretrained(folder, save_embedding_layers=False)

    async def update(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        name = self._name(admin.server, publication)
        body = {"lora_name": name, "lora_path": str(publication.path.resolve()), "load_inplace": False}
        try:
            await admin.post("/v1/load_lora_adapter", body)
        except RequestFailed as error:  # a try whose answer got lost; the name has the hash, so it is the same adapter
            if error.status != 400 or name not in await self._loaded(admin):
                raise
        admin.server.model = name

    async def read_back(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        name = self._name(admin.server, publication)
        if name not in await self._loaded(admin):
            raise InvalidResponse("adapter missing", f"{name!r} is not in /v1/models")

    async def forget(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        await admin.post("/v1/unload_lora_adapter", {"lora_name": self._name(admin.server, publication)})

    async def _loaded(self, admin: ServerAdmin) -> set[str]:
        data = (await admin.get("/v1/models")).get("data")
        return (
            {str(entry.get("id")) for entry in data if isinstance(entry, Mapping)} if isinstance(data, list) else set()
        )

    @staticmethod
    def _name(server: Server, publication: WeightUpdate) -> str:
        return f"{server.facts.model.rpartition('/')[2]}-{publication.name}"


# Weight transfer


@dataclass
class VLLMTransfer:
    """vLLM's weight-transfer routes. `send` moves the tensors (by NCCL, between GPUs); HTTP says when.

    init_info: for /init_weight_transfer_engine; tensors(policy) -> (name, dtype name, shape) in the order of sending;
    send(policy): blocks until the server received all. No second attempts: half a transfer cannot be repeated.
    """

    init_info: Mapping[str, Any]
    tensors: Callable[[Any], list[tuple[str, str, list[int]]]]
    send: Callable[[Any], Coroutine[Any, Any, None]]
    kept: int = 1
    _ready: set[str] = field(default_factory=set)
    _policy: Any = None

    def write(self, publication: WeightUpdate, policy: Any) -> None:
        self._policy = policy  # nothing goes to disk

    async def update(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        url = admin.server.url
        if url not in self._ready:
            await admin.post("/init_weight_transfer_engine", {"init_info": dict(self.init_info)}, attempts=1)
            self._ready.add(url)
        await admin.post("/pause?mode=keep&clear_cache=true", attempts=1)
        try:
            await admin.post("/start_weight_update", attempts=1)
            names, dtypes, shapes = (list(column) for column in zip(*self.tensors(self._policy), strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            # The server's answer comes when it has received what `send` sends
            await gather([admin.post("/update_weights", {"update_info": info}, attempts=1), self.send(self._policy)])
            await admin.post("/finish_weight_update", {"weight_version": publication.label}, attempts=1)
        finally:
            await admin.post("/resume", attempts=1)
        admin.server.read_label = lambda http: _weight_version(ServerAdmin(http, admin.server, admin.patience))

    async def read_back(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        _require_label(await _weight_version(admin), publication)

    async def forget(self, admin: ServerAdmin, publication: WeightUpdate) -> None:
        """It was replaced."""


async def _weight_version(admin: ServerAdmin) -> str | None:
    version = (await admin.get("/weight_info")).get("weight_version")
    return version if isinstance(version, str) else None


def _require_success(answer: Any) -> None:
    if not isinstance(answer, Mapping) or answer.get("success") is not True:
        said = answer.get("message") if isinstance(answer, Mapping) else answer
        raise InvalidResponse("update refused", f"{said!r:.200}")


def _require_label(found: Any, publication: WeightUpdate) -> None:
    if found != publication.label:
        raise InvalidResponse("unconfirmed", f"it says that it runs {found!r}")
