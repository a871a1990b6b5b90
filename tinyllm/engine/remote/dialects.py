"""How the request for one completion is written and its response read, for each kind of server: a table of dialects.

The request is the same everywhere: token ids in, one completion, every sampling field explicit (a server fills what
is missing from the model's generation config), log-probabilities and token ids out. What differs is spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinyllm.engine.remote.http import InvalidResponse
from tinyllm.records import SamplingParams, fault_of


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The request for one completion."""

    id: str
    model: str
    token_ids: tuple[int, ...]
    key: int
    """63-bit key of its random numbers."""
    params: SamplingParams
    seeded: bool = True
    """Whether the key is sent."""
    tops: int = 0
    """How many of the likeliest tokens at each position the response is to list."""


@dataclass(frozen=True, slots=True)
class CompletionResponse:
    """What a server returned, not yet checked against the request."""

    id: str | None
    model: str | None
    token_ids: list[Any]
    logprobs: list[Any]
    finish_reason: str
    text: str
    spans: tuple[tuple[str, int, int], ...] | None
    """(weight version, start, end) over the tokens; None where the server does not say."""
    first_tops: list[Any]
    """Log-probabilities of the likeliest first tokens, where the request asked for `tops`."""


@dataclass(frozen=True)
class Dialect:
    """The path, the fields and the response of one kind of server."""

    path: str
    write: Callable[[CompletionRequest], dict[str, Any]]
    read: Callable[[Any], CompletionResponse]
    """Raises InvalidResponse."""


# /v1/completions


def _write_completions(request: CompletionRequest) -> dict[str, Any]:
    p = request.params
    return {
        "model": request.model,
        "prompt": list(request.token_ids),
        "max_tokens": p.max_new_tokens,
        "n": 1,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k,
        "min_p": p.min_p,
        "stop": list(p.stop_strings),
        "stop_token_ids": list(p.stop_token_ids),
        "ignore_eos": True,  # the run's stop tokens are the only ones
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": request.tops,
        "return_token_ids": True,
        "stream": False,
        "request_id": request.id,
    }


def _write_tinyllm(request: CompletionRequest) -> dict[str, Any]:
    """Random numbers by key instead of by seed: those of the embedded engine for the same prompt, step and sample."""
    return _write_completions(request) | {"seed_keys": [request.key]}


def _write_vllm(request: CompletionRequest) -> dict[str, Any]:
    body = _write_completions(request) | {"repetition_penalty": 1.0, "min_tokens": 0, "skip_special_tokens": True}
    if request.tops:  # named by token id, since two tokens may decode to the same text
        body["return_tokens_as_token_ids"] = True
    return body | ({"seed": request.key} if request.seeded else {})


def _read_completions(body: Any) -> CompletionResponse:
    choice = _one_choice(body)
    block = _part(choice, "logprobs")
    ids, logprobs, tops = choice.get("token_ids"), block.get("token_logprobs"), _first(block.get("top_logprobs"))
    if not isinstance(ids, list):
        raise InvalidResponse("no token ids", "the choice has no list token_ids")
    if not isinstance(logprobs, list):
        raise InvalidResponse("no log-probabilities", "the choice has no list logprobs.token_logprobs")
    spans = choice.get("weight_versions")
    return CompletionResponse(
        id=_text_or_none(body.get("id")),
        model=_text_or_none(body.get("model")),
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=str(choice.get("finish_reason")),
        text=choice["text"] if isinstance(choice.get("text"), str) else "",
        spans=None if spans is None else _spans(spans),
        first_tops=list(tops.values()) if isinstance(tops, Mapping) else [],
    )


# SGLang's /generate


def _write_sglang(request: CompletionRequest) -> dict[str, Any]:
    p = request.params
    sampling = {
        "max_new_tokens": p.max_new_tokens,
        "n": 1,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k or -1,
        "min_p": p.min_p,
        "stop": list(p.stop_strings),
        "stop_token_ids": list(p.stop_token_ids),
        "ignore_eos": not p.stop_token_ids,  # with it, SGLang heeds no stop token at all
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "skip_special_tokens": True,
    }
    return {
        "input_ids": list(request.token_ids),
        "sampling_params": sampling | ({"sampling_seed": request.key} if request.seeded else {}),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": request.tops,
        "stream": False,
        "rid": request.id,
    }


def _read_sglang(body: Any) -> CompletionResponse:
    if isinstance(body, list):
        if len(body) != 1:
            raise InvalidResponse("several answers", f"{len(body)} for one request")
        body = body[0]
    meta = _part(body, "meta_info")
    pairs = meta.get("output_token_logprobs")
    if not isinstance(pairs, list):
        raise InvalidResponse("no log-probabilities", "the answer has no list meta_info.output_token_logprobs")
    if not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
        raise InvalidResponse(
            "no token ids", "an entry of output_token_logprobs is no [log-probability, token id, text]"
        )
    ids = [pair[1] for pair in pairs]
    given = body.get("output_ids")  # some versions leave the stop token out here; each logprob names its token itself
    if isinstance(given, list) and given not in (ids, ids[:-1]):
        raise InvalidResponse(
            "ids and log-probabilities differ", f"{len(given)} output_ids, {len(ids)} log-probabilities"
        )
    version, spans = meta.get("weight_version"), meta.get("weight_versions")
    tops = _first(meta.get("output_top_logprobs"))
    if spans is None and isinstance(version, str):
        spans = [{"version": version, "start": 0, "end": len(ids)}]
    return CompletionResponse(
        id=_text_or_none(meta.get("id")),
        model=None,
        token_ids=ids,
        logprobs=[pair[0] for pair in pairs],
        finish_reason=str(_part(meta, "finish_reason").get("type")),
        text=body["text"] if isinstance(body.get("text"), str) else "",
        spans=None if spans is None else _spans(spans),
        first_tops=[_first(entry) for entry in tops] if isinstance(tops, list) else [],
    )


DIALECTS: Mapping[str, Dialect] = {
    "tinyllm": Dialect("/v1/completions", _write_tinyllm, _read_completions),
    "vllm": Dialect("/v1/completions", _write_vllm, _read_completions),
    "sglang": Dialect("/generate", _write_sglang, _read_sglang),
}


# What is demanded of every response


def require_sound(
    response: CompletionResponse, request: CompletionRequest, vocab_size: int = 2**31
) -> CompletionResponse:
    """The response with its finish reason as the trainer counts it.

    Raises InvalidResponse for what cannot be trained on, and for a server that stopped by other rules than ours.
    """
    ids, params = response.token_ids, request.params
    if response.model is not None and request.model and response.model != request.model:
        raise InvalidResponse("wrong model", f"{response.model!r} answered, {request.model!r} was asked")
    if ids and ids[-1] in params.stop_token_ids and response.finish_reason == "length":
        response = replace(response, finish_reason="stop")  # vLLM says "length" when the stop token is the last to fit
    fault = fault_of(ids, response.logprobs, response.finish_reason, params, vocab_size=vocab_size)
    if fault is not None:
        raise InvalidResponse(*fault)
    early = [position for position, token in enumerate(ids[:-1]) if token in params.stop_token_ids]
    if early:
        raise InvalidResponse("stop token ignored", f"token {ids[early[0]]} at position {early[0]} of {len(ids)}")
    if response.finish_reason == "length" and len(ids) < params.max_new_tokens:
        raise InvalidResponse(
            "cut short", f"after {len(ids)} of {params.max_new_tokens} tokens, by a limit of the server's own"
        )
    return response


def _one_choice(body: Any) -> Mapping[str, Any]:
    choices = _part({"answer": body}, "answer").get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InvalidResponse("no choices", "the answer has no list of choices")
    if len(choices) > 1:
        raise InvalidResponse("several answers", f"{len(choices)} choices, one was asked for")
    return choices[0]


def _part(body: Any, name: str) -> Mapping[str, Any]:
    part = body.get(name) if isinstance(body, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else None


def _spans(spans: Any) -> tuple[tuple[str, int, int], ...]:
    try:
        return tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in spans)
    except (TypeError, KeyError, ValueError, OverflowError):
        raise InvalidResponse("bad revision spans", f"{spans!r:.80}") from None
