"""A model behind an OpenAI-compatible server: text in, text out.

    http://host:port/v1#model        (#model may be left out where the server has one)

Chat prompts go to /chat/completions, raw text to /completions, with max_tokens, temperature, top_p, seed, n and stop.
A request that fails is retried with growing pauses while that may help (no connection, 408, 429, 5xx), within a
deadline (http.py); a request that fails for good is a failed completion with its reason, never a wrong answer. The key
is OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.engine.remote.http import (
    Http,
    InvalidResponse,
    RequestFailed,
    RetryPolicy,
    gather,
    list_models,
    retry,
    run,
)
from tinyllm.engine.seeds import seed_key
from tinyllm.errors import ModelError, nearest
from tinyllm.records import Completion, Prompt, Revision, SamplingParams

ATTEMPTS = 4
PAUSE_S = 1.0
"""Before the second attempt; see RetryPolicy."""
DEADLINE_S = 600.0
"""For one request, all attempts together."""
PARALLEL = 16
"""Requests under way at a time."""


@dataclass(frozen=True)
class ChatServer:
    """Samples like the engine does, but returns no token ids."""

    url: str
    model: str

    @classmethod
    def connect(cls, address: str) -> ChatServer:
        """Ask the server which models it has. Raises ModelError: nobody there, key refused, no such model."""
        url, _, model = address.partition("#")
        url = url.rstrip("/")
        try:
            listed = run(lambda http: list_models(http, url, timeout_s=30.0, key=_key()))
        except InvalidResponse as error:
            raise ModelError(f"{url}/models {error}; is it OpenAI-compatible?") from None
        except RequestFailed as error:
            if error.status in (401, 403):
                raise ModelError(f"{url} refuses the key; set the environment variable OPENAI_API_KEY") from None
            if error.status == 404 and model:  # some servers do not list
                return cls(url, model)
            raise ModelError(f"{url}: {error}; give the address up to /v1, as in http://localhost:8000/v1") from None
        there = [entry["id"] for entry in listed]
        if model and model not in there:
            raise ModelError(f"{url} has no model {model!r}; {nearest(model, there[:10], 'it has')}")
        if not model and len(there) != 1:
            names = ", ".join(there[:10]) or "none"
            raise ModelError(f"{url} has {len(there)} models ({names}); name one as {url}#MODEL")
        return cls(url, model or there[0])

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of every prompt, prompt after prompt."""

        async def all_of_them(http: Http) -> list[list[Completion]]:
            slots = asyncio.Semaphore(PARALLEL)
            return await gather([self._sample_one(http, slots, prompt, params) for prompt in prompts])

        return [completion for part in run(all_of_them) for completion in part]

    async def _sample_one(
        self, http: Http, slots: asyncio.Semaphore, prompt: Prompt, params: SamplingParams
    ) -> list[Completion]:
        """The completions of one prompt. A server may return fewer choices than n; the rest is requested again."""
        found: list[Completion] = []
        async with slots:
            while len(found) < params.n:
                key = seed_key(params.seed, params.step, prompt.id, prompt.draw, len(found))
                try:
                    choices = await self._choices(http, prompt, params, params.n - len(found), key)
                except RequestFailed as error:
                    rest = range(len(found), params.n)
                    return found + [Completion.failed(prompt, sample, key, str(error)) for sample in rest]
                for choice in choices[: params.n - len(found)]:
                    found.append(_read_choice(prompt, len(found), key, choice))
        return found

    async def _choices(self, http: Http, prompt: Prompt, params: SamplingParams, n: int, key: int) -> list[Any]:
        """The choices of one response. Raises RequestFailed."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": key % 2**31,
            "n": n,
        }
        body |= {"top_p": params.top_p} if params.top_p < 1 else {}
        body |= {"top_k": params.top_k} if params.top_k else {}
        body |= {"min_p": params.min_p} if params.min_p else {}
        body |= {"stop": list(params.stop_strings)} if params.stop_strings else {}
        if prompt.messages is None:
            path = "/completions"
            body["prompt"] = prompt.text
        else:
            path = "/chat/completions"
            body["messages"] = [dict(message) for message in prompt.messages]
        response = await retry(
            RetryPolicy(ATTEMPTS, DEADLINE_S, PAUSE_S),
            lambda _, seconds: http.request("POST", self.url + path, body, timeout_s=seconds, key=_key()),
        )
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or not choices:
            raise InvalidResponse("the server's answer has no choices")
        return choices


def _read_choice(prompt: Prompt, sample: int, key: int, choice: Any) -> Completion:
    try:
        text = choice["text"] if prompt.messages is None else choice["message"]["content"]
        reason = choice["finish_reason"]
    except (KeyError, TypeError):
        return Completion.failed(prompt, sample, key, "a choice without text or finish reason")
    if reason not in ("stop", "length"):
        return Completion.failed(prompt, sample, key, f"finish reason {reason!r}")
    if text is not None and not isinstance(text, str):
        return Completion.failed(prompt, sample, key, f"its text is {type(text).__name__}")
    return Completion(prompt.id, prompt.draw, sample, (), (), reason, key, Revision(0, ""), text or "")


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY", "")
