"""The seam under the scheduler: a `Runner` holds the tensors (weights, keys and values, logits) and draws tokens.

    scheduler.py: queue, cached prompts, slots, forks, stops, text     plain Python
    Runner:       prefill, draw, start, decode, copy_slots, free       tensors

Keys and values are in one of two places. A *handle* names a sequence that is computed and will not change: any number
of running sequences may continue it. A *slot* holds one running sequence: the handle that it continues, and private
keys and values behind it. Slots 0 .. n-1 run, so a batch is a range of slots. Nothing in this file needs torch, and
another engine is one more file with a class of these methods.

Legend: n rows of a batch, one per running sequence; m samples that share a sequence because they drew the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from tinyllm.records import SamplingParams

Handle = NewType("Handle", int)
"""Names one computed sequence whose keys and values a runner holds until `free`."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What to draw from one next-token distribution."""

    params: SamplingParams
    """temperature, top_k, top_p and min_p are read."""
    uniforms: tuple[float, ...]
    """One number in [0, 1) per sample, at which the cumulative distribution is inverted; greedy decoding needs only
    their count."""
    top_logprobs: int = 0
    """How many of the most probable tokens to report besides."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn: one token per uniform number."""

    tokens: list[int]
    logprobs: list[float]
    """Natural logarithms, under the distribution that the tokens were drawn from."""
    top: list[tuple[int, float]]
    """The most probable tokens with their log-probabilities, the most probable first."""


@dataclass(frozen=True, slots=True)
class Start:
    """A slot that begins to run."""

    slot: int
    prefix: Handle
    """The computed sequence that the slot continues."""
    max_new_tokens: int
    """How many tokens the slot may grow by."""


@dataclass(frozen=True, slots=True)
class Row:
    """One running sequence in a decode step; row i is the sequence in slot i."""

    token: int
    """The newest token, whose key and value are not computed yet."""
    position: int
    """Its position in the sequence, from 0."""
    prefix: Handle
    """The handle that the slot was started with."""
    draw: Draw


class Runner(Protocol):
    """Computes next-token distributions and draws from them. One thread calls all methods.

    What a row draws depends on its sequence and its `Draw` alone, not on the other rows. Exact runners give the bits
    that the trainer gives; where a runner does not, the recorded log-probabilities are still those of its own draw.
    Raises EngineError for logits that are not finite.
    """

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths fit beside all handles without more memory."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Handle]:
        """Computes token sequences (equal beginnings once) and holds them: one handle for each."""
        ...

    def draw(self, handles: Sequence[Handle], draws: Sequence[Draw]) -> list[Drawn]:
        """The token after each of these sequences."""
        ...

    def start(self, starts: Sequence[Start]) -> None:
        """Slots begin to continue their handles; the handles must be held as long as the slots run."""
        ...

    def decode(self, rows: Sequence[Row]) -> list[Drawn]:
        """Appends its newest token to every running sequence, and draws the token after that."""
        ...

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source slot, destination slot): sequences fork, or move so that slots 0 .. n-1 are those that run.

        Every source is read before any destination is written.
        """
        ...

    def free(self, handle: Handle) -> None:
        """Releases a sequence that no slot continues."""
        ...

    def publish(self) -> None:
        """The policy has new weights. Handles and slots keep the keys and values that they have."""
        ...
