"""The processes (ranks) that train one model together: torchrun starts them, this module connects them.

    torchrun --nproc-per-node 2 -m tinyllm grpo ...

Without torchrun (WORLD_SIZE unset or 1) there is one rank, SOLO: nothing distributed is imported or run. Only small
values are exchanged here (records, sums, names); weights and gradients go through fsdp.py.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from tinyllm.errors import ConfigError, TinyLLMError

T = TypeVar("T")
U = TypeVar("U")

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others, which may be sampling. The end of a rank is noticed at once."""
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Timeout")
"""Words of the errors that a collective raises when another process has ended (gloo, the store)."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and their number. Every rank calls the methods in the same order."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that records, logs, saves and shows."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def on_main(self, work: Callable[[], T]) -> T:
        """The result of `work`, which rank 0 alone runs, on every rank; its TinyLLMError is raised on every rank."""
        if self.count == 1:
            return work()
        return _values(self.gather(_attempt(work) if self.is_main else None)[:1])[0]

    def share(self, items: Sequence[U], work: Callable[[Sequence[U]], Sequence[T]]) -> list[T]:
        """work(items), one result per item: each rank does every count-th item, and every rank has all results."""
        if self.count == 1:
            return list(work(items))
        mine = items[self.rank :: self.count]
        results: list[Any] = [None] * len(items)
        parts = _values(self.gather(_attempt(lambda: list(work(mine)) if mine else [])))
        for rank, part in enumerate(parts):
            results[rank :: self.count] = part
        return results


SOLO = Ranks()
"""Training in one process."""


def _attempt(work: Callable[[], T]) -> tuple[T | None, TinyLLMError | None]:
    try:
        return work(), None
    except TinyLLMError as error:
        return None, type(error)(str(error))


def _values(outcomes: Sequence[Any]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


@functools.cache
def current_ranks() -> Ranks:
    """The ranks this process belongs to, joined at the first call. Raises ConfigError where variables are missing."""
    if not several():
        return SOLO
    count, rank, local = _number("WORLD_SIZE"), _number("RANK"), _number("LOCAL_RANK")
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        gpus = torch.cuda.device_count()
        if gpus and local < gpus:
            torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        store = distributed.PrefixStore("ranks", _store())
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
        atexit.register(_leave)
    if rank:
        logging.getLogger("tinyllm").setLevel(logging.ERROR)  # rank 0 warns for all
    return Ranks(rank, count)


def _leave() -> None:
    from torch import distributed

    with suppress(Exception):  # the other ranks may have ended first
        distributed.destroy_process_group()


def _setting(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise ConfigError(f"WORLD_SIZE = {os.environ.get('WORLD_SIZE')} but {name} is not set; start with torchrun")
    return text


def _number(name: str) -> int:
    text = _setting(name)
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} in the environment is not a number; start with torchrun")
    return int(text)


@functools.cache
def _store() -> Any:
    """The key-value store that torchrun (or rank 0) holds for all ranks."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        _setting(name)
    from torch import distributed

    store, _, _ = next(distributed.rendezvous("env://", timeout=timedelta(minutes=5)))
    return store


def several() -> bool:
    """Whether the environment says that this is one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def claim_report() -> bool:
    """Whether this process reports its failure: only the first rank that fails does, so that it is reported once."""
    if not several():
        return True
    try:
        return _store().add("failed", 1) == 1
    except TinyLLMError:
        return True  # without torchrun there is no store to ask
    except Exception:  # noqa: BLE001 - the process that held the store has ended
        return os.environ.get("RANK") == "0"


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"DistError", "DistNetworkError", "DistStoreError"}) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)
    )
