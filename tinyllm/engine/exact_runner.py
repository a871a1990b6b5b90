"""The runner that gives the trainer's bits: `prefill` and `decode` in the arithmetic of attention.py, on any device.

The cache grows with the requests, and the tensors of a decode step have one row per running sequence.

Legend: n rows (running sequences, padded to a multiple of 4), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from tinyllm.engine.attention import PackedPlan
from tinyllm.engine.kv_cache import DecodePlan, KVCache
from tinyllm.engine.packing import BLOCK, ROWS, pack, round_up
from tinyllm.engine.policy import Policy
from tinyllm.engine.runner import Draw, Drawn, Handle, Row, Start
from tinyllm.engine.sampling import draw, greedy, normalize, restrict, scale_logits
from tinyllm.engine.trie import Trie


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """A computed sequence: where its keys and values are, and the hidden state that predicts the next token."""

    length: int
    full: tuple[int, ...]
    """Numbers of its full shared blocks."""
    tail: int
    """Number of the shared block that holds its last tokens, fewer than 64."""
    hidden: Tensor
    """[hidden size], of the last token."""

    @property
    def blocks(self) -> tuple[int, ...]:
        return (*self.full, self.tail)


class ExactRunner:
    """A `Runner` that computes with the weights of a policy."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy = policy
        self.cache = KVCache(policy.config, slots, policy.head_weight.dtype, policy.device)
        self._computed: dict[Handle, _Computed] = {}
        self._numbers = count()
        self._used_blocks = 1
        """Private blocks that the longest slot has written."""

    def fits(self, lengths: Sequence[int]) -> bool:
        return sum(length // BLOCK + 1 for length in lengths) <= len(self.cache.free_shared)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Handle]:
        blocks = [self.cache.take_shared(len(prompt) // BLOCK + 1) for prompt in prompts]
        trie = Trie()
        paths = [trie.add(prompt) for prompt in prompts]
        packed = pack(trie, self.policy.device)
        plan = PackedPlan(packed, keep=True)
        hidden = self.policy.hidden(packed.input_ids, packed.position_ids, plan)
        self.cache.store(plan.kept, list(zip(blocks, paths, strict=True)))
        handles = []
        for (*full, tail), path in zip(blocks, paths, strict=True):
            handle = Handle(next(self._numbers))
            self._computed[handle] = _Computed(len(path), tuple(full), tail, hidden[path[-1]].clone())
            handles.append(handle)
        return handles

    @torch.no_grad()
    def draw(self, handles: Sequence[Handle], draws: Sequence[Draw]) -> list[Drawn]:
        return self._draw(torch.stack([self._computed[handle].hidden for handle in handles]), draws)

    @torch.no_grad()
    def start(self, starts: Sequence[Start]) -> None:
        if not starts:
            return
        computed = [self._computed[start.prefix] for start in starts]
        longest = max(c.length % BLOCK + start.max_new_tokens for c, start in zip(computed, starts, strict=True))
        self.cache.grow_private(-(-longest // BLOCK))
        self.cache.fill_slots([(c.tail, start.slot) for c, start in zip(computed, starts, strict=True)])

    @torch.no_grad()
    def decode(self, rows: Sequence[Row]) -> list[Drawn]:
        n = len(rows)
        padding = [0] * (round_up(n, ROWS) - n)
        positions = [row.position for row in rows]
        device = self.policy.device
        ids = torch.tensor([[row.token for row in rows] + padding], device=device)
        plan = DecodePlan(self.cache, positions, [self._computed[row.prefix].full for row in rows])
        hidden = self.policy.hidden(ids, torch.tensor([positions + padding], device=device), plan)
        self._used_blocks = plan.private_blocks
        return self._draw(hidden[:n], [row.draw for row in rows])

    @torch.no_grad()
    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_slots(copies, self._used_blocks)

    def free(self, handle: Handle) -> None:
        self.cache.free_shared += self._computed.pop(handle).blocks

    def publish(self) -> None:
        """Nothing to do: the policy's weights are changed in place, and nothing is derived from them."""

    def _draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One next-token draw per row of hidden [n, hidden size]; rows with equal parameters are drawn together."""
        logits = self.policy.logits(hidden)
        rows_of: dict[tuple[float, int, float, float], list[int]] = {}
        for row, one in enumerate(draws):
            p = one.params
            rows_of.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(row)
        drawn: dict[int, Drawn] = {}
        for rows in rows_of.values():
            part = logits if len(rows) == len(draws) else logits[rows]
            drawn.update(zip(rows, _draw_alike(part, [draws[row] for row in rows]), strict=True))
        return [drawn[row] for row in range(len(draws))]


def _draw_alike(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draws of equal temperature, top-k, top-p and min-p; logits [len(draws), V]."""
    params = draws[0].params
    logits = restrict(scale_logits(logits, params.temperature), params)
    width = max(len(one.uniforms) for one in draws)
    if params.temperature == 0.0:
        tokens, logprobs = greedy(logits, width)
    else:
        padded = [[*one.uniforms, *[0.0] * (width - len(one.uniforms))] for one in draws]
        tokens, logprobs = draw(logits, torch.tensor(padded, dtype=torch.float64))
    top = _most_probable(logits, draws)
    return [
        Drawn(row_tokens[: len(one.uniforms)], row_logprobs[: len(one.uniforms)], row_top)
        for one, row_tokens, row_logprobs, row_top in zip(draws, tokens.tolist(), logprobs.tolist(), top, strict=True)
    ]


def _most_probable(logits: Tensor, draws: Sequence[Draw]) -> list[list[tuple[int, float]]]:
    """The most probable tokens with their log-probabilities, as many as each draw asks for."""
    top: list[list[tuple[int, float]]] = [[] for _ in draws]
    rows = [row for row, one in enumerate(draws) if one.top_logprobs]
    if rows:
        chosen = logits[rows]
        k = min(max(draws[row].top_logprobs for row in rows), chosen.shape[-1])
        values, tokens = (chosen - normalize(chosen)[0]).topk(k, dim=-1)
        for row, row_tokens, row_values in zip(rows, tokens.tolist(), values.tolist(), strict=True):
            asked = draws[row].top_logprobs
            top[row] = list(zip(row_tokens[:asked], row_values[:asked], strict=True))
    return top
