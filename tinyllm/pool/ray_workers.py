"""Workers as actors on Ray: started, called and killed.

Ray places processes and carries data; what to do when one dies or hangs is decided in driver.py, so actors are never
restarted and no call is repeated by Ray itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from tinyllm.errors import ConfigError, EngineError, require_extra
from tinyllm.pool.workers import WorkerDied

log = logging.getLogger("tinyllm")

_STARTS = 3
"""Ray gives up on its own start after half a minute, which a busy machine can take."""
_STORE_BYTES = 256 << 20
_LOCAL = {
    "worker_register_timeout_seconds": 600,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 20,
    "worker_niceness": 0,
}
"""On one machine a slow process is not a dead one, and an engine has the trainer's priority (Ray's own nice: 15)."""


def require_ray() -> None:
    """Raises MissingExtra, with the remedy, where Ray is not installed."""
    require_extra("cluster", "a pool of engines or verifiers")


class RayCluster:
    """Ray for one run: a running cluster, or one of our own on this machine, which ends with the run."""

    def __init__(self, address: str | None, workers: int, weights_bytes: int) -> None:
        import ray

        self.own = not ray.is_initialized()
        if self.own:
            _connect(address, workers, _STORE_BYTES + 4 * weights_bytes)
        self.node = ray.get_runtime_context().get_node_id()

    def put(self, value: Any) -> Any:
        """Put a value into shared memory; the reference returned stands for it in calls of workers."""
        import ray

        return ray.put(value)

    def require_portable(self, build: Callable[[], Any], what: str, remedy: str) -> None:
        """Raises ConfigError for a `build` that cannot be sent to another process."""
        from ray import cloudpickle

        try:
            cloudpickle.dumps(build)
        except Exception as error:  # whatever a user's object raises when it is copied
            raise ConfigError(f"{what} cannot be sent to another process ({error}); {remedy}") from error

    def worker(self, build: Callable[[], Any]) -> RayWorker:
        """A process in which build() makes the object whose methods are called."""
        return RayWorker(build, self.node)

    def close(self) -> None:
        import ray

        if self.own:
            ray.shutdown()


def _connect(address: str | None, workers: int, store_bytes: int) -> None:
    import ray
    from ray._private import worker as ray_worker

    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"address": address or "local", "include_dashboard": False, "log_to_driver": False}
    options |= {"logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        # num_cpus: how many processes are started in advance; workers ask for none, so that all of them are placed
        options |= {"num_cpus": workers, "object_store_memory": store_bytes, "_system_config": _LOCAL}
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    for attempt in range(1, _STARTS + 1):
        try:
            with _environment():
                ray.init(**options)
            ray_worker.print_to_stdstream = lambda *_, **__: None  # how each worker ended; driver.py says it in a line
            return
        except (Exception, SystemExit) as error:
            with suppress(Exception):
                ray.shutdown()
            for child in psutil.Process().children(recursive=True):  # Ray leaves what it had started by then
                if child.pid not in others:
                    child.kill()
            if address is not None or attempt == _STARTS:
                remedy = "check pool.ray_address" if address else "see the logs in /tmp/ray/session_latest/logs"
                raise EngineError(f"Ray did not start: {' '.join(str(error).split())[:300]}; {remedy}") from error
            log.warning("Ray did not start (%s); trying again", str(error).split(".")[0])
            time.sleep(1.0)


@contextmanager
def _environment() -> Iterator[None]:
    """Environment for the processes that Ray starts: our modules, no usage reports; restored here on exit."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    given = {
        "PYTHONPATH": paths,
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    before = {name: os.environ.get(name) for name in given}
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.update(given)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():  # Ray sets one of its own
            signal.signal(signal.SIGTERM, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Host:
    """The actor: holds one object and calls its methods, one after another."""

    def __init__(self) -> None:
        self.object: Any = None

    def identity(self) -> tuple[str, int]:
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def start(self, build: Callable[[], Any]) -> None:
        self.object = build()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.object, method)(*arguments)


class RayWorker:
    """One actor."""

    def __init__(self, build: Callable[[], Any], node: str) -> None:
        import ray

        self._build, self._node = build, node
        actor: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(_Host)
        self._actor = actor.remote()
        self._identity: Future[tuple[str, int]] = self._actor.identity.remote().future()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        host = self._actor
        given = host.start.remote(self._build) if method == "start" else host.call.remote(method, *arguments)
        outcome: Future[Any] = Future()

        def returned(future: Future[Any]) -> None:
            error = _plain_error(future.exception())
            if error is None:
                outcome.set_result(future.result())
            else:
                outcome.set_exception(error)

        given.future().add_done_callback(returned)
        return outcome

    def kill(self) -> None:
        """Kill through Ray, then SIGKILL if the process is on this machine: a SIGSTOPped one reacts to nothing else."""
        import ray

        with suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        if self._identity.done() and self._identity.exception() is None:
            node, pid = self._identity.result()
            if node == self._node:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _plain_error(error: BaseException | None) -> BaseException | None:
    """The exception that the worker raised itself, or WorkerDied for the end of its process."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, BaseException) else error
    if isinstance(error, RayError):
        return WorkerDied(f"its process ended ({type(error).__name__})")
    return error
