"""The frozen records that pass from stage to stage: prompts, completions, verdicts, rollouts, groups, steps.

Standard library only. No field is filled in later or edited in place: a stage that knows more makes a new record.
Numbers that can be derived from these records (advantages, losses, KL) are not stored in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]
"""stop: a stop token or stop string was sampled; length: the token limit was reached; error: sampling failed."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A version of the policy's weights: the optimizer step that made them and the hash of their content."""

    step: int
    hash: str

    def __str__(self) -> str:
        return f"{self.step}:{self.hash[:12]}"


@dataclass(frozen=True, slots=True)
class RevisionSpan:
    """Tokens [start, end) of a completion with one origin: the weights of one revision, or the environment."""

    revision: Revision | None
    """Revision of the weights that sampled these tokens; None for tokens that the environment inserted."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, already rendered to token ids, and the task row that its completions are verified against."""

    id: str
    """Identity of the data row; stable over epochs, runs and shuffles."""
    token_ids: tuple[int, ...]
    text: str
    """The text of token_ids, special tokens included."""
    row: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The task row: the gold answer and all other columns that the verifier reads."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The messages of a chat prompt; None for raw text."""
    draw: int = 0
    """How often the step drew this row before; above 0 after a refill or where an epoch ends within the step."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """All settings of sampling. Nothing is inherited from the model's generation config."""

    max_new_tokens: int
    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0: greedy decoding, whose recorded log-probabilities are those of the softmax at temperature 1."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    """The run's sampling seed; every random number is a hash of seed, step, prompt id, draw, sample and position."""
    step: int = 0

    @property
    def full_support(self) -> bool:
        """Whether every token of the vocabulary can be sampled: no top-k, top-p or min-p."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p <= 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The token ids, log-probabilities and text sampled for one (prompt, draw, sample)."""

    prompt_id: str
    draw: int
    sample: int
    token_ids: tuple[int, ...]
    """Ids of all tokens, the stop token included."""
    logprobs: tuple[float | None, ...]
    """Natural-log probability of each token under the distribution that it was sampled from; None for a token that the
    environment inserted."""
    finish_reason: FinishReason
    seed_key: int
    """64-bit key from which this completion's random numbers are derived."""
    revision: Revision
    """Revision of the weights that sampled the first token: the oldest of the completion."""
    text: str
    """The decoded completion, without special tokens and without a trailing stop string."""
    error: str | None = None
    """Why sampling failed; None unless finish_reason is "error"."""
    spans: tuple[RevisionSpan, ...] = ()
    """The origin of every token; empty: all tokens were sampled by the weights of `revision`.

    The KV cache is kept across a weight update: a token sampled after the update comes from the new weights, applied to
    keys and values that the old weights computed.
    """

    @property
    def all_spans(self) -> tuple[RevisionSpan, ...]:
        """`spans`, or one span of all tokens where `spans` is empty."""
        return self.spans or (RevisionSpan(self.revision, 0, len(self.token_ids)),)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """One flag per token: True where the policy sampled it, False where the environment inserted it.

        Only sampled tokens are trained and counted in lengths and denominators.
        """
        return tuple(span.revision is not None for span in self.all_spans for _ in range(span.start, span.end))

    @classmethod
    def failed(cls, prompt: Prompt, sample: int, seed_key: int, reason: str) -> Completion:
        """The record of a completion that could not be sampled: a reason, and no tokens to train on."""
        return cls(prompt.id, prompt.draw, sample, (), (), "error", seed_key, Revision(-1, ""), "", error=reason)


def fault_of(
    token_ids: Sequence[Any],
    logprobs: Sequence[Any],
    finish_reason: Any,
    params: SamplingParams,
    *,
    vocab_size: int = 2**31,
    sampled: Sequence[bool] | None = None,
) -> tuple[str, str] | None:
    """Why a sampler's output cannot be trained on, as (short name to count by, details); None for a usable output.

    sampled: one flag per token, False for a token that the environment inserted, which has no log-probability; None:
    every token was sampled.
    """
    if finish_reason not in ("stop", "length"):  # such as a server's "abort": the completion is not whole
        return "cut short", f"finish reason {finish_reason!r}: only 'stop' and 'length' are whole completions"
    if len(token_ids) != len(logprobs):
        words = f"{len(token_ids)} token ids with {len(logprobs)} log-probabilities"
        return "ids and log-probabilities differ", words
    if len(token_ids) == 0:
        return "empty", "0 token ids with 0 log-probabilities"
    flags = sampled or (True,) * len(token_ids)
    for position, (token, logprob, drawn) in enumerate(zip(token_ids, logprobs, flags, strict=True)):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:  # type: ignore[operator]
            return "bad token id", f"id of token {position} is {token!r}"
        if not (is_logprob(logprob) if drawn else logprob is None):
            return "bad log-probability", f"log-probability of token {position} is {logprob!r}"
    if sum(flags) > params.max_new_tokens:
        return "too long", f"{sum(flags)} tokens, but max_new_tokens is {params.max_new_tokens}"
    only_tokens_stop = params.stop_token_ids and not params.stop_strings
    if finish_reason == "stop" and only_tokens_stop and token_ids[-1] not in params.stop_token_ids:
        return "stop token dropped", f"it stopped, but its last token {token_ids[-1]} is no stop token"
    return None


def is_logprob(value: Any) -> bool:
    """Whether a value is a log-probability: a finite number, above 0 by rounding errors at most."""
    return isinstance(value, Real) and not isinstance(value, bool) and -1e9 < value <= 1e-3  # type: ignore[operator]


class Unscored(StrEnum):
    """The kind of reason why a verdict has no value, for programs; `Verdict.reason` is the text for people."""

    NOT_APPLICABLE = "not_applicable"
    """A reward function returned None: this row is scored by other functions."""
    NOT_FINITE = "not_finite"
    """A reward is NaN, infinite, or too large for a float."""
    RAISED = "raised"
    """A reward function or a verifier raised an exception."""
    TIMED_OUT = "timed_out"
    """Judging took longer than its limit."""
    DIED = "died"
    """The worker process, or the sandbox within it, ended while it judged."""
    BAD_TASK = "bad_task"
    """The row's task or gold answer cannot be used."""
    SAMPLING_FAILED = "sampling_failed"
    """Sampling failed, so there is no completion to judge."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement: a finite value, or unscored (value None) with a named reason; never NaN."""

    value: float | None
    reason: str | None = None
    """Why the verdict has no value; None when it has one."""
    answer: str | None = None
    """The answer that was extracted and judged, if any."""
    parts: tuple[tuple[str, float], ...] = ()
    """Named reward parts before weighting, e.g. (("correct", 1.0), ("format", 0.0))."""
    cause: Unscored | None = field(default=None, compare=False)
    """The kind of `reason`, known only while a run judges: it is not recorded, and replay does not compare it."""

    def __post_init__(self) -> None:
        if self.value is None:
            assert self.reason, "an unscored verdict names its reason"
        else:
            assert math.isfinite(self.value), f"a verdict's value is finite, got {self.value}"
        # Training must see the values that the record gives back: 1, True and numpy's numbers are read back as 1.0
        plain = {
            "value": None if self.value is None else float(self.value),
            "reason": None if self.reason is None else _recordable(self.reason),
            "answer": None if self.answer is None else _recordable(self.answer),
            "parts": tuple((name, float(value)) for name, value in self.parts),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def _recordable(text: Any) -> str:
    """The text with lone surrogates (JSON may contain them) replaced by their escapes, so that UTF-8 can encode it."""
    return str(text).encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Logged:
    """Numbers and columns that reward functions logged while they judged."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """One number per name; a name is "function/name"."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns by name: one value per completion, in order; None for a completion that was not judged."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A judge's result: one verdict per completion, in order, and the numbers that reward functions logged."""

    verdicts: tuple[Verdict, ...]
    logged: Logged = Logged()


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its verdict."""

    completion: Completion
    verdict: Verdict

    @property
    def reward(self) -> float:
        """The verdict's value; NaN when unscored, which group_advantages leaves out of the group."""
        return math.nan if self.verdict.value is None else self.verdict.value


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one (prompt, draw); advantages compare rollouts within a group."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def id(self) -> str:
        return f"{self.prompt.id}#{self.prompt.draw}"


@dataclass(frozen=True, slots=True)
class Step:
    """The rollouts of one training step, as a source yields them and the loop trains on them."""

    number: int
    """From 1."""
    groups: tuple[Group, ...]
    logged: Logged = Logged()
    """Numbers and columns that reward functions logged; columns have one value per rollout, group after group."""
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Wall-clock seconds of each part ("sample_s", "verify_s"); replay does not compare them."""
    prompts: int = 0
    """How many prompts the step took from the run's prompt order."""
    recorded: bool = False
    """Whether the run directory already holds this step."""
