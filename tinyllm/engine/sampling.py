"""From logits to log-probabilities and to the draw of a token.

A token is drawn by inverting the cumulative distribution at a uniform number of its sample and position (seeds.py), so
neither the rest of the batch nor its order can change the token.

Legend: n rows, V vocabulary, M samples that share a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyllm.errors import EngineError
from tinyllm.records import SamplingParams

_DRAW_BLOCK = 256


def scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """fp32 logits at the sampling temperature; temperature 0 (greedy) leaves them as they are."""
    logits = logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def restrict(logits: Tensor, params: SamplingParams) -> Tensor:
    """[n, V] logits with the tokens outside top-k, top-p and min-p at -inf, in this order of application.

    top-p keeps the smallest set whose probability reaches p (Holtzman et al., arXiv 1904.09751); min-p keeps tokens
    with at least min_p times the largest probability (arXiv 2407.01082). Ties at the top-k boundary are all kept.
    """
    if params.full_support:
        return logits
    if 0 < params.top_k < logits.shape[-1]:
        bound = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < bound, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1, dtype=torch.float64)
        drop = mass.cumsum(-1) - mass >= params.top_p
        drop[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
    if params.min_p > 0.0:
        probability = logits.softmax(-1)
        logits = logits.masked_fill(probability < params.min_p * probability.amax(-1, keepdim=True), -torch.inf)
    return logits


def normalize(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, e, s): log sum exp [n, 1], exp(logits - max) [n, V] and its sum [n, 1], for sampler and trainer alike."""
    if logits.shape[0] == 1:  # a sum with a single result is split over threads, in another order than one of several
        lse, e, s = normalize(logits.expand(2, -1))
        return lse[:1], e[:1], s[:1]
    largest = logits.amax(-1, keepdim=True)
    e = (logits - largest).exp_()
    s = e.sum(-1, keepdim=True)
    return s.log() + largest, e, s


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities. logits [n, V] scaled and restricted, uniforms [n, M] fp64 -> [n, M] each.

    The distribution is inverted in two levels, first over blocks of tokens, then within one. A token of probability 0
    is never drawn: the cumulative sums do not grow there, and right=True passes over it.
    """
    lse, e, _ = normalize(logits)
    if e.device.type == "mps":  # has no fp64
        e = e.cpu()
    uniforms = uniforms.to(e.device)
    n, vocabulary = e.shape
    weights = F.pad(e, (0, -vocabulary % _DRAW_BLOCK)).view(n, -1, _DRAW_BLOCK)
    above = weights.sum(-1, dtype=torch.float64).cumsum(-1)  # [n, blocks]
    _require_finite(above)
    target = _below(uniforms * above[:, -1:], above[:, -1:])
    block = torch.searchsorted(above, target, right=True)  # [n, M]
    before = F.pad(above, (1, 0)).gather(-1, block)
    chosen = weights.gather(1, block[..., None].expand(-1, -1, _DRAW_BLOCK)).double().cumsum(-1)  # [n, M, within]
    rest = _below((target - before)[..., None], chosen[..., -1:])
    tokens = (block * _DRAW_BLOCK + torch.searchsorted(chosen, rest, right=True)[..., 0]).to(logits.device)
    return tokens, logits.gather(-1, tokens) - lse


def _require_finite(x: Tensor) -> None:
    """Raise EngineError where logits with NaN or infinity left no distribution to draw from."""
    if not x.isfinite().all():
        raise EngineError(
            "the model's logits are not finite, so nothing can be sampled; lower optimizer.lr if training went wrong, "
            "raise sampling.temperature if it is tiny, or check the model"
        )


def _below(x: Tensor, bound: Tensor) -> Tensor:
    """x, or the largest number under bound where rounding took x to it."""
    return torch.minimum(x, torch.nextafter(bound, torch.zeros_like(bound)))


def greedy(logits: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The most probable token (the first of equals) and its log-probability, repeated for M samples: [n, M] each."""
    tokens = logits.argmax(-1, keepdim=True)
    logprobs = logits.gather(-1, tokens) - normalize(logits)[0]
    _require_finite(logprobs)
    return tokens.expand(-1, samples), logprobs.expand(-1, samples)
