"""The contract of grpo.py: every public name with its meaning, shapes, units, errors and source.

grpo.py has the same docstrings above its code; a course workspace must fulfil this file. The choices on each axis, with
their meanings, and the published presets are in tinyllm/axes.py.

Legend: B rollouts (rows), T completion tokens (columns, padded), G rollouts of one group.
Log-probabilities are natural logarithms of the probability of the sampled token, at the sampler's temperature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from tinyllm.axes import KL, Aggregate, Baseline, Clip, Ratio, SamplerCorrection, SamplerMode, Scale
from tinyllm.records import Completion, Group, Judged, Prompt, SamplingParams, Verdict

Verify: TypeAlias = Callable[[list[Prompt], list[Completion]], Sequence[Verdict] | Judged]
"""A batched verifier: (prompts, completions), lists of equal length -> one Verdict per pair, in the same order."""

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

    @property
    def ratio_mean(self) -> float:
        """Mean of q over trained tokens; exactly 1 on policy."""

    @property
    def clip_fraction_low(self) -> float:
        """Share of trained tokens at which the lower bound of q takes effect (see clipped_low)."""

    @property
    def clip_fraction_high(self) -> float:
        """Share of trained tokens at which the upper bound of q takes effect (see clipped_high)."""

    @property
    def zero_advantage_share(self) -> float:
        """Share of trained rows with advantage 0."""

    @property
    def kl(self) -> float | None:
        """Mean KL estimate per trained token, also with beta 0; None when no reference was given."""

    @property
    def sampler_gap(self) -> float | None:
        """Mean |logp_old - logp_sampler| over the tokens of gap_tokens, in nats; None when there are none."""

    @property
    def sampler_kl(self) -> float | None:
        """Mean k3 estimate of KL(sampler || trainer) over gap_tokens, d = logp_old - logp_sampler; None without any."""

    @property
    def sampler_equal_share(self) -> float | None:
        """Share of gap_tokens with logp_old == logp_sampler, bit for bit; None without any."""

    @property
    def sampler_weight(self) -> float | None:
        """Mean importance weight after the cap over gap_tokens; 1 without a correction; None without any."""

def step_denominator(mask: Tensor, aggregate: Aggregate, constant_length: int | None = None) -> float:
    """The denominator N of clipped_objective for a whole optimizer step.

        sequence  completions with a trained token
        token     trained tokens
        constant  B x L: all rows, masked ones too, times constant_length

    mask [B, T] or [B], true where a token is trained. The denominators of micro-batches and ranks add up to the step's:
    give their sum to clipped_objective for every part. Raises ConfigError for "constant" without a constant_length of
    at least 1.
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

class RolloutClient(Protocol):
    """A sampler of completions: the embedded engine, a server, a pool.

    A client returns the token ids that were sampled, stop token included, and one log-probability per id under the
    distribution that the token was sampled from. It never tokenizes text again, and raises EngineError when it receives
    no ids or no log-probabilities. A single failed completion is returned with finish_reason "error" and the reason.
    """

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions for each prompt, each with its (prompt_id, draw, sample), in any order."""

def collect_groups(
    client: RolloutClient, prompts: Sequence[Prompt], params: SamplingParams, verify: Verify
) -> list[Group]:
    """Sample all prompts, verify the completions and group them: params.n rollouts per prompt, in the prompts' order.

    Completions are matched to prompts by (prompt_id, draw, sample), never by position. verify is called once, with
    every usable completion and its prompt; it is not called when no completion is usable. A failed completion is data:
    an unscored rollout with the reason, finish_reason "error" and no tokens. Raises EngineError and RewardError as
    check_completions and judge_completions do.
    """

def check_completions(
    returned: Sequence[Completion], prompts: Sequence[Prompt], params: SamplingParams
) -> list[Completion]:
    """A client's completions, checked and in order: params.n per prompt, prompt after prompt, sample after sample.

    A completion that is missing or cannot be trained on becomes a failed completion with the reason. Raises EngineError
    for a completion that was not requested or was returned twice, when the client returned nothing, and when every
    completion is unusable though the client marked at least one as successful.
    """

def judge_completions(verify: Verify, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Judged:
    """One verdict per completion, in order, and the values that reward functions logged.

    verify gets every completion that did not fail, once, with its prompt; it returns one Verdict for each, or Judged.
    A failed completion is unscored, with its reason. If verify raises an exception, all completions given to it are
    unscored with that exception as the reason; a TinyLLMError passes through. A reward beyond 1e100 is unscored too.
    Raises RewardError when verify returns a wrong number of verdicts, or objects other than verdicts.
    """

def group_rollouts(
    prompts: Sequence[Prompt], completions: Sequence[Completion], verdicts: Sequence[Verdict]
) -> list[Group]:
    """One group per prompt, from completions and their verdicts at the same index."""
