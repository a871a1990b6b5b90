"""The servers that sample: which of them work, which weights each has confirmed, and which takes the next request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinyllm.engine.remote.capabilities import Capabilities, alive
from tinyllm.engine.remote.dialects import DIALECTS, Dialect
from tinyllm.engine.remote.http import FailureKind, Http, RequestFailed
from tinyllm.errors import EngineError
from tinyllm.records import Revision

log = logging.getLogger("tinyllm")

_REMEMBERED = 64
"""Versions that a server is remembered to have run; more than the lag of any request."""
_LOOK_S = 0.02
_CHECKED_S = 0.5
"""How long a good /health stays valid; many requests fail at the same moment."""


@dataclass
class Server:
    """One server and what it has confirmed."""

    facts: Capabilities
    model: str
    """The name that requests carry; a LoRA adapter's name when weights are published so."""
    label: str | None = None
    """The weight version it confirmed after the last update."""
    revision: Revision | None = None
    confirmed: dict[str, Revision] = field(default_factory=dict)
    """Every revision it was seen to run, by weight version, the newest last: a request may begin under one and end
    under another."""
    updating: bool = False
    """Whether an update is under way that the server has not confirmed yet."""
    quarantined: str | None = None
    """Why the server gets no requests; None when it does."""
    outstanding: int = 0
    """Requests under way."""
    checked_at: float = -_CHECKED_S

    @property
    def url(self) -> str:
        return self.facts.url

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.facts.server]

    def quarantine(self, reason: str) -> None:
        """No more requests to this server, until it takes an update."""
        if self.quarantined is None:
            log.warning("%s gets no more requests: %s", self.url, reason)
        self.quarantined = reason

    def confirm(self, revision: Revision, label: str) -> None:
        """Mark the server as verified to run this revision, and let requests go to it."""
        if self.quarantined is not None:
            log.warning("%s gets requests again: it runs revision %s", self.url, revision)
        self.revision, self.label, self.quarantined = revision, label, None
        self.confirmed[label] = revision
        for old in list(self.confirmed)[:-_REMEMBERED]:
            del self.confirmed[old]

    async def wait_until_updated(self) -> None:
        """Return once no update of this server is under way."""
        while self.updating:
            await asyncio.sleep(_LOOK_S)

    async def check_after(self, failure: RequestFailed, http: Http) -> None:
        """After a failure that a dead server would cause: quarantine the server, unless its /health is good."""
        if failure.kind is FailureKind.TIMED_OUT or (failure.status is not None and failure.status < 500):
            return  # slow or busy
        async with http.lock(self.url):
            if self.quarantined is not None or time.monotonic() - self.checked_at < _CHECKED_S:
                return
            works = await alive(http, self.url)
            self.checked_at = time.monotonic()
            if not works:
                self.quarantine(f"it does not work any more ({failure})")


Confirmed = tuple[str, str | None, Revision | None, str | None]
"""Of one server: the name that requests carry, label and revision it runs, and why it is quarantined."""


class Servers:
    """All servers of a run."""

    def __init__(self, servers: Sequence[Server]) -> None:
        assert servers
        self.all = list(servers)

    @property
    def live(self) -> list[Server]:
        return [server for server in self.all if server.quarantined is None]

    def require_live(self) -> list[Server]:
        """The servers that work. Raises EngineError, with each server's reason, when none does."""
        if not self.live:
            reasons = "; ".join(f"{server.url}: {server.quarantined}" for server in self.all)
            raise EngineError(f"no server is left to sample on ({reasons}); start it again and resume the run")
        return self.live

    def confirmed(self) -> list[Confirmed]:
        """What each server has confirmed, for another process that samples on the same servers."""
        return [(server.model, server.label, server.revision, server.quarantined) for server in self.all]

    def adopt(self, confirmed: Sequence[Confirmed]) -> None:
        """Take over what another process saw confirmed."""
        for server, (model, label, revision, quarantined) in zip(self.all, confirmed, strict=True):
            server.model, server.label, server.revision, server.quarantined = model, label, revision, quarantined

    def pick(self, avoid: Server | None = None) -> Server:
        """The server with the fewest requests under way; `avoid` (it just failed) only where it is the last."""
        live = self.require_live()
        return min(live, key=lambda server: (server is avoid and len(live) > 1, server.outstanding))
