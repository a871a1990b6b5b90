"""The canary: a fixed prompt whose log-probabilities prove which weights a server runs.

After an update the server samples the prompt greedily, the trainer scores the same ids, and their log-probabilities of
each token must agree within the tolerance. That alone would miss a lost update that is smaller than the tolerance. So
a server is also refused when its output equals the one before the update to the last bit, while the trainer's
log-probabilities for that output moved by more than a tenth of the tolerance (a smaller update may vanish in the
rounding of the server's precision).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinyllm.engine.remote.client import exchange, spans_of
from tinyllm.engine.remote.dialects import CompletionRequest, require_sound
from tinyllm.engine.remote.http import Http, InvalidResponse
from tinyllm.engine.remote.servers import Server
from tinyllm.records import SamplingParams

Score = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""(prompt ids, completion ids) -> the trainer's log-probability of each completion token, at temperature 1."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats, by the trainer's dtype: two fp32 engines differ by about 1e-6 to 1e-5, two bf16 engines by about 0.01."""
_FOREIGN = {"float32": 1e-3}
"""Of servers with kernels of their own: up to 8e-5 nats a token were seen of vLLM in fp32."""


def tolerance_of(server: str, dtype: str) -> float:
    """Nats by which a token's log-probabilities of a kind of server and of the trainer may differ."""
    own = TOLERANCES.get(dtype, TOLERANCES["bfloat16"])
    return own if server == "tinyllm" else _FOREIGN.get(dtype, own)


@dataclass(frozen=True)
class CanaryOutput:
    """What a server sampled from the fixed prompt: greedy ids and their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class Canary:
    """The fixed prompt, and each server's last output for it."""

    prompt: tuple[int, ...]
    score: Score
    tolerance: float
    tokens: int = 16
    _last: dict[str, tuple[CanaryOutput, tuple[float, ...]]] = field(default_factory=dict)
    """By server: its last output, and the trainer's log-probabilities of it at that time."""
    _count: int = 0

    async def sample(self, http: Http, server: Server, seconds: float) -> CanaryOutput:
        """The server's output. Raises RequestFailed, also when the response names another revision."""
        self._count += 1
        params = SamplingParams(max_new_tokens=self.tokens, temperature=0.0)
        request = CompletionRequest(f"tinyllm-canary-{self._count}", server.model, self.prompt, 1, params, seeded=False)
        response = require_sound(await exchange(http, server, request, seconds), request)
        spans_of(response, server, server.revision, max_lag=0)
        return CanaryOutput(tuple(response.token_ids), tuple(float(x) for x in response.logprobs))

    def judge(self, server: Server, output: CanaryOutput) -> float:
        """The largest difference to the trainer's log-probabilities, in nats.

        Raises InvalidResponse when the output is not of the trainer's weights.
        """
        before = self._last.get(server.url)
        now = tuple(self.score(self.prompt, output.token_ids))
        gap = _largest(now, output.logprobs)
        stale = before is not None and before[0] == output
        moved = _largest(now, before[1]) if stale and before is not None else 0.0
        if stale and moved > self.tolerance / 10:
            raise InvalidResponse(
                "canary",
                f"it still answers as before the update, to the last bit, while the trainer's numbers moved by "
                f"{moved:.3g}",
            )
        if not gap <= self.tolerance:
            raise InvalidResponse(
                "canary",
                f"its log-probabilities differ from the trainer's by up to {gap:.3g}, more than the "
                f"{self.tolerance:g} of the canary",
            )
        self._last[server.url] = (output, now)
        return gap


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference; NaN, which max() would pass over, where there is one."""
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)
