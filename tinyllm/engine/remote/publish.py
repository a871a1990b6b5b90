"""New weights for servers: written once, loaded by each server in its own way, read back, and proved by the canary.

    publisher = Publisher(servers, TinyllmDisk(), folder, canary, RetryPolicy())
    publisher.publish(Revision(12, hash), policy)

A server that did not take an update is quarantined with a warning and tried again at the next update; when none is
left, EngineError names each server and its reason. The files of an update stay until every server has confirmed the
next one, and one update longer, so that a slow load never finds its files gone.
"""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.engine.policy import Policy
from tinyllm.engine.remote.canary import Canary, CanaryOutput
from tinyllm.engine.remote.capabilities import alive
from tinyllm.engine.remote.http import (
    FailureKind,
    Http,
    InvalidResponse,
    RequestFailed,
    RetryPolicy,
    RunRequests,
    admin_key,
    gather,
    retry,
    run,
)
from tinyllm.engine.remote.servers import Server, Servers
from tinyllm.errors import EngineError
from tinyllm.model import models
from tinyllm.record.files import new_folder, recover_folders, write_errors
from tinyllm.records import Revision

log = logging.getLogger("tinyllm")

KEPT_ADAPTERS = 3
"""LoRA adapters loaded at a time: the newest, the one before, and one for late requests."""


@dataclass(frozen=True)
class WeightUpdate:
    """One revision's weights, on their way to the servers."""

    revision: Revision
    folder: Path
    content_hash: str | None = None
    """Of the whole model, where a server that loads it must come to the same; None where it is merged or adapters."""

    @property
    def label(self) -> str:
        """The weight version that servers are told: step and the start of the hash."""
        return str(self.revision)

    @property
    def name(self) -> str:
        """The weight version, fit for the name of a folder or an adapter."""
        return f"v{self.revision.step}-{self.revision.hash[:12]}"

    @property
    def path(self) -> Path:
        """What servers load."""
        return self.folder / self.name


class WeightTransfer(ABC):
    """How weights get to a server; by default as a whole model, in a folder that the servers see too."""

    kept = 1
    """How many updates a server holds at a time, the newest among them."""

    def write(self, update: WeightUpdate, policy: Policy) -> None:
        """Put on disk what servers load, whole or not at all."""
        if not update.path.exists():  # the folder's name has the weights' hash
            models.save_model(policy.model, None, update.path)

    @abstractmethod
    async def load(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        """Make the server load the update. Raises RequestFailed."""

    @abstractmethod
    async def read_back(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        """Ask the server which weights it runs now. Raises RequestFailed when they are not the update's."""

    async def forget(self, admin: ServerAdmin, update: WeightUpdate) -> None:  # noqa: B027
        """Free what the server holds of an older update; nothing, where the newer weights took its place."""


@dataclass(frozen=True)
class ServerAdmin:
    """One server's routes for changing weights, during one update."""

    http: Http
    server: Server
    retry_policy: RetryPolicy

    async def post(self, path: str, body: Any) -> Any:
        """The JSON of the response, None where its body is empty. Raises RequestFailed."""
        return await retry(self.retry_policy, lambda _, seconds: self._request("POST", path, body, seconds))

    async def get(self, path: str) -> Mapping[str, Any]:
        """The JSON object of the response. Raises RequestFailed."""
        response = await retry(self.retry_policy, lambda _, seconds: self._request("GET", path, None, seconds))
        return response if isinstance(response, Mapping) else {}

    async def _request(self, method: str, path: str, body: Any, seconds: float) -> Any:
        try:
            return await self.http.request(method, self.server.url + path, body, timeout_s=seconds, key=admin_key())
        except RequestFailed as error:
            if error.kind is FailureKind.NOT_JSON:
                return None  # routes such as vLLM's /resume answer with an empty body
            if error.status in (401, 403, 404):
                why = f"{path} is not open to us; {_OPENING[self.server.facts.server]}"
                raise RequestFailed(FailureKind.STATUS, why, status=error.status) from None
            raise


_OPENING = {
    "tinyllm": "start the server with --admin-key and set TINYLLM_ADMIN_KEY to the same",
    "vllm": "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
    "sglang": "set TINYLLM_ADMIN_KEY to the key of SGLang's --admin-api-key",
}


class Publisher:
    """Publishes weights to all servers, and proves that they run them. run: where its requests run (see http.py)."""

    def __init__(
        self,
        servers: Servers,
        transfer: WeightTransfer,
        folder: Path,
        canary: Canary,
        retry_policy: RetryPolicy,
        run: RunRequests = run,
    ) -> None:
        self.servers, self.transfer, self.folder, self.canary = servers, transfer, folder, canary
        self.retry_policy, self._run = retry_policy, run
        self._published: list[WeightUpdate] = []
        self._leftover: list[Path] = []

    def publish(self, revision: Revision, policy: Policy, content_hash: str | None = None) -> None:
        """Every server that works runs these weights when this returns. Raises EngineError when none does.

        content_hash: of the whole model, where servers can come to the same.
        """
        update = WeightUpdate(revision, self.folder, content_hash)
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._published:  # files of a process before us, the last of which a server may still be loading
                recover_folders(self.folder)
                self._leftover = [path for path in self.folder.glob("v*-*") if path != update.path]
        self.transfer.write(update, policy)
        try:
            outputs = self._run(lambda http: gather([self._load(http, s, update) for s in self.servers.all]))
            for server, output in zip(self.servers.all, outputs, strict=True):
                if output is not None:
                    self._judge(server, output, update)
        finally:
            for server in self.servers.all:
                server.updating = False
        self.servers.require_live()
        if update not in self._published:
            self._published.append(update)
        self._tidy()

    async def _load(self, http: Http, server: Server, update: WeightUpdate) -> CanaryOutput | None:
        """What the server samples with the update, or None when it did not take the update."""
        if server.quarantined is not None and not await alive(http, server.url):
            return None
        before = (server.label, server.revision, server.model)
        admin = ServerAdmin(http, server, self.retry_policy)
        server.updating = True
        try:
            await self.transfer.load(admin, update)
            await self.transfer.read_back(admin, update)
            server.label, server.revision = update.label, update.revision
            return await retry(self.retry_policy, lambda _, seconds: self.canary.sample(http, server, seconds))
        except RequestFailed as error:
            server.label, server.revision, server.model = before
            server.quarantine(f"it did not take revision {update.label} ({error})")
            return None

    def _judge(self, server: Server, output: CanaryOutput, update: WeightUpdate) -> None:
        """Confirm the update where the canary holds, and quarantine the server where it does not."""
        try:
            self.canary.judge(server, output)
        except InvalidResponse as error:
            server.quarantine(f"it did not take revision {update.label} ({error})")
            return
        server.confirm(update.revision, update.label)

    def _tidy(self) -> None:
        """Servers free the oldest update; its files go one update later, for a load that hangs."""
        kept = self.transfer.kept
        if len(self._published) > kept:
            old = self._published[-kept - 1]
            self._run(lambda http: self._forget(http, old))
        while len(self._published) > kept + 1:
            shutil.rmtree(self._published.pop(0).path, ignore_errors=True)
        if len(self._published) > 1:
            while self._leftover:
                shutil.rmtree(self._leftover.pop(), ignore_errors=True)

    async def _forget(self, http: Http, old: WeightUpdate) -> None:
        async def one(server: Server) -> None:
            try:
                await self.transfer.forget(ServerAdmin(http, server, RetryPolicy(1, self.retry_policy.deadline_s)), old)
            except RequestFailed as error:
                log.warning("%s still holds %s: %s", server.url, old.name, error)

        await gather([one(server) for server in self.servers.live])


class TinyllmDisk(WeightTransfer):
    """tinyllm serve: pauses automatically; reports the content hash of the loaded weights."""

    async def load(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        body = {"model_path": str(update.path.resolve()), "weight_version": update.label}
        _require_success(await admin.post("/update_weights_from_disk", body))

    async def read_back(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        info = await admin.get("/weight_info")
        _require_label(info.get("weight_version"), update)
        digest = info.get("weight_hash")
        if digest is not None and update.content_hash is not None and digest != update.content_hash:
            raise InvalidResponse("other weights", f"content hash {digest}, the trainer's is {update.content_hash}")


class SGLangDisk(WeightTransfer):
    """SGLang: pause, update, flush, continue."""

    async def load(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        body = {
            "model_path": str(update.path.resolve()),
            "weight_version": update.label,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        await admin.post("/pause_generation", {"mode": "abort"})  # of ours nothing runs during an update
        try:
            _require_success(await admin.post("/update_weights_from_disk", body))
        finally:
            await admin.post("/continue_generation", {})

    async def read_back(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        _require_label((await admin.get("/model_info")).get("weight_version"), update)


class VLLMLora(WeightTransfer):
    """vLLM: a LoRA adapter with a new name for each revision, so that requests name the weights that answer them.

    max_lag: of the pool; a request keeps the adapter that it was sent with, so that more of them must stay loaded.
    """

    def __init__(self, max_lag: int = 0) -> None:
        self.kept = max(KEPT_ADAPTERS, max_lag + 2)

    def write(self, update: WeightUpdate, policy: Policy) -> None:
        if not hasattr(policy.model, "peft_config"):
            raise EngineError("vLLM takes weights as adapters, and there are none to publish; set lora.rank")
        if not update.path.exists():
            with new_folder(update.path) as folder:
                policy.model.save_pretrained(folder, save_embedding_layers=False)

    async def load(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        name = self._name(admin.server, update)
        body = {"lora_name": name, "lora_path": str(update.path.resolve()), "load_inplace": False}
        try:
            await admin.post("/v1/load_lora_adapter", body)
        except RequestFailed as error:  # an attempt whose response got lost; the name has the hash: the same adapter
            if error.status != 400 or name not in await self._loaded(admin):
                raise
        admin.server.model = name

    async def read_back(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        name = self._name(admin.server, update)
        if name not in await self._loaded(admin):
            raise InvalidResponse("adapter missing", f"{name!r} is not in /v1/models")

    async def forget(self, admin: ServerAdmin, update: WeightUpdate) -> None:
        await admin.post("/v1/unload_lora_adapter", {"lora_name": self._name(admin.server, update)})

    async def _loaded(self, admin: ServerAdmin) -> set[str]:
        data = (await admin.get("/v1/models")).get("data")
        entries = data if isinstance(data, list) else []
        return {str(entry.get("id")) for entry in entries if isinstance(entry, Mapping)}

    @staticmethod
    def _name(server: Server, update: WeightUpdate) -> str:
        return f"{server.facts.model.rpartition('/')[2]}-{update.name}"


def _require_success(response: Any) -> None:
    if not isinstance(response, Mapping) or response.get("success") is not True:
        said = response.get("message") if isinstance(response, Mapping) else response
        raise InvalidResponse("update refused", f"{said!r:.200}")


def _require_label(found: Any, update: WeightUpdate) -> None:
    if found != update.label:
        raise InvalidResponse("unconfirmed", f"it says that it runs {found!r}")
