"""Runs a Service on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from tinyllm.errors import ConfigError
from tinyllm.serve.app import Service

BACKLOG = 2048
_CLOSE_S = 5
"""How long connections may take to close once no request is under way."""


class _Server(uvicorn.Server):
    """uvicorn's server, but signals are left to serve_until_signal, and on_ready is called when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, which nobody can connect to yet. Raises ConfigError, as for a port in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
            # A second server that binds the same port before either listens would be let in otherwise.
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        remedy = "choose another --port (0 = a free one)" if port else "choose another --host"
        raise ConfigError(f"cannot listen on {where}: {getattr(error, 'strerror', error)}; {remedy}") from None
    return bound


def address(bound: socket.socket) -> str:
    """http://host:port of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(service: Service, bound: socket.socket, on_ready: Callable[[], None], stop: asyncio.Event) -> int:
    """Serve until `stop` is set and the requests under way are finished; returns how many were cut off."""
    config = uvicorn.Config(
        service.app,
        loop="asyncio",
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config, on_ready)
    service.start()
    running = asyncio.create_task(server.serve(sockets=[bound]))
    stopped = asyncio.create_task(stop.wait())
    cut = 0
    try:
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            cut = await service.drain()
        server.should_exit = True
        await running
    finally:
        stopped.cancel()
        service.close()
    return cut


def serve_until_signal(service: Service, bound: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serve until SIGTERM or SIGINT, then finish the requests under way; a second signal ends the process at once."""

    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                _leave_now()
            print(f"stopping: {service.outstanding} completions under way are finished first", file=sys.stderr)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        return await serve(service, bound, on_ready, stop)

    return asyncio.run(main())


def _leave_now() -> Any:
    """Ends the process without waiting for the engine's thread, which may be in the middle of a step."""
    print("stopped: a second signal", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130)
