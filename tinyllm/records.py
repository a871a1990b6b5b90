"""The frozen records that flow from hop to hop: prompts, completions, verdicts, rollouts, groups.

Standard library only. Nothing here is filled in later or edited in place: a hop that learns more makes a new record.
What can be derived (advantages, losses, KL) is not stored here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]
"""stop: a stop token or stop string was drawn; length: the token limit cut it; error: the sampler failed."""


@dataclass(frozen=True, slots=True)
class Revision:
    """Which weights sampled a completion: the optimizer step they come from and the hash of their content."""

    step: int
    hash: str

    def __str__(self) -> str:
        return f"{self.step}:{self.hash[:12]}"


@dataclass(frozen=True, slots=True)
class RevisionSpan:
    """Tokens [start, end) of a completion that came from one place: the weights of one revision, or the environment."""

    revision: Revision | None
    """Of the weights that sampled these tokens; None: nobody sampled them, the environment gave them."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, already rendered to token ids, with the task row its completions are verified against."""

    id: str
    """Identity of the data row; stable over epochs, runs and shuffles."""
    token_ids: tuple[int, ...]
    text: str
    """What token_ids say, special tokens included."""
    row: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The task row: gold answer and whatever else its verifier reads."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat form, when the prompt is a chat; None for raw text."""
    draw: int = 0
    """How often this row was already drawn within the step (a refill or a small data set draws it again)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that decides what is sampled. Nothing is inherited from a model's generation config."""

    max_new_tokens: int
    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0 is greedy decoding; log-probabilities are then those of the softmax at temperature 1."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    """The run's sampling seed; with step, prompt id, draw, sample and position it keys every random number."""
    step: int = 0

    @property
    def full_support(self) -> bool:
        """Whether every token of the vocabulary can be drawn (no top-k, top-p, min-p)."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p <= 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What the sampler returned for one (prompt, draw, sample)."""

    prompt_id: str
    draw: int
    sample: int
    token_ids: tuple[int, ...]
    """The completion's ids, the stop token included."""
    logprobs: tuple[float | None, ...]
    """One natural-log probability per token, under the distribution the token was really drawn from; None for a token
    that the environment gave."""
    finish_reason: FinishReason
    seed_key: int
    """64-bit key from which this completion's random numbers were derived."""
    revision: Revision
    """Of the weights that drew the first token, which are the oldest."""
    text: str
    """Decoded completion without special tokens and without a trailing stop string."""
    error: str | None = None
    """Why sampling failed (finish_reason "error"), else None."""
    spans: tuple[RevisionSpan, ...] = ()
    """Which weights drew which tokens, and which the environment gave; empty: all are of `revision`.

    The keys and values of earlier tokens are kept across an update: a token's distribution is that of its own weights
    on what the weights before have left in the cache.
    """

    @property
    def all_spans(self) -> tuple[RevisionSpan, ...]:
        """`spans`, also for a completion whose tokens are all of one revision."""
        return self.spans or (RevisionSpan(self.revision, 0, len(self.token_ids)),)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """One flag per token: whether it was sampled (and so is trained, counted and divided by), or given."""
        return tuple(span.revision is not None for span in self.all_spans for _ in range(span.start, span.end))

    @classmethod
    def failed(cls, prompt: Prompt, sample: int, seed_key: int, reason: str) -> Completion:
        """A completion that could not be sampled: data with a reason, and no token that anything could train on."""
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
    """Why what a sampler returned cannot be trained on, as (a few words to count by, the details), or None.

    sampled: one flag per token, False where the environment gave it and so has no log-probability; None: all were.
    """
    if finish_reason not in ("stop", "length"):  # such as "abort": cut short by no rule of ours
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
    """Whether this is a log-probability: a finite number, above 0 by no more than the rounding of a certain token."""
    return isinstance(value, Real) and not isinstance(value, bool) and -1e9 < value <= 1e-3  # type: ignore[operator]


class Unscored(StrEnum):
    """Why a verdict has no value, as programs ask for it; people read the verdict's reason."""

    NOT_APPLICABLE = "not_applicable"
    """A reward function returned None: the row is for other functions."""
    NOT_FINITE = "not_finite"
    """A reward is NaN or infinite, or beyond what a float can hold."""
    RAISED = "raised"
    """A reward function or a verifier raised an exception."""
    TIMED_OUT = "timed_out"
    """Judging took longer than its limit."""
    DIED = "died"
    """The worker process, or the sandbox within it, broke while it judged."""
    BAD_TASK = "bad_task"
    """The row's task or gold answer cannot be used."""
    SAMPLING_FAILED = "sampling_failed"
    """There is no completion to judge."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement: a finite value, or unscored (value None) with a named reason; never NaN."""

    value: float | None
    reason: str | None = None
    """Why there is no value; None when there is one."""
    answer: str | None = None
    """The answer that was extracted and judged, if any."""
    parts: tuple[tuple[str, float], ...] = ()
    """Named reward parts before weighting, e.g. (("correct", 1.0), ("format", 0.0))."""
    cause: Unscored | None = field(default=None, compare=False)
    """The kind of `reason`, known while a run judges. Not recorded, and no part of what replay compares."""

    def __post_init__(self) -> None:
        if self.value is None:
            assert self.reason, "an unscored verdict names its reason"
        else:
            assert math.isfinite(self.value), f"a verdict's value is finite, got {self.value}"
        # What is trained on is what the record gives back: 1, True and numpy's numbers are 1.0 there
        plain = {
            "value": None if self.value is None else float(self.value),
            "reason": None if self.reason is None else _recordable(self.reason),
            "answer": None if self.answer is None else _recordable(self.answer),
            "parts": tuple((name, float(value)) for name, value in self.parts),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def _recordable(text: Any) -> str:
    """Text that UTF-8 can hold: half a surrogate pair (JSON can bring one) is written as its escape."""
    return str(text).encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Logged:
    """What reward functions logged while they judged."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """One number by name, "function/name"."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns by name: one value per completion given to the judge, in order; None for one that was not judged."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What judging returns: one verdict per completion, in order, and what was logged on the way."""

    verdicts: tuple[Verdict, ...]
    logged: Logged = Logged()


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its verdict."""

    completion: Completion
    verdict: Verdict

    @property
    def reward(self) -> float:
        """The verdict's value; NaN when unscored (the mark that group_advantages leaves out)."""
        return math.nan if self.verdict.value is None else self.verdict.value


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one (prompt, draw); what advantages are computed within."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def id(self) -> str:
        return f"{self.prompt.id}#{self.prompt.draw}"


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one optimizer step is made from: what every source yields and the loop trains on."""

    number: int
    """From 1."""
    groups: tuple[Group, ...]
    logged: Logged = Logged()
    """What reward functions logged; extras have one value per rollout, group after group."""
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Wall-clock time of each part ("sample_s", "verify_s"). Not part of what is derived again."""
    prompts: int = 0
    """How many prompts of the run's order the step used."""
    recorded: bool = False
    """Whether the record on disk holds this step already."""
