"""A causal LM in two parts: the trunk gives hidden states of a row of trie nodes, the head logits of some of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyllm.engine.attention import AttentionPlan, PackedPlan, attach
from tinyllm.engine.packing import ROWS, pack, round_up
from tinyllm.engine.trie import Trie
from tinyllm.errors import ModelError

_PRODUCT_ROWS = 128


class Policy:
    """A transformers causal LM (plain or with LoRA adapters) with our attention, split into trunk and head.

    The head is a linear map, optionally scaled (Granite, Cohere) and soft-capped (Gemma 2); `check` compares the split
    with the model's own logits, so that an architecture with another output step is refused, not computed wrongly.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        attach(causal)
        self.causal = causal
        self.trunk = causal.base_model
        config = causal.config.get_text_config()
        self.config = config
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        multiplier = getattr(config, "logit_scale", None)
        divisor = getattr(config, "logits_scaling", None)
        # The largest width from 512 to 1024, in steps of 8, that cuts the vocabulary evenly; 0 when there is none.
        self._slice = next((w for w in range(1024, 511, -8) if self.vocab_size % w == 0 and self.vocab_size > w), 0)
        self.multiplier = float(multiplier if multiplier is not None else 1.0 / divisor if divisor else 1.0)

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.causal.get_output_embeddings()
        return head

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    def hidden(self, input_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Last hidden states [N, hidden] of one row of trie nodes [1, N] that attend by `plan`."""
        out = self.trunk(input_ids=input_ids, position_ids=position_ids, attention_plan=plan, use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, V] of rows [n, hidden]; rows are padded to a multiple of 4 for the product."""
        n = hidden.shape[0]
        rows = F.pad(hidden, (0, 0, 0, round_up(n, ROWS) - n))
        parts = [self._products(part) for part in rows.split(_PRODUCT_ROWS)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.finish_logits(logits.float())[:n]

    def _products(self, rows: Tensor) -> Tensor:
        """rows W^T + bias. A wide head is cut into slices: few rows times 49,152 columns at once ran at half speed."""
        weight, bias = self.head_weight, self.head.bias
        if not self._slice:
            return F.linear(rows, weight, bias)
        slices = weight.view(-1, self._slice, weight.shape[1]).transpose(1, 2)
        out = torch.bmm(rows.expand(slices.shape[0], -1, -1), slices)
        out = out.transpose(0, 1).reshape(rows.shape[0], -1)
        return out if bias is None else out + bias

    def finish_logits(self, logits: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def finish_logits_grad(self, logits: Tensor, grad: Tensor) -> Tensor:
        """Gradient before finish_logits, from finished logits and the gradient after it."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        return grad * self.multiplier if self.multiplier != 1.0 else grad

    @torch.no_grad()
    def check(self) -> None:
        """Raises ModelError when trunk and head do not give the logits of the model's own eager forward pass."""
        vocab = self.vocab_size
        ids = [(7 * i + 3) % vocab for i in range(9)]
        trie = Trie()
        trie.add(ids)
        packed = pack(trie, self.device)
        ours = self.logits(self.hidden(packed.input_ids, packed.position_ids, PackedPlan(packed))[: len(ids)])
        self.causal.set_attn_implementation("eager")
        try:
            theirs = self.causal(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
        finally:
            attach(self.causal)
        gap = (ours - theirs).abs().max().item()
        bound = (1e-3 if ours.dtype == self.head_weight.dtype else 0.1) * (1 + theirs.abs().max().item())
        if not gap <= bound:
            raise ModelError(
                f"model {self.causal.config.model_type!r} gives other logits through tinyllm's attention and head "
                f"(largest difference {gap:.3g}); the model has a step that tinyllm does not know; use another model"
            )
