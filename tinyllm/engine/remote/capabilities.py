"""Which properties of a server training relies on: asked at the start, recorded in the manifest, never guessed.

Each property comes from one question, not from the server's version number:

    kind of server    `owned_by` in /v1/models
    ids, logprobs     one greedy request of two tokens
    convention        of log-probabilities. tinyllm: /version; vLLM: /server_info where the server shows it; otherwise a
                      probe. The log-probabilities of the two likeliest first tokens differ by d at temperature 1. At
                      temperature 1/2 they differ by d again where they are raw, and by exactly 2 d where they are taken
                      after the temperature, whatever was drawn: log softmax(z / T) shifts all tokens alike. Prefixes of
                      the prompt are tried until d is large enough to tell.
    seeds             asked last, since vLLM's CPU engine dies of a seed: the same seed twice must give the same tokens,
                      and another seed others
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinyllm.engine.remote.dialects import DIALECTS, CompletionRequest, CompletionResponse, require_sound
from tinyllm.engine.remote.http import (
    FailureKind,
    Http,
    InvalidResponse,
    RequestFailed,
    RetryPolicy,
    api_key,
    list_models,
    retry,
)
from tinyllm.errors import EngineError
from tinyllm.records import SamplingParams, is_logprob

AFTER_TEMPERATURE, RAW, UNKNOWN = "after temperature", "raw", "unknown"
QUESTION_S = 60.0
"""For one question; a server that has just started may compile at its first request."""
_GAP = 0.05  # nats between the two likeliest tokens from which the convention can be told


@dataclass(frozen=True)
class Capabilities:
    """The properties of one server, as they stand in the manifest."""

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
    """Whether responses name the weights that drew their tokens."""
    echoes_id: bool
    """Whether responses carry the request's id; elsewhere the HTTP exchange itself is the match."""
    max_length: int | None
    """Tokens of prompt and completion together."""
    dtype: str | None = None
    """Of the server's weights, where the server names it."""


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
    convention = "before temperature" if facts.logprobs == RAW else "in a convention that could not be found out"
    raise EngineError(
        f"{facts.url} returns log-probabilities {convention}, and the temperature is {params.temperature:g}: {remedy}"
    )


async def ask_capabilities(
    http: Http, url: str, model: str | None, prompt: tuple[int, ...], retry_policy: RetryPolicy
) -> Capabilities:
    """The properties of the server at a URL. model: None where it has only one; prompt: valid token ids.

    Raises EngineError for a server that training cannot use.
    """
    entry = await _model_entry(http, url, model, retry_policy)
    interview = _Interview(http, url, entry, prompt)
    try:
        shown = await interview.shown()
        request, response = await interview.sample(SamplingParams(max_new_tokens=2, temperature=0.0))
        convention = shown.logprobs if shown.logprobs != UNKNOWN else await interview.convention()
    except RequestFailed as error:
        raise EngineError(f"{url}: {error}") from None
    return replace(
        shown,
        logprobs=convention,
        spans=response.spans is not None,
        echoes_id=(response.id or "").endswith(request.id),
        seeds=shown.server == "tinyllm" or (shown.seeds and await interview.seeds()),
    )


async def _model_entry(http: Http, url: str, model: str | None, retry_policy: RetryPolicy) -> Mapping[str, Any]:
    """The entry of the model in /v1/models. Raises EngineError."""
    try:
        listed = await retry(
            replace(retry_policy, deadline_s=min(QUESTION_S, retry_policy.deadline_s)),
            lambda _, seconds: list_models(http, f"{url}/v1", timeout_s=seconds, key=api_key()),
        )
    except InvalidResponse as error:
        raise EngineError(f"{url}/v1/models {error}") from None
    except RequestFailed as error:
        if error.status in (401, 403):
            raise EngineError(f"{url} refuses the key; set TINYLLM_API_KEY") from None
        raise EngineError(f"{url}: {error}; is a server running there?") from None
    entries = {entry["id"]: entry for entry in listed if not entry.get("parent")}  # an adapter has a parent
    names = ", ".join(list(entries)[:10]) or "none"
    if model is None and len(entries) != 1:
        raise EngineError(f"{url} has {len(entries)} models ({names}); name one, as in {url}#NAME")
    if model is not None and model not in entries:
        raise EngineError(f"{url} has no model {model!r}; it has: {names}")
    entry = entries[model] if model else next(iter(entries.values()))
    if entry.get("owned_by") not in DIALECTS:
        raise EngineError(
            f"{url} calls itself {entry.get('owned_by')!r}; rollouts come from {', '.join(DIALECTS)}, whose answers "
            "carry token ids and log-probabilities"
        )
    return entry


class _Interview:
    """The questions to one server about one of its models."""

    def __init__(self, http: Http, url: str, entry: Mapping[str, Any], prompt: tuple[int, ...]) -> None:
        self.http, self.url, self.entry, self.prompt = http, url, entry, prompt
        self.dialect = DIALECTS[entry["owned_by"]]
        self.count = 0

    async def shown(self) -> Capabilities:
        """What the server's own pages say; seeds is False where a seed must not even be tried."""
        server = self.entry["owned_by"]
        page = await self.get("/server_info" if server == "sglang" else "/version")
        convention, seeds, limit = UNKNOWN, True, self.entry.get("max_model_len")
        version = _text(page.get("version"))
        if server == "tinyllm":
            convention = AFTER_TEMPERATURE if str(page.get("logprobs")).startswith(AFTER_TEMPERATURE) else UNKNOWN
        elif server == "vllm":
            config = _object((await self.get("/server_info?config_format=json")).get("vllm_config"))
            mode = str(_object(config.get("model_config")).get("logprobs_mode"))
            if mode.endswith("_logits"):
                raise EngineError(f"{self.url} returns logits; start vLLM with --logprobs-mode processed_logprobs")
            convention = {"processed_logprobs": AFTER_TEMPERATURE, "raw_logprobs": RAW}.get(mode, UNKNOWN)
            device = json.dumps(config.get("device_config", ""), default=str)
            seeds = not ((version or "").endswith("+cpu") or '"cpu"' in device)
        return Capabilities(
            url=self.url,
            server=server,
            version=version,
            model=self.entry["id"],
            logprobs=convention,
            seeds=seeds,
            spans=False,
            echoes_id=False,
            max_length=limit if isinstance(limit, int) else None,
            dtype=_text(page.get("dtype")) if server == "tinyllm" else None,
        )

    async def get(self, path: str) -> Mapping[str, Any]:
        """A JSON object, empty where the server has no such page."""
        try:
            return _object(await self.http.request("GET", self.url + path, timeout_s=QUESTION_S, key=api_key()))
        except RequestFailed as error:
            if error.status is None:
                raise
            return {}

    async def sample(
        self, params: SamplingParams, key: int = 1, seeded: bool = False
    ) -> tuple[CompletionRequest, CompletionResponse]:
        """A request of the whole prompt, and its checked response."""
        request = self.request(self.prompt, params, key=key, seeded=seeded)
        return request, require_sound(await self.ask(request), request)

    def request(
        self, prompt: tuple[int, ...], params: SamplingParams, *, key: int = 1, seeded: bool = False, tops: int = 0
    ) -> CompletionRequest:
        self.count += 1
        name = f"tinyllm-question-{self.count}"
        return CompletionRequest(name, self.entry["id"], prompt, key, params, seeded, tops)

    async def ask(self, request: CompletionRequest) -> CompletionResponse:
        url, body = self.url + self.dialect.path, self.dialect.write(request)
        return self.dialect.read(await self.http.request("POST", url, body, timeout_s=QUESTION_S, key=api_key()))

    async def convention(self) -> str:
        """Which log-probabilities the server returns, by the probe at the head of this file."""
        for end in range(len(self.prompt), 0, -1):
            gaps = [await self.gap(self.prompt[:end], temperature) for temperature in (1.0, 0.5)]
            if gaps[0] >= _GAP:
                ratio = gaps[1] / gaps[0]
                return RAW if 0.8 < ratio < 1.25 else AFTER_TEMPERATURE if 1.6 < ratio < 2.5 else UNKNOWN
        return UNKNOWN

    async def gap(self, prompt: tuple[int, ...], temperature: float) -> float:
        """Difference of the log-probabilities of the two likeliest first tokens, in nats."""
        params = SamplingParams(max_new_tokens=1, temperature=temperature)
        tops = (await self.ask(self.request(prompt, params, tops=2))).first_tops
        if len(tops) < 2 or not all(map(is_logprob, tops)):
            raise InvalidResponse("bad alternatives", f"the two likeliest tokens were asked for, it gave {tops!r:.80}")
        first, second, *_ = sorted(tops, reverse=True)
        return first - second

    async def seeds(self) -> bool:
        """Whether a seed decides what is drawn. Raises EngineError when the server does not survive the question."""
        params = SamplingParams(max_new_tokens=16)
        try:
            drawn = [(await self.sample(params, key, seeded=True))[1].token_ids for key in (5, 5, 6)]
        except RequestFailed:
            if await alive(self.http, self.url) and await self.still_samples():
                return False
            raise EngineError(
                f"{self.url} died of a request with a seed (as vLLM's CPU engine does); such a server cannot be used, "
                "choose another version of it"
            ) from None
        return drawn[0] == drawn[1] != drawn[2]

    async def still_samples(self) -> bool:
        try:
            await self.sample(SamplingParams(max_new_tokens=1, temperature=0.0))
        except RequestFailed:
            return False
        return True


async def alive(http: Http, url: str) -> bool:
    """Whether /health of a server reports no failure; a server without /health is alive when it answers at all."""
    for pause_s in (0.2, 0.0):  # twice, since a full backlog refuses connections for a moment
        try:
            await http.request("GET", f"{url}/health", timeout_s=5.0, key=api_key())
        except RequestFailed as error:
            if error.status in (400, 401, 403, 404, 405) or error.kind is FailureKind.NOT_JSON:
                return True  # vLLM's and SGLang's /health has no body
            if error.kind is FailureKind.TIMED_OUT:
                return False
            await asyncio.sleep(pause_s)
        else:
            return True
    return False


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
