"""The KV cache of the sampler, and the attention of a decode step over it.

A block holds the keys and values of 64 tokens. A computed prompt has shared blocks, which exist once; every running
sequence that continues the prompt reads the full ones. A running sequence has a slot of private blocks: the first block
begins with a copy of the prompt's last, partial block, and the sequence's own tokens follow. Slots 0 .. n-1 run, so a
decode step reads them as views. Blocks are aligned to the sequence's start, as in training.

Legend: n running sequences, S slots, K key heads, R query heads per key head, D head dimension, J private blocks of a
slot, U prompts with full shared blocks, C full shared blocks of the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tinyllm.engine.attention import ScoreRule, exponentials, finish_scores, weighted_values
from tinyllm.engine.packing import BLOCK, ROWS, round_up


class KVCache:
    """Keys and values: private [2, layers, J, S, K, 64, D] by slot, shared [2, layers, blocks, K, 64, D].

    A new cache has no blocks; both parts grow when a request needs more.
    """

    def __init__(self, config: PretrainedConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        block, layers = (heads, BLOCK, head_dim), config.num_hidden_layers
        self.private = torch.zeros(2, layers, 0, slots, *block, dtype=dtype, device=device)
        self.shared = torch.zeros(2, layers, 0, *block, dtype=dtype, device=device)
        self.free_shared: list[int] = []

    def grow_private(self, blocks: int) -> None:
        """Gives every slot at least `blocks` private blocks."""
        if blocks > self.private.shape[2]:
            self.private = _grown(self.private, blocks)

    def grow_shared(self, blocks: int) -> None:
        """Adds at least `blocks` shared blocks, and at least doubles their number, so that growing is rare."""
        have = self.shared.shape[2]
        self.shared = _grown(self.shared, have + max(blocks, have))
        self.free_shared += range(have, self.shared.shape[2])

    def take_shared(self, blocks: int) -> list[int]:
        """Takes `blocks` of the free shared blocks; grows the cache where there are too few."""
        if len(self.free_shared) < blocks:
            self.grow_shared(blocks)
        return [self.free_shared.pop() for _ in range(blocks)]

    def store(self, kept: Mapping[int, tuple[Tensor, Tensor]], prompts: Sequence[tuple[list[int], list[int]]]) -> None:
        """Copies prefilled keys and values into shared blocks.

        kept: layer -> (k, v), [N, K, D] each; prompts: (blocks, trie nodes) of each prompt, the last block partial.
        """
        nodes: list[list[int]] = []
        blocks: list[int] = []
        for taken, path in prompts:
            padded = path + [path[0]] * (len(taken) * BLOCK - len(path))
            nodes += [padded[b * BLOCK : (b + 1) * BLOCK] for b in range(len(taken))]
            blocks += taken
        rows, index = (torch.tensor(x, device=self.shared.device) for x in (nodes, blocks))
        for layer, pair in kept.items():
            for which, x in enumerate(pair):
                self.shared[which, layer, index] = x[rows].transpose(1, 2)

    def fill_slots(self, starts: Sequence[tuple[int, int]]) -> None:
        """Copies partial blocks of prompts to the begin of slots; starts: (shared block, slot) pairs."""
        if starts:
            blocks, slots = torch.tensor(starts, device=self.private.device).T
            self.private[:, :, 0, slots] = self.shared[:, :, blocks]

    def copy_slots(self, copies: Sequence[tuple[int, int]], used_blocks: int) -> None:
        """Copies whole slots (source, destination); every source is read before any destination is written."""
        if copies:
            source, destination = torch.tensor(copies, device=self.private.device).T
            self.private[:, :, :used_blocks, destination] = self.private[:, :, :used_blocks, source]


def _grown(x: Tensor, blocks: int) -> Tensor:
    """A copy of x with more blocks along dimension 2, zero at first."""
    # Zeros, not empty: a masked entry has weight 0, and 0 x NaN would not be 0.
    grown = x.new_zeros(*x.shape[:2], blocks, *x.shape[3:])
    grown[:, :, : x.shape[2]] = x
    return grown


class DecodePlan:
    """Attention of one decode step: sequence i is in slot i at positions[i], with the full shared blocks shared[i]."""

    def __init__(self, cache: KVCache, positions: list[int], shared: list[tuple[int, ...]]) -> None:
        self.cache, self.n = cache, len(positions)
        device = cache.private.device
        position = torch.tensor(positions, device=device)
        n_shared = torch.tensor([len(s) for s in shared], device=device)
        in_slot = position - n_shared * BLOCK  # position within the slot
        self.slots, self.block, self.offset = torch.arange(self.n, device=device), in_slot // BLOCK, in_slot % BLOCK
        self.private_blocks = int(self.block.max()) + 1
        of_prompt: dict[tuple[int, ...], list[int]] = {}
        for i, blocks in enumerate(shared):
            if blocks:
                of_prompt.setdefault(blocks, []).append(i)
        self.shared_keys = max(map(len, shared)) * BLOCK
        key = torch.arange(self.shared_keys + self.private_blocks * BLOCK, device=device)[None]
        private_key = key - self.shared_keys + (n_shared * BLOCK)[:, None]
        is_shared = key < self.shared_keys
        # Positions of the keys of each sequence; no query reaches that of a column past its prompt's own blocks.
        shared_key = torch.where(key < (n_shared * BLOCK)[:, None], key, 1 << 40)
        self.key_position = torch.where(is_shared, shared_key, private_key)
        self.position = position
        self._masks: dict[int | None, Tensor] = {}
        if of_prompt:
            self._plan_shared(of_prompt, device)

    def _plan_shared(self, of_prompt: Mapping[tuple[int, ...], Sequence[int]], device: torch.device) -> None:
        """Groups the sequences by the full shared blocks of their prompt: each shared key is read once for them all."""
        self.per_prompt = round_up(max(map(len, of_prompt.values())), ROWS)
        width = self.shared_keys // BLOCK
        self.table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks in of_prompt], device=device)
        # Sequences of prompts without a full block go to a spare row; all that they read from it is masked.
        place = [len(of_prompt) * self.per_prompt] * self.n
        for u, sequences in enumerate(of_prompt.values()):
            for m, i in enumerate(sequences):
                place[i] = u * self.per_prompt + m
        self.place = torch.tensor(place, device=device)

    def masked(self, window: int | None) -> Tensor:
        """[n, 1, 1, 1, keys] True where a sequence must not see a key."""
        if window not in self._masks:
            position = self.position[:, None]
            masked = self.key_position > position
            if window is not None:
                masked |= self.key_position <= position - window
            self._masks[window] = masked[:, None, None, None]
        return self._masks[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [rows, H, D], k and v [rows, K, D], rows n padded to a multiple of 4 -> [rows, H, D]."""
        n, rows, heads, d = self.n, q.shape[0], k.shape[1], q.shape[-1]
        private_k, private_v = self.cache.private[0, layer], self.cache.private[1, layer]
        private_k[self.block, self.slots, :, self.offset] = k[:n]
        private_v[self.block, self.slots, :, self.offset] = v[:n]
        r = q.shape[1] // heads
        padded = torch.zeros(n, heads, round_up(r, ROWS), d, dtype=torch.float32, device=q.device)
        padded[:, :, :r] = q[:n].view(n, heads, r, d)
        query = padded.view(n * heads, -1, d)
        pieces = []
        if self.shared_keys:
            shared_k, shared_v = (self._shared(which, layer) for which in (0, 1))
            grouped = torch.bmm(self._group(padded), shared_k.transpose(1, 2))
            pieces.append(self._ungroup(grouped, heads).reshape(n * heads, -1, self.shared_keys))
        for j in range(self.private_blocks):
            pieces.append(torch.bmm(query, private_k[j, :n].reshape(n * heads, BLOCK, d).float().transpose(1, 2)))
        s = finish_scores(torch.cat(pieces, -1), self.masked(rule.window), rule.scaling, rule.softcap)
        sink = rule.sink
        if sink is not None:
            spread = torch.zeros(heads, padded.shape[2], device=q.device)
            spread[:, :r] = sink.float().view(heads, r)
            sink = spread.expand(n, -1, -1).reshape(n * heads, -1, 1)
        p, total, _ = exponentials(s, sink)
        out = None
        if self.shared_keys:
            grouped = weighted_values(
                self._group(p[..., : self.shared_keys].view(n, heads, -1, self.shared_keys)), shared_v
            )
            out = self._ungroup(grouped, heads).reshape(n * heads, -1, d)
        for j in range(self.private_blocks):
            start = self.shared_keys + j * BLOCK
            value = torch.bmm(p[..., start : start + BLOCK], private_v[j, :n].reshape(n * heads, BLOCK, d).float())
            out = value if out is None else out.add_(value)
        assert out is not None
        result = torch.zeros(rows, heads * r, d, dtype=torch.float32, device=q.device)
        result[:n] = (out / total).view(n, heads, -1, d)[:, :, :r].reshape(n, heads * r, d)
        return result

    def _shared(self, which: int, layer: int) -> Tensor:
        """[U * K, C * 64, D] fp32: the full blocks of every prompt, one after the other."""
        u, c = self.table.shape
        blocks = self.cache.shared[which, layer].index_select(0, self.table.reshape(-1))  # [U * C, K, 64, D]
        heads, d = blocks.shape[1], blocks.shape[-1]
        return blocks.view(u, c, heads, BLOCK, d).transpose(1, 2).reshape(u * heads, c * BLOCK, d).float()

    def _group(self, x: Tensor) -> Tensor:
        """Sequences by prompt: x [n, K, R, *] -> [U * K, sequences of a prompt * R, *], zero where there is none."""
        u = self.table.shape[0]
        grouped = torch.zeros(u * self.per_prompt + 1, *x.shape[1:], dtype=x.dtype, device=x.device)
        grouped[self.place] = x
        grouped = grouped[:-1].view(u, self.per_prompt, *x.shape[1:]).transpose(1, 2)
        return grouped.reshape(u * x.shape[1], -1, x.shape[-1])

    def _ungroup(self, x: Tensor, heads: int) -> Tensor:
        """Inverse of _group: [U * K, sequences of a prompt * R, *] -> [n, K, R, *]."""
        u = self.table.shape[0]
        rows = (
            x.view(u, heads, self.per_prompt, -1, x.shape[-1])
            .transpose(1, 2)
            .reshape(u * self.per_prompt, heads, -1, x.shape[-1])
        )
        return torch.cat([rows, torch.zeros_like(rows[:1])])[self.place]
