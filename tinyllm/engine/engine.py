"""The embedded engine: samples completions in process, from the same weights that are trained.

engine = EmbeddedEngine(policy, tokenizer, max_batch=128)
engine.publish(Revision(0, hash))
completions = engine.sample(prompts, SamplingParams(max_new_tokens=24, n=8))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyllm.engine.build import START, make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import Detokenizer, sample_request
from tinyllm.errors import EngineError
from tinyllm.records import Completion, Prompt, Revision, SamplingParams
from tinyllm.seams import Engine


class EmbeddedEngine(Engine):
    """Continuous batching over a KV cache, on the policy that is trained; at most max_batch samples run together."""

    def __init__(self, policy: Policy, tokenizer: Detokenizer, *, max_batch: int = 128) -> None:
        self.policy, self.tokenizer, self.max_batch = policy, tokenizer, max_batch
        self.revision = START

    def publish(self, revision: Revision) -> None:
        """The weights are now those of `revision`. Nothing is copied, and no cache outlives a call of `sample`."""
        self.revision = revision

    def facts(self) -> Mapping[str, Any]:
        """Nothing besides what the manifest says of the model that is trained, which is the one that samples."""
        return {}

    def close(self) -> None:
        """Nothing to let go of: the cache lives as long as a call of `sample`."""

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt. Raises EngineError where `check` does."""
        self.check(prompts, params)
        if not prompts:
            return []
        slots = min(self.max_batch, len(prompts) * params.n)
        scheduler = make_scheduler(self.policy, self.tokenizer, max_batch=slots, revision=self.revision)
        groups: list[list[Completion]] = [[] for _ in prompts]
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            scheduler.submit(sample_request(str(number), prompt, params, range(params.n), group.append))
        while scheduler.step():
            pass
        return [completion for group in groups for completion in sorted(group, key=lambda c: c.sample)]

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raises EngineError for an empty prompt, and for one that may grow past the model's positions."""
        limit = getattr(self.policy.config, "max_position_embeddings", None)
        for prompt in prompts:
            length = len(prompt.token_ids)
            if not length:
                raise EngineError(f"prompt {prompt.id!r} has no tokens; give it text or a chat template")
            if limit is not None and length + params.max_new_tokens > limit:
                raise EngineError(
                    f"prompt {prompt.id!r} has {length} tokens and may grow by {params.max_new_tokens}, more than the "
                    f"model's {limit} positions; lower sampling.max_new_tokens or data.max_prompt_tokens"
                )
