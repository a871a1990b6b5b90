"""Lay a trie of token sequences out for the model, so that every distinct prefix is computed once.

The row that the model sees has one entry per trie node. The nodes that a sequence added are a contiguous run of the
row. The run is cut into spans of at most 256 queries, and each span attends to the whole path of its sequence.

Legend: N trie nodes (padded to ROWS), E spans in a bucket, Q padded queries of a span, L padded keys of a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinyllm.engine.trie import Trie

BLOCK = 64
"""Sums over keys are taken block by block, in blocks of this many keys from the start of each sequence."""
ROWS = 4
"""Row counts are padded to a multiple of this: fp32 matrix products then give each row the same bits at any count."""
_QUERIES_PER_SPAN = 256
_SCORES_PER_BUCKET = 1 << 24


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Bucket:
    """Spans of similar size that attend together; padding repeats trie node 0 and sees key 0 only."""

    queries: torch.Tensor  # [E, Q] trie node of each query
    keys: torch.Tensor  # [E, L] trie node of each key, in path order
    positions: torch.Tensor  # [E, Q] position of each query in its sequence; key j stands at position j
    rows: torch.Tensor  # [number of real queries] index into the flattened [E * Q]
    nodes: torch.Tensor  # [number of real queries] the trie node that each of those rows belongs to

    def masked(self, window: int | None) -> torch.Tensor:
        """[E, 1, 1, Q, L] True where a key must not be seen: after the query, or before its sliding window."""
        key = torch.arange(self.keys.shape[1], device=self.keys.device)
        query = self.positions[:, :, None]
        masked = key > query
        if window is not None:
            masked |= key <= query - window
        return masked[:, None, None]


@dataclass(frozen=True)
class Packed:
    """One row of trie nodes for the model, and the spans in which they attend."""

    input_ids: torch.Tensor  # [1, N]
    position_ids: torch.Tensor  # [1, N]
    buckets: tuple[Bucket, ...]


def pack(trie: Trie, device: torch.device | str = "cpu") -> Packed:
    """Lay a trie out for the model: pad the row and cut the new run of every sequence into attention spans."""
    n = len(trie)
    padded = round_up(n, ROWS)
    ids = torch.tensor([trie.tokens + [0] * (padded - n)], device=device)
    positions = torch.tensor([trie.positions + [0] * (padded - n)], device=device)
    by_shape: dict[tuple[int, int], list[tuple[list[int], int, int]]] = {}
    for path, new in zip(trie.paths, trie.new, strict=True):
        for start in range(new, len(path), _QUERIES_PER_SPAN):
            end = min(start + _QUERIES_PER_SPAN, len(path))
            shape = (max(ROWS, 1 << (end - start - 1).bit_length()), round_up(end, BLOCK))
            by_shape.setdefault(shape, []).append((path, start, end))
    buckets = []
    for (q, length), spans in sorted(by_shape.items()):
        per_bucket = max(1, _SCORES_PER_BUCKET // (q * length * 8))
        for first in range(0, len(spans), per_bucket):
            buckets.append(_bucket(spans[first : first + per_bucket], q, length, device))
    return Packed(ids, positions, tuple(buckets))


def _bucket(spans: Sequence[tuple[list[int], int, int]], q: int, length: int, device: torch.device | str) -> Bucket:
    q = min(q, round_up(max(end - start for _, start, end in spans), ROWS))
    queries: list[list[int]] = []
    keys: list[list[int]] = []
    positions: list[list[int]] = []
    rows: list[int] = []
    nodes: list[int] = []
    for e, (path, start, end) in enumerate(spans):
        pad = q - (end - start)
        queries.append(path[start:end] + [0] * pad)
        positions.append(list(range(start, end)) + [0] * pad)
        keys.append(path[:end] + [0] * (length - end))
        rows.extend(range(e * q, e * q + end - start))
        nodes.extend(path[start:end])
    return Bucket(*(torch.tensor(x, device=device) for x in (queries, keys, positions, rows, nodes)))
