"""The core without a model: advantages and the clipped objective on five numbers."""

import torch

from tinyllm.post.grpo import clipped_objective, group_advantages

rewards = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
group_ids = torch.tensor([7, 7, 7, 9, 9])
advantages = group_advantages(rewards, group_ids)
print("advantages", [round(a, 4) for a in advantages.tolist()])  # group 9 agrees: nothing to learn from it

logp_old = torch.full((5,), -1.2)
logp_new = torch.tensor([-1.0, -0.9, -1.5, -0.7, -0.9], requires_grad=True)
loss, stats = clipped_objective(logp_new, logp_old, advantages)
loss.backward()
print("loss", round(loss.item(), 4), "clipped", stats.clip_fraction_low, stats.clip_fraction_high)
print("gradient", [round(g, 4) for g in logp_new.grad.tolist()])  # exactly 0 in group 9, and where the clip holds
