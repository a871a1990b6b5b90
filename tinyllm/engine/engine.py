"""The embedded engine: samples completions in process, from the same weights that are trained.

    engine = Engine(policy, tokenizer, max_batch=128)
    engine.publish(Revision(0, hash))
    completions = engine.sample(prompts, SamplingParams(max_new_tokens=24, n=8))

Waiting samples enter when slots are free (prefill), every running branch advances by one token (decode), finished ones
leave. A branch is one distinct history: samples of a prompt that drew the same tokens so far share it, and it forks
when they part. So a prompt is computed once per group, and no history twice.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyllm.engine.attention import PackedPaths
from tinyllm.engine.head import Policy
from tinyllm.engine.kv_cache import CacheShape, DecodePaths, KVCache
from tinyllm.engine.packing import BLOCK, ROWS, Trie, pack, round_up
from tinyllm.engine.sampling import draw, greedy, restrict, scale_logits, seed_key, uniform
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, SamplingParams

_PREFILL_NODES = 2048


@dataclass
class _Job:
    """Samples of one prompt that wait to enter; `first` is the index of the first."""

    prompt: Prompt
    index: int
    first: int
    count: int


@dataclass
class _Shared:
    """Pool blocks of a prompt and how many branches still read them."""

    blocks: tuple[int, ...]
    users: int = 0


@dataclass
class _Member:
    index: int  # of the prompt in the call
    sample: int
    key: int


@dataclass
class _Branch:
    """One distinct running history."""

    prompt: Prompt
    shared: _Shared
    members: list[_Member]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the newest token in the sequence."""
        return len(self.prompt.token_ids) + len(self.tokens) - 1


class Engine:
    """Continuous batching over a KV cache; fits the RolloutClient protocol by shape.

    max_batch bounds the samples that run together; cache_tokens bounds the cache (0: as many as max_batch needs).
    """

    def __init__(self, policy: Policy, tokenizer: Any, *, max_batch: int = 128, cache_tokens: int = 0) -> None:
        assert max_batch >= 1, max_batch
        self.policy, self.tokenizer = policy, tokenizer
        self.max_batch, self.cache_tokens = max_batch, cache_tokens
        self.revision = Revision(0, "")
        self.shape = CacheShape.of(policy.config, policy.head_weight.dtype)

    def publish(self, revision: Revision) -> None:
        """The weights now are those of `revision`. Nothing is copied and nothing is cached between calls."""
        self.revision = revision

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt. EngineError before any work if one cannot fit."""
        run = _Run(self, prompts, params)
        while run.waiting or run.branches:
            run.admit()
            run.decode()
        return [run.done[i, s] for i in range(len(prompts)) for s in range(params.n)]

    def slots(self, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[int, int, int]:
        """(slots, own blocks of a slot, pool blocks) within the cache bound; EngineError when not one slot fits."""
        longest = max(prompts, key=lambda p: len(p.token_ids))
        limit = getattr(self.policy.config, "max_position_embeddings", None)
        length = len(longest.token_ids) + params.max_new_tokens
        if limit is not None and length > limit:
            raise EngineError(
                f"prompt {longest.id!r} has {len(longest.token_ids)} tokens and may grow by {params.max_new_tokens}, "
                f"more than the model's {limit} positions; lower sampling.max_new_tokens or data.max_prompt_tokens"
            )
        own = max(-(-(len(p.token_ids) % BLOCK + params.max_new_tokens) // BLOCK) for p in prompts)
        pool = max(len(p.token_ids) // BLOCK for p in prompts)
        want = min(self.max_batch, len(prompts) * params.n)
        if self.cache_tokens:
            per_slot = (own + pool) * BLOCK
            want = min(want, self.cache_tokens // per_slot)
            if want < 1:
                raise EngineError(
                    f"prompt {longest.id!r} needs {per_slot} cached tokens "
                    f"({per_slot * self.shape.token_bytes / 2**20:.0f} MiB) and "
                    f"sampling.cache_tokens is {self.cache_tokens}; raise it, or lower max_new_tokens"
                )
        return want, own, pool * want


class _Run:
    """The state of one `sample` call."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        assert params.n >= 1 and params.max_new_tokens >= 1, params
        self.engine, self.policy, self.params = engine, engine.policy, params
        self.done: dict[tuple[int, int], Completion] = {}
        self.branches: list[_Branch] = []
        self.waiting: deque[_Job] = deque()
        if not prompts:
            return
        for prompt in prompts:
            if not prompt.token_ids:
                raise EngineError(f"prompt {prompt.id!r} has no tokens; give it text or a chat template")
        self.capacity, own, pool = engine.slots(prompts, params)
        self.cache = KVCache(engine.shape, round_up(self.capacity, ROWS), own, pool, self.policy.device)
        for index, prompt in enumerate(prompts):
            for first in range(0, params.n, self.capacity):
                self.waiting.append(_Job(prompt, index, first, min(self.capacity, params.n - first)))
        self.stop_ids = frozenset(params.stop_token_ids)

    # -- entering -------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Prefills waiting prompts while their samples fit; small admissions wait until a quarter is free."""
        free = self.capacity - sum(len(b.members) for b in self.branches)
        if self.branches and free < self.capacity // 4:
            return
        while self.waiting and self.waiting[0].count <= free:
            jobs, trie = [], Trie()
            while self.waiting and self.waiting[0].count <= free and len(trie) < _PREFILL_NODES:
                job = self.waiting.popleft()
                trie.add(job.prompt.token_ids)
                free -= job.count
                jobs.append(job)
            self._prefill(jobs, trie)

    def _prefill(self, jobs: list[_Job], trie: Trie) -> None:
        packed = pack(trie, self.policy.device)
        paths = PackedPaths(packed, keep=True)
        hidden = self.policy.hidden(packed.input_ids, packed.position_ids, paths)
        last = [path[-1] for path in trie.paths]
        branches, stored = [], []
        for job, path in zip(jobs, trie.paths, strict=True):
            blocks = tuple(self.cache.free_pool.pop() for _ in range(len(path) // BLOCK))
            members = [_Member(job.index, s, self._key(job.prompt, s)) for s in range(job.first, job.first + job.count)]
            branches.append(_Branch(job.prompt, _Shared(blocks), members))
            stored.append((path, list(blocks)))
        next_slot = len(self.branches)
        fresh = []
        for branch, children, (path, pool) in zip(branches, self._extend(branches, hidden[last]), stored, strict=True):
            branch.shared.users = len(children)
            slots = list(range(next_slot, next_slot + len(children)))
            next_slot += len(children)
            fresh.append((path, pool, slots))
            self.branches.extend(children)
            if not children:
                self.cache.free_pool.extend(pool)
        self.cache.store_prompts(paths, fresh)

    def _key(self, prompt: Prompt, sample: int) -> int:
        return seed_key(self.params.seed, self.params.step, prompt.id, prompt.draw, sample)

    # -- running --------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """One token for every running branch."""
        n = len(self.branches)
        if not n:
            return
        positions = [b.position for b in self.branches]
        pad = round_up(n, ROWS) - n
        device = self.policy.device
        ids = torch.tensor([[b.tokens[-1] for b in self.branches] + [0] * pad], device=device)
        paths = DecodePaths(self.cache, positions, [b.shared.blocks for b in self.branches])
        hidden = self.policy.hidden(ids, torch.tensor([positions + [0] * pad], device=device), paths)
        self._replace(self._extend(self.branches, hidden[:n]), paths.own_blocks)

    def _replace(self, children: list[list[_Branch]], used_blocks: int) -> None:
        """Puts every branch's children in its place: the first keeps the slot, others fork, free slots are filled."""
        for branch, heirs in zip(self.branches, children, strict=True):
            branch.shared.users += len(heirs) - 1
            if not branch.shared.users:
                self.cache.free_pool.extend(branch.shared.blocks)
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

    def _extend(self, branches: list[_Branch], hidden: torch.Tensor) -> list[list[_Branch]]:
        """Draws every member's next token; returns the branches that go on, per branch, and files what is finished."""
        logits = restrict(scale_logits(self.policy.logits(hidden), self.params.temperature), self.params)
        width = max(len(b.members) for b in branches)
        if self.params.temperature == 0.0:
            tokens, logprobs = greedy(logits, width)
        else:
            rows = [[uniform(m.key, len(b.tokens)) for m in b.members] for b in branches]
            padded = torch.tensor([r + [0.0] * (width - len(r)) for r in rows], dtype=torch.float64)
            tokens, logprobs = draw(logits, padded)
        return [
            self._children(branch, row_tokens, row_logprobs)
            for branch, row_tokens, row_logprobs in zip(branches, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _children(self, branch: _Branch, tokens: list[int], logprobs: list[float]) -> list[_Branch]:
        heirs: dict[int, _Branch] = {}
        for member, token, logprob in zip(branch.members, tokens, logprobs, strict=False):  # rows are padded
            heir = heirs.get(token)
            if heir is None:
                heir = copy.copy(branch)
                heir.members, heir.tokens, heir.logprobs = [], [*branch.tokens, token], [*branch.logprobs, logprob]
                heirs[token] = heir
            heir.members.append(member)
        return [heir for heir in heirs.values() if not self._finish(heir)]

    def _finish(self, branch: _Branch) -> bool:
        text = None
        if branch.tokens[-1] in self.stop_ids:
            reason = "stop"
        elif self.params.stop_strings and (text := self._cut(branch.tokens)) is not None:
            reason = "stop"
        elif len(branch.tokens) >= self.params.max_new_tokens:
            reason = "length"
        else:
            return False
        if text is None:
            text = self.engine.tokenizer.decode(branch.tokens, skip_special_tokens=True)
        for member in branch.members:
            self.done[member.index, member.sample] = Completion(
                prompt_id=branch.prompt.id,
                draw=branch.prompt.draw,
                sample=member.sample,
                token_ids=tuple(branch.tokens),
                logprobs=tuple(branch.logprobs),
                finish_reason=reason,  # type: ignore[arg-type]
                seed_key=member.key,
                revision=self.engine.revision,
                text=text,
            )
        return True

    def _cut(self, tokens: list[int]) -> str | None:
        """The text before the first stop string, or None when there is none yet."""
        text = self.engine.tokenizer.decode(tokens, skip_special_tokens=True)
        found = [i for i in (text.find(s) for s in self.params.stop_strings) if i >= 0]
        return text[: min(found)] if found else None
