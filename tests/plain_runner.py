"""A runner of plain Python: a language model whose next token depends on the whole history, and on its weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate

from tinyllm.engine.runner import Draw, Drawn, Handle, Row, Start
from tinyllm.engine.seeds import uniform
from tinyllm.records import SamplingParams

VOCABULARY = 8


class Letters:
    """A tokenizer with one character per token; token 0 is special."""

    def decode(self, token_ids, /, *, skip_special_tokens):
        return "".join(chr(ord("a") + i) for i in token_ids if not (skip_special_tokens and i == 0))


def distribution(weights: int, history: Sequence[int]) -> list[float]:
    """Probabilities of the next token."""
    digest = hashlib.blake2b(bytes([weights, *history]), digest_size=VOCABULARY).digest()
    powers = [1.4 ** (byte % 16) for byte in digest]
    return [power / sum(powers) for power in powers]


def draw(probabilities: Sequence[float], params: SamplingParams, number: float) -> tuple[int, float]:
    """The token at a uniform number, with its log-probability."""
    if params.temperature == 0.0:
        token = max(range(VOCABULARY), key=lambda t: probabilities[t])
    else:
        token = next(t for t, mass in enumerate(accumulate(probabilities)) if number < mass or t == VOCABULARY - 1)
    return token, math.log(probabilities[token])


def drawn_alone(
    weights_at: Sequence[int] | int, prompt: Sequence[int], params: SamplingParams, key: int
) -> tuple[list[int], list[float]]:
    """One sample as it is defined, until its length or a stop token; weights_at: the weights of each token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < params.max_new_tokens and not (tokens and tokens[-1] in params.stop_token_ids):
        weights = weights_at if isinstance(weights_at, int) else weights_at[len(tokens)]
        number = uniform(key, len(tokens))
        token, logprob = draw(distribution(weights, [*prompt, *tokens]), params, number)
        tokens.append(token)
        logprobs.append(logprob)
    return tokens, logprobs


class PlainRunner:
    """Holds token lists where another runner has keys and values, and checks that it is called as agreed."""

    def __init__(self, slots: int, room: int = 10_000) -> None:
        self.room = room
        """Tokens that handles may hold together before unused ones have to go."""
        self.weights = 0
        self.held: dict[Handle, tuple[int, ...]] = {}
        self.next_of: dict[Handle, list[float]] = {}
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.started: list[Handle | None] = [None] * slots
        self.prefilled: list[tuple[int, ...]] = []
        """Every prompt that was computed."""
        self.rows: list[int] = []
        """Sequences of each decode step."""
        self.most_held = 0

    def fits(self, lengths):
        return sum(map(len, self.held.values())) + sum(lengths) <= self.room

    def prefill(self, prompts):
        assert prompts and len(set(map(tuple, prompts))) == len(prompts)
        handles = []
        for prompt in prompts:
            handle = Handle(len(self.prefilled))
            self.prefilled.append(tuple(prompt))
            self.held[handle] = tuple(prompt)
            self.next_of[handle] = distribution(self.weights, prompt)
            handles.append(handle)
        self.most_held = max(self.most_held, sum(map(len, self.held.values())))
        return handles

    def draw(self, handles, draws):
        return [_drawn(self.next_of[handle], one) for handle, one in zip(handles, draws, strict=True)]

    def start(self, starts: Sequence[Start]):
        for start in starts:
            assert start.max_new_tokens > 1, "a sequence that goes on"
            self.slots[start.slot] = list(self.held[start.prefix])
            self.started[start.slot] = start.prefix

    def decode(self, rows: Sequence[Row]):
        drawn = []
        for slot, row in enumerate(rows):
            assert row.prefix == self.started[slot] and row.prefix in self.held
            assert row.position == len(self.slots[slot]), "the newest token follows what the slot holds"
            self.slots[slot].append(row.token)
            drawn.append(_drawn(distribution(self.weights, self.slots[slot]), row.draw))
        self.rows.append(len(rows))
        return drawn

    def copy_slots(self, copies):
        assert copies and all(source != destination for source, destination in copies)
        read = [(list(self.slots[source]), self.started[source]) for source, _ in copies]
        for (_, destination), (tokens, prefix) in zip(copies, read, strict=True):
            self.slots[destination], self.started[destination] = tokens, prefix

    def free(self, handle):
        del self.held[handle], self.next_of[handle]

    def publish(self):
        self.weights += 1


def _drawn(probabilities: list[float], one: Draw) -> Drawn:
    pairs = [draw(probabilities, one.params, number) for number in one.uniforms]
    order = sorted(range(VOCABULARY), key=lambda t: -probabilities[t])[: one.top_logprobs]
    return Drawn([t for t, _ in pairs], [x for _, x in pairs], [(t, math.log(probabilities[t])) for t in order])
