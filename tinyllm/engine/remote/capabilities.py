"""What a server can give, asked of it at the start and recorded; what it cannot give is refused, never guessed.

Features are probed, not derived from a version. What each answer rests on:

    server            `owned_by` in /v1/models
    ids, logprobs     one greedy request of two tokens
    convention        tinyllm: /version; vLLM: /server_info where the server shows it; otherwise a probe. The log-
                      probabilities of the two likeliest first tokens differ by d at temperature 1. At temperature 1/2
                      they differ by d again where they are raw, and by exactly 2 d where they are taken after the
                      temperature, whatever was drawn: log softmax(z / T) shifts all tokens alike. Prefixes of the
                      prompt are tried until d is large enough to tell.
    seeds             asked last, since vLLM's CPU engine dies of a seed: the same seed twice must give the same tokens,
                      and another seed others
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyllm.engine.remote.dialects import DIALECTS, CompletionRequest, CompletionResponse, Dialect, require_sound
from tinyllm.engine.remote.http import (
    FailureKind,
    Http,
    InvalidResponse,
    RequestFailed,
    RetryPolicy,
    list_models,
    retry,
)
from tinyllm.errors import EngineError
from tinyllm.records import SamplingParams

AFTER_TEMPERATURE, RAW, UNKNOWN = "after temperature", "raw", "unknown"
QUESTION_S = 60.0
"""For one question; a server that has just started may compile at its first request."""
_GAP = 0.05  # nats between the two likeliest tokens from which the convention can be told


@dataclass(frozen=True)
class Capabilities:
    """What one server gives, as it stands in the manifest."""

    url: str
    server: str
    """tinyllm, vllm or sglang; also the name of its dialect."""
    version: str | None
    model: str
    logprobs: str
    """Whether log-probabilities are those after temperature or raw (before it); "unknown" where no probe could tell."""
    seeds: bool
    """Whether equal seeds give equal tokens, so that a step can be sampled again."""
    spans: bool
    """Whether answers say which weights their tokens come from."""
    echoes_id: bool
    """Whether answers carry the request's id; elsewhere the HTTP exchange itself is the match."""
    max_length: int | None
    """Tokens of prompt and completion together."""
    dtype: str | None = None
    """Of its weights, where it says so."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def require_fit(facts: Capabilities, params: SamplingParams) -> None:
    """Raises EngineError where a server samples or reports another distribution than the one that is trained."""
    if not params.full_support:
        raise EngineError(
            "top-k, top-p or min-p is on: completions would be drawn from other tokens than are trained; leave them "
            "off and use the temperature"
        )
    if params.temperature in (0.0, 1.0) or facts.logprobs == AFTER_TEMPERATURE:
        return
    remedy = "set sampling.temperature to 1"
    remedy += {"vllm": ", or start vLLM with --logprobs-mode processed_logprobs"}.get(facts.server, "")
    remedy += {"sglang": ", or start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"}.get(facts.server, "")
    what = "before temperature" if facts.logprobs == RAW else "in a convention that could not be found out"
    raise EngineError(
        f"{facts.url} returns log-probabilities {what}, and the temperature is {params.temperature:g}: {remedy}"
    )


async def ask_capabilities(
    http: Http,
    url: str,
    *,
    model: str | None = None,
    prompt: tuple[int, ...] = (1, 2, 3, 4),
    key: str = "",
    retry_policy: RetryPolicy | None = None,
) -> Capabilities:
    """Ask one server. prompt: valid token ids. Raises EngineError."""
    interview = _Interview(http, url, prompt, key, retry_policy or RetryPolicy())
    try:
        facts = await interview.who(model)
        facts = await interview.what_it_returns(facts)
        if facts.logprobs == UNKNOWN:
            facts = replace(facts, logprobs=await interview.convention(facts))
    except RequestFailed as error:
        raise EngineError(f"{url}: {error}") from None
    if facts.seeds and facts.server != "tinyllm":
        facts = replace(facts, seeds=await interview.seeds(facts))
    return facts


class _Interview:
    """The questions to one server."""

    def __init__(self, http: Http, url: str, prompt: tuple[int, ...], key: str, retry_policy: RetryPolicy) -> None:
        self.http, self.url, self.prompt, self.key, self.retry_policy = http, url, prompt, key, retry_policy
        self.count = 0

    async def get(self, path: str) -> Mapping[str, Any]:
        """A JSON object, empty where the server has no such page."""
        try:
            body = await self.http.request("GET", self.url + path, timeout_s=QUESTION_S, key=self.key)
        except RequestFailed as error:
            if error.status is None:
                raise
            return {}
        return body if isinstance(body, Mapping) else {}

    async def who(self, model: str | None) -> Capabilities:
        """Which server it is, and which of its models is meant."""
        try:
            listed = await retry(
                replace(self.retry_policy, deadline_s=min(QUESTION_S, self.retry_policy.deadline_s)),
                lambda _, seconds: list_models(self.http, f"{self.url}/v1", timeout_s=seconds, key=self.key),
            )
        except InvalidResponse as error:
            raise EngineError(f"{self.url}/v1/models {error}") from None
        except RequestFailed as error:
            if error.status in (401, 403):
                raise EngineError(f"{self.url} refuses the key; set TINYLLM_API_KEY") from None
            raise EngineError(f"{self.url}: {error}; is a server running there?") from None
        entries = [entry for entry in listed if not entry.get("parent")]  # a parent: it is an adapter
        names = [entry["id"] for entry in entries]
        there = ", ".join(names[:10]) or "none"
        if model is None and len(names) != 1:
            raise EngineError(f"{self.url} has {len(names)} models ({there}); name one, as in {self.url}#NAME")
        if model is not None and model not in names:
            raise EngineError(f"{self.url} has no model {model!r}; it has: {there}")
        entry = entries[names.index(model) if model else 0]
        server = str(entry.get("owned_by"))
        if server not in DIALECTS:
            raise EngineError(
                f"{self.url} calls itself {server!r}; rollouts come from {', '.join(DIALECTS)}, whose answers carry "
                "token ids and log-probabilities"
            )
        length = entry.get("max_model_len")
        return Capabilities(
            url=self.url,
            server=server,
            version=None,
            model=entry["id"],
            logprobs=UNKNOWN,
            seeds=True,
            spans=False,
            echoes_id=False,
            max_length=length if isinstance(length, int) else None,
        )

    async def what_it_returns(self, facts: Capabilities) -> Capabilities:
        """Version, convention where it is shown, and one greedy request."""
        facts = await _SHOWN[facts.server](self, facts)
        request, response = await self.sample(facts, SamplingParams(max_new_tokens=2, temperature=0.0))
        return replace(facts, spans=response.spans is not None, echoes_id=(response.id or "").endswith(request.id))

    async def sample(
        self, facts: Capabilities, params: SamplingParams, key: int = 1, seeded: bool = False
    ) -> tuple[CompletionRequest, CompletionResponse]:
        dialect = DIALECTS[facts.server]
        request = self.request(facts, self.prompt, params, key, seeded)
        return request, require_sound(dialect.read(await self.post(dialect, dialect.write(request))), request)

    def request(
        self, facts: Capabilities, prompt: tuple[int, ...], params: SamplingParams, key: int = 1, seeded: bool = False
    ) -> CompletionRequest:
        self.count += 1
        return CompletionRequest(f"tinyllm-question-{self.count}", facts.model, prompt, key, params, seeded)

    async def post(self, dialect: Dialect, body: Any) -> Any:
        return await self.http.request("POST", self.url + dialect.path, body, timeout_s=QUESTION_S, key=self.key)

    async def convention(self, facts: Capabilities) -> str:
        """See the head of this file."""
        dialect = DIALECTS[facts.server]
        for end in range(len(self.prompt), 0, -1):
            gaps = []
            for temperature in (1.0, 0.5):
                params = SamplingParams(max_new_tokens=1, temperature=temperature)
                request = self.request(facts, self.prompt[:end], params)
                first, second, *_ = sorted(
                    dialect.read_tops(await self.post(dialect, dialect.write_tops(request))), reverse=True
                ) + [0.0, 0.0]
                gaps.append(first - second)
            if gaps[0] >= _GAP:
                ratio = gaps[1] / gaps[0]
                return RAW if 0.8 < ratio < 1.25 else AFTER_TEMPERATURE if 1.6 < ratio < 2.5 else UNKNOWN
        return UNKNOWN

    async def seeds(self, facts: Capabilities) -> bool:
        """Whether a seed decides what is drawn. Raises EngineError when the server does not survive the question."""
        params = SamplingParams(max_new_tokens=16)
        try:
            drawn = [(await self.sample(facts, params, key, seeded=True))[1].token_ids for key in (5, 5, 6)]
        except RequestFailed:
            if await alive(self.http, self.url, self.key) and await self.still_samples(facts):
                return False
            raise EngineError(
                f"{self.url} died of a request with a seed (as vLLM's CPU engine does); such a server cannot be used, "
                "choose another version of it"
            ) from None
        return drawn[0] == drawn[1] != drawn[2]

    async def still_samples(self, facts: Capabilities) -> bool:
        try:
            await self.sample(facts, SamplingParams(max_new_tokens=1, temperature=0.0))
        except RequestFailed:
            return False
        return True


async def alive(http: Http, url: str, key: str = "") -> bool:
    """Whether a server says that it works; one without /health counts as alive when it answers at all."""
    for pause_s in (0.2, 0.0):  # twice, since a full backlog refuses connections for a moment
        try:
            await http.request("GET", f"{url}/health", timeout_s=5.0, key=key)
        except RequestFailed as error:
            if error.status in (400, 401, 403, 404, 405) or error.kind is FailureKind.NOT_JSON:
                return True  # vLLM's and SGLang's answer has no body
            if error.kind is FailureKind.TIMED_OUT:
                return False
            await asyncio.sleep(pause_s)
        else:
            return True
    return False


async def _shown_by_tinyllm(interview: _Interview, facts: Capabilities) -> Capabilities:
    shown = await interview.get("/version")
    convention = str(shown.get("logprobs"))
    limits = shown.get("limits")
    length = limits.get("max_length") if isinstance(limits, Mapping) else None
    return replace(
        facts,
        version=_text(shown.get("version")),
        logprobs=AFTER_TEMPERATURE if convention.startswith(AFTER_TEMPERATURE) else UNKNOWN,
        max_length=length if isinstance(length, int) else facts.max_length,
        dtype=_text(shown.get("dtype")),
    )


async def _shown_by_vllm(interview: _Interview, facts: Capabilities) -> Capabilities:
    version = _text((await interview.get("/version")).get("version"))
    shown = (await interview.get("/server_info?config_format=json")).get("vllm_config")
    config = shown if isinstance(shown, Mapping) else {}
    model = config.get("model_config")
    mode = str(model.get("logprobs_mode")) if isinstance(model, Mapping) else ""
    if mode.endswith("_logits"):
        raise EngineError(f"{facts.url} returns logits; start vLLM with --logprobs-mode processed_logprobs")
    on_cpu = (version or "").endswith("+cpu") or '"cpu"' in json.dumps(config.get("device_config", ""), default=str)
    known = {"processed_logprobs": AFTER_TEMPERATURE, "raw_logprobs": RAW}
    return replace(facts, version=version, logprobs=known.get(mode, UNKNOWN), seeds=not on_cpu)


async def _shown_by_sglang(interview: _Interview, facts: Capabilities) -> Capabilities:
    return replace(facts, version=_text((await interview.get("/server_info")).get("version")))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_SHOWN: Mapping[str, Callable[[_Interview, Capabilities], Any]] = {
    "tinyllm": _shown_by_tinyllm,
    "vllm": _shown_by_vllm,
    "sglang": _shown_by_sglang,
}
