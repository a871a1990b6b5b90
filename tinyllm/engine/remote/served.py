"""Servers in the place of the embedded engine: an `Engine` of seams.py.

engine = make_served_engine(config.engine, policy, tokenizer, prompts, params, score, folder=run / "weights")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm.config.sections import EngineConfig
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.engine.policy import Policy
from tinyllm.engine.remote.canary import Canary, Score, tolerance_of
from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import Portal, RetryPolicy
from tinyllm.engine.remote.publish import Publisher, SGLangDisk, TinyllmDisk, VLLMLora, WeightTransfer
from tinyllm.engine.remote.servers import Confirmed
from tinyllm.errors import EngineError
from tinyllm.record.hashing import hash_bytes
from tinyllm.records import Completion, Prompt, Revision, SamplingParams

_ATTEMPTS = 4
"""Of one request: enough for a server that restarts, and what ends it is the deadline."""


class ServedEngine:
    """Samples on servers, and publishes the policy's weights to them.

    On several ranks each samples its share, and rank 0 publishes for all. All requests run in one portal, so that an
    update goes out while a pool's requests are under way. same_bits: whether servers that load the policy's weights
    hold the same bits.
    """

    def __init__(
        self,
        client: HTTPRolloutClient,
        publisher: Publisher,
        portal: Portal,
        policy: Policy,
        *,
        same_bits: bool,
        ranks: Ranks = SOLO,
    ) -> None:
        self.client, self.publisher, self.portal, self.policy = client, publisher, portal, policy
        self.same_bits, self.ranks = same_bits, ranks

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt; see HTTPRolloutClient."""
        return self.client.sample(prompts, params)

    def publish(self, revision: Revision) -> None:
        """Every server that samples from now on was seen to run the policy's weights. Raises EngineError."""
        servers = self.client.servers

        def publish() -> list[Confirmed]:
            self.publisher.publish(revision, self.policy, revision.hash if self.same_bits else None)
            return servers.confirmed()

        servers.adopt(self.ranks.on_main(publish))

    def facts(self) -> Mapping[str, Any]:
        """The properties of each server, as the manifest's "engine"."""
        return {"engine": self.client.capabilities()}

    def close(self) -> None:
        """Cut off requests under way, and let go of the connections; safe to call twice."""
        self.portal.close()


def make_served_engine(
    config: EngineConfig,
    policy: Policy,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    score: Score,
    *,
    folder: Path,
    max_lag: int = 0,
    ranks: Ranks = SOLO,
) -> ServedEngine:
    """The engine on the servers of a configuration. Raises EngineError for servers that cannot be trained on.

    prompts: all that will be sampled; the first is the canary. score: the trainer's log-probabilities at temperature 1.
    folder: where weights are put, seen by servers too (`weights_folder`). max_lag: of the pool; more than 0 lets an
    update come while a completion is sampled.
    """
    portal = Portal()
    try:
        retry_policy = RetryPolicy(_ATTEMPTS, config.deadline_s)
        client = HTTPRolloutClient(
            config.urls,
            probe_prompt=prompts[0].token_ids,
            max_concurrent=config.max_concurrent,
            retry_policy=retry_policy,
            tokenizer=tokenizer,
            vocab_size=policy.vocab_size,
            max_lag=max_lag,
            run=portal.run,
        )
        client.require(prompts, params)
        adapters = hasattr(policy.model, "peft_config")
        transfer = _transfer(client, max_lag, adapters)
        dtype = str(policy.head_weight.dtype).removeprefix("torch.")
        tolerance = tolerance_of(client.servers.all[0].facts.server, dtype)
        canary = Canary(prompts[0].token_ids, score, tolerance, tokens=min(16, params.max_new_tokens))
        publisher = Publisher(client.servers, transfer, folder, canary, retry_policy, portal.run)
        # A server of another precision holds other bits of the same weights; there the canary alone must do
        same_bits = not adapters and all(server.facts.dtype in (None, dtype) for server in client.servers.all)
        return ServedEngine(client, publisher, portal, policy, same_bits=same_bits, ranks=ranks)
    except BaseException:
        portal.close()
        raise


def weights_folder(config: EngineConfig, run: Path) -> Path:
    """Where a run puts weights for servers: in its own folder, or in one of its own within engine.folder."""
    if not config.folder:
        return run / "weights"
    return Path(config.folder) / f"{run.name}-{hash_bytes(bytes(run.resolve()))[:8]}"  # others may be called the same


def _transfer(client: HTTPRolloutClient, max_lag: int, adapters: bool) -> WeightTransfer:
    """How weights get to these servers. Raises EngineError where they cannot."""
    kinds = sorted({server.facts.server for server in client.servers.all})
    if len(kinds) > 1:
        raise EngineError(f"engine.urls are servers of several kinds ({', '.join(kinds)}); use one kind in a run")
    kind = kinds[0]
    if kind == "vllm":
        if not adapters:
            raise EngineError(f"{kind} takes new weights as LoRA adapters; set lora.rank (for example to 16)")
        return VLLMLora(max_lag)
    if kind == "sglang":
        if max_lag:
            raise EngineError("SGLang cuts off what it samples at an update; set pool.max_lag to 0")
        return SGLangDisk()
    return TinyllmDisk()
