"""The embedded engine: samples completions in process, from the same weights that are trained.

engine = EmbeddedEngine(policy, tokenizer, max_batch=128)
engine.publish(Revision(0, hash))
completions = engine.sample(prompts, SamplingParams(max_new_tokens=24, n=8))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tinyllm.engine.build import START, make_scheduler
from tinyllm.engine.kv_cache import CacheShape
from tinyllm.engine.packing import BLOCK
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import Detokenizer, Sampled, SampleRequest
from tinyllm.engine.seeds import seed_key
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, SamplingParams
from tinyllm.seams import Engine

_KEPT_PROMPTS = 4
"""Prompts whose group is larger than the free slots and enters in parts."""


class CacheSize(NamedTuple):
    """What a call of `sample` needs of the KV cache; blocks are of 64 tokens."""

    slots: int
    """Samples that run together."""
    private_blocks: int
    """Of each slot."""
    shared_blocks: int
    """Of all prompts that run together."""


class EmbeddedEngine(Engine):
    """Continuous batching over a KV cache, on the policy that is trained.

    max_batch bounds the samples that run together; cache_tokens bounds the cache (0: as many as max_batch needs).
    """

    def __init__(self, policy: Policy, tokenizer: Detokenizer, *, max_batch: int = 128, cache_tokens: int = 0) -> None:
        assert max_batch >= 1, max_batch
        self.policy, self.tokenizer = policy, tokenizer
        self.max_batch, self.cache_tokens = max_batch, cache_tokens
        self.revision = START
        self.shape = CacheShape.of(policy.config, policy.head_weight.dtype)

    def publish(self, revision: Revision) -> None:
        """The weights now are those of `revision`. Nothing is copied and nothing is cached between calls."""
        self.revision = revision

    def facts(self) -> Mapping[str, Any]:
        """Nothing besides what the manifest says of the model that is trained, which is the one that samples."""
        return {}

    def close(self) -> None:
        """Nothing to let go of: the cache lives as long as a call of `sample`."""

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt. EngineError before any work if one cannot fit."""
        assert params.n >= 1 and params.max_new_tokens >= 1, params
        if not prompts:
            return []
        for prompt in prompts:
            if not prompt.token_ids:
                raise EngineError(f"prompt {prompt.id!r} has no tokens; give it text or a chat template")
        size = self.cache_size(prompts, params)
        scheduler = make_scheduler(
            self.policy,
            self.tokenizer,
            max_batch=size.slots,
            revision=self.revision,
            private_blocks=size.private_blocks,
            shared_blocks=size.shared_blocks,
            keep_prompts=_KEPT_PROMPTS,
        )
        done: dict[tuple[int, int], Completion] = {}

        def finish(index: int, completion: Completion) -> None:
            done[index, completion.sample] = completion

        for index, prompt in enumerate(prompts):
            scheduler.submit(sample_request(str(index), prompt, params, range(params.n), partial(finish, index)))
        while scheduler.step():
            pass
        return [done[i, s] for i in range(len(prompts)) for s in range(params.n)]

    def cache_size(self, prompts: Sequence[Prompt], params: SamplingParams) -> CacheSize:
        """The cache that sampling these prompts needs, within the bound; EngineError when not one slot fits."""
        longest = max(prompts, key=lambda p: len(p.token_ids))
        limit = getattr(self.policy.config, "max_position_embeddings", None)
        length = len(longest.token_ids) + params.max_new_tokens
        if limit is not None and length > limit:
            raise EngineError(
                f"prompt {longest.id!r} has {len(longest.token_ids)} tokens and may grow by {params.max_new_tokens}, "
                f"more than the model's {limit} positions; lower sampling.max_new_tokens or data.max_prompt_tokens"
            )
        private = max(-(-(len(p.token_ids) % BLOCK + params.max_new_tokens) // BLOCK) for p in prompts)
        shared = max(len(p.token_ids) // BLOCK for p in prompts) + 1
        slots = min(self.max_batch, len(prompts) * params.n)
        if self.cache_tokens:
            per_slot = (private + shared) * BLOCK
            slots = min(slots, self.cache_tokens // per_slot)
            if slots < 1:
                raise EngineError(
                    f"prompt {longest.id!r} needs {per_slot} cached tokens "
                    f"({per_slot * self.shape.token_bytes / 2**20:.0f} MiB) and "
                    f"cache_tokens is {self.cache_tokens}; raise it, or lower max_new_tokens"
                )
        return CacheSize(slots, private, shared * min(slots, len(prompts)))


def sample_request(
    name: str, prompt: Prompt, params: SamplingParams, samples: Sequence[int], on_finish: Callable[[Completion], None]
) -> SampleRequest:
    """A request to the scheduler that draws these samples of a prompt and hands each on as a completion."""
    keys = tuple(seed_key(params.seed, params.step, prompt.id, prompt.draw, sample) for sample in samples)

    def finish(s: Sampled) -> None:
        first = s.spans[0].revision
        assert first is not None, "the scheduler samples every token that it returns"
        on_finish(
            Completion(
                prompt_id=prompt.id,
                draw=prompt.draw,
                sample=samples[s.sample],
                token_ids=s.token_ids,
                logprobs=s.logprobs,
                finish_reason=s.finish_reason,
                seed_key=keys[s.sample],
                revision=first,
                text=s.text,
                spans=s.spans if len(s.spans) > 1 else (),
            )
        )

    return SampleRequest(name, prompt.token_ids, params, keys, finish)
