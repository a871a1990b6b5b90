"""The contract of grpo.py: every public name with its meaning, shapes, units, errors and source.

The same words stand in grpo.py, above the code that keeps them; this file is what a course workspace is held to.
The choices on each axis, with their meanings, and the published presets are in tinyllm/axes.py.

Legend: B rollouts (rows), T completion tokens (columns, padded), G rollouts of one group.
Log-probabilities are natural logarithms of the probability of the sampled token, under the same temperature the
sampler used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from tinyllm.axes import KL, Aggregate, Baseline, Clip, Ratio, SamplerCorrection, SamplerMode, Scale
from tinyllm.records import Completion, Group, Judged, Prompt, SamplingParams, Verdict

Verify: TypeAlias = Callable[[list[Prompt], list[Completion]], Sequence[Verdict] | Judged]
"""A batched verifier: lists of equal length in, one Verdict for each pair out, in the same order."""

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

    @property
    def ratio_mean(self) -> float:
        """Mean of q over trained tokens; exactly 1 on policy."""

    @property
    def clip_fraction_low(self) -> float:
        """Share of trained tokens whose update the lower bound stopped (looks at the sign of A)."""

    @property
    def clip_fraction_high(self) -> float:
        """Share of trained tokens whose update the upper bound stopped (looks at the sign of A)."""

    @property
    def zero_advantage_share(self) -> float:
        """Share of trained rows with advantage 0."""

    @property
    def kl(self) -> float | None:
        """Mean KL estimate per trained token, also with beta 0; None when no reference was given."""

    @property
    def sampler_gap(self) -> float | None:
        """Mean |logp_old - logp_sampler| over trained tokens; None when logp_sampler was not given."""

    @property
    def sampler_kl(self) -> float | None:
        """Mean k3 estimate of KL(sampler || trainer) per trained token, d = logp_old - logp_sampler; None as above."""

    @property
    def sampler_equal_share(self) -> float | None:
        """Share of trained tokens with logp_old == logp_sampler, bit for bit; None as above."""

    @property
    def sampler_weight(self) -> float | None:
        """Mean importance weight after the cap; 1 without a correction; None as above."""

def step_denominator(mask: Tensor, aggregate: Aggregate, constant_length: int | None = None) -> float:
    """N of clipped_objective for a whole optimizer step: what its summed loss is divided by.

        sequence  completions with a trained token
        token     trained tokens
        constant  B x L: all rows, masked ones too, times constant_length

    mask [B, T] or [B], true where a token is trained. It adds up over micro-batches and ranks: pass each part of the
    step the sum over all parts. Raises ConfigError for "constant" without a constant_length of at least 1.
    """

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

class RolloutClient(Protocol):
    """Whatever samples: the embedded engine, a server, a pool.

    A client returns the ids that were sampled, stop token included, and one log-probability per id under the
    distribution it was really drawn from. It never tokenizes text again, and raises EngineError when its source gives
    no ids or no log-probabilities. A single completion that failed is returned with finish_reason "error" and its
    reason.
    """

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions for each prompt, each with its (prompt_id, draw, sample), in any order."""

def collect_groups(
    client: RolloutClient, prompts: Sequence[Prompt], params: SamplingParams, verify: Verify
) -> list[Group]:
    """Sample all prompts, verify what came back, and group it: params.n rollouts per prompt, prompts in their order.

    Completions are matched to prompts by (prompt_id, draw, sample), never by position. verify is called once, with
    every usable completion exactly once beside its prompt; not at all when there is none. A failure is data: an
    unscored rollout with its reason, whose completion has finish_reason "error" and no tokens (see _fault for what
    counts as one). Raises EngineError and RewardError as check_completions and judge_completions do.
    """

def check_completions(
    returned: Sequence[Completion], prompts: Sequence[Prompt], params: SamplingParams
) -> list[Completion]:
    """What a client returned, put in order: params.n completions per prompt, prompt after prompt, sample after sample.

    One that is missing, or that nothing can be trained on, is a failed completion with its reason. Raises EngineError
    for a completion that was not asked for or is there twice, and when nothing of what the client claims is usable.
    """

def judge_completions(verify: Verify, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Judged:
    """One verdict per completion, in order, and what was logged for it.

    verify gets every completion that did not fail, once, beside its prompt; it returns one Verdict for each, or Judged.
    A completion that failed is unscored with its reason. If verify raises, everything it was given is unscored with
    what it raised; our own errors pass through. A reward beyond 1e100 is unscored too. Raises RewardError when verify
    returns another number of verdicts, or something else.
    """

def group_rollouts(
    prompts: Sequence[Prompt], completions: Sequence[Completion], verdicts: Sequence[Verdict]
) -> list[Group]:
    """One group per prompt: its completions, each with the verdict at the same place."""
