"""Group Relative Policy Optimization: the paper as code, in three sections.

    1. Grouped advantages   rewards of one prompt's completions -> how much better each is than its group
    2. Clipped objective    log-probabilities and advantages    -> loss to minimize, numbers to watch
    3. Rollout client       prompts                             -> sampled, verified groups

Imports torch, the records, the errors and the table of axes, but no model and no trainer: every function runs on a few
floats. axes.py has the meaning and the values of each axis, and the published presets.

Legend: B rollouts (rows), T completion tokens (columns, padded), G rollouts of one group.
Log-probabilities are natural logarithms of the probability of the sampled token, at the sampler's temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from tinyllm.axes import (
    KL,
    Aggregate,
    Baseline,
    Clip,
    Ratio,
    SamplerCorrection,
    SamplerMode,
    Scale,
    check_axes,
    require_number,
)
from tinyllm.errors import ConfigError, EngineError, RewardError, TinyLLMError
from tinyllm.records import Completion, Group, Judged, Logged, Prompt, Rollout, SamplingParams, Verdict, fault_of

Verify: TypeAlias = Callable[[list[Prompt], list[Completion]], Sequence[Verdict] | Judged]
"""A batched verifier: (prompts, completions), lists of equal length -> one Verdict per pair, in the same order."""

_LARGEST_REWARD = 1e100  # its square is still a number


# ---------------------------------------------------------------------------------------------------------------------
# 1. Grouped advantages
# ---------------------------------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, baseline: Baseline = "mean", scale: Scale = "std", eps: float = 1e-6
) -> Tensor:
    """Advantage of each rollout: its reward relative to the rewards of its group.

        A_i = (r_i - b_i) / (std + eps)     b_i: mean of the group, or of the others (leave_one_out)

    rewards [B] float; group_ids [B] integers, any values in any order: rows with equal ids form a group, wherever they
    stand. Returns A [B], without gradient, with the rewards' device and dtype (the default dtype for integer rewards).
    std is the population standard deviation (divided by G) of the whole group, with either baseline; scale "none"
    omits the division. With the mean baseline the advantages of a group add up to 0, and |A| is at most sqrt(G - 1).
    A group whose rewards are all equal, or of one rollout, has advantages of exactly 0, so it trains nothing.
    A reward of NaN marks an unscored or excluded rollout: mean and std leave it out, and its advantage is 0.
    Raises RewardError, naming the row, for a reward that is infinite or beyond 1e100, and RewardError for an A that
    overflows the dtype; ConfigError for an unknown axis value or eps < 0.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; scale "none": Dr. GRPO, arXiv:2503.20783, section 3.
    """
    check_axes(baseline=baseline, scale=scale)
    require_number("eps", eps)
    assert rewards.ndim == 1 and rewards.shape == group_ids.shape, f"{rewards.shape} rewards, {group_ids.shape} ids"
    # Rewards come from the host anyway; summed in fp64 on the CPU, they give the same advantages on every device
    r = rewards.detach().to("cpu", torch.float64)
    wild = torch.nonzero(r.abs() > _LARGEST_REWARD).flatten().tolist()
    if wild:
        row = wild[0]
        raise RewardError(f"reward of row {row} is {r[row]:g}: return a finite number, or NaN for an unscored row")
    ids, group = torch.unique(group_ids.detach().cpu(), return_inverse=True)
    scored = ~r.isnan()

    def of_group(x: Tensor, how: str = "sum") -> Tensor:
        """Reduce x [B] over the scored members of each group; every row gets the result of its group. [B]"""
        result = torch.zeros(len(ids), dtype=x.dtype)
        return result.scatter_reduce_(0, group[scored], x[scored], how, include_self=False)[group]

    size = of_group(torch.ones_like(r))
    centered = r - of_group(r) / size
    std = (of_group(centered**2) / size).sqrt()  # centered first: a mean of squares less a squared mean would cancel
    # Leaving r_i out of its own baseline: r_i - sum of the others / (n - 1) = n / (n - 1) (r_i - mean)
    advantage = centered * size / (size - 1) if baseline == "leave_one_out" else centered
    if scale == "std":
        advantage = advantage / (std + eps)
    # A group of equal rewards must give exactly 0. Rewards are compared: rounding may make their computed std nonzero
    differ = scored & (of_group(r, "amax") > of_group(r, "amin"))
    kind = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()  # integers would truncate A
    result = torch.where(differ, advantage, 0.0).to(rewards.device, kind)
    if not result.isfinite().all():
        raise RewardError(f"advantages of rewards up to {r.abs().nan_to_num().max():g} do not fit {kind}: scale them")
    return result


# ---------------------------------------------------------------------------------------------------------------------
# 2. Clipped objective
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectiveStats:
    """Statistics of one call of clipped_objective: sums over its trained tokens, so that parts of a step can be added.

    `a + b` merges two micro-batches (or ranks), `sum(parts, ObjectiveStats())` a whole step; the properties are then
    means over all trained tokens of the step. When every part was given the step's denominator, policy_loss + kl_loss
    of the merged statistics is the step's loss.

    Legend: q probability ratio, A advantage, as in clipped_objective.
    """

    policy_loss: float = 0.0
    """Policy term of the loss."""
    kl_loss: float = 0.0
    """beta times the aggregated KL; loss = policy_loss + kl_loss."""
    rows: float = 0.0
    """Completions with a trained token."""
    zero_rows: float = 0.0
    """Completions among `rows` whose advantage is 0 at every trained token."""
    tokens: float = 0.0
    """Trained tokens."""
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    """Largest q of a trained token (0 when there is none)."""
    clipped_low: float = 0.0
    """Tokens with A < 0 and q < 1 - clip_low (cispo: A != 0)."""
    clipped_high: float = 0.0
    """Tokens with A > 0 and q > 1 + clip_high (cispo: A != 0; dual: also A < 0 and q > dual_clip)."""
    kl_sum: float = 0.0
    kl_tokens: float = 0.0
    gap_tokens: float = 0.0
    """Trained tokens whose gap |logp_old - logp_sampler| was measured: logp_sampler given, and gap_mask true."""
    gap_sum: float = 0.0
    gap_max: float = 0.0
    """Largest |logp_old - logp_sampler|."""
    gap_kl: float = 0.0
    gap_equal: float = 0.0
    weight_sum: float = 0.0

    def __add__(self, other: ObjectiveStats) -> ObjectiveStats:
        """Statistics of both parts together: sums are added, maxima compared."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return ObjectiveStats(**{name: max(ab) if name.endswith("_max") else sum(ab) for name, ab in pairs.items()})

    @property
    def ratio_mean(self) -> float:
        """Mean of q over trained tokens; exactly 1 on policy."""
        return self.ratio_sum / max(self.tokens, 1)

    @property
    def clip_fraction_low(self) -> float:
        """Share of trained tokens at which the lower bound of q takes effect (see clipped_low)."""
        return self.clipped_low / max(self.tokens, 1)

    @property
    def clip_fraction_high(self) -> float:
        """Share of trained tokens at which the upper bound of q takes effect (see clipped_high)."""
        return self.clipped_high / max(self.tokens, 1)

    @property
    def zero_advantage_share(self) -> float:
        """Share of trained rows with advantage 0."""
        return self.zero_rows / max(self.rows, 1)

    @property
    def kl(self) -> float | None:
        """Mean KL estimate per trained token, also with beta 0; None when no reference was given."""
        return self.kl_sum / self.kl_tokens if self.kl_tokens else None

    @property
    def sampler_gap(self) -> float | None:
        """Mean |logp_old - logp_sampler| over the tokens of gap_tokens, in nats; None when there are none."""
        return self.gap_sum / self.gap_tokens if self.gap_tokens else None

    @property
    def sampler_kl(self) -> float | None:
        """Mean k3 estimate of KL(sampler || trainer) over gap_tokens, d = logp_old - logp_sampler; None without any."""
        return self.gap_kl / self.gap_tokens if self.gap_tokens else None

    @property
    def sampler_equal_share(self) -> float | None:
        """Share of gap_tokens with logp_old == logp_sampler, bit for bit; None without any."""
        return self.gap_equal / self.gap_tokens if self.gap_tokens else None

    @property
    def sampler_weight(self) -> float | None:
        """Mean importance weight after the cap over gap_tokens; 1 without a correction; None without any."""
        return self.weight_sum / self.gap_tokens if self.gap_tokens else None


def step_denominator(mask: Tensor, aggregate: Aggregate, constant_length: int | None = None) -> float:
    """The denominator N of clipped_objective for a whole optimizer step.

        sequence  completions with a trained token
        token     trained tokens
        constant  B x L: all rows, masked ones too, times constant_length

    mask [B, T] or [B], true where a token is trained. The denominators of micro-batches and ranks add up to the step's:
    give their sum to clipped_objective for every part. Raises ConfigError for "constant" without a constant_length of
    at least 1.
    """
    check_axes(aggregate=aggregate)
    if aggregate == "sequence":
        return float((mask if mask.ndim == 2 else mask[:, None]).bool().any(-1).sum())
    if aggregate == "token":
        return float(mask.bool().sum())
    if constant_length is None or not 1 <= constant_length < math.inf:
        raise ConfigError(f"constant_length is {constant_length}: aggregate 'constant' needs a length of at least 1")
    return float(len(mask) * constant_length)


def clipped_objective(
    logp_new: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip: Clip = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    beta: float = 0.0,
    logp_ref: Tensor | None = None,
    kl: KL = "k3",
    ratio: Ratio = "token",
    aggregate: Aggregate = "sequence",
    constant_length: int | None = None,
    denominator: float | Tensor | None = None,
    logp_sampler: Tensor | None = None,
    sampler_correction: SamplerCorrection = "none",
    sampler_mode: SamplerMode = "truncate",
    sampler_cap: float = 2.0,
    gap_mask: Tensor | None = None,
) -> tuple[Tensor, ObjectiveStats]:
    """(loss to minimize, statistics) of GRPO and its variants.

        q    = exp(logp_new - logp_old)
        loss = 1/N sum_i n_i sum_t [ -w min(q A, clip(q, 1 - clip_low, 1 + clip_high) A) + beta KL(logp_new, logp_ref) ]

    n_i is 1/|o_i| with aggregate "sequence" and 1 otherwise; N is `denominator`; w is 1 without a sampler correction.

    logp_new, logp_old, logp_ref, logp_sampler, mask: [B, T], or [B] (one token each) with mask None or [B].
    advantages: [B], or [B, T] for one per token. mask: true (nonzero) where a token is trained; None: everywhere. Only
    logp_new is differentiated; no argument is written to. Loss: 0-d, in logp_new's dtype but at least fp32.

    Masked positions may hold NaN or inf in any argument: they change neither loss nor gradient. The caller masks rows
    that are unscored or excluded, and then their KL does not count either. With everything masked, loss and gradient
    are 0. Where logp_new - logp_old exceeds 20, exp is continued by its tangent, so that an extreme q stays finite and
    visible (ratio_max).

    denominator: N of the whole optimizer step, from step_denominator over all its micro-batches and ranks; the summed
    gradient then does not depend on how the step was split. None: this call is the whole step. constant_length: L.
    beta: weight of the KL; kl names its estimator (see kl_estimate; k1 is refused when beta > 0). With beta 0 the KL is
    still reported when logp_ref is given.
    logp_sampler: log-probabilities that the sampler reported, when they may differ from logp_old. sampler_correction
    multiplies the policy term by w = exp(logp_old - logp_sampler), per token or as the product over the sequence,
    without gradient; a w above sampler_cap becomes sampler_cap ("truncate") or 0 ("mask": the token still counts in N).
    gap_mask: [B], or [B, T], true where the gap between logp_old and logp_sampler is measured; None: at every trained
    token. It changes only the statistics, never the loss.

    Raises ConfigError for an unknown axis value, a negative or non-finite clip bound or beta, dual_clip <= 1, beta > 0
    without logp_ref or with k1, a sampler correction without logp_sampler, "constant" with neither L nor N.
    Sources: the rows of PRESETS; correction: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training" (truncated, token), Liu et al. 2025, "When speed kills stability" (masked, sequence).
    """
    check_axes(clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, beta=beta, kl=kl, ratio=ratio)
    check_axes(
        aggregate=aggregate, sampler_correction=sampler_correction, sampler_mode=sampler_mode, sampler_cap=sampler_cap
    )
    if beta > 0 and (logp_ref is None or kl == "k1"):
        why = "k1 as a loss does not pull towards the reference" if kl == "k1" else "logp_ref is missing"
        raise ConfigError(f"beta is {beta} but {why}: set beta to 0, or use kl k3 or k2 and give logp_ref")
    if sampler_correction != "none" and logp_sampler is None:
        raise ConfigError(
            f"sampler_correction is {sampler_correction!r}, logp_sampler is missing: give it or use 'none'"
        )
    mask = _token_mask(logp_new, mask)
    if denominator is None:
        denominator = step_denominator(mask, aggregate, constant_length)

    new, old, A = _read(logp_new, mask), _read(logp_old.detach(), mask), _read(advantages.detach(), mask, per_row=True)
    log_q = new - old
    if ratio == "sequence":
        log_q = (log_q.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(new)
    q = _exp(log_q)
    surrogate = _surrogate(q, A, new, clip, clip_low, clip_high, dual_clip)
    numbers = _policy_numbers(q.detach(), A, mask, clip, clip_low, clip_high, dual_clip)
    if logp_sampler is not None:
        log_w = old - _read(logp_sampler.detach(), mask)
        weight = _sampler_weight(log_w, sampler_correction, sampler_mode, sampler_cap)
        surrogate = weight * surrogate
        measured = mask if gap_mask is None else mask & _rows(gap_mask, mask)
        numbers |= _sampler_numbers(log_w, weight, measured)
    loss = numbers["policy_loss"] = _aggregated(-surrogate, mask, aggregate, denominator)
    if logp_ref is not None:
        divergence = kl_estimate(new, _read(logp_ref.detach(), mask), kl)
        numbers |= {"kl_tokens": mask.sum(), "kl_sum": _total(divergence, mask)}
        if beta > 0:
            numbers["kl_loss"] = beta * _aggregated(divergence, mask, aggregate, denominator)
            loss = loss + numbers["kl_loss"]
    values = torch.stack([x.detach().to(loss.dtype) for x in numbers.values()]).tolist()  # one copy from the device
    return loss.to(new.dtype), ObjectiveStats(**dict(zip(numbers, values, strict=True)))


def kl_estimate(logp: Tensor, logp_ref: Tensor, kl: KL = "k3") -> Tensor:
    """KL of the policy to the reference, estimated per token drawn from the policy; d = logp_ref - logp.

        k3 = exp(d) - d - 1   at least 0, unbiased for KL(policy || ref); as a loss its on-policy gradient is that of
                              the forward KL(ref || policy). Above d = 20 it is continued by its tangent: value and
                              gradient are finite and not zero at +-100
        k2 = d^2 / 2          at least 0, biased; as a loss its on-policy gradient is that of the reverse
                              KL(policy || ref)
        k1 = -d               unbiased, of either sign; as a loss its on-policy gradient is 0 in expectation, so
                              clipped_objective refuses it

    Arguments and result have one shape; the result is at least fp32. Differentiable in logp. Raises ConfigError for an
    unknown kl.
    Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath, arXiv:2402.03300, eq. 4.
    """
    check_axes(kl=kl)
    assert logp.shape == logp_ref.shape, f"log-probabilities {tuple(logp.shape)}, reference {tuple(logp_ref.shape)}"
    d = _wide(logp_ref) - _wide(logp)  # exp(d) overflows fp16 above d = 11
    if kl == "k1":
        return -d
    if kl == "k2":
        return d**2 / 2
    near = d.clamp(max=20.0)
    return torch.expm1(near) + torch.exp(near) * (d - near) - d  # tangent above 20, as in _exp


def _exp(x: Tensor) -> Tensor:
    """exp(x), continued above 20 by its tangent: value and gradient stay finite, and the gradient does not vanish."""
    near = x.clamp(max=20.0)
    return torch.exp(near) * (1 + (x - near))


def _surrogate(q: Tensor, A: Tensor, logp: Tensor, clip: Clip, low: float, high: float, dual_clip: float) -> Tensor:
    """The term to maximize, per token: min(q A, clip(q) A), its dual clip, or CISPO's constant weight times A logp."""
    clipped = q.clamp(1 - low, 1 + high)
    if clip == "cispo":
        return clipped.detach() * A * logp
    pessimistic = torch.minimum(q * A, clipped * A)
    if clip == "dual":
        return torch.where(A < 0, torch.maximum(pessimistic, dual_clip * A), pessimistic)
    return pessimistic


def _sampler_weight(log_w: Tensor, level: SamplerCorrection, mode: SamplerMode, cap: float) -> Tensor:
    """Importance weight exp(log_w) of the trainer's old policy over the sampler; above the cap it becomes cap or 0."""
    if level == "none":
        return torch.ones_like(log_w)
    w = _exp(log_w.sum(-1, keepdim=True).expand_as(log_w) if level == "sequence" else log_w)
    return torch.where(w > cap, cap if mode == "truncate" else 0.0, w)


def _token_mask(logp: Tensor, mask: Tensor | None) -> Tensor:
    """The mask as bool [B, T]; [B] is one token per completion."""
    assert logp.ndim in (1, 2), f"log-probabilities are [B, T] or [B], got {tuple(logp.shape)}"
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask.to(logp.device, torch.bool)
    assert mask.shape == logp.shape, f"mask {tuple(mask.shape)}, log-probabilities {tuple(logp.shape)}"
    return mask.unsqueeze(-1) if mask.ndim == 1 else mask


def _rows(x: Tensor, mask: Tensor) -> Tensor:
    """A mask [B, T], or [B] with one flag per row, as bool on the device of `mask`, broadcastable to its shape."""
    x = x.to(mask.device, torch.bool)
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    assert x.shape in (mask.shape, (len(mask), 1)), f"{tuple(x.shape)} does not fit {tuple(mask.shape)}"
    return x


def _wide(x: Tensor) -> Tensor:
    """x in its own dtype, or in fp32 if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _read(x: Tensor, mask: Tensor, per_row: bool = False) -> Tensor:
    """x as [B, T], masked positions (NaN included) set to 0; x may be [B] if T is 1 or, with per_row, one per row."""
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    fits = x.shape == mask.shape or (per_row and x.shape == (len(mask), 1))
    assert fits, f"{tuple(x.shape)} does not fit {tuple(mask.shape)}"
    return torch.where(mask, _wide(x.to(mask.device)), 0.0)


def _aggregated(x: Tensor, mask: Tensor, aggregate: Aggregate, denominator: float | Tensor) -> Tensor:
    """Sum (with "sequence" mean) over tokens, then sum over rows, over the denominator; 0 if no token is trained."""
    n = float(denominator)
    assert 0 < n < math.inf or not mask.any(), f"denominator {n} for {int(mask.sum())} trained tokens"
    rows = torch.where(mask, x, 0.0).sum(-1)
    rows = rows / mask.sum(-1).clamp(min=1) if aggregate == "sequence" else rows
    return rows.sum() / (n or 1.0)


def _total(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens, row by row: the order of summation does not depend on the number of threads."""
    return torch.where(mask, x, 0.0).sum(-1).sum()


def _largest(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).max() if x.numel() else x.sum()


def _policy_numbers(
    q: Tensor, A: Tensor, mask: Tensor, clip: Clip, low: float, high: float, dual_clip: float
) -> dict[str, Tensor]:
    """Sums for ObjectiveStats. A bound stops a token only if A pushes q beyond it; CISPO caps its weight either way."""
    live, moves = mask.any(-1), mask & (A != 0)
    falls, rises = (moves, moves) if clip == "cispo" else (moves & (A < 0), moves & (A > 0))
    too_high = rises & (q > 1 + high)
    if clip == "dual":
        too_high |= falls & (q > dual_clip)
    return {
        "rows": live.sum(),
        "zero_rows": (live & ~moves.any(-1)).sum(),
        "tokens": mask.sum(),
        "ratio_sum": _total(q, mask),
        "ratio_max": _largest(q, mask),
        "clipped_low": (falls & (q < 1 - low)).sum(),
        "clipped_high": too_high.sum(),
    }


def _sampler_numbers(log_w: Tensor, weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums for ObjectiveStats: the gap between trainer and sampler, and the weight that corrects it."""
    return {
        "gap_tokens": mask.sum(),
        "gap_equal": (mask & (log_w == 0)).sum(),
        "gap_sum": _total(log_w.abs(), mask),
        "gap_max": _largest(log_w.abs(), mask),
        "gap_kl": _total(kl_estimate(torch.zeros_like(log_w), log_w), mask),
        "weight_sum": _total(weight, mask),
    }


# ---------------------------------------------------------------------------------------------------------------------
# 3. Rollout client
# ---------------------------------------------------------------------------------------------------------------------


class RolloutClient(Protocol):
    """A sampler of completions: the embedded engine, a server, a pool.

    A client returns the token ids that were sampled, stop token included, and one log-probability per id under the
    distribution that the token was sampled from. It never tokenizes text again, and raises EngineError when it receives
    no ids or no log-probabilities.
    """

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of each prompt, in any order; a failed one has finish_reason "error" and a reason."""
        ...


def collect_groups(
    client: RolloutClient, prompts: Sequence[Prompt], params: SamplingParams, verify: Verify
) -> list[Group]:
    """Sample all prompts, verify the completions and group them: params.n rollouts per prompt, in the prompts' order.

    Completions are matched to prompts by (prompt_id, draw, sample), never by position. verify is called once, with
    every usable completion and its prompt; it is not called when no completion is usable. A failed completion is data:
    an unscored rollout with the reason, finish_reason "error" and no tokens. Raises EngineError and RewardError as
    check_completions and judge_completions do.
    """
    completions = check_completions(client.sample(prompts, params), prompts, params)
    return group_rollouts(prompts, completions, judge_completions(verify, prompts, completions).verdicts)


def check_completions(
    returned: Sequence[Completion], prompts: Sequence[Prompt], params: SamplingParams
) -> list[Completion]:
    """A client's completions, checked and in order: params.n per prompt, prompt after prompt, sample after sample.

    A completion that is missing or cannot be trained on becomes a failed completion with the reason. Raises EngineError
    for a completion that was not requested or was returned twice, when the client returned nothing, and when every
    completion is unusable though the client marked at least one as successful.
    """
    asked = {(p.id, p.draw, sample): p for p in prompts for sample in range(params.n)}
    assert len(asked) == len(prompts) * params.n, "a prompt drawn twice in one call needs two draw numbers"
    found: dict[tuple[str, int, int], Completion] = {}
    for c in returned:
        key = (c.prompt_id, c.draw, c.sample)
        if key not in asked or key in found:
            what = "twice" if key in found else "without being asked"
            raise EngineError(
                f"the client returned prompt {key[0]!r} draw {key[1]} sample {key[2]} {what}: fix its ids"
            )
        found[key] = c
    faults = {key: fault for key, c in found.items() if (fault := _fault(c, params))}
    claimed = [key for key, c in found.items() if c.finish_reason != "error"]
    if (
        asked and len(faults) == len(found) and (claimed or not found)
    ):  # one bad completion is a record with a reason; a client without any good one is an error
        why = f"{claimed[0]}: {faults[claimed[0]]}" if claimed else "it returned nothing"
        raise EngineError(f"the client gave no usable completion for {len(asked)} asked ({why}): fix the client")

    # A completion with a fault loses its tokens, so that no later stage can train on them
    blank = {"token_ids": (), "logprobs": (), "spans": (), "finish_reason": "error"}
    for key, fault in faults.items():
        found[key] = replace(found[key], **blank, error=fault)  # type: ignore[arg-type]
    for key in [key for key in asked if key not in found]:
        found[key] = Completion.failed(asked[key], key[2], 0, "the client returned no completion")
    return [found[key] for key in asked]


def judge_completions(verify: Verify, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Judged:
    """One verdict per completion, in order, and the values that reward functions logged.

    verify gets every completion that did not fail, once, with its prompt; it returns one Verdict for each, or Judged.
    A failed completion is unscored, with its reason. If verify raises an exception, all completions given to it are
    unscored with that exception as the reason; a TinyLLMError passes through. A reward beyond 1e100 is unscored too.
    Raises RewardError when verify returns a wrong number of verdicts, or objects other than verdicts.
    """
    by_id = {(p.id, p.draw): p for p in prompts}
    place = {i: n for n, i in enumerate(i for i, c in enumerate(completions) if c.finish_reason != "error")}
    given = [completions[i] for i in place]
    verdicts: Sequence[Verdict] = []
    logged = Logged()
    try:
        result = verify([by_id[c.prompt_id, c.draw] for c in given], given) if given else []
        verdicts, logged = (result.verdicts, result.logged) if isinstance(result, Judged) else (result, logged)
    except TinyLLMError:
        raise
    except Exception as error:  # noqa: BLE001 - not hidden: the recorded reason of every rollout it leaves unscored
        reason = f"verifier raised {type(error).__name__}: {' '.join(str(error).split())}"
        verdicts = [Verdict(None, reason=reason)] * len(given)
    count = len(verdicts) if isinstance(verdicts, Sequence) else None
    if count != len(given) or not all(isinstance(v, Verdict) for v in verdicts):
        what = f"{count} verdicts" if count not in (None, len(given)) else "something other than verdicts"
        raise RewardError(f"the verifier returned {what} for {len(given)} completions: return one Verdict for each")
    # A failed completion has no value, so group_advantages leaves it out of its group's mean and std
    return Judged(
        tuple(
            _bounded(verdicts[place[i]])
            if i in place
            else Verdict(None, c.error or "the sampler failed without a reason")
            for i, c in enumerate(completions)
        ),
        Logged(
            logged.metrics,
            {
                name: [column[place[i]] if i in place else None for i in range(len(completions))]
                for name, column in logged.extras.items()
            },
        ),
    )


def group_rollouts(
    prompts: Sequence[Prompt], completions: Sequence[Completion], verdicts: Sequence[Verdict]
) -> list[Group]:
    """One group per prompt, from completions and their verdicts at the same index."""
    members: dict[tuple[str, int], list[Rollout]] = {(p.id, p.draw): [] for p in prompts}
    for c, v in zip(completions, verdicts, strict=True):
        members[c.prompt_id, c.draw].append(Rollout(c, v))
    return [Group(p, tuple(members[p.id, p.draw])) for p in prompts]


def _fault(c: Completion, params: SamplingParams) -> str | None:
    """Why a completion cannot be trained on, or None."""
    if c.finish_reason == "error":
        return c.error or "the sampler failed without a reason"
    ids, sampled = c.token_ids or (), c.sampled if c.spans else None
    if sampled is not None and len(sampled) != len(ids):
        return f"spans of {len(sampled)} tokens for {len(ids)} token ids"
    fault = fault_of(ids, c.logprobs or (), c.finish_reason, params, sampled=sampled)
    return None if fault is None else fault[1]


def _bounded(v: Verdict) -> Verdict:
    """The verdict, unscored if group_advantages would refuse its value: one extreme reward must not end a run."""
    if v.value is None or abs(v.value) <= _LARGEST_REWARD:
        return v
    return replace(v, value=None, reason=f"reward {v.value:g} is beyond {_LARGEST_REWARD:g}")
