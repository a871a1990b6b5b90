"""Pack token sequences so that every distinct prefix is computed once.

The sequences of a forward pass form a trie: nodes are (prefix, token) pairs, and a node shared by several sequences
(a system prompt, the prompt of a group, equal beginnings of completions) appears once in the row the model sees.
Nodes are numbered so that each sequence adds one contiguous run of new nodes, which attends to its whole path.

Legend: N nodes (padded to ROWS), S sequences, E spans in a bucket, Q padded queries of a span, L padded keys of a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

BLOCK = 64
"""Keys are summed in blocks of this many, aligned to the start of each sequence."""
ROWS = 4
"""Row counts are padded to a multiple of this: fp32 matrix products then give each row the same bits at any count."""
_QUERIES_PER_SPAN = 256
_SCORES_PER_BUCKET = 1 << 24


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Trie:
    """Grows by whole sequences; `paths[s][i]` is the node that holds token i of sequence s."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.paths: list[list[int]] = []
        self.new: list[int] = []
        """Index of the first token of each sequence that needed a new node (its length when all were known)."""
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token_ids: Iterable[int]) -> list[int]:
        node, path, first_new = -1, [], -1
        for position, token in enumerate(token_ids):
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self._children[node, token] = child
                self.tokens.append(token)
                self.positions.append(position)
                if first_new < 0:
                    first_new = position
            node = child
            path.append(node)
        self.paths.append(path)
        self.new.append(len(path) if first_new < 0 else first_new)
        return path

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Bucket:
    """Spans of similar size that attend together; padding repeats node 0 and sees key 0 only."""

    queries: torch.Tensor  # [E, Q] node of each query
    keys: torch.Tensor  # [E, L] node of each key, in path order
    positions: torch.Tensor  # [E, Q] position of each query in its sequence; key j stands at position j
    rows: torch.Tensor  # [number of real queries] index into the flattened [E * Q]
    nodes: torch.Tensor  # [number of real queries] the node each of those rows belongs to

    def hidden(self, window: int | None) -> torch.Tensor:
        """[E, 1, 1, Q, L] True where a key must not be seen: after the query, or before its sliding window."""
        key = torch.arange(self.keys.shape[1], device=self.keys.device)
        query = self.positions[:, :, None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return hidden[:, None, None]


@dataclass(frozen=True)
class Packed:
    """One row of nodes for the model, and the plan by which they attend."""

    input_ids: torch.Tensor  # [1, N]
    position_ids: torch.Tensor  # [1, N]
    buckets: tuple[Bucket, ...]
    n_nodes: int
    """Real nodes; the rest of N is padding."""


def pack(trie: Trie, device: torch.device | str = "cpu") -> Packed:
    """Lay a trie out for the model: pad the nodes and cut the new run of every sequence into attention spans."""
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
    return Packed(ids, positions, tuple(buckets), n)


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
