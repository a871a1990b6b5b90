"""Durable files: atomic writes (temporary file, fsync, rename, directory fsync), checksums, locks, tensors on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from tinyllm.errors import RunError
from tinyllm.record.hashing import hash_file, hash_json, tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The error numbers of a full disk, quota or file."""


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """An OSError inside becomes a RunError of one line that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "choose a folder you can write to"
        if error.errno in FULL:
            remedy = "what was recorded is safe; free some room, then go on with --resume"
        raise RunError(f"cannot write {path}: {reason}; {remedy}") from error


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write bytes so that after a crash at any point the file is the old one or the new one, whole. Raises RunError.

    durable: flushed to disk before it returns; without, a power cut may lose the file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with write_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def append_line(path: Path, line: str, *, durable: bool) -> None:
    """Append one line in one write; a line that did not fit whole (disk full) is taken back. Raises RunError."""
    data = line.encode() + b"\n"
    with write_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                if (written := os.write(fd, data)) < len(data):
                    os.write(fd, data[written:])
                if durable:
                    os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a .jsonl file, and how many bytes of it are whole lines: a crash can tear the last one.

    Raises RunError for a broken line that others follow.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    rows: list[dict[str, Any]] = []
    good = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(row, dict):
                raise ValueError
        except ValueError:
            if any(rest.strip(b"\0\n") for rest in lines[number:]):
                raise RunError(f"{path}, line {number}: damaged; restore the file from a copy") from None
            break
        rows.append(row)
        good += len(line)
    return rows, good


def json_text(obj: Any) -> str:
    """One line of JSON with sorted keys: equal objects give equal text. Raises RunError for NaN and what JSON lacks."""
    try:
        return json.dumps(obj, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunError(f"cannot be written as JSON: {error}; log None for a value that is missing") from None


def write_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Write an object as indented JSON with a checksum of its content among its keys."""
    checked = {**obj, "checksum": hash_json(obj)}
    write_atomic(path, (json.dumps(checked, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read what write_json wrote. Raises RunError when it is missing or not what was written."""
    try:
        obj = json.loads(path.read_bytes())
        checksum = obj.pop("checksum")
    except FileNotFoundError:
        raise RunError(f"{path}: missing") from None
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RunError(f"{path}: damaged (not a whole JSON object with a checksum)") from None
    if hash_json(obj) != checksum:
        raise RunError(f"{path}: changed since it was written (its checksum does not hold)")
    return obj


# Locks


TAKEN = (errno.EACCES, errno.EAGAIN)
"""Error numbers of a lock that another process holds."""


def lock_file(fd: int, on_wait: Callable[[], None] | None = None) -> None:
    """Lock an open file against other processes, until the first close of it here or the end of this process.

    Where another process holds it: raises OSError (one of TAKEN), or, with on_wait, calls that and waits.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if on_wait is None or error.errno not in TAKEN:
            raise
        on_wait()
        fcntl.lockf(fd, fcntl.LOCK_EX)


_held: set[str] = set()


class Lock:
    """An exclusive lock on a folder; the system releases it when the process ends in any way. Raises RunError.

    POSIX record locks, since those are not inherited by forked workers that outlive us; they do not exclude a second
    holder in the same process, so this process keeps a list of its own.
    """

    def __init__(self, folder: Path):
        self.path = str(folder.resolve() / "lock")
        if self.path in _held:
            raise RunError(f"{folder} is in use by this process; close it first")
        with write_errors(folder):
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_file(self.fd)
        except OSError as error:
            owner = os.read(self.fd, 100).decode(errors="replace").strip()
            os.close(self.fd)
            if error.errno not in TAKEN:
                raise RunError(f"{folder} cannot be locked: {error.strerror}; use a local disk") from None
            raise RunError(f"{folder} is in use by process {owner}; wait for it, or choose another --run.dir") from None
        _held.add(self.path)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.path in _held:
            _held.discard(self.path)
            os.close(self.fd)


# Tensors


DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_tensors(fd: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors as a safetensors file, hashing as it goes, without a copy; returns its size and hash.

    The library's own writer cannot hash on the way, refuses tensors that overlap, and hides the system's error. Tied
    tensors are written once, the other names as aliases in the metadata. Raises OSError.
    """
    entries: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        storage = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and storage in first:
            aliases[name] = first[storage]
            continue
        first[storage] = name
        size = tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps({"__metadata__": {"aliases": json.dumps(aliases)}, **entries}).encode()
    head += b" " * (-len(head) % 8)
    digest = xxhash.xxh3_128()
    total = 0
    start = memoryview(struct.pack("<Q", len(head)) + head)
    for blob in itertools.chain([start], (tensor_bytes(tensors[name]) for name in entries)):
        digest.update(blob)
        total += len(blob)
        while len(blob):
            blob = blob[os.write(fd, blob[: 1 << 28]) :]
    return {"bytes": total, "hash": digest.hexdigest()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read what write_tensors wrote; tied names share one tensor again."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return tensors | {name: tensors[of] for name, of in aliases.items()}


def write_shards(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write groups of sharded tensors, one safetensors file per rank; every rank calls it. Raises OSError."""
    from torch.distributed import checkpoint

    # A scalar (AdamW's count of steps) cannot be read back by slices
    flat = {f"{group}/{name}": x if x.ndim else x[None] for group, part in tensors.items() for name, x in part.items()}
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        checkpoint.save(flat, storage_writer=writer)
    except checkpoint.api.CheckpointException as error:
        faults = [fault for fault, _ in error.failures.values()]
        raise next((fault for fault in faults if isinstance(fault, OSError)), OSError(str(faults[0]))) from error


def read_shards(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Read what write_shards wrote on any number of ranks: groups of whole tensors. Scalars have one element."""
    import torch
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    found: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    flat = {name: torch.empty(facts.size, dtype=facts.properties.dtype) for name, facts in found.items()}
    with warnings.catch_warnings():  # it warns that each rank reads for itself
        warnings.simplefilter("ignore")
        checkpoint.load(flat, storage_reader=reader, no_dist=True)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        group, _, rest = name.partition("/")
        tensors.setdefault(group, {})[rest] = tensor
    return tensors


def file_facts(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as write_tensors returns them. Raises OSError."""
    return {"bytes": path.stat().st_size, "hash": hash_file(path)}


# Folders


def commit_folder(temporary: Path, path: Path) -> None:
    """Make a folder that was written under a temporary name durable and give it its name, replacing an older one.

    The older one is set aside first and removed last; recover_folders brings it back after a crash in between.
    Raises OSError.
    """
    for file in temporary.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(temporary)
    aside = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    os.rename(temporary, path)
    sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to write into; it becomes `path` when all went well. Raises RunError for OSErrors."""
    temporary = path.with_name(f".{path.name}.tmp")
    with write_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            commit_folder(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def recover_folders(parent: Path) -> None:
    """Clear what a crash left in a folder: unfinished temporaries go, a folder set aside too early comes back."""
    for left in [*parent.glob(".*.tmp"), *parent.glob(".*.old")]:
        path = left.with_name(left.name[1:-4])
        if left.suffix == ".old" and not path.exists():
            os.rename(left, path)
        elif left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
