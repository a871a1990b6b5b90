"""The run directory of a run on several ranks: rank 0 writes it, the others read it, all save their shards.

The directory must be on storage that every rank sees. A checkpoint has one safetensors file per rank, written by
torch's distributed checkpointing; any number of ranks, or one process, can resume from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.distributed.ranks import Ranks
from tinyllm.record.checkpoint import Checkpoints
from tinyllm.record.files import file_facts, write_errors, write_shards
from tinyllm.record.rundir import RunDir

if TYPE_CHECKING:
    from torch import Tensor


class SharedCheckpoints(Checkpoints):
    """Checkpoints that all ranks save together. Loading is that of one process, on each rank."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        super().__init__(folder)
        self.ranks = ranks

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, keep: int
    ) -> None:
        """As Checkpoints.save; tensors may be shards, and every rank calls it."""
        path = self.path(step)
        temporary = path.with_name(f".{path.name}.tmp")

        def begin() -> None:
            self.wait()
            with write_errors(path):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)

        self.ranks.on_main(begin)
        with write_errors(path):
            write_shards(temporary, tensors)
        self.ranks.gather(None)  # every file is written

        def commit() -> None:
            with write_errors(path):
                files = {file.name: file_facts(file) for file in sorted(temporary.iterdir())}
            self._commit(step, {"files": files, "shards": self.ranks.count, "state": dict(state)}, keep)

        self.ranks.on_main(commit)


class Follower(RunDir):
    """The run directory on ranks other than 0, which read it and leave the writing to rank 0."""

    def record(self, *_: Any, **__: Any) -> None:
        """Rank 0 records the groups of all ranks."""

    def write_derived(self, *_: Any) -> None:
        """Rank 0 has the numbers of all ranks."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Rank 0 logs."""

    def log_timing(self, timing: Mapping[str, Any]) -> None:
        """Rank 0 logs its own."""

    def _writable(self) -> None:
        """Nothing to check: these ranks write only their shards of checkpoints."""


def shared_run(ranks: Ranks, make: Callable[[], RunDir]) -> RunDir:
    """The run that `make` creates or opens on rank 0, for every rank. Raises what make raises, on all of them."""
    if ranks.count == 1:
        return make()
    made: list[RunDir] = []

    def on_main() -> Path:
        made.append(make())
        return made[0].path

    path = ranks.on_main(on_main)
    run = made[0] if made else Follower.read(path)
    run.checkpoints = SharedCheckpoints(run.checkpoints.folder, ranks)
    return run
