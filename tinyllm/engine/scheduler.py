"""Continuous batching: requests enter when slots are free, every running sample advances by one token a step.

    scheduler = make_scheduler(policy, tokenizer, max_batch=64)
    scheduler.submit(sample_request("a", prompt, params, range(8), on_finish=print))
    while scheduler.step():
        pass

A running sequence is one distinct history: samples of a request that drew the same tokens so far share it, and it forks
when they draw different ones. A prompt is computed once however many samples of however many requests want it (until
the weights change), and no history twice. What a sample draws depends on its prompt, parameters and key alone, not on
what else runs. Everything with tensors is behind the seam `Runner` (runner.py): no torch here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tinyllm.engine.runner import Draw, Drawn, Handle, Row, Runner, Start
from tinyllm.engine.seeds import seed_key, uniform
from tinyllm.engine.text import cut_at_stop
from tinyllm.engine.trie import Trie
from tinyllm.records import Completion, Prompt, Revision, RevisionSpan, SamplingParams

_PREFILL_TOKENS = 2048
"""A prefill takes no further prompt once it has so many tokens to compute."""


class Detokenizer(Protocol):
    """The part of a tokenizer that the scheduler needs."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """The text of these tokens."""
        ...


OnToken = Callable[[int, int, float, list[tuple[int, float]]], None]
"""(sample, token id, its log-probability, the most probable tokens with theirs)"""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Samples of one prompt, drawn with the same parameters."""

    id: str
    """Unique among the requests that are not finished."""
    prompt: Prompt
    params: SamplingParams
    """Its n, seed and step are not read: `keys` stands for them."""
    keys: Mapping[int, int]
    """Sample number -> seed key of its random numbers."""
    on_finish: Callable[[Completion], None]
    on_token: OnToken | None = None
    top_logprobs: int = 0
    """How many of the most probable tokens on_token is told."""

    def __post_init__(self) -> None:
        assert self.prompt.token_ids and self.keys and self.params.max_new_tokens >= 1, self


def sample_request(
    name: str, prompt: Prompt, params: SamplingParams, samples: Sequence[int], on_finish: Callable[[Completion], None]
) -> SampleRequest:
    """A request for these samples of a prompt, with the random numbers that a run gives them."""
    keys = {sample: seed_key(params.seed, params.step, prompt.id, prompt.draw, sample) for sample in samples}
    return SampleRequest(name, prompt, params, keys, on_finish)


@dataclass(slots=True)
class _Queued:
    """A request with samples that wait for a slot."""

    request: SampleRequest
    started: int = 0
    """How many of its samples have entered."""


@dataclass(slots=True, eq=False)
class _Prefix:
    """A computed prompt."""

    handle: Handle
    users: int = 0
    """Running sequences that continue it."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One distinct running history, of one or more samples of a request."""

    request: SampleRequest
    prefix: _Prefix
    samples: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    revisions: list[tuple[Revision, int]] = field(default_factory=list)
    """(weights, index of the first token that they drew), in order."""

    def fork(self) -> _Sequence:
        return _Sequence(
            self.request, self.prefix, self.samples, self.tokens.copy(), self.logprobs.copy(), self.revisions.copy()
        )

    def append(self, token: int, logprob: float, revision: Revision) -> None:
        if not self.revisions or self.revisions[-1][0] != revision:
            self.revisions.append((revision, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def draw(self) -> Draw:
        """The draw of the next token: a greedy one gives every sample the same token and needs no random numbers."""
        params, keys, position = self.request.params, self.request.keys, len(self.tokens)
        if params.temperature == 0.0:
            uniforms = (0.0,) * len(self.samples)
        else:
            uniforms = tuple(uniform(keys[sample], position) for sample in self.samples)
        return Draw(params, uniforms, self.request.top_logprobs)

    def row(self) -> Row:
        position = len(self.request.prompt.token_ids) + len(self.tokens) - 1
        return Row(self.tokens[-1], position, self.prefix.handle, self.draw())

    def spans(self) -> tuple[RevisionSpan, ...]:
        ends = [*(start for _, start in self.revisions[1:]), len(self.tokens)]
        return tuple(RevisionSpan(r, start, end) for (r, start), end in zip(self.revisions, ends, strict=True))


class Scheduler:
    """Runs requests, at most max_batch samples at a time. One thread calls all methods; callbacks run in it."""

    keep_prompts = 64
    """How many prompts that nothing runs on stay cached at most, for requests that ask for the same."""

    def __init__(self, runner: Runner, tokenizer: Detokenizer, *, max_batch: int, revision: Revision) -> None:
        assert max_batch >= 1, max_batch
        self.runner, self.tokenizer, self.revision, self.capacity = runner, tokenizer, revision, max_batch
        self._queue: deque[_Queued] = deque()
        self._sequences: list[_Sequence] = []
        """The running sequences; the index is the slot."""
        self._prompts: dict[tuple[int, ...], _Prefix] = {}
        """Prompts that were computed with the present weights."""
        self._unused: dict[tuple[int, ...], _Prefix] = {}
        """Those of `_prompts` without users, longest unused first."""

    @property
    def running(self) -> int:
        """Samples that hold a slot."""
        return sum(len(sequence.samples) for sequence in self._sequences)

    @property
    def waiting(self) -> int:
        """Samples that wait for a slot."""
        return sum(len(queued.request.keys) - queued.started for queued in self._queue)

    @property
    def not_begun(self) -> frozenset[str]:
        """Ids of the requests of which no sample has held a slot yet."""
        return frozenset(queued.request.id for queued in self._queue if not queued.started)

    def submit(self, request: SampleRequest) -> None:
        self._queue.append(_Queued(request))

    def cancel(self, request_id: str) -> None:
        """Ends a request without further callbacks; an unknown id is ignored."""
        for queued in [queued for queued in self._queue if queued.request.id == request_id]:
            self._queue.remove(queued)
        ended = [sequence.request.id == request_id for sequence in self._sequences]
        if any(ended):
            self._replace([[] if end else [s] for s, end in zip(self._sequences, ended, strict=True)])

    def publish(self, revision: Revision) -> None:
        """The weights are now those of `revision`: cached prompts are dropped, running samples keep their cache."""
        self.revision = revision
        self.runner.publish()
        for prefix in self._unused.values():
            self.runner.free(prefix.handle)
        self._unused.clear()
        self._prompts.clear()

    def step(self) -> bool:
        """Admits waiting samples and draws a token for every running one; False when no request is left."""
        self._admit()
        self._decode()
        return bool(self._queue or self._sequences)

    # -- entering -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admits waiting samples in bulk: a small batch only if it empties the queue, since each costs a prefill."""
        free = self.capacity - self.running
        if self._sequences and free < self.capacity // 4 and free < self.waiting:
            return
        while self._queue and free:
            entering: list[tuple[SampleRequest, list[int]]] = []
            fresh: dict[tuple[int, ...], None] = {}  # prompts to compute, in order
            trie = Trie()
            while self._queue and free and len(trie) < _PREFILL_TOKENS:
                queued = self._queue[0]
                request, prompt = queued.request, queued.request.prompt.token_ids
                samples = list(request.keys)[queued.started : queued.started + free]
                queued.started += len(samples)  # first: a request whose prompt finds no memory has begun and failed
                if prompt not in self._prompts and prompt not in fresh:
                    fresh[prompt] = None
                    trie.add(prompt)
                    self._make_room([len(other) for other in fresh])
                self._unused.pop(prompt, None)  # a later prompt of this round must not take its memory
                free -= len(samples)
                entering.append((request, samples))
                if queued.started == len(request.keys):
                    self._queue.popleft()
            if fresh:
                handles = self.runner.prefill(list(fresh))
                self._prompts.update(zip(fresh, map(_Prefix, handles), strict=True))
            self._start(entering)

    def _make_room(self, lengths: Sequence[int]) -> None:
        """Unused prompts make room for new ones of these lengths."""
        while self._unused and not self.runner.fits(lengths):
            self._forget(next(iter(self._unused)))

    def _start(self, entering: Sequence[tuple[SampleRequest, list[int]]]) -> None:
        """Samples first tokens; assigns a slot to every unfinished sequence."""
        sequences = [_Sequence(request, self._prompts[request.prompt.token_ids], part) for request, part in entering]
        for sequence in sequences:
            sequence.prefix.users += 1
        drawn = self.runner.draw([s.prefix.handle for s in sequences], [s.draw() for s in sequences])
        starts: list[Start] = []
        for sequence, row in zip(sequences, drawn, strict=True):
            children = self._advance(sequence, row)
            self._count_users(sequence, len(children))
            for child in children:
                slot = len(self._sequences)
                starts.append(Start(slot, child.prefix.handle, child.request.params.max_new_tokens))
                self._sequences.append(child)
        self.runner.start(starts)

    def _count_users(self, sequence: _Sequence, children: int) -> None:
        """Updates the prefix's reference count after a fork; an unused prefix moves to the LRU cache."""
        prefix, token_ids = sequence.prefix, sequence.request.prompt.token_ids
        prefix.users += children - 1
        if prefix.users:
            return
        if self._prompts.get(token_ids) is not prefix:  # computed with weights before an update
            self.runner.free(prefix.handle)
            return
        self._unused[token_ids] = prefix
        if len(self._unused) > self.keep_prompts:
            self._forget(next(iter(self._unused)))

    def _forget(self, token_ids: tuple[int, ...]) -> None:
        del self._prompts[token_ids]
        self.runner.free(self._unused.pop(token_ids).handle)

    # -- running --------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Draws one token for every running sequence."""
        if self._sequences:
            drawn = self.runner.decode([sequence.row() for sequence in self._sequences])
            pairs = zip(self._sequences, drawn, strict=True)
            self._replace([self._advance(sequence, row) for sequence, row in pairs])

    def _replace(self, children: list[list[_Sequence]]) -> None:
        """Puts every sequence's children in its place: the first keeps the slot, others fork, free slots are filled."""
        for sequence, heirs in zip(self._sequences, children, strict=True):
            self._count_users(sequence, len(heirs))
        kept: dict[int, _Sequence] = {slot: heirs[0] for slot, heirs in enumerate(children) if heirs}
        forks = [(slot, heir) for slot, heirs in enumerate(children) for heir in heirs[1:]]
        total = len(kept) + len(forks)
        holes = [slot for slot in range(total) if slot not in kept]
        beyond = [(slot, kept.pop(slot)) for slot in sorted(kept) if slot >= total]
        copies: list[tuple[int, int]] = []
        for hole, (source, sequence) in zip(holes, beyond + forks, strict=True):
            kept[hole] = sequence
            copies.append((source, hole))
        if copies:
            self.runner.copy_slots(copies)
        self._sequences = [kept[slot] for slot in range(total)]

    def _advance(self, sequence: _Sequence, drawn: Drawn) -> list[_Sequence]:
        """Appends the drawn tokens: one child sequence per distinct token. Returns the unfinished children."""
        request = sequence.request
        samples_of: dict[int, list[int]] = {}
        logprob_of: dict[int, float] = {}
        for sample, token, logprob in zip(sequence.samples, drawn.tokens, drawn.logprobs, strict=True):
            samples_of.setdefault(token, []).append(sample)
            logprob_of[token] = logprob
            if request.on_token is not None:
                request.on_token(sample, token, logprob, drawn.top)
        children = [sequence, *(sequence.fork() for _ in range(len(samples_of) - 1))]
        for child, (token, samples) in zip(children, samples_of.items(), strict=True):
            child.samples = samples
            child.append(token, logprob_of[token], self.revision)
        return [child for child in children if not self._finish(child)]

    def _finish(self, sequence: _Sequence) -> bool:
        """Whether the newest token ends the sequence; if so, its samples are handed to the request."""
        request, params = sequence.request, sequence.request.params
        text = None
        stopped = sequence.tokens[-1] in params.stop_token_ids
        if not stopped and params.stop_strings:
            text = cut_at_stop(self._text(sequence), params.stop_strings)
            stopped = text is not None
        if not stopped and len(sequence.tokens) < params.max_new_tokens:
            return False
        if text is None:
            text = self._text(sequence)
        token_ids, logprobs, spans = tuple(sequence.tokens), tuple(sequence.logprobs), sequence.spans()
        for sample in sequence.samples:
            completion = Completion(
                prompt_id=request.prompt.id,
                draw=request.prompt.draw,
                sample=sample,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason="stop" if stopped else "length",
                seed_key=request.keys[sample],
                revision=sequence.revisions[0][0],
                text=text,
                spans=spans if len(spans) > 1 else (),
            )
            request.on_finish(completion)
        return True

    def _text(self, sequence: _Sequence) -> str:
        return self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
