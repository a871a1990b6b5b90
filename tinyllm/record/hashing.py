"""Content hashes: xxh3-128, written as 32 hex digits. Fast enough (memory speed) to hash every weight of every step.

A hash says whether two things are the same, nothing more: it guards against accidents, not against forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def hash_bytes(data: Any) -> str:
    """xxh3-128 of a bytes-like object (bytes, memoryview, contiguous numpy array), without a copy."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_json(obj: Any) -> str:
    """Hash of a JSON-like value; the order of keys does not matter, tuples count as lists.

    Raises TypeError for what JSON cannot hold.
    """
    text = json.dumps(obj, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hash_bytes(text.encode("utf-8", "surrogatepass"))


def hash_file(path: str | Path) -> str:
    """Hash of a file's bytes, read in blocks. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in C order as bytes; no copy when it is a contiguous CPU tensor."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def hash_tensor(tensor: Tensor) -> str:
    """Hash of dtype, shape and elements: two tensors have one hash exactly when they are equal bit for bit."""
    head = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    digest = xxhash.xxh3_128(head.encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """Hash of named tensors in the order of their names; the order given does not matter.

    Tied weights (one storage under several names) are read once.
    """
    seen: dict[tuple, str] = {}
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(dict(tensors).items()):
        storage = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if storage not in seen or not tensor.numel():
            seen[storage] = hash_tensor(tensor)
        digest.update(f"{name}\0{seen[storage]}\n".encode())
    return digest.hexdigest()
