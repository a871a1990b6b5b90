"""A policy trained in shards, one per rank: torch's FSDP2 (`fully_shard`) around one forward and backward pass.

Each rank has the weights twice. The policy itself is whole: it samples, is evaluated, hashed and saved as in a run of
one process. The sharded twin has this rank's part of the fp32 masters, their gradients and the optimizer's moments; a
pass gathers one decoder layer at a time in the policy's own type, so the pass computes the same bits. After a step the
masters are copied into the whole policy (`copy_to`).

Gradients are summed over ranks, never averaged: the loss is divided by a denominator of the whole step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tinyllm.distributed.ranks import Ranks
from tinyllm.engine.policy import Policy
from tinyllm.errors import ConfigError
from tinyllm.model.memory import decoder_layers

Score = Callable[[Policy, Any, float], tuple[Tensor, Tensor]]
"""(policy, targets, temperature) -> log-probabilities and entropies of the targets."""


class Sharded(nn.Module):
    """A policy whose parameters are sharded; calling the module runs `score` with it. Made by `shard`.

    The root of FSDP's modules, so that FSDP's hooks run for embedding, layers, norm and head alike.
    """

    def __init__(self, policy: Policy, score: Score) -> None:
        super().__init__()
        self.model = policy.model
        self._policy, self._score = policy, score

    def forward(self, targets: Any, temperature: float) -> tuple[Tensor, Tensor]:
        return self._score(self._policy, targets, temperature)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copies the present weights into a whole model of the same architecture. All ranks call it together."""
        own = dict(self.model.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(own[name].full_tensor())  # type: ignore[attr-defined]


def shard(policy: Policy, score: Score, ranks: Ranks) -> Sharded:
    """A sharded twin of a policy: this rank keeps its part of every parameter, in fp32.

    Raises ConfigError for a device that ranks cannot share work on.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    _check_device(policy.device)
    dtype = policy.head_weight.dtype
    mesh = init_device_mesh(policy.device.type, (ranks.count,))
    rules = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    twin = Policy(copy.deepcopy(policy.model))
    root = Sharded(twin, score)
    layers = decoder_layers(twin.trunk, twin.config.num_hidden_layers)
    for module in (*layers, root):  # one after the other, so that only one is whole in fp32
        for parameter in module.parameters():
            if parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        fully_shard(module, mesh=mesh, mp_policy=rules)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # type: ignore[operator] # experts that only another rank's rows use
    return root


def _check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"model.device = {device.type!r}: several ranks train on cpu or cuda only; choose one of them"
        )
    there, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and here > there:
        raise ConfigError(
            f"{here} ranks on a machine with {there} GPUs; start one rank per GPU (--nproc-per-node {there})"
        )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(whole: Tensor, target: Tensor) -> Tensor:
    """A whole tensor sharded as `target` is; the tensor itself where `target` is not sharded."""
    if not hasattr(target, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    moved = whole.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]
