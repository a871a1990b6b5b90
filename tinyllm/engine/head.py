"""The trainer's log-probabilities: pack rollouts, run the trunk once per distinct prefix, score tokens at the head.

log p(token t | prefix) = z_t - log sum exp z, with z = logits / temperature. The sampler computes these numbers by the
same operations, so on the embedded engine the sampler's and the trainer's are equal bit for bit.

The head works on blocks of 256 rows and keeps no logits: backward computes them again, so the [rows, vocabulary] matrix
never exists whole. Legend: R distinct prefixes that predict a token, P predicted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tinyllm.engine.attention import PackedPlan
from tinyllm.engine.packing import Packed, pack
from tinyllm.engine.policy import Policy
from tinyllm.engine.sampling import normalize, scale_logits
from tinyllm.engine.trie import Trie
from tinyllm.records import Completion, Prompt

HEAD_ROWS = 256


@dataclass(frozen=True)
class Targets:
    """What a packed row of sequences predicts: P tokens, sequence after sequence."""

    packed: Packed
    rows: Tensor  # [R] trie node of each distinct predicting prefix
    row: Tensor  # [P] index into `rows` of the prefix that predicts the token
    token: Tensor  # [P] the token predicted
    lengths: tuple[int, ...]
    """Predicted tokens of each sequence."""


class Scored(NamedTuple):
    """A completion of a prompt, and which of its tokens are scored."""

    prompt: Sequence[int]
    completion: Sequence[int]
    positions: Sequence[int] | None = None
    """Places of the scored tokens in the completion, ascending; None: all of them."""

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion) -> Scored:
        """A completion whose sampled tokens are scored; tokens that the environment gave are context only."""
        positions = tuple(t for t, sampled in enumerate(completion.sampled) if sampled)
        return cls(prompt.token_ids, completion.token_ids, positions)

    @property
    def targets(self) -> Sequence[int]:
        """Places of the scored tokens, also where `positions` is None."""
        return range(len(self.completion)) if self.positions is None else self.positions


Scorable: TypeAlias = Scored | tuple[Sequence[int], Sequence[int]]
"""A plain (prompt ids, completion ids) pair stands for a `Scored` of all completion tokens."""


def pack_targets(sequences: Sequence[Scorable], device: torch.device | str) -> Targets:
    """Packs sequences; every scored completion token is predicted by the prefix before it."""
    trie = Trie()
    scored = [Scored(*sequence) for sequence in sequences]
    for prompt, completion, _ in scored:
        assert prompt, "a completion needs at least one prompt token to be predicted from"
        trie.add([*prompt, *completion[:-1]])
    rows: dict[int, int] = {}
    row, token = [], []
    for sequence, path in zip(scored, trie.paths, strict=True):
        for position in sequence.targets:
            node = path[len(sequence.prompt) - 1 + position]
            row.append(rows.setdefault(node, len(rows)))
            token.append(sequence.completion[position])
    return Targets(
        packed=pack(trie, device),
        rows=torch.tensor(list(rows), dtype=torch.long, device=device),
        row=torch.tensor(row, dtype=torch.long, device=device),
        token=torch.tensor(token, dtype=torch.long, device=device),
        lengths=tuple(len(sequence.targets) for sequence in scored),
    )


def score(policy: Policy, targets: Targets, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability (differentiable) and entropy (not) of every predicted token: [P] fp32 each."""
    plan = PackedPlan(targets.packed)
    hidden = policy.hidden(targets.packed.input_ids, targets.packed.position_ids, plan)
    head = policy.head
    scored: tuple[Tensor, Tensor] = _Head.apply(
        hidden[targets.rows], head.weight, head.bias, policy, targets.row, targets.token, temperature
    )
    return scored


class _Head(torch.autograd.Function):
    """Log-probabilities of given tokens, block by block over rows.

    d logp_p / dz = onehot(t_p) - softmax(z), so a row's logit gradient is sum g_p onehot(t_p) - (sum g_p) softmax(z).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        policy: Policy,
        row: Tensor,
        token: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(row.shape, dtype=torch.float32, device=hidden.device)
        row_entropy = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        blocks = _blocks(row, hidden.shape[0])
        for start, end, pairs in blocks:
            z = scale_logits(policy.logits(hidden[start:end]), temperature)
            lse, e, s = normalize(z)
            logp[pairs] = z[row[pairs] - start, token[pairs]] - lse[row[pairs] - start, 0]
            row_entropy[start:end] = (lse - e.mul_(z).sum(-1, keepdim=True) / s)[:, 0]
        ctx.save_for_backward(hidden, weight, bias, row, token)
        ctx.rest = (policy, temperature, blocks)
        entropy = row_entropy[row]
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, row, token = ctx.saved_tensors
        policy, temperature, blocks = ctx.rest
        d_hidden = torch.zeros_like(hidden)
        want_weight = ctx.needs_input_grad[1]
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want_weight else None
        d_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for start, end, pairs in blocks:
            local, g = row[pairs] - start, d_logp[pairs]
            if not g.any():
                continue
            logits = policy.logits(hidden[start:end])
            z = scale_logits(logits, temperature)
            per_row = torch.zeros(end - start, dtype=g.dtype, device=g.device).index_add_(0, local, g)
            d_z = z.softmax(-1).mul_(-per_row[:, None])
            d_z.index_put_((local, token[pairs]), g, accumulate=True)
            if temperature not in (0.0, 1.0):
                d_z /= temperature
            d_z = policy.finish_logits_grad(logits, d_z)
            rows = hidden[start:end]
            d_z_low = d_z.to(weight.dtype)
            d_hidden[start:end] = d_z_low @ weight
            if d_weight is not None:
                if weight.dtype == torch.float32:
                    d_weight.addmm_(d_z.T, rows)
                else:
                    d_weight += d_z_low.T @ rows
            if d_bias is not None:
                d_bias += d_z.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _blocks(row: Tensor, n_rows: int) -> list[tuple[int, int, Tensor]]:
    """(first row, end row, indices of the predictions from these rows) for blocks of HEAD_ROWS rows."""
    block = row // HEAD_ROWS
    return [
        (start, min(start + HEAD_ROWS, n_rows), torch.nonzero(block == start // HEAD_ROWS)[:, 0])
        for start in range(0, n_rows, HEAD_ROWS)
    ]
