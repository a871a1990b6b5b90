"""Continuous batching: jobs enter when slots are free, every running sample advances by one token a step.

    scheduler = Scheduler(policy, tokenizer, max_batch=64)
    scheduler.submit(Job("a", token_ids, params, keys, on_finish=print))
    while scheduler.step():
        pass

A branch is one distinct history: samples of a job that drew the same tokens so far share it, and it forks when they
part. A prompt is computed once however many samples of however many jobs want it (until the weights change), and no
history twice. What a sample draws depends on its prompt, parameters and key alone, not on what else runs.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tinyllm.engine.attention import PackedPaths
from tinyllm.engine.kv_cache import CacheShape, DecodePaths, KVCache
from tinyllm.engine.packing import BLOCK, ROWS, Trie, pack, round_up
from tinyllm.engine.policy import Policy
from tinyllm.engine.sampling import draw, greedy, normalize, restrict, scale_logits, uniform
from tinyllm.records import Revision, RevisionSpan, SamplingParams

_PREFILL_NODES = 2048


@dataclass(frozen=True, slots=True)
class Sampled:
    """One finished sample of a job."""

    sample: int
    token_ids: tuple[int, ...]
    """The stop token included."""
    logprobs: tuple[float, ...]
    finish_reason: str
    """stop or length."""
    text: str
    """Decoded, without special tokens, cut before the first stop string."""
    spans: tuple[RevisionSpan, ...]


OnToken = Callable[[int, int, float, list[tuple[int, float]]], None]
"""(sample, token id, its log-probability, the top alternatives with theirs)"""


@dataclass(slots=True)
class SampleRequest:
    """Samples of one prompt, drawn with the same parameters."""

    id: str
    """Unique among the jobs that are not finished."""
    token_ids: tuple[int, ...]
    params: SamplingParams
    """Its n, seed and step are not read: `keys` stands for them."""
    keys: tuple[int, ...]
    """One seed key per sample."""
    on_finish: Callable[[Sampled], None]
    on_token: OnToken | None = None
    top_logprobs: int = 0
    """How many alternatives on_token is told."""
    started: int = field(default=0, init=False)
    """Samples that hold a slot or are finished."""
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids and self.keys and self.params.max_new_tokens >= 1, self
        self.stop_ids = frozenset(self.params.stop_token_ids)


@dataclass(eq=False)
class _Prefix:
    """A prompt's keys and values in the pool (full blocks, then the partial one), and what its last token leads to."""

    full: tuple[int, ...]
    tail: int
    hidden: Any = None
    """[hidden size], once computed."""
    users: int = 0
    """Branches that read it."""


@dataclass
class _Branch:
    """One distinct running history."""

    job: SampleRequest
    prefix: _Prefix
    members: list[int]
    """Samples of the job."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    revisions: list[tuple[Revision, int]] = field(default_factory=list)
    """Whose weights drew the tokens from which index on."""

    @property
    def position(self) -> int:
        """Position of the newest token in the sequence."""
        return len(self.job.token_ids) + len(self.tokens) - 1


class Scheduler:
    """Runs jobs, at most max_batch samples at a time. One thread calls all methods; callbacks run in it.

    own_blocks and pool_blocks are the cache to begin with; it grows to what the jobs need. Up to keep_prompts prompts
    that nothing runs on stay cached, for jobs that ask for the same.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        *,
        max_batch: int,
        revision: Revision = Revision(0, ""),  # noqa: B008 - frozen
        own_blocks: int = 0,
        pool_blocks: int = 0,
        keep_prompts: int = 64,
    ) -> None:
        assert max_batch >= 1, max_batch
        self.policy, self.tokenizer, self.revision = policy, tokenizer, revision
        self.capacity, self.keep_prompts = max_batch, keep_prompts
        shape = CacheShape.of(policy.config, policy.head_weight.dtype)
        self.cache = KVCache(shape, round_up(max_batch, ROWS), own_blocks, pool_blocks, policy.device)
        self.branches: list[_Branch] = []
        self.queue: deque[SampleRequest] = deque()
        self.prompts: dict[tuple[int, ...], _Prefix] = {}
        self.idle: dict[tuple[int, ...], _Prefix] = {}
        """Those of `prompts` without users, longest unused first."""

    @property
    def running(self) -> int:
        """Samples that hold a slot."""
        return sum(len(branch.members) for branch in self.branches)

    @property
    def waiting(self) -> int:
        """Samples that wait for one."""
        return sum(len(job.keys) - job.started for job in self.queue)

    def submit(self, job: SampleRequest) -> None:
        self.queue.append(job)

    def cancel(self, job_id: str) -> None:
        """Ends a job without further callbacks; nothing happens when there is none of this name."""
        for job in [job for job in self.queue if job.id == job_id]:
            self.queue.remove(job)
        ended = [branch.job.id == job_id for branch in self.branches]
        if any(ended):
            used = 1 + max((b.position - len(b.prefix.full) * BLOCK) // BLOCK for b in self.branches)
            self._replace([[] if end else [branch] for branch, end in zip(self.branches, ended, strict=True)], used)

    def publish(self, revision: Revision) -> None:
        """The weights now are those of `revision`: cached prompts are dropped, running samples keep their keys."""
        self.revision = revision
        for prefix in self.idle.values():
            self._free(prefix)
        self.idle.clear()
        self.prompts.clear()

    @torch.no_grad()
    def step(self) -> bool:
        """Admits what fits and draws one token for all that runs; False when there is nothing to do."""
        self._admit()
        self._decode()
        return bool(self.queue or self.branches)

    # -- entering -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts waiting samples; a few at a time only when that leaves none waiting, since each time costs a pass."""
        free = self.capacity - self.running
        if self.branches and free < self.capacity // 4 and free < self.waiting:
            return
        while self.queue and free:
            entering: list[tuple[SampleRequest, _Prefix, range]] = []
            fresh: list[_Prefix] = []
            trie = Trie()
            while self.queue and free and len(trie) < _PREFILL_NODES:
                job = self.queue[0]
                samples = range(job.started, min(len(job.keys), job.started + free))
                job.started = samples.stop  # first: a job whose prompt finds no memory has begun and failed
                prefix = self.prompts.get(job.token_ids)
                if prefix is None:
                    prefix = self.prompts[job.token_ids] = self._new_prefix(len(job.token_ids))
                    fresh.append(prefix)
                    trie.add(job.token_ids)
                self.idle.pop(job.token_ids, None)  # a later prompt of this round must not take its blocks
                free -= len(samples)
                entering.append((job, prefix, samples))
                if job.started == len(job.keys):
                    self.queue.popleft()
            self._prefill(fresh, trie)
            self._start(entering)

    def _new_prefix(self, length: int) -> _Prefix:
        """Pool blocks for a prompt; unused prompts make room, then the pool grows."""
        need = length // BLOCK + 1
        while len(self.cache.free_pool) < need and self.idle:
            self._forget(next(iter(self.idle)))
        if len(self.cache.free_pool) < need:
            self.cache.grow_pool(need)
        *full, tail = (self.cache.free_pool.pop() for _ in range(need))
        return _Prefix(tuple(full), tail)

    def _prefill(self, fresh: list[_Prefix], trie: Trie) -> None:
        """Computes prompts that are not cached."""
        if not fresh:
            return
        packed = pack(trie, self.policy.device)
        paths = PackedPaths(packed, keep=True)
        hidden = self.policy.hidden(packed.input_ids, packed.position_ids, paths)
        self.cache.store_prompts(paths, [((*p.full, p.tail), path) for p, path in zip(fresh, trie.paths, strict=True)])
        for prefix, path in zip(fresh, trie.paths, strict=True):
            prefix.hidden = hidden[path[-1]].clone()

    def _start(self, entering: list[tuple[SampleRequest, _Prefix, range]]) -> None:
        """Draws first tokens and gives every branch that goes on a slot."""
        branches = [_Branch(job, prefix, list(samples)) for job, prefix, samples in entering]
        for branch in branches:
            branch.prefix.users += 1
        last = torch.stack([prefix.hidden for _, prefix, _ in entering])
        filled: list[tuple[int, int]] = []
        for branch, children in zip(branches, self._extend(branches, last), strict=True):
            self._use(branch, len(children))
            for child in children:
                filled.append((branch.prefix.tail, len(self.branches)))
                self.branches.append(child)
        need = max(-(-(len(b.job.token_ids) % BLOCK + b.job.params.max_new_tokens) // BLOCK) for b in branches)
        self.cache.grow_own(need)
        self.cache.fill_slots(filled)

    def _use(self, branch: _Branch, heirs: int) -> None:
        """A branch has become so many; a prompt that none reads any longer is kept for a while."""
        prefix = branch.prefix
        prefix.users += heirs - 1
        if prefix.users:
            return
        if self.prompts.get(branch.job.token_ids) is not prefix:  # of weights before an update
            self._free(prefix)
            return
        self.idle[branch.job.token_ids] = prefix
        if len(self.idle) > self.keep_prompts:
            self._forget(next(iter(self.idle)))

    def _forget(self, token_ids: tuple[int, ...]) -> None:
        del self.prompts[token_ids]
        self._free(self.idle.pop(token_ids))

    def _free(self, prefix: _Prefix) -> None:
        self.cache.free_pool += [*prefix.full, prefix.tail]

    # -- running --------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every running branch."""
        n = len(self.branches)
        if not n:
            return
        positions = [b.position for b in self.branches]
        pad = round_up(n, ROWS) - n
        device = self.policy.device
        ids = torch.tensor([[b.tokens[-1] for b in self.branches] + [0] * pad], device=device)
        paths = DecodePaths(self.cache, positions, [b.prefix.full for b in self.branches])
        hidden = self.policy.hidden(ids, torch.tensor([positions + [0] * pad], device=device), paths)
        self._replace(self._extend(self.branches, hidden[:n]), paths.own_blocks)

    def _replace(self, children: list[list[_Branch]], used_blocks: int) -> None:
        """Puts every branch's children in its place: the first keeps the slot, others fork, free slots are filled."""
        for branch, heirs in zip(self.branches, children, strict=True):
            self._use(branch, len(heirs))
        kept: dict[int, _Branch] = {slot: heirs[0] for slot, heirs in enumerate(children) if heirs}
        forks = [(slot, heir) for slot, heirs in enumerate(children) for heir in heirs[1:]]
        total = len(kept) + len(forks)
        holes = [slot for slot in range(total) if slot not in kept]
        beyond = [(slot, kept.pop(slot)) for slot in sorted(kept) if slot >= total]
        moves = []
        for hole, (source, branch) in zip(holes, beyond + forks, strict=True):
            kept[hole] = branch
            moves.append((source, hole))
        self.cache.copy_slots(moves, used_blocks)
        self.branches = [kept[slot] for slot in range(total)]

    # -- drawing --------------------------------------------------------------------------------------------------

    def _extend(self, branches: list[_Branch], hidden: Tensor) -> list[list[_Branch]]:
        """Draws every sample's next token; returns the branches that go on, per branch, and hands on what is done."""
        logits = self.policy.logits(hidden)
        rows_of: dict[tuple[float, int, float, float], list[int]] = {}
        for row, branch in enumerate(branches):
            p = branch.job.params
            rows_of.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(row)
        children: dict[int, list[_Branch]] = {}
        for rows in rows_of.values():
            part = logits if len(rows) == len(branches) else logits[rows]
            for row, heirs in zip(rows, self._draw([branches[row] for row in rows], part), strict=True):
                children[row] = heirs
        return [children[row] for row in range(len(branches))]

    def _draw(self, branches: list[_Branch], logits: Tensor) -> list[list[_Branch]]:
        """The same for branches whose parameters of the distribution are equal; logits [branches, V]."""
        params = branches[0].job.params
        logits = restrict(scale_logits(logits, params.temperature), params)
        width = max(len(b.members) for b in branches)
        if params.temperature == 0.0:
            tokens, logprobs = greedy(logits, width)
        else:
            rows = [[uniform(b.job.keys[m], len(b.tokens)) for m in b.members] for b in branches]
            padded = torch.tensor([r + [0.0] * (width - len(r)) for r in rows], dtype=torch.float64)
            tokens, logprobs = draw(logits, padded)
        top = _alternatives(branches, logits)
        return [self._children(*row) for row in zip(branches, tokens.tolist(), logprobs.tolist(), top, strict=True)]

    def _children(
        self, branch: _Branch, tokens: list[int], logprobs: list[float], top: list[tuple[int, float]]
    ) -> list[_Branch]:
        heirs: dict[int, _Branch] = {}
        for member, token, logprob in zip(branch.members, tokens, logprobs, strict=False):  # rows are padded
            heir = heirs.get(token)
            if heir is None:
                heir = copy.copy(branch)
                heir.members, heir.tokens, heir.logprobs = [], [*branch.tokens, token], [*branch.logprobs, logprob]
                if not branch.revisions or branch.revisions[-1][0] != self.revision:
                    heir.revisions = [*branch.revisions, (self.revision, len(branch.tokens))]
                heirs[token] = heir
            heir.members.append(member)
            if branch.job.on_token is not None:
                branch.job.on_token(member, token, logprob, top)
        return [heir for heir in heirs.values() if not self._finish(heir)]

    def _finish(self, branch: _Branch) -> bool:
        job, text = branch.job, None
        if branch.tokens[-1] in job.stop_ids:
            reason = "stop"
        elif job.params.stop_strings and (text := self._cut(branch)) is not None:
            reason = "stop"
        elif len(branch.tokens) >= job.params.max_new_tokens:
            reason = "length"
        else:
            return False
        if text is None:
            text = self.tokenizer.decode(branch.tokens, skip_special_tokens=True)
        ends = [*(start for _, start in branch.revisions[1:]), len(branch.tokens)]
        spans = tuple(RevisionSpan(r, start, end) for (r, start), end in zip(branch.revisions, ends, strict=True))
        for member in branch.members:
            job.on_finish(Sampled(member, tuple(branch.tokens), tuple(branch.logprobs), reason, text, spans))
        return True

    def _cut(self, branch: _Branch) -> str | None:
        """The text before the first stop string, or None when there is none yet."""
        text = self.tokenizer.decode(branch.tokens, skip_special_tokens=True)
        found = [i for i in (text.find(s) for s in branch.job.params.stop_strings) if i >= 0]
        return text[: min(found)] if found else None


def _alternatives(branches: list[_Branch], logits: Tensor) -> list[list[tuple[int, float]]]:
    """The most probable tokens with their log-probabilities, as many as each job asks for."""
    top: list[list[tuple[int, float]]] = [[] for _ in branches]
    rows = [row for row, branch in enumerate(branches) if branch.job.top_logprobs]
    if rows:
        chosen = logits[rows]
        k = min(max(branches[row].job.top_logprobs for row in rows), chosen.shape[-1])
        values, tokens = (chosen - normalize(chosen)[0]).topk(k, dim=-1)
        for row, row_tokens, row_values in zip(rows, tokens.tolist(), values.tolist(), strict=True):
            count = branches[row].job.top_logprobs
            top[row] = list(zip(row_tokens[:count], row_values[:count], strict=True))
    return top
