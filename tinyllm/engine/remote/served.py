"""Servers in the place of the embedded engine: the same two methods, sample and publish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyllm.config.sections import EngineConfig
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.engine.policy import Policy
from tinyllm.engine.remote.canary import Canary, Score, tolerance_of
from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import RetryPolicy
from tinyllm.engine.remote.publish import Publisher, SGLangDisk, TinyllmDisk, VLLMLora, WeightTransfer
from tinyllm.engine.remote.servers import Confirmed
from tinyllm.errors import EngineError
from tinyllm.pool.served_workers import Loop, ServedWorker
from tinyllm.pool.workers import WorkerGroup
from tinyllm.records import Completion, Prompt, Revision, SamplingParams

_WAYS: dict[str, type[Any]] = {"tinyllm": TinyllmDisk, "sglang": SGLangDisk, "vllm": VLLMLora}
"""How each kind of server takes weights."""
_ATTEMPTS = 4
"""Of one request: enough for a server that restarts, and what ends it is the deadline."""


def split_urls(urls: Sequence[str]) -> tuple[list[str], str | None]:
    """The addresses, and the model's name that stands behind them (http://127.0.0.1:8000#NAME), where one does.

    Raises EngineError for two names: a run samples one model.
    """
    parts = [url.partition("#") for url in urls]
    names = list(dict.fromkeys(name for _, _, name in parts if name))
    if len(names) > 1:
        raise EngineError(f"engine.urls name several models ({', '.join(names)}); give one")
    return [url for url, _, _ in parts], names[0] if names else None


class ServedEngine:
    """Samples on the servers of a configuration, and publishes the policy's weights to them.

    prompts: all that will be sampled; the first is the canary. score: the trainer's log-probabilities at temperature 1.
    folder: where weights are put, seen by servers too. On several ranks each samples its share, and rank 0 publishes
    for all. Raises EngineError for what the servers cannot give.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        score: Score,
        folder: Path | None = None,
        ranks: Ranks = SOLO,
    ) -> None:
        self.policy, self.ranks = policy, ranks
        self.loop: Loop | None = None
        self.client = HTTPRolloutClient.connect(
            *split_urls(config.urls),
            max_concurrent=config.max_concurrent,
            deadline_s=config.deadline_s,
            attempts=_ATTEMPTS,
            probe_prompt=prompts[0].token_ids,
            tokenizer=tokenizer,
            vocab_size=policy.vocab_size,
        )
        self.client.require(prompts, params)
        self.adapters = hasattr(policy.model, "peft_config")
        dtype = str(policy.head_weight.dtype).removeprefix("torch.")
        tolerance = tolerance_of(self.client.servers.all[0].facts.server, dtype)
        canary = Canary(prompts[0].token_ids, score, tolerance, tokens=min(16, params.max_new_tokens))
        patience = RetryPolicy(_ATTEMPTS, config.deadline_s)
        self.publisher = Publisher(self.client.servers, self._way(), folder or Path(), canary, patience)
        # A server of another precision holds other bits of the same weights; there the canary alone must do
        self._same_bits = not self.adapters and all(s.facts.dtype in (None, dtype) for s in self.client.servers.all)

    def _way(self) -> WeightTransfer:
        kinds = sorted({server.facts.server for server in self.client.servers.all})
        if len(kinds) > 1:
            raise EngineError(f"engine.urls are servers of several kinds ({', '.join(kinds)}); use one kind in a run")
        way = _WAYS[kinds[0]]
        if way is VLLMLora and not self.adapters:
            raise EngineError(f"{kinds[0]} takes new weights as LoRA adapters; set lora.rank (for example to 16)")
        return way()

    def staff(self, groups: int, max_lag: int) -> WorkerGroup:
        """The servers as the engines of a pool, at most so many groups at a time. Raises EngineError."""
        kind = self.client.servers.all[0].facts.server
        if max_lag and kind == "sglang":
            raise EngineError("SGLang cuts off what it samples at an update; set pool.max_lag to 0")
        loop = self.loop = Loop()
        self.client.max_lag = max_lag
        self.client.run = self.publisher.run = loop.run
        if isinstance(self.publisher.way, VLLMLora):  # a request keeps the adapter it was sent with
            self.publisher.way.kept = max(self.publisher.way.kept, max_lag + 2)
        return WorkerGroup("servers", 1, lambda: ServedWorker(self.client, loop), groups)

    def close(self) -> None:
        """Ends what `staff` began."""
        if self.loop is not None:
            self.loop.close()

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt; see HTTPRolloutClient."""
        return self.client.sample(prompts, params)

    def publish(self, revision: Revision) -> None:
        """Every server that samples from now on was seen to run the policy's weights. Raises EngineError."""
        servers = self.client.servers

        def publish() -> list[Confirmed]:
            self.publisher.publish(revision, self.policy, revision.hash if self._same_bits else None)
            return servers.confirmed()

        servers.adopt(self.ranks.on_main(publish))

    def facts(self) -> list[dict[str, Any]]:
        """What each server can give, for the manifest."""
        return self.client.capabilities()
