"""Group Relative Policy Optimization: the paper as code, in three sections.

    1. Grouped advantages   rewards of one prompt's completions -> how much better each is than its group
    2. Clipped objective    log-probabilities and advantages    -> loss to minimize, numbers to watch
    3. Rollout client       prompts                             -> sampled, verified groups

Needs torch, the records and the table of axes; no model, no trainer: every function runs with five floats. What each
axis means and which values it has stands in axes.py, with the published presets.

Legend: B rollouts (rows), T completion tokens (columns, padded), G rollouts of one group.
Log-probabilities are natural logarithms of the probability of the sampled token, under the same temperature the
sampler used.
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
"""A batched verifier: lists of equal length in, one Verdict for each pair out, in the same order."""

_LARGEST_REWARD = 1e100  # its square is still a number


# ---------------------------------------------------------------------------------------------------------------------
# 1. Grouped advantages
# ---------------------------------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, baseline: Baseline = "mean", scale: Scale = "std", eps: float = 1e-6
) -> Tensor:
    """How much better each rollout is than its group.

        A_i = (r_i - b_i) / (std + eps)     b_i: mean of the group, or of the others (leave_one_out)

    rewards [B] float; group_ids [B] integers, any values in any order: groups are cut by id, never by position.
    Returns A [B] in the rewards' type (fp32 when that is whole numbers) and on their device, without gradient.
    std is the population one (divided by G), of the whole group with either baseline; scale "none" leaves it out.
    With the mean baseline the advantages of a group add up to 0, and |A| is at most sqrt(G - 1).
    A group whose members are all equal gives exactly 0, and so does a group of one: nothing is learned from it.
    NaN marks an unscored (or excluded) rollout: it is left out of mean and std, and its advantage is 0.
    Raises RewardError naming the row for inf (or beyond 1e100), and where A is beyond the rewards' type; ConfigError
    for an unknown axis value or eps < 0.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; scale "none": Dr. GRPO, arXiv:2503.20783, section 3.
    """
    check_axes(baseline=baseline, scale=scale)
    require_number("eps", eps)
    assert rewards.ndim == 1 and rewards.shape == group_ids.shape, f"{rewards.shape} rewards, {group_ids.shape} ids"
    # B numbers that come from the host anyway: on the CPU in fp64, the sums are the same on every device
    r = rewards.detach().to("cpu", torch.float64)
    wild = torch.nonzero(r.abs() > _LARGEST_REWARD).flatten().tolist()
    if wild:
        row = wild[0]
        raise RewardError(f"reward of row {row} is {r[row]:g}: return a finite number, or NaN for an unscored row")
    ids, group = torch.unique(group_ids.detach().cpu(), return_inverse=True)
    scored = ~r.isnan()

    def of_group(x: Tensor, how: str = "sum") -> Tensor:
        """Reduce x [B] over the scored members of each group, then give every row its group's number. [B]"""
        result = torch.zeros(len(ids), dtype=x.dtype)
        return result.scatter_reduce_(0, group[scored], x[scored], how, include_self=False)[group]

    size = of_group(torch.ones_like(r))
    centered = r - of_group(r) / size
    std = (of_group(centered**2) / size).sqrt()  # two passes: the squares are of small numbers
    # Leaving r_i out of its own baseline: r_i - sum of the others / (n - 1) = n / (n - 1) (r_i - mean)
    advantage = centered * size / (size - 1) if baseline == "leave_one_out" else centered
    if scale == "std":
        advantage = advantage / (std + eps)
    # Equal members say nothing, exactly: members are compared, because a computed std of equal numbers is noise
    differ = scored & (of_group(r, "amax") > of_group(r, "amin"))
    kind = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()  # whole numbers would cut A
    result = torch.where(differ, advantage, 0.0).to(rewards.device, kind)
    if not result.isfinite().all():
        raise RewardError(f"advantages of rewards up to {r.abs().nan_to_num().max():g} do not fit {kind}: scale them")
    return result


# ---------------------------------------------------------------------------------------------------------------------
# 2. Clipped objective
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectiveStats:
    """What one call of clipped_objective saw: sums over its trained tokens, so that parts of a step can be added.

    `a + b` merges two micro-batches (or ranks), `sum(parts, ObjectiveStats())` a whole step; the properties are then
    means over all trained tokens of the step. policy_loss and kl_loss are shares of the step's loss: they add up to it
    when every part was given the step's denominator.
    """

    policy_loss: float = 0.0
    """The policy term of the loss."""
    kl_loss: float = 0.0
    """beta times the aggregated KL; loss = policy_loss + kl_loss."""
    rows: float = 0.0
    """Completions with a trained token."""
    zero_rows: float = 0.0
    """Those of them with advantage 0 at every trained token."""
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
    """Trained tokens whose gap was measured: logp_sampler was given, and gap_mask was true."""
    gap_sum: float = 0.0
    gap_max: float = 0.0
    """Largest |logp_old - logp_sampler|."""
    gap_kl: float = 0.0
    gap_equal: float = 0.0
    weight_sum: float = 0.0

    def __add__(self, other: ObjectiveStats) -> ObjectiveStats:
        """Sum of sums, maximum of maxima."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return ObjectiveStats(**{name: max(ab) if name.endswith("_max") else sum(ab) for name, ab in pairs.items()})

    @property
    def ratio_mean(self) -> float:
        """Mean of q over trained tokens; exactly 1 on policy."""
        return self.ratio_sum / max(self.tokens, 1)

    @property
    def clip_fraction_low(self) -> float:
        """Share of trained tokens whose update the lower bound stopped (looks at the sign of A)."""
        return self.clipped_low / max(self.tokens, 1)

    @property
    def clip_fraction_high(self) -> float:
        """Share of trained tokens whose update the upper bound stopped (looks at the sign of A)."""
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
        """Mean |logp_old - logp_sampler| over trained tokens; None when logp_sampler was not given."""
        return self.gap_sum / self.gap_tokens if self.gap_tokens else None

    @property
    def sampler_kl(self) -> float | None:
        """Mean k3 estimate of KL(sampler || trainer) per trained token, d = logp_old - logp_sampler; None as above."""
        return self.gap_kl / self.gap_tokens if self.gap_tokens else None

    @property
    def sampler_equal_share(self) -> float | None:
        """Share of trained tokens with logp_old == logp_sampler, bit for bit; None as above."""
        return self.gap_equal / self.gap_tokens if self.gap_tokens else None

    @property
    def sampler_weight(self) -> float | None:
        """Mean importance weight after the cap; 1 without a correction; None as above."""
        return self.weight_sum / self.gap_tokens if self.gap_tokens else None


def step_denominator(mask: Tensor, aggregate: Aggregate, constant_length: int | None = None) -> float:
    """N of clipped_objective for a whole optimizer step: what its summed loss is divided by.

        sequence  completions with a trained token
        token     trained tokens
        constant  B x L: all rows, masked ones too, times constant_length

    mask [B, T] or [B], true where a token is trained. It adds up over micro-batches and ranks: pass each part of the
    step the sum over all parts. Raises ConfigError for "constant" without a constant_length of at least 1.
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
    """The loss of GRPO and its relatives, to be minimized, and what was seen on the way.

        q    = exp(logp_new - logp_old)
        loss = 1/N sum_i n_i sum_t [ -w min(q A, clip(q, 1 - clip_low, 1 + clip_high) A) + beta KL(logp_new, logp_ref) ]

    n_i is 1/|o_i| with aggregate "sequence" and 1 otherwise; N is `denominator`; w is 1 without a sampler correction.

    logp_new, logp_old, logp_ref, logp_sampler, mask: [B, T], or [B] (one token each) with mask None or [B].
    advantages: [B], or [B, T] for one per token. mask is true (nonzero) where a token is trained; None means
    everywhere. Only logp_new is differentiated; no argument is written to. Loss: 0-d, in logp_new's type but at least
    fp32.

    Masked positions may hold NaN or inf in any argument: they change neither loss nor gradient. A row that is
    unscored or excluded is masked by the caller, and then its KL does not count either. Everything masked gives loss
    0 and gradient 0. q past exp(20) goes on along the tangent, so that a wild ratio stays finite and visible
    (ratio_max).

    denominator: N of the whole optimizer step, from step_denominator over all its micro-batches and ranks; the summed
    gradient then does not depend on how the step was cut. None: this call is the whole step. constant_length is L.
    beta: weight of the KL; kl names its estimator (see kl_estimate; k1 is refused when beta > 0). With beta 0 the KL is
    still reported when logp_ref is given.
    logp_sampler: what the sampler reported, when it may differ from logp_old. sampler_correction weights the policy
    term by w = exp(logp_old - logp_sampler), per token or as the product over the sequence, without gradient; above
    sampler_cap it is cut to it ("truncate") or the token is left out but still counted in N ("mask").
    gap_mask: [B], or [B, T], true where the gap between logp_old and logp_sampler is measured; None: at every trained
    token. It decides about the statistics alone, never about the loss.

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
                              the forward KL(ref || policy). Past d = 20 it goes on along its tangent: value and
                              gradient are finite and not zero at +-100
        k2 = d^2 / 2          at least 0, biased; as a loss its on-policy gradient is that of the reverse
                              KL(policy || ref)
        k1 = -d               unbiased, either sign; as a loss its on-policy gradient is 0 in expectation: refused there

    Arguments and result have one shape; the result is at least fp32. Differentiable in logp. Raises ConfigError for an
    unknown kl.
    Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath, arXiv:2402.03300, eq. 4.
    """
    check_axes(kl=kl)
    assert logp.shape == logp_ref.shape, f"log-probabilities {tuple(logp.shape)}, reference {tuple(logp_ref.shape)}"
    d = _wide(logp_ref) - _wide(logp)  # fp16 ends at exp(11)
    if kl == "k1":
        return -d
    if kl == "k2":
        return d**2 / 2
    near = d.clamp(max=20.0)
    return torch.expm1(near) + torch.exp(near) * (d - near) - d  # past 20 along the tangent, as in _exp


def _exp(x: Tensor) -> Tensor:
    """exp(x), past 20 along its tangent: value and gradient stay finite, and the gradient does not vanish."""
    near = x.clamp(max=20.0)
    return torch.exp(near) * (1 + (x - near))


def _surrogate(q: Tensor, A: Tensor, logp: Tensor, clip: Clip, low: float, high: float, dual_clip: float) -> Tensor:
    """What is maximized, per token: min(q A, clip(q) A), its dual clip, or CISPO's constant weight times A logp."""
    clipped = q.clamp(1 - low, 1 + high)
    if clip == "cispo":
        return clipped.detach() * A * logp
    pessimistic = torch.minimum(q * A, clipped * A)
    if clip == "dual":
        return torch.where(A < 0, torch.maximum(pessimistic, dual_clip * A), pessimistic)
    return pessimistic


def _sampler_weight(log_w: Tensor, level: SamplerCorrection, mode: SamplerMode, cap: float) -> Tensor:
    """Importance weight of the trainer's old policy over the sampler; above the cap it is cut to it, or to 0."""
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
    """A mask [B, T], or [B] with one flag per row, as bool on the device of `mask`, to be broadcast over it."""
    x = x.to(mask.device, torch.bool)
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    assert x.shape in (mask.shape, (len(mask), 1)), f"{tuple(x.shape)} does not fit {tuple(mask.shape)}"
    return x


def _wide(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _read(x: Tensor, mask: Tensor, per_row: bool = False) -> Tensor:
    """[B, T], or [B] where T is 1 or x has one number per row. What is masked, NaN too, becomes 0 before any use."""
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    fits = x.shape == mask.shape or (per_row and x.shape == (len(mask), 1))
    assert fits, f"{tuple(x.shape)} does not fit {tuple(mask.shape)}"
    return torch.where(mask, _wide(x.to(mask.device)), 0.0)


def _aggregated(x: Tensor, mask: Tensor, aggregate: Aggregate, denominator: float | Tensor) -> Tensor:
    """Tokens to rows, rows to one number, over the step's denominator (0 when nothing is trained: the sum is 0)."""
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
    """Whatever samples: the embedded engine, a server, a pool.

    A client returns the ids that were sampled, stop token included, and one log-probability per id under the
    distribution the token was really drawn from. It never tokenizes text again, and raises EngineError when its source
    gives no ids or no log-probabilities.
    """

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of each prompt, in any order; one that failed has finish_reason "error" and a reason."""
        ...


def collect_groups(
    client: RolloutClient, prompts: Sequence[Prompt], params: SamplingParams, verify: Verify
) -> list[Group]:
    """Sample all prompts, verify what came back, and group it: params.n rollouts per prompt, prompts in their order.

    Completions are matched to prompts by (prompt_id, draw, sample), never by position. verify is called once, with
    every usable completion exactly once beside its prompt; not at all when there is none. A failure is data: an
    unscored rollout with its reason, whose completion has finish_reason "error" and no tokens (see _fault for what
    counts as one). Raises EngineError and RewardError as check_completions and judge_completions do.
    """
    completions = check_completions(client.sample(prompts, params), prompts, params)
    return group_rollouts(prompts, completions, judge_completions(verify, prompts, completions).verdicts)


def check_completions(
    returned: Sequence[Completion], prompts: Sequence[Prompt], params: SamplingParams
) -> list[Completion]:
    """What a client returned, put in order: params.n completions per prompt, prompt after prompt, sample after sample.

    One that is missing, or that nothing can be trained on, is a failed completion with its reason. Raises EngineError
    for a completion that was not asked for or is there twice, and when nothing of what the client claims is usable.
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
    ):  # one bad completion is data; a bad client is not
        why = f"{claimed[0]}: {faults[claimed[0]]}" if claimed else "it returned nothing"
        raise EngineError(f"the client gave no usable completion for {len(asked)} asked ({why}): fix the client")

    # Without tokens nothing downstream can train on a completion that has a fault
    blank = {"token_ids": (), "logprobs": (), "spans": (), "finish_reason": "error"}
    for key, fault in faults.items():
        found[key] = replace(found[key], **blank, error=fault)  # type: ignore[arg-type]
    for key in [key for key in asked if key not in found]:
        found[key] = Completion.failed(asked[key], key[2], 0, "the client returned no completion")
    return [found[key] for key in asked]


def judge_completions(verify: Verify, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Judged:
    """One verdict per completion, in order, and what was logged for it.

    verify gets every completion that did not fail, once, beside its prompt; it returns one Verdict for each, or Judged.
    A completion that failed is unscored with its reason. If verify raises, everything it was given is unscored with
    what it raised; our own errors pass through. A reward beyond 1e100 is unscored too. Raises RewardError when verify
    returns another number of verdicts, or something else.
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
    # Without a value a failed completion leaves mean and std of its group
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
    """One group per prompt: its completions, each with the verdict at the same place."""
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
    """A value that group_advantages would refuse is unscored, so that one wild reward does not end a run."""
    if v.value is None or abs(v.value) <= _LARGEST_REWARD:
        return v
    return replace(v, value=None, reason=f"reward {v.value:g} is beyond {_LARGEST_REWARD:g}")
