"""Checkpoints: a folder per step with safetensors files and state.json, complete or absent, checked when loaded.

The files hold one group of tensors each or, of a run on several ranks, one rank's shards each; either loads anywhere.

Saving copies the tensors into the system's page cache and returns; a thread then waits for the disk, gives the folder
its name and removes checkpoints that are too old. Until then the folder has a temporary name and does not count.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.errors import RunError
from tinyllm.record.files import (
    commit_folder,
    read_json,
    read_shards,
    read_tensors,
    write_errors,
    write_json,
    write_tensors,
)
from tinyllm.record.hashing import hash_file

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("tinyllm")


class Checkpoints:
    """The checkpoints of one run, in `folder`/<step>/."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._error: RunError | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder / f"{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first (finished ones; whether they are whole is seen when loading)."""
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdigit())

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, keep: int
    ) -> None:
        """Save groups of tensors (one file each) and a JSON-like state; afterwards only the newest `keep` are kept.

        The tensors may change as soon as this returns. Raises RunError, also for the save before this one.
        """
        self.wait()
        path = self.path(step)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with write_errors(path):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                files = {}
                for name, group in tensors.items():
                    fd = os.open(temporary / f"{name}.safetensors", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                    try:
                        files[f"{name}.safetensors"] = write_tensors(fd, group)
                    finally:
                        os.close(fd)
            self._commit(step, {"files": files, "state": dict(state)}, keep)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _commit(self, step: int, saved: Mapping[str, Any], keep: int) -> None:
        """Write state.json into the temporary folder, and let a thread make the folder durable."""
        path = self.path(step)
        temporary = path.with_name(f".{path.name}.tmp")
        write_json(temporary / "state.json", {"step": step, **saved})
        self._thread = threading.Thread(target=self._finish, args=(temporary, path, keep), name=f"checkpoint-{step}")
        self._thread.start()

    def _finish(self, temporary: Path, path: Path, keep: int) -> None:
        try:
            with write_errors(path):
                commit_folder(temporary, path)
                for step in self.steps()[:-keep]:
                    shutil.rmtree(self.path(step))
        except RunError as error:
            self._error = error
            shutil.rmtree(temporary, ignore_errors=True)

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises RunError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load(self, step: int | None = None) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(step, tensors, state) of the checkpoint of `step`, or of the newest whole one.

        Damaged ones are passed over with a warning that names them. Raises RunError when there is none.
        """
        self.wait()
        if step is not None:
            return self._load(step)
        for candidate in reversed(self.steps()):
            try:
                return self._load(candidate)
            except RunError as error:
                log.warning("checkpoint of step %d is passed over: %s", candidate, error)
        raise RunError(f"{self.folder}: no whole checkpoint; start the run again")

    def _load(self, step: int) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
        path = self.path(step)
        if not path.is_dir():
            have = ", ".join(map(str, self.steps())) or "none"
            raise RunError(f"{self.folder}: no checkpoint of step {step}; there is: {have}")
        saved = read_json(path / "state.json")
        tensors = {}
        for name, facts in saved["files"].items():
            file = path / name
            if not file.exists():
                raise RunError(f"{file}: missing")
            if (size := file.stat().st_size) != facts["bytes"]:
                raise RunError(f"{file}: {size:,} bytes instead of {facts['bytes']:,}")
            if hash_file(file) != facts["hash"]:
                raise RunError(f"{file}: damaged (its checksum does not hold)")
            if "shards" not in saved:
                tensors[name.removesuffix(".safetensors")] = read_tensors(file)
        if "shards" in saved:
            tensors = read_shards(path)
        return step, tensors, saved["state"]
