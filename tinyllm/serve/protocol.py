"""Requests for completions: OpenAI's fields, those of vLLM that training needs, and nothing filled in silently.

What a request leaves out is temperature 1, top_p 1, top_k off: never a model's generation configuration. A field that
is known but not supported is accepted only with the value that changes nothing.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm.engine.seeds import seed_key
from tinyllm.records import SamplingParams
from tinyllm.serve import fields
from tinyllm.serve.fields import APIError, Reader, flag, number, one_of, text, whole, wrong

MAX_LOGPROBS = 20
COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when it is left out, as OpenAI has it."""
_SMALLEST_TEMPERATURE = 1e-3
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

Message = Mapping[str, str]
Text = str | tuple[int, ...] | tuple[Message, ...]
"""A prompt as it was given: text, token ids, or a chat."""


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """A request for completions, checked."""

    chat: bool
    model: str | None
    prompts: tuple[Text, ...]
    n: int
    seed: int
    """Drawn when the request has none."""
    keys: tuple[int, ...]
    """The random key of every choice, prompt-major."""
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    name_tokens_by_id: bool
    request_id: str | None

    def params(self, max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """For the engine. stop_token_ids are the model's own."""
        ends = self.stop_token_ids if self.ignore_eos else (*stop_token_ids, *self.stop_token_ids)
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_token_ids=tuple(sorted(set(ends))),
            stop_strings=self.stop,
        )


def request_id(name: str, value: Any) -> str:
    """A name for the request: up to 128 visible ASCII characters, so that a header can carry it."""
    if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
        raise wrong(name, value, "1 to 128 visible ASCII characters")
    return value


def _temperature(name: str, value: Any) -> float:
    value = number(0, 100)(name, value)
    if 0 < value < _SMALLEST_TEMPERATURE:
        raise wrong(name, value, f"0 (greedy) or at least {_SMALLEST_TEMPERATURE:g}")
    return value


def _top_p(name: str, value: Any) -> float:
    value = number(0, 1)(name, value)
    if value == 0:
        raise wrong(name, value, "a number above 0, up to 1")
    return value


def _top_k(name: str, value: Any) -> int:
    return max(0, whole(-1, 2**31)(name, value))  # -1 and 0 are off


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    known: dict[str, Reader] = {"include_usage": flag}
    neutral: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    return fields.read(value, known, neutral).get("include_usage", False)


def _shared(vocabulary: int) -> dict[str, Reader]:
    return {
        "model": text,
        "max_tokens": whole(1, 2**31),
        "temperature": _temperature,
        "top_p": _top_p,
        "top_k": _top_k,
        "min_p": number(0, 1),
        "n": whole(1, 4096),
        "seed": whole(-(2**63), 2**64 - 1),
        "seed_keys": fields.keys,
        "stop": fields.stops,
        "stop_token_ids": fields.tokens(vocabulary),
        "ignore_eos": flag,
        "stream": flag,
        "stream_options": _stream_options,
        "return_token_ids": flag,
        "request_id": request_id,
        # What only names the caller changes nothing.
        "user": text,
        "safety_identifier": text,
        "prompt_cache_key": text,
    }


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "priority": (0,),
    "cache_salt": (),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "response_format": ({"type": "text"},),
}
"""Known fields that are not supported, with the values that change nothing."""

_COMPLETION_NEUTRAL = {**NEUTRAL, "echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}
_CHAT_NEUTRAL = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}


def read_completion(body: Mapping[str, Any], vocabulary: int, most: int) -> CompletionParams:
    """The body of POST /v1/completions, for at most `most` choices. Raises APIError."""
    readers = {
        "prompt": _prompts(vocabulary),
        **_shared(vocabulary),
        "logprobs": whole(0, MAX_LOGPROBS),
        "return_tokens_as_token_ids": flag,
        "best_of": whole(1, 4096),
    }
    got = fields.read(body, readers, _COMPLETION_NEUTRAL)
    if "prompt" not in got:
        raise APIError("prompt is missing: a string, a list of strings, token ids, or a list of these", param="prompt")
    if got.get("best_of", got.get("n", 1)) != got.get("n", 1):
        raise APIError("best_of is supported only when it equals n; leave it out", param="best_of")
    logprobs = got.get("logprobs")
    limit = got.get("max_tokens")
    return _asked(got, False, got["prompt"], most, limit, logprobs=logprobs is not None, top_logprobs=logprobs or 0)


def read_chat(body: Mapping[str, Any], vocabulary: int, most: int) -> CompletionParams:
    """The body of POST /v1/chat/completions, for at most `most` choices. Raises APIError."""
    readers = {
        "messages": _messages,
        **_shared(vocabulary),
        "max_completion_tokens": whole(1, 2**31),
        "logprobs": flag,
        "top_logprobs": whole(0, MAX_LOGPROBS),
    }
    got = fields.read(body, readers, _CHAT_NEUTRAL)
    if "messages" not in got:
        raise APIError("messages is missing: a list of {role, content}", param="messages")
    limits = {got[name] for name in ("max_tokens", "max_completion_tokens") if name in got}
    if len(limits) > 1:
        raise APIError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    logprobs, top = got.get("logprobs", False), got.get("top_logprobs", 0)
    if top and not logprobs:
        raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = limits.pop() if limits else None
    return _asked(got, True, (got["messages"],), most, limit, logprobs=logprobs, top_logprobs=top)


def _asked(
    got: Mapping[str, Any],
    chat: bool,
    prompts: tuple[Text, ...],
    most: int,
    max_tokens: int | None,
    *,
    logprobs: bool,
    top_logprobs: int,
) -> CompletionParams:
    n, stream = got.get("n", 1), got.get("stream", False)
    if n * len(prompts) > most:  # before there is a key for each
        raise APIError(f"{n * len(prompts)} completions are asked for; one request may have {most}", param="n")
    if "stream_options" in got and not stream:
        raise APIError("stream_options needs stream: true", param="stream_options")
    seed = got.get("seed")
    seed = secrets.randbits(53) if seed is None else seed  # 53 bits: what every client's numbers can hold
    if "seed_keys" in got:
        keys = got["seed_keys"]
        if len(keys) != n * len(prompts):
            raise APIError(f"seed_keys has {len(keys)} keys for {n * len(prompts)} choices", param="seed_keys")
    else:
        keys = tuple(seed_key(seed, 0, "", j, i) for j in range(len(prompts)) for i in range(n))
    return CompletionParams(
        chat=chat,
        model=got.get("model"),
        prompts=prompts,
        n=n,
        seed=seed,
        keys=keys,
        max_tokens=max_tokens,
        temperature=got.get("temperature", 1.0),
        top_p=got.get("top_p", 1.0),
        top_k=got.get("top_k", 0),
        min_p=got.get("min_p", 0.0),
        stop=got.get("stop", ()),
        stop_token_ids=got.get("stop_token_ids", ()),
        ignore_eos=got.get("ignore_eos", False),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=got.get("stream_options", False),
        return_token_ids=got.get("return_token_ids", False),
        name_tokens_by_id=got.get("return_tokens_as_token_ids", False),
        request_id=got.get("request_id"),
    )


def _prompts(vocabulary: int) -> Reader:
    """A string, token ids, a list of strings, or a list of lists of token ids."""
    ids = fields.tokens(vocabulary)

    def reader(name: str, value: Any) -> tuple[Text, ...]:
        if isinstance(value, str):
            return (text(name, value),)
        if not isinstance(value, list) or not value:
            raise wrong(name, value, "a string, a list of strings, token ids, or a list of lists of token ids")
        if type(value[0]) is int:
            return (ids(name, value),)
        one = text if isinstance(value[0], str) else ids
        prompts = tuple(one(f"{name}[{i}]", item) for i, item in enumerate(value))
        if () in prompts:
            raise APIError(f"{name}[{prompts.index(())}] is empty", param=name)
        return prompts

    return reader


_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_call_id": (),
    "reasoning_content": (),
}


def _messages(name: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a list of messages that is not empty")
    known: dict[str, Reader] = {"role": text, "content": _content, "name": text}
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise wrong(f"{name}[{i}]", message, "an object with role and content")
        try:
            got = fields.read(message, known, _MESSAGE_NEUTRAL)
        except APIError as error:
            raise APIError(f"{name}[{i}]: {error}", param=name) from None
        if "role" not in got or "content" not in got:
            raise APIError(f"{name}[{i}] lacks a role or a content", param=name)
        messages.append(got)
    return tuple(messages)


def _content(name: str, value: Any) -> str:
    """Text, or parts of type text, which are joined."""
    if isinstance(value, list):
        parts = []
        for i, part in enumerate(value):
            if not isinstance(part, dict):
                raise wrong(f"{name}[{i}]", part, "an object")
            got = fields.read(part, {"type": one_of("text"), "text": text})
            if set(got) != {"type", "text"}:
                raise APIError(f"{name}[{i}] lacks a type or a text", param=name)
            parts.append(got["text"])
        return "".join(parts)
    return text(name, value)
