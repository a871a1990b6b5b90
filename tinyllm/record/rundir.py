"""The run directory: enough to derive a run again without the process that made it.

    manifest.json             configuration, versions, machine, content hashes
    config.toml               the resolved configuration, to read or to start from
    rollouts/000001.parquet   what step 1 sampled and how it was judged
    metrics.jsonl             one line per step and per evaluation; the same in every identical run
    timing.jsonl              seconds, memory, wall clock; different in every run
    ledger.jsonl              with a pool: how each group went; different in every run
    checkpoints/000020/       tensors and state
    derived/000001.parquet    advantages and trainer log-probabilities of step 1; replay computes them again
    superseded/               what a resumed run put aside
    model/  report.png        the result

One process writes; any number may read. Every write is whole or absent after a crash, and carries a checksum.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.config.io import from_dict, to_toml
from tinyllm.config.old import upgrade
from tinyllm.config.sections import CONFIGS
from tinyllm.errors import ConfigError, RunError
from tinyllm.record.checkpoint import Checkpoints, log
from tinyllm.record.files import (
    Lock,
    append_line,
    json_text,
    read_json,
    read_lines,
    recover_folders,
    sync_folder,
    write_atomic,
    write_errors,
    write_json,
)
from tinyllm.record.manifest import compare_manifests
from tinyllm.records import Group, Step

if TYPE_CHECKING:
    from torch import Tensor

    from tinyllm.record.rollouts import Recorded

MANIFEST = "manifest.json"


def new_run_path(root: str | Path = "runs") -> Path:
    """A name for a new run: root/<date>-<time>, with a number behind when that is taken."""
    base = Path(root) / datetime.now().strftime("%Y%m%d-%H%M%S")
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


class RunDir:
    """One run directory. Made by create, open (to go on) or read (no lock, no writing)."""

    def __init__(self, path: Path, manifest: dict[str, Any], lock: Lock | None):
        self.path = path
        try:
            self.manifest = manifest = manifest | {"config": upgrade(manifest["config"])}
            self.config: Any = from_dict(manifest["config"], CONFIGS[manifest["kind"]]())
        except KeyError:
            raise RunError(f"{path / MANIFEST}: not the manifest of a run (it has no config of a known kind)") from None
        except ConfigError as error:
            raise RunError(f"{path / MANIFEST}: {error} (is the run of another version of tinyllm?)") from None
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock = lock
        self._earlier: dict[tuple[str, int], str] = {}

    # Opening and closing

    @classmethod
    def create(cls, path: str | Path, manifest: Mapping[str, Any]) -> RunDir:
        """A new run directory, locked. Raises RunError when it holds a run already or cannot be written."""
        path = cls.require_free(path)
        lock = Lock(path)
        try:
            run = cls(path, dict(manifest), lock)
            with write_errors(path):
                recover_folders(path)
                (path / "rollouts").mkdir(exist_ok=True)
            write_atomic(path / "config.toml", to_toml(run.config).encode())
            write_json(path / MANIFEST, manifest)
            sync_folder(path.parent)
            return run
        except BaseException:
            lock.release()
            raise

    @staticmethod
    def require_free(path: str | Path) -> Path:
        """Make the folder of a new run. Raises RunError when it holds a run or other files, or cannot be written."""
        path = Path(path)
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        if (path / MANIFEST).exists():
            raise RunError(f"{path} already holds a run; go on with --resume {path}, or choose another --run.dir")
        left = {"lock", "config.toml", "rollouts", ".config.toml.tmp", f".{MANIFEST}.tmp"}  # by a crash in create
        if others := sorted(set(os.listdir(path)) - left):
            raise RunError(f"{path} holds other files ({others[0]}); choose an empty or new --run.dir")
        return path

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run directory, locked, with the traces of a crash cleared. Raises RunError."""
        path = cls._existing(path)
        lock = Lock(path)
        try:
            run = cls(path, read_json(path / MANIFEST), lock)
            with write_errors(path):
                for folder in (path, *(path / name for name in ("rollouts", "checkpoints", "derived"))):
                    recover_folders(folder)
                for file in (path / name for name in ("metrics.jsonl", "timing.jsonl", "ledger.jsonl")):
                    if file.exists():
                        os.truncate(file, read_lines(file)[1])  # without the line that a crash tore
            run._earlier = {_line_key(row): json_text(row) for row in run.metrics()}
            return run
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, path: str | Path) -> RunDir:
        """An existing run directory for reading; it may be in use by a run. Raises RunError."""
        path = cls._existing(path)
        return cls(path, read_json(path / MANIFEST), None)

    @staticmethod
    def _existing(path: str | Path) -> Path:
        path = Path(path)
        if not (path / MANIFEST).exists():
            raise RunError(f"{path}: no run here ({MANIFEST} is missing); see: tinyllm runs {path.parent}")
        return path

    def close(self) -> None:
        """Wait for the disk and let go of the lock. Raises RunError when the last checkpoint could not be saved."""
        try:
            self.checkpoints.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Rollouts

    def record(self, step: Step) -> None:
        """Write a step's rollouts, and what reward functions logged, durably, before they are trained on.

        A step that the record holds already is left as it is. Raises RunError, and RewardError for a logged column
        named like one of ours.
        """
        from tinyllm.record.rollouts import write_table

        if step.recorded:
            return
        self._writable()
        write_atomic(self.rollout_path(step.number), write_table(step))

    def write_derived(
        self, step: int, rows: Sequence[tuple[str, int]], advantages: Sequence[float], logprobs: Mapping[int, Any]
    ) -> None:
        """Keep what training computed for each rollout, in derived/; see rollouts.derived_table. Replay rebuilds it."""
        from tinyllm.record.rollouts import derived_table

        path = self.derived_path(step)
        with write_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_atomic(path, derived_table(step, rows, advantages, logprobs), durable=False)

    def read_groups(self, step: int) -> list[Group]:
        """The groups of a step as they were recorded. Raises RunError."""
        return list(self.read_step(step).groups)

    def read_step(self, step: int) -> Step:
        """A step as it was recorded, none of its rows changed. Raises RunError."""
        file = self.read_rollouts(step)
        if file.changed:
            raise RunError(f"{self.rollout_path(step)}: changed since it was recorded: {file.changed[0]}")
        groups = tuple(file.groups)
        return Step(step, groups, file.logged, prompts=len(groups), recorded=True)

    def read_rollouts(self, step: int) -> Recorded:
        """The file of a step, whatever its checksums say; it lists the rows that were changed. Raises RunError."""
        from tinyllm.record.rollouts import read_table

        path = self.rollout_path(step)
        if not path.exists():
            raise RunError(f"{path}: missing")
        return read_table(path)

    def steps(self) -> list[int]:
        """Steps that have rollouts, in order. Raises RunError where the folder of rollouts is missing."""
        folder = self.path / "rollouts"
        if not folder.is_dir():
            raise RunError(f"{folder}: missing; restore it from a copy of the run")
        return sorted(int(match[1]) for name in os.listdir(folder) if (match := re.fullmatch(r"(\d+)\.parquet", name)))

    def require_logged(self, step: int) -> None:
        """Raise RunError when metrics.jsonl lacks a line that a checkpoint of `step` says was written."""
        logged = {row["step"] for row in self.metrics("train")}
        if missing := sorted(set(range(1, step + 1)) - logged):
            raise RunError(
                f"{self.path / 'metrics.jsonl'}: the line of step {missing[0]} is missing; restore it from a copy, "
                "or move checkpoints/ away, so that every step is trained again from the record"
            )

    def take_recorded(self, after: int) -> list[int]:
        """The recorded steps that follow `after` without a gap, to be trained from the record.

        Whatever lies beyond them (a damaged file and all after it) moves to superseded/.
        """
        self._writable()
        good: list[int] = []
        step = after + 1
        recorded = set(self.steps())
        while step in recorded and self._is_whole(step):
            good.append(step)
            step += 1
        for later in [s for s in self.steps() if s >= step]:
            self._supersede(later)
        return good

    def rollout_path(self, step: int) -> Path:
        """The Parquet file of a step."""
        return self.path / "rollouts" / f"{step:06d}.parquet"

    def derived_path(self, step: int) -> Path:
        """The Parquet file of what training computed in a step."""
        return self.path / "derived" / f"{step:06d}.parquet"

    def _is_whole(self, step: int) -> bool:
        try:
            file = self.read_rollouts(step)
        except RunError as error:
            log.warning("%s; step %d is sampled again", error, step)
            return False
        if file.changed:
            changed, path = file.changed[0], self.rollout_path(step)
            log.warning("%s: changed: %s; step %d is sampled again", path, changed, step)
        return not file.changed

    def _supersede(self, step: int) -> None:
        source = self.rollout_path(step)
        target = self._superseded(source.stem, ".parquet")
        with write_errors(target):
            os.rename(source, target)
            sync_folder(target.parent)
            sync_folder(source.parent)

    def _superseded(self, stem: str, suffix: str) -> Path:
        """A name in superseded/ that is not taken."""
        aside = self.path / "superseded"
        with write_errors(aside):
            aside.mkdir(exist_ok=True)
        return next(path for n in itertools.count(1) if not (path := aside / f"{stem}.{n}{suffix}").exists())

    # Metrics

    def log(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl: "step", perhaps "kind" ("train" when absent), and what is the same in every run.

        A resumed run logs again what it trains again from the record: a line that is there already must be equal.
        Raises RunError that names the first key that is not.
        """
        self._writable()
        text = json_text(metrics)
        earlier = self._earlier.pop(_line_key(metrics), None)
        if earlier is None:
            append_line(self.path / "metrics.jsonl", text, durable=True)
        elif earlier != text:
            raise RunError(f"{self.path}: {_first_difference(earlier, text, metrics['step'])}")

    def leave_lines(self, step: int, ranks: int) -> None:
        """Put the lines after `step` aside when they come of another number of ranks, whose last bits differ."""
        self._writable()
        rows = self.metrics()
        later = [row for row in rows if row["step"] > step]
        if all(row.get("ranks", 1) == ranks for row in later if row.get("kind", "train") == "train"):
            return
        target, kept = self._superseded("metrics", ".jsonl"), [row for row in rows if row["step"] <= step]
        for path, lines in ((target, later), (self.path / "metrics.jsonl", kept)):
            write_atomic(path, "".join(json_text(row) + "\n" for row in lines).encode())
        self._earlier = {key: text for key, text in self._earlier.items() if key[1] <= step}

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of one kind if given. Raises RunError for a damaged line."""
        path = self.path / "metrics.jsonl"
        rows, _ = read_lines(path)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("step"), int):
                raise RunError(f"{path}, line {number}: has no step; restore the file from a copy")
        return [row for row in rows if kind in (None, row.get("kind", "train"))]

    def log_timing(self, timing: Mapping[str, Any]) -> None:
        """One line of timing.jsonl: seconds by hop, peak memory, wall clock."""
        self._writable()
        append_line(self.path / "timing.jsonl", json_text(timing), durable=False)

    def timings(self) -> list[dict[str, Any]]:
        """The lines of timing.jsonl."""
        return read_lines(self.path / "timing.jsonl")[0]

    def log_ledger(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Lines of ledger.jsonl: groups that left the pool; see ledger.py."""
        self._writable()
        if lines:
            append_line(self.path / "ledger.jsonl", "\n".join(map(json_text, lines)), durable=False)

    def ledger(self) -> list[dict[str, Any]]:
        """The lines of ledger.jsonl; none without a pool."""
        return read_lines(self.path / "ledger.jsonl")[0]

    # Checkpoints

    def save_checkpoint(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Save groups of tensors and a JSON-like state; the newest run.keep_checkpoints are kept.

        Returns once the tensors may change; with wait, once all is on disk. Raises RunError, also for the save before.
        """
        self._writable()
        self.checkpoints.save(step, tensors, state, keep=self.config.run.keep_checkpoints)
        if wait:
            self.checkpoints.wait()

    def load_checkpoint(self, step: int | None = None) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(step, tensors, state) of a step's checkpoint, or of the newest whole one; damaged ones are named and passed.

        Raises RunError when there is none.
        """
        return self.checkpoints.load(step)

    def _writable(self) -> None:
        assert self._lock is not None, f"{self.path} was opened for reading, or closed"


def find_runs(root: str | Path) -> Iterator[Path]:
    """Run directories in a folder (or the folder itself), by name."""
    root = Path(root)
    if (root / MANIFEST).exists():
        yield root
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        yield path.parent


def _line_key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row.get("kind", "train"), row["step"]


def _first_difference(earlier: str, now: str, step: int) -> str:
    before, after = json.loads(earlier), json.loads(now)
    name, was, value = compare_manifests(before, after, ignore=())[0]
    return (
        f"step {step} does not repeat: {name} is {value} and was {was}; "
        "resume where the run was made (compare the manifests with: tinyllm diff)"
    )
