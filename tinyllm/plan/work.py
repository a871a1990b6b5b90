"""One step in numbers: the job, the layout (how many devices of each kind), and the FLOPs and bytes of each hop.

Legend: Q groups, G completions of each, P prompt tokens, C completion tokens, S = Q G C sampled tokens,
T weights of the trunk, H weights of the head, W all weights, W_t trained ones, L layers, A query heads x their size,
e bytes of an element, N trainer devices, E engines, t devices of an engine.

Sources: 2 FLOPs per weight and token forward and 4 backward (Kaplan et al., arXiv:2001.08361, section 2.1); attention's
4 L A FLOPs per token and key it looks at (the same, table 1); one forward more for recomputation (Korthikanti et al.,
arXiv:2205.05198); decode reads all weights and the keys and values once per token (Pope et al., arXiv:2211.05102,
section 2.1); ring all-gather and reduce-scatter move (N - 1)/N of the data per rank (Rajbhandari et al.,
arXiv:1910.02054, section 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinyllm.model.memory import ModelShape


@dataclass(frozen=True)
class Workload:
    """One step of training, in numbers. Lengths are means over completions; `longest` bounds prompt and completion."""

    shape: ModelShape
    dtype: str
    element_bytes: int
    groups: float
    """Groups drawn in a step; with dynamic sampling more than prompts_per_step."""
    group_size: int
    prompt_tokens: float
    completion_tokens: float
    max_new_tokens: int
    longest: int
    live_share: float
    """Share of the tokens that is trained: groups without signal need no backward pass."""
    max_batch: int
    tokens_per_microbatch: int
    updates: int
    lora_rank: int
    reference: bool
    """Whether a reference policy is scored."""
    checkpointing: bool
    moments: int
    """Of the optimizer: 2 AdamW, 0 SGD."""
    publish_adapters: bool = False
    """Whether engines are sent the adapters alone."""

    @property
    def rollouts(self) -> float:
        return self.groups * self.group_size

    @property
    def sampled_tokens(self) -> float:
        return self.rollouts * self.completion_tokens

    @property
    def distinct_tokens(self) -> float:
        """Tokens of a step with each prompt once per group."""
        return self.groups * self.prompt_tokens + self.sampled_tokens

    @property
    def trained(self) -> int:
        return self.shape.trained(self.lora_rank)


@dataclass(frozen=True)
class Layout:
    """The devices and verifiers of a job, and its largest lag."""

    trainers: int = 1
    """Devices that train (FSDP ranks)."""
    engines: int = 0
    """Engines with devices of their own; 0: the trainers sample."""
    gpus_per_engine: int = 1
    verifiers: int = 2
    max_lag: int = 0
    """By how many revisions a group may be older than the weights that are trained on it; 0 = synchronous."""

    @property
    def devices(self) -> int:
        return self.trainers + self.engines * self.gpus_per_engine


# FLOPs of a whole step


def prefill_flops(job: Workload) -> float:
    """Q (2 T P + 4 L A P^2 / 2): each prompt once per group."""
    p = job.prompt_tokens
    return job.groups * (2 * job.shape.trunk * p + _attention(job, p, p / 2))


def decode_flops(job: Workload) -> float:
    """S (2 (T + H) + 4 L A (P + C / 2))."""
    keys = job.prompt_tokens + job.completion_tokens / 2
    return 2 * (job.shape.trunk + job.shape.head) * job.sampled_tokens + _attention(job, job.sampled_tokens, keys)


def training_flops(job: Workload) -> float:
    """Forward and backward of all updates, and the reference policy's forward.

    Per trained token: 6 T, 8 T with checkpointing (adapters: 4 T and 6 T, and 6 of their own weights), attention 3 or 4
    times its forward. Per completion token: 8 H (6 H with adapters), since the head keeps no logits and computes them
    again in backward.
    """
    passes = (2 if job.lora_rank else 3) + job.checkpointing
    tokens, scored = job.live_share * job.distinct_tokens, job.live_share * job.sampled_tokens
    forward = 2 * job.shape.trunk * tokens
    keys = _mean_keys(job)
    attention = (3 + job.checkpointing) * _attention(job, tokens, keys)
    adapters = 6 * job.trained * tokens if job.lora_rank else 0
    head = (6 if job.lora_rank else 8) * job.shape.head * scored
    update = passes * forward + adapters + attention + head
    reference = forward + 2 * job.shape.head * scored + _attention(job, tokens, keys) if job.reference else 0
    return job.updates * update + reference


def _attention(job: Workload, tokens: float, keys: float) -> float:
    """4 L A per token and key."""
    return 4 * job.shape.layers * job.shape.query * tokens * keys


def _mean_keys(job: Workload) -> float:
    """Keys a token of a packed group looks at, on average: P / 2 for the prompt's, P + C / 2 for the others."""
    p, c = job.prompt_tokens, job.completion_tokens
    own = job.group_size * c
    return (p * p / 2 + own * (p + c / 2)) / (p + own)


# Bytes


def weight_bytes(job: Workload) -> int:
    return job.shape.parameters * job.element_bytes


def published_bytes(job: Workload) -> int:
    """Bytes of weights that engines are sent after each step."""
    return job.trained * job.element_bytes if job.publish_adapters else weight_bytes(job)


def decode_steps(job: Workload, engines: int) -> float:
    """Passes of the busiest of E engines: at most max_batch completions together, and the longest one in any case."""
    own = sampling_share(job, engines) * job.rollouts
    return max(job.max_new_tokens, own * job.completion_tokens / min(job.max_batch, math.ceil(own)))


def decode_bytes(job: Workload, engines: int) -> float:
    """What the busiest engine reads: all weights in every pass, and for every token P + C / 2 keys and values."""
    keys = job.prompt_tokens + job.completion_tokens / 2
    cache = job.shape.cache_bytes(job.element_bytes)
    own = sampling_share(job, engines) * job.sampled_tokens
    return decode_steps(job, engines) * weight_bytes(job) + own * keys * cache


def sampling_share(job: Workload, engines: int) -> float:
    """Share of the busiest of E engines: groups are dealt whole."""
    return math.ceil(job.groups / engines) / math.ceil(job.groups)


def optimizer_bytes(job: Workload, trainers: int) -> float:
    """Traffic of one rank: fp32 gradient read for its norm and again, master and moments read and written.

    AdamW 4 (2 + 2 + 4) = 32 bytes per weight, SGD 16; bf16 weights are written from their masters, 2 more.
    """
    masters = 2 if job.element_bytes == 2 else 0
    return job.updates * job.trained / trainers * (4 * (4 + 2 * job.moments) + masters)


def microbatches(job: Workload, trainers: int) -> int:
    """Forward and backward passes of a rank in one update."""
    tokens = job.live_share * job.distinct_tokens / trainers
    return max(1, math.ceil(tokens / job.tokens_per_microbatch))


def collective_bytes(job: Workload, layout: Layout) -> float:
    """What a rank receives in a step; 0 for one rank.

    (N - 1)/N of: in every micro-batch the weights for forward and for backward and the fp32 gradients; and after the
    step the fp32 masters, of which every rank makes its whole weights. A reference policy is whole on every rank.
    """
    n = layout.trainers
    update = microbatches(job, n) * (2 * weight_bytes(job) + 4 * job.trained)
    return (n - 1) / n * (job.updates * update + 4 * job.trained)
