"""The tokens of one multi-turn rollout: sampled turns with given tokens between them. It only grows at its end.

    prompt | turn 1 | given | turn 2 | given | turn 3        a prompt reads everything before it
             sampled         sampled         sampled         trained; given tokens are read, never trained

Sampled ids are kept as they were sampled: no text of a turn is ever tokenized again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from tinyllm.engine.scheduler import Detokenizer
from tinyllm.records import Completion, Prompt, RevisionSpan

Key: TypeAlias = tuple[str, int, int]
"""(prompt id, draw, sample)."""


@dataclass(frozen=True, slots=True)
class Turns:
    """One rollout so far."""

    prompt: Prompt
    sample: int
    sampled: tuple[Completion, ...] = ()
    """One completion per turn."""
    given: tuple[tuple[int, ...], ...] = ()
    """given[i] are the token ids that the environment gave after turn i."""

    @property
    def key(self) -> Key:
        return self.prompt.id, self.prompt.draw, self.sample

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything after the prompt."""
        given = (*self.given, ()) if len(self.given) < len(self.sampled) else self.given
        return tuple(t for turn, more in zip(self.sampled, given, strict=True) for t in (*turn.token_ids, *more))

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.sampled)

    @property
    def given_tokens(self) -> int:
        return sum(map(len, self.given))

    def with_turn(self, turn: Completion) -> Turns:
        """The rollout with one more sampled turn."""
        assert len(self.given) == len(self.sampled), self.key
        return self._grown(replace(self, sampled=(*self.sampled, turn)))

    def with_given(self, token_ids: tuple[int, ...]) -> Turns:
        """The rollout with the answer to its last turn."""
        assert len(self.given) == len(self.sampled) - 1 and token_ids, self.key
        return self._grown(replace(self, given=(*self.given, token_ids)))

    def _grown(self, longer: Turns) -> Turns:
        assert longer.token_ids[: len(self.token_ids)] == self.token_ids, f"{self.key}: earlier tokens changed"
        return longer

    def next_prompt(self, tokenizer: Detokenizer) -> Prompt:
        """What the next turn is sampled from: the prompt and everything after it, under an id of its own.

        The id says sample and turn besides the row, so a turn's random numbers are keyed by (seed, step, prompt, draw,
        sample, turn). It is joined by the separator of engine/seeds.py, which no row's id holds.
        """
        ids = (*self.prompt.token_ids, *self.token_ids)
        name = "\x1f".join((self.prompt.id, str(self.sample), str(len(self.sampled))))
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        return replace(self.prompt, id=name, token_ids=ids, text=text, messages=None)

    def completion(self, tokenizer: Detokenizer) -> Completion:
        """The whole rollout as one completion: tokens, log-probabilities (None for given tokens) and spans.

        It ends with a sampled turn, and has that turn's finish reason. A rollout of one turn is that turn, unchanged.
        """
        assert len(self.given) == len(self.sampled) - 1, f"{self.key}: given tokens at the end would train nothing"
        first, last = self.sampled[0], self.sampled[-1]
        if first is last:
            return first
        logprobs: list[float | None] = []
        spans: list[RevisionSpan] = []
        for turn, given in zip(self.sampled, (*self.given, ()), strict=True):
            start = len(logprobs)
            spans += (replace(span, start=start + span.start, end=start + span.end) for span in turn.all_spans)
            logprobs += turn.logprobs
            if given:
                spans.append(RevisionSpan(None, len(logprobs), len(logprobs) + len(given)))
                logprobs += [None] * len(given)
        ids = self.token_ids
        before = tokenizer.decode(list(ids[: -len(last.token_ids)]), skip_special_tokens=True)
        return replace(
            first,
            token_ids=ids,
            logprobs=tuple(logprobs),
            finish_reason=last.finish_reason,
            text=before + last.text,
            spans=tuple(spans),
        )


def cut_turn(turn: Completion, max_new_tokens: int, tokenizer: Detokenizer) -> Completion:
    """The turn as it is when sampled with this limit: what a sample draws does not depend on where it is cut."""
    if len(turn.token_ids) <= max_new_tokens:
        return turn
    ids = turn.token_ids[:max_new_tokens]
    spans = (replace(s, end=min(s.end, len(ids))) for s in turn.spans if s.start < len(ids))
    return replace(
        turn,
        token_ids=ids,
        logprobs=turn.logprobs[: len(ids)],
        finish_reason="length",
        text=tokenizer.decode(list(ids), skip_special_tokens=True),
        spans=tuple(spans),
    )
