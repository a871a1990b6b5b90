"""The KV cache of the sampler, and the attention of a decode step over it.

A running branch owns a slot. The blocks of its prompt live once in a pool; the full ones are shared by every branch of
the prompt, and the slot begins with a copy of the last, partial one, followed by the branch's own tokens. Slots
0 .. n-1 are the active ones, so a decode step reads them as views. Blocks are aligned to the sequence's start, as in
training.

Legend: n active branches (padded to a multiple of 4), S slots, K key heads, R query heads per key head, D head
dimension, U prompts with shared blocks, J own blocks of a slot, C shared blocks of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tinyllm.engine.attention import PackedPaths, exponentials, finish_scores, weighted_values
from tinyllm.engine.packing import BLOCK, ROWS, round_up


@dataclass(frozen=True)
class CacheShape:
    """What decides the size of a cache."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> CacheShape:
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(text.num_hidden_layers, heads, head_dim, dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of running branches: own [2, layers, J, S, K, 64, D], pool [2, layers, blocks, K, 64, D]."""

    def __init__(self, shape: CacheShape, slots: int, own_blocks: int, pool_blocks: int, device: torch.device) -> None:
        tail = (shape.heads, BLOCK, shape.head_dim)
        # Zeros, not empty: a masked entry has weight 0, and 0 x NaN would not be 0.
        self.own = torch.zeros(2, shape.layers, own_blocks, slots, *tail, dtype=shape.dtype, device=device)
        self.pool = torch.zeros(2, shape.layers, pool_blocks, *tail, dtype=shape.dtype, device=device)
        self.free_pool = list(range(pool_blocks))

    def grow_own(self, blocks: int) -> None:
        """Room for longer sequences."""
        have = self.own.shape[2]
        if blocks > have:
            self.own = torch.cat([self.own, _more(self.own, 2, blocks - have)], 2)

    def grow_pool(self, blocks: int) -> None:
        """At least so many more shared blocks; the pool doubles, so that this is rare."""
        have = self.pool.shape[2]
        extra = max(blocks, have)
        self.pool = torch.cat([self.pool, _more(self.pool, 2, extra)], 2)
        self.free_pool += range(have, have + extra)

    def store_prompts(self, kept: PackedPaths, prompts: list[tuple[tuple[int, ...], list[int]]]) -> None:
        """Copies prefilled keys and values in: per prompt (pool blocks, nodes of its path). The last is partial."""
        nodes: list[list[int]] = []
        blocks: list[int] = []
        for pool, path in prompts:
            padded = path + [path[0]] * (len(pool) * BLOCK - len(path))
            nodes += [padded[b * BLOCK : (b + 1) * BLOCK] for b in range(len(pool))]
            blocks += pool
        rows, index = (torch.tensor(x, device=self.pool.device) for x in (nodes, blocks))
        assert kept.kept is not None
        for layer, pair in kept.kept.items():
            for which, x in enumerate(pair):
                self.pool[which, layer, index] = x[rows].transpose(1, 2)

    def fill_slots(self, moves: list[tuple[int, int]]) -> None:
        """Begins slots with the partial block of their prompt: (pool block, slot)."""
        if moves:
            blocks, slots = torch.tensor(moves, device=self.own.device).T
            self.own[:, :, 0, slots] = self.pool[:, :, blocks]

    def copy_slots(self, moves: list[tuple[int, int]], used_blocks: int) -> None:
        """Copies whole slots (source, destination); every source is read before any destination is written."""
        if moves:
            source, destination = torch.tensor(moves, device=self.own.device).T
            self.own[:, :, :used_blocks, destination] = self.own[:, :, :used_blocks, source]


def _more(x: Tensor, dim: int, count: int) -> Tensor:
    return x.new_zeros(*x.shape[:dim], count, *x.shape[dim + 1 :])


class DecodePaths:
    """Attention of one decode step: branch i is in slot i at positions[i], its prompt's full blocks in `shared[i]`."""

    def __init__(self, cache: KVCache, positions: list[int], shared: list[tuple[int, ...]]) -> None:
        self.cache, self.n = cache, len(positions)
        device = cache.own.device
        position = torch.tensor(positions, device=device)
        n_shared = torch.tensor([len(s) for s in shared], device=device)
        own = position - n_shared * BLOCK  # position within the slot
        self.slots, self.block, self.offset = torch.arange(self.n, device=device), own // BLOCK, own % BLOCK
        self.own_blocks = int(self.block.max()) + 1
        units = {blocks: u for u, blocks in enumerate(dict.fromkeys(s for s in shared if s))}
        self.shared_keys = max(map(len, shared)) * BLOCK
        key = torch.arange(self.shared_keys + self.own_blocks * BLOCK, device=device)[None]
        own_key = key - self.shared_keys + (n_shared * BLOCK)[:, None]
        in_pool = key < self.shared_keys
        # Absolute position of each key of each branch; a pool column past the branch's own prompt blocks is nowhere.
        self.key_position = torch.where(in_pool, torch.where(key < (n_shared * BLOCK)[:, None], key, 1 << 40), own_key)
        self.position = position
        self._hidden: dict[int | None, Tensor] = {}
        if units:
            self._plan_shared(units, shared, device)

    def _plan_shared(
        self, units: dict[tuple[int, ...], int], shared: list[tuple[int, ...]], device: torch.device
    ) -> None:
        count = [0] * len(units)
        places = []
        for blocks in shared:
            u = units.get(blocks)
            places.append(None if u is None else (u, count[u]))
            if u is not None:
                count[u] += 1
        self.per_unit = round_up(max(count), ROWS)
        width = self.shared_keys // BLOCK
        self.table = torch.tensor([list(blocks) + [0] * (width - len(blocks)) for blocks in units], device=device)
        # Branches of prompts without a full block go to a spare row; everything they read from it is masked.
        spare = len(units) * self.per_unit
        self.place = torch.tensor([spare if p is None else p[0] * self.per_unit + p[1] for p in places], device=device)

    def hidden(self, window: int | None) -> Tensor:
        """[n, 1, 1, 1, keys] True where the branch must not look."""
        if window not in self._hidden:
            position = self.position[:, None]
            hide = self.key_position > position
            if window is not None:
                hide |= self.key_position <= position - window
            self._hidden[window] = hide[:, None, None, None]
        return self._hidden[window]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sink: Tensor | None,
    ) -> Tensor:
        """q [rows, H, D], k and v [rows, K, D], rows n padded to a multiple of 4 -> [rows, H, D]."""
        n, rows, heads, d = self.n, q.shape[0], k.shape[1], q.shape[-1]
        own_k, own_v = self.cache.own[0, layer], self.cache.own[1, layer]
        own_k[self.block, self.slots, :, self.offset] = k[:n]
        own_v[self.block, self.slots, :, self.offset] = v[:n]
        r = q.shape[1] // heads
        padded = torch.zeros(n, heads, round_up(r, ROWS), d, dtype=torch.float32, device=q.device)
        padded[:, :, :r] = q[:n].view(n, heads, r, d)
        query = padded.view(n * heads, -1, d)
        pieces = []
        if self.shared_keys:
            pool_k, pool_v = (self._pool(which, layer) for which in (0, 1))
            grouped = torch.bmm(self._group(padded), pool_k.transpose(1, 2))
            pieces.append(self._ungroup(grouped, heads).reshape(n * heads, -1, self.shared_keys))
        for j in range(self.own_blocks):
            pieces.append(torch.bmm(query, own_k[j, :n].reshape(n * heads, BLOCK, d).float().transpose(1, 2)))
        s = finish_scores(torch.cat(pieces, -1), self.hidden(window), scaling, softcap)
        if sink is not None:
            spread = torch.zeros(heads, padded.shape[2], device=q.device)
            spread[:, :r] = sink.float().view(heads, r)
            sink = spread.expand(n, -1, -1).reshape(n * heads, -1, 1)
        p, total, _ = exponentials(s, sink)
        out = None
        if self.shared_keys:
            grouped = weighted_values(
                self._group(p[..., : self.shared_keys].view(n, heads, -1, self.shared_keys)), pool_v
            )
            out = self._ungroup(grouped, heads).reshape(n * heads, -1, d)
        for j in range(self.own_blocks):
            start = self.shared_keys + j * BLOCK
            value = torch.bmm(p[..., start : start + BLOCK], own_v[j, :n].reshape(n * heads, BLOCK, d).float())
            out = value if out is None else out.add_(value)
        assert out is not None
        result = torch.zeros(rows, heads * r, d, dtype=torch.float32, device=q.device)
        result[:n] = (out / total).view(n, heads, -1, d)[:, :, :r].reshape(n, heads * r, d)
        return result

    def _pool(self, which: int, layer: int) -> Tensor:
        """[U * K, C * 64, D] fp32: the shared blocks of every prompt, one after the other."""
        u, c = self.table.shape
        blocks = self.cache.pool[which, layer].index_select(0, self.table.reshape(-1))  # [U * C, K, 64, D]
        heads, d = blocks.shape[1], blocks.shape[-1]
        return blocks.view(u, c, heads, BLOCK, d).transpose(1, 2).reshape(u * heads, c * BLOCK, d).float()

    def _group(self, x: Tensor) -> Tensor:
        """Branches to prompts: x [n, K, R, *] -> [U * K, branches of a prompt * R, *], zero where there is none."""
        u = self.table.shape[0]
        grouped = torch.zeros(u * self.per_unit + 1, *x.shape[1:], dtype=x.dtype, device=x.device)
        grouped[self.place] = x
        grouped = grouped[:-1].view(u, self.per_unit, *x.shape[1:]).transpose(1, 2)
        return grouped.reshape(u * x.shape[1], -1, x.shape[-1])

    def _ungroup(self, x: Tensor, heads: int) -> Tensor:
        """Inverse of _group: [U * K, branches of a prompt * R, *] -> [n, K, R, *]."""
        u = self.table.shape[0]
        rows = (
            x.view(u, heads, self.per_unit, -1, x.shape[-1])
            .transpose(1, 2)
            .reshape(u * self.per_unit, heads, -1, x.shape[-1])
        )
        return torch.cat([rows, torch.zeros_like(rows[:1])])[self.place]
