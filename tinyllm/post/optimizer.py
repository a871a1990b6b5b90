"""Fp32 master weights, AdamW or SGD, learning-rate schedule, gradient norm.

A model in bf16 has an fp32 master of each parameter here; the parameter is the master's rounded copy, and gradients
accumulate in fp32. In a model in fp32 each parameter is its own master. Sums over whole tensors are taken in fixed
blocks, so they do not depend on the number of threads. On several ranks each optimizer updates its rank's shards;
gradient_norm and the searches for non-finite numbers cover the shards of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tinyllm.config.sections import OptimizerConfig
from tinyllm.distributed.fsdp import like, local
from tinyllm.distributed.ranks import SOLO, Ranks

_SUM_BLOCK = 4096
EPS = 1e-8
"""Epsilon of AdamW, the usual value; it keeps a gradient of 0 from dividing by 0."""


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x^2, added in blocks of a fixed size: the same bits for every number of threads. 0-d fp64 on the CPU."""
    flat = x.detach().reshape(-1)
    whole = flat.numel() // _SUM_BLOCK * _SUM_BLOCK
    blocks = flat[:whole].view(-1, _SUM_BLOCK).float().square().sum(-1)
    tail = flat[whole:].float().square().sum()
    return torch.tensor(math.fsum([*blocks.tolist(), tail.item()]), dtype=torch.float64)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of a step, 1 to `steps`: linear warm-up, then constant, or linear or cosine decay.

    The decay would reach 0 one step after the last.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps)
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """Updates the trainable parameters of a model from their accumulated gradients."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, ranks: Ranks = SOLO
    ) -> None:
        self.config, self.ranks = config, ranks
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        assert self.parameters, "nothing to train"
        self.masters: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if p.dtype == torch.float32:
                self.masters[name] = p
            else:
                p.grad_dtype = torch.float32
                self.masters[name] = p.detach().float().clone()
        masters = list(self.masters.values())
        if config.name == "sgd":
            self._inner: torch.optim.Optimizer = torch.optim.SGD(
                masters, lr=config.lr, weight_decay=config.weight_decay
            )
        else:
            fused = masters[0].device.type in ("cpu", "cuda")
            self._inner = torch.optim.AdamW(
                masters, lr=config.lr, betas=config.betas, eps=EPS, weight_decay=config.weight_decay, fused=fused
            )

    @property
    def has_masters(self) -> bool:
        """Whether any parameter is stored in less than fp32 and so has a separate fp32 master."""
        return any(self.masters[name] is not p for name, p in self.parameters.items())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name; of this rank's shards where the parameters are sharded."""
        return {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Discard all gradients."""
        for p in self.parameters.values():
            p.grad = None

    def gradient_norm(self) -> float:
        """L2 norm of the gradient over all parameters, and over all ranks' shards."""
        squares = [sum_of_squares(g).item() for g in self.gradients().values()]
        return math.sqrt(math.fsum(x for shards in self.ranks.gather(squares) for x in shards))

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient has a sum of squares that is not finite in fp32; or None."""
        return self._first(n for n, g in self.gradients().items() if not math.isfinite(sum_of_squares(g)))

    @torch.no_grad()
    def non_finite_weight(self) -> str | None:
        """Name of the first parameter that contains NaN or infinity; None if none does."""
        return self._first(n for n, p in self.parameters.items() if not local(p).sum().isfinite())

    def _first(self, names: Iterable[str]) -> str | None:
        """The first name that any rank gives, in the order of ranks."""
        return next((name for name in self.ranks.gather(next(iter(names), None)) if name is not None), None)

    @torch.no_grad()
    def step(self, lr: float, norm: float) -> None:
        """One update at learning rate lr; gradients are scaled down where `norm`, their L2 norm, exceeds clip_norm."""
        assert math.isfinite(norm), norm
        scale = self.config.clip_norm / (norm + 1e-6) if self.config.clip_norm else 1.0
        for name, p in self.parameters.items():
            if p.grad is not None and scale < 1.0:
                p.grad.mul_(scale)
            if self.masters[name] is not p:
                self.masters[name].grad = p.grad
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()
        if self.has_masters:
            for name, p in self.parameters.items():
                p.copy_(self.masters[name])
                self.masters[name].grad = None

    # -- saving ---------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors for a checkpoint, in groups: "weights", "masters" where they differ from weights, and "optimizer"."""
        groups: dict[str, dict[str, Tensor]] = {"weights": {n: p.detach() for n, p in self.parameters.items()}}
        if self.has_masters:
            groups["masters"] = dict(self.masters)
        moments = {}
        for name, master in self.masters.items():
            for key, value in self._inner.state.get(master, {}).items():
                moments[f"{key}:{name}"] = value
        groups["optimizer"] = moments
        return groups

    @torch.no_grad()
    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the state that `tensors` saved, bit for bit, on any number of ranks.

        The given tensors are whole, not shards.
        """
        exact = groups.get("masters", groups["weights"])  # weights in fp32 are their own masters
        for name, p in self.parameters.items():
            p.copy_(like(groups["weights"][name], p))
            self.masters[name].copy_(like(exact[name], p))
        # SGD has no moments, and a sharded checkpoint stores no empty group
        for key, value in groups.get("optimizer", {}).items():
            moment, name = key.split(":", 1)
            master = self.masters[name]
            if moment == "step":  # 0-d on the fused kernel's device; in a sharded checkpoint [1]
                there = master.device if self._inner.defaults.get("fused") else value.device
                self._inner.state[master][moment] = value.clone().reshape(()).to(there)
            else:
                self._inner.state[master][moment] = like(value.clone(), master).to(master.device)
