"""Tensors and gradients for the tests of the objective."""

import math

import torch

from tinyllm.post.grpo import (
    clipped_objective,
)

NAN = math.nan


def t(values, dtype=torch.float64, grad=False):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


def gradient(logp_new, *args, **axes):
    """Loss, its gradient with respect to logp_new, and the stats."""
    logp_new = logp_new.detach().clone().requires_grad_()
    loss, stats = clipped_objective(logp_new, *args, **axes)
    loss.backward()
    return loss.item(), logp_new.grad, stats
