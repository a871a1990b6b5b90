"""Requests for completions: OpenAI's fields, and those of vLLM that training needs.

The defaults are temperature 1, top_p 1 and top_k off, never those of a model's generation configuration. A known field
that is not supported is accepted only with a value that changes nothing.
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
from tinyllm.serve.fields import APIError, Reader, checked, flag, list_of, number, one_of, text, whole, wrong

MAX_LOGPROBS = 20
COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when it is left out, as OpenAI has it."""
_SMALLEST = 1e-3
"""The smallest temperature that is not greedy."""

Message = Mapping[str, str]
Text = str | tuple[int, ...] | tuple[Message, ...]
"""A prompt as it was given: text, token ids, or a chat."""


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """A request for completions, checked. A field without a text is the field of the same name in the request."""

    chat: bool
    prompts: tuple[Text, ...]
    seed: int
    """Drawn when the request has none."""
    keys: tuple[int, ...]
    """The random key of every choice, prompt after prompt."""
    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk of token counts."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None

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


request_id = checked(text, re.compile(r"[!-~]{1,128}").fullmatch, "1 to 128 visible ASCII characters")
"""Reader of a name for the request, which a header can carry."""


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
        "temperature": checked(
            number(0, 100), lambda t: t == 0 or t >= _SMALLEST, f"0 (greedy) or at least {_SMALLEST:g}"
        ),
        "top_p": checked(number(0, 1), bool, "a number above 0, up to 1"),
        "top_k": _top_k,
        "min_p": number(0, 1),
        "n": whole(1, 4096),
        "seed": whole(-(2**63), 2**64 - 1),
        "seed_keys": list_of(whole(0, 2**64 - 1), "whole numbers"),
        "stop": fields.stops,
        "stop_token_ids": fields.tokens(vocabulary),
        "ignore_eos": flag,
        "stream": flag,
        "stream_options": _stream_options,
        "return_token_ids": flag,
        "request_id": request_id,
        **dict.fromkeys(_CALLER, text),
    }


_CALLER = ("user", "safety_identifier", "prompt_cache_key")
"""Fields that only name the caller, which changes nothing."""
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
    n, top = got.get("n", 1), got.pop("logprobs", None)
    if got.pop("best_of", n) != n:
        raise APIError("best_of is supported only when it equals n; leave it out", param="best_of")
    got |= {"logprobs": top is not None, "top_logprobs": top or 0}
    return _params(got, got.pop("prompt"), most, chat=False)


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
    limits = {got.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in got}
    if len(limits) > 1:
        raise APIError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    if limits:
        got["max_tokens"] = limits.pop()
    if got.get("top_logprobs") and not got.get("logprobs"):
        raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
    return _params(got, (got.pop("messages"),), most, chat=True)


def _params(got: dict[str, Any], prompts: tuple[Text, ...], most: int, *, chat: bool) -> CompletionParams:
    """The fields that both routes have, with a random key for every choice."""
    for name in _CALLER:
        got.pop(name, None)
    n = got.get("n", 1)
    if n * len(prompts) > most:  # before there is a key for each
        raise APIError(f"{n * len(prompts)} completions are asked for; one request may have {most}", param="n")
    if "stream_options" in got and not got.get("stream"):
        raise APIError("stream_options needs stream: true", param="stream_options")
    include_usage = got.pop("stream_options", False)
    seed = got.pop("seed", None)
    seed = secrets.randbits(53) if seed is None else seed  # 53 bits: as many as every client's numbers can hold
    keys = got.pop("seed_keys", None)
    if keys is None:
        keys = tuple(seed_key(seed, 0, "", j, i) for j in range(len(prompts)) for i in range(n))
    elif len(keys) != n * len(prompts):
        raise APIError(f"seed_keys has {len(keys)} keys for {n * len(prompts)} choices", param="seed_keys")
    return CompletionParams(chat, prompts, seed, keys, include_usage=include_usage, **got)


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
