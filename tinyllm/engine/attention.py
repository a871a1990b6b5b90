"""Attention whose numbers do not depend on what else is in the batch.

Registered with transformers under the name "tinyllm". A forward pass gets an attention plan, which says which keys each
query sees, as the keyword `attention_plan`: PackedPlan here (training and prefill) or DecodePlan of kv_cache.py. Both
plans use the same arithmetic:

    s = scaling q k^T in fp32 (softcap, masked to -inf);  m = max s;  p = exp(s - m)
    out = (sum over blocks of 64 keys, in order, of p_block V_block) / (the same sum of p_block)

Each product has a row count that is a multiple of 4 and an inner dimension that never varies, and masked keys add exact
zeros, so a query gets the same bits alone or among others, in decode or in training, before or after padding.

Legend: N trie nodes, H query heads, K key heads, R = H / K, D head dimension, E spans, Q queries, L keys (a multiple of
64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from tinyllm.engine.packing import BLOCK, Bucket, Packed
from tinyllm.errors import ModelError

NAME = "tinyllm"
_HONOURED = {"full_attention", "sliding_attention"}
_REFUSED_FIELDS = {
    "alibi": "ALiBi position biases",
    "attention_chunk_size": "chunked attention masks",
    "attn_logit_softcapping_type": "a special soft cap",
    "position_buckets": "bucketed relative positions",
    "relative_attention_num_buckets": "bucketed relative positions",
}


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How a layer turns the products q k^T into scores."""

    scaling: float
    window: int | None = None
    """How many keys a query sees, its own included; None: all keys up to its own."""
    softcap: float | None = None
    """Scores s become softcap tanh(s / softcap)."""
    sink: Tensor | None = None
    """[H] scores without a value (gpt-oss), which take part in the sum only."""


class AttentionPlan(Protocol):
    """Which keys each query sees in one forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [N, H, D], k and v [N, K, D] of the row that the model computes -> [N, H, D] fp32."""
        ...


def attach(model: PreTrainedModel) -> None:
    """Makes `model` use this attention. Raises ModelError, with the reason, for one that needs another feature."""
    reason = unsupported(model)
    if reason:
        raise ModelError(
            f"model {model.config.model_type!r} needs {reason}, which tinyllm's attention does not honour; "
            "use one with plain or sliding-window causal attention (Llama, Qwen, Mistral, Gemma, GPT-2, SmolLM, ...)"
        )
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)


def unsupported(model: PreTrainedModel) -> str | None:
    """The attention feature of `model` that would silently be lost here, or None."""
    config: PretrainedConfig = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder and cross attention"
    for field, name in _REFUSED_FIELDS.items():
        if getattr(config, field, None):
            return name
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _HONOURED)
    if other:
        return f"layers of type {', '.join(other)}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its own attention code (it does not go through transformers' attention interface)"
    return None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask function. It makes no mask: the attention plan has its own."""


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call. query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    assert attention_plan is not None, "a model with tinyllm's attention is called with attention_plan="
    assert attention_mask is None, "masks come from the attention plan, not from transformers"
    rule = ScoreRule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention_plan.attend(module.layer_idx, q, k, v, rule)
    return out[None].to(query.dtype), None


class PackedPlan:
    """Attention of a packed row (training, prefill): each trie node sees the nodes before it on its path.

    With `keep`, the keys and values of every layer stay in `kept`: layer -> (k, v), [N, K, D] each.
    """

    def __init__(self, packed: Packed, keep: bool = False) -> None:
        self.packed, self.keep = packed, keep
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """See AttentionPlan."""
        if self.keep:
            self.kept[layer] = (k, v)
        masks = []
        for i, bucket in enumerate(self.packed.buckets):
            if (i, rule.window) not in self._masks:
                self._masks[i, rule.window] = bucket.masked(rule.window)
            masks.append(self._masks[i, rule.window])
        out: Tensor = _PackedAttention.apply(q, k, v, rule.sink, self.packed.buckets, masks, rule.scaling, rule.softcap)
        return out


def scores(q: Tensor, k: Tensor, masked: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """fp32 scores. q [E*K, R*Q, D], k [E*K, L, D], masked [E, 1, 1, Q, L] -> [E*K, R*Q, L], -inf where masked."""
    return finish_scores(torch.bmm(q.float(), k.float().transpose(1, 2)), masked, scaling, softcap)


def finish_scores(s: Tensor, masked: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Scales, caps and masks raw products q k^T [E*K, R*Q, L] in place."""
    s.mul_(scaling)
    if softcap is not None:
        s.div_(softcap).tanh_().mul_(softcap)
    e, _, _, queries, keys = masked.shape
    s.view(e, s.shape[0] // e, -1, queries, keys).masked_fill_(masked, -torch.inf)
    return s


def exponentials(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turns scores into weights in place. s [X, M, L] -> (p [X, M, L], their sum [X, M, 1], max [X, M, 1]).

    sink [X, M, 1] is a score without a value (gpt-oss): it takes part in the sum only.
    """
    m = s.amax(-1, keepdim=True)
    if sink is not None:
        m = torch.maximum(m, sink)
    p = s.sub_(m).exp_()
    blocks = p.view(*p.shape[:-1], -1, BLOCK).sum(-1)
    total = blocks[..., 0]
    for b in range(1, blocks.shape[-1]):
        total = total + blocks[..., b]
    total = total[..., None]
    if sink is not None:
        total = total + (sink - m).exp()
    return p, total, m


def weighted_values(p: Tensor, v: Tensor) -> Tensor:
    """sum over key blocks, in order, of p_block V_block. p [X, M, L], v [X, L, D] -> [X, M, D] fp32."""
    out = torch.bmm(p[..., :BLOCK], v[:, :BLOCK].float())
    for start in range(BLOCK, p.shape[-1], BLOCK):
        out += torch.bmm(p[..., start : start + BLOCK], v[:, start : start + BLOCK].float())
    return out


def _spread(x: Tensor, index: Tensor, heads: int) -> Tensor:
    """Rows of trie nodes to batched matrices: x [N, heads * R, D], index [E, T] -> [E * heads, R * T, D]."""
    e, t = index.shape
    rows = x.index_select(0, index.reshape(-1)).view(e, t, heads, -1, x.shape[-1])
    return rows.permute(0, 2, 3, 1, 4).reshape(e * heads, -1, x.shape[-1])


def _gather_rows(x: Tensor, e: int, t: int) -> Tensor:
    """Inverse of _spread's layout: x [E * heads, R * T, D] -> [E * T, heads * R, D]."""
    d = x.shape[-1]
    return x.view(e, x.shape[0] // e, -1, t, d).permute(0, 3, 1, 2, 4).reshape(e * t, -1, d)


def _spread_sink(sink: Tensor | None, bucket: Bucket, heads: int) -> Tensor | None:
    """sink [H] -> [E * K, R * Q, 1]."""
    if sink is None:
        return None
    e, q = bucket.queries.shape
    return sink.float().view(1, heads, -1, 1).expand(e, -1, -1, q).reshape(e * heads, -1, 1)


class _PackedAttention(torch.autograd.Function):
    """Forward as in the file's header; backward recomputes the weights, so no [queries, keys] matrix is kept.

    dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = scaling dS K, dK = scaling dS^T Q
    (FlashAttention-2, arXiv 2307.08691, algorithm 2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        buckets: tuple[Bucket, ...],
        masks: list[Tensor],
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        heads = k.shape[1]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        stats = []
        for bucket, masked in zip(buckets, masks, strict=True):
            s = scores(_spread(q, bucket.queries, heads), _spread(k, bucket.keys, heads), masked, scaling, softcap)
            p, total, m = exponentials(s, _spread_sink(sink, bucket, heads))
            o = weighted_values(p, _spread(v, bucket.keys, heads)) / total
            out[bucket.nodes] = _gather_rows(o, *bucket.queries.shape)[bucket.rows]
            stats += [total, m]
        ctx.save_for_backward(q, k, v, sink, out, *stats)
        ctx.rest = (buckets, masks, scaling, softcap)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, *stats = ctx.saved_tensors
        buckets, masks, scaling, softcap = ctx.rest
        n, heads, d = k.shape
        d_out = d_out.float()
        delta = (d_out * out).sum(-1, keepdim=True)  # [N, H, 1]
        d_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        d_k, d_v = (torch.zeros(n, heads * d, dtype=torch.float32, device=q.device) for _ in range(2))
        d_sink = None if sink is None else torch.zeros(sink.shape, dtype=torch.float32, device=q.device)
        for i, (bucket, masked) in enumerate(zip(buckets, masks, strict=True)):
            total, m = stats[2 * i : 2 * i + 2]
            e, t = bucket.queries.shape
            qs, ks = _spread(q, bucket.queries, heads).float(), _spread(k, bucket.keys, heads).float()
            s = scores(qs, ks, masked, scaling, softcap)
            p = (s - m).exp_().div_(total)
            do, dl = _padded(d_out, bucket, heads), _padded(delta, bucket, heads)
            _add_rows(d_v, torch.bmm(p.transpose(1, 2), do), bucket)
            ds = torch.bmm(do, _spread(v, bucket.keys, heads).float().transpose(1, 2)).sub_(dl).mul_(p)
            if softcap is not None:
                ds.mul_(1 - torch.nan_to_num(s / softcap, neginf=0.0).square_())
            ds.mul_(scaling)
            d_q[bucket.nodes] = _gather_rows(torch.bmm(ds, ks), e, t)[bucket.rows]
            _add_rows(d_k, torch.bmm(ds.transpose(1, 2), qs), bucket)
            if sink is not None:
                share = (_spread_sink(sink, bucket, heads) - m).exp_() / total
                d_sink -= (share * dl).view(e, heads, -1, t).sum((0, 3)).reshape(-1)
        return (
            d_q.to(q.dtype),
            d_k.view(k.shape).to(k.dtype),
            d_v.view(v.shape).to(v.dtype),
            None if sink is None or d_sink is None else d_sink.to(sink.dtype),
            *(None,) * 4,
        )


def _padded(x: Tensor, bucket: Bucket, heads: int) -> Tensor:
    """Gradient rows of a bucket's real queries, zero at its padding: x [N, H, D] -> [E * K, R * Q, D]."""
    e, q = bucket.queries.shape
    rows = torch.zeros(e * q, *x.shape[1:], dtype=x.dtype, device=x.device)
    rows[bucket.rows] = x[bucket.nodes]
    return rows.view(e, q, heads, -1, x.shape[-1]).permute(0, 2, 3, 1, 4).reshape(e * heads, -1, x.shape[-1])


def _add_rows(total: Tensor, x: Tensor, bucket: Bucket) -> None:
    """Adds key gradients x [E * K, L, D] to their trie nodes in total [N, K * D], in a fixed order."""
    e, length = bucket.keys.shape
    rows = x.view(e, -1, length, x.shape[-1]).transpose(1, 2).reshape(e * length, -1)
    # The gradient of an embedding look-up is this sum: parallel over trie nodes, in order within one.
    total += torch.ops.aten.embedding_dense_backward(rows, bucket.keys.reshape(-1), total.shape[0], -1, False)
