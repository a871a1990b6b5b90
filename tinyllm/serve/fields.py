"""JSON bodies, read field by field: a mistake is a 4xx that names the field, what it was, and what it may be.

A field is in a table of readers (known), or in a table of neutral values (known, but only what changes nothing is
accepted), or unknown. null is as good as absent everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tinyllm.errors import closest

Reader = Callable[[str, Any], Any]
"""(name of the field, its value) -> the checked value. Raises APIError."""


class APIError(Exception):
    """A request that is not served, as OpenAI's API says it: status, message, type, field, code."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_json(obj: Any) -> bytes:
    """Compact JSON in ASCII (half a surrogate pair, which JSON can bring and UTF-8 cannot hold, stays an escape)."""
    return json.dumps(obj, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises APIError: not UTF-8, not JSON, NaN or infinity, too deep, not an object."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise APIError("the body is not UTF-8 text") from None
    except RecursionError:
        raise APIError("the body's JSON is nested too deeply") from None
    except ValueError as error:
        what = str(error) if data.strip() else "it is empty"
        raise APIError(f"the body is not JSON: {what[:200]}") from None
    if not isinstance(value, dict):
        raise APIError(f"the body is {_kind(value)}, not a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def read(
    body: Mapping[str, Any], readers: Mapping[str, Reader], neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> dict[str, Any]:
    """The known fields of a body, each checked. Raises APIError for the first that is not right."""
    neutral = neutral or {}
    found: dict[str, Any] = {}
    for name, value in body.items():
        if name in readers:
            if value is not None:
                found[name] = readers[name](name, value)
        elif name in neutral:
            if value is not None and not any(_same(value, fine) for fine in neutral[name]):
                accepted = " or ".join(json.dumps(fine) for fine in neutral[name]) or "null"
                raise APIError(
                    f"{name} is not supported; leave it out (accepted: {accepted})",
                    param=name,
                    code="unsupported_field",
                )
        else:
            close = closest(name, [*readers, *neutral])
            hint = f"did you mean {close!r}?" if close else f"there is: {', '.join(readers)}"
            raise APIError(f"unknown field {show(name)}; {hint}", param=name[:100], code="unknown_field")
    return found


def _same(value: Any, fine: Any) -> bool:
    """Equal, and true is not 1."""
    return isinstance(value, bool) == isinstance(fine, bool) and value == fine


def wrong(name: str, value: Any, expected: str) -> APIError:
    return APIError(f"{name} is {show(value)}; expected {expected}", param=name, code="invalid_value")


def show(value: Any) -> str:
    """A value as it stands in a message, cut to a line."""
    if isinstance(value, (dict, list)):
        return _kind(value)
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "null")


# Readers


def whole(low: int, high: int) -> Reader:
    """A whole number from low to high."""

    def reader(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # 16.0: some clients know one kind of number
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, f"a whole number from {low} to {high}")
        return value

    return reader


def number(low: float, high: float) -> Reader:
    """A finite number from low to high."""

    def reader(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return reader


def flag(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """A string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise APIError(f"{name} holds half a surrogate pair, which is no character", param=name) from None
    return value


def one_of(*choices: str) -> Reader:
    """One of some strings."""

    def reader(name: str, value: Any) -> str:
        if value not in choices:
            raise wrong(name, value, " or ".join(map(repr, choices)))
        return value

    return reader


def tokens(high: int) -> Reader:
    """A list of token ids."""

    def reader(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise wrong(name, value, "a list of token ids")
        for i, token in enumerate(value):
            if type(token) is not int or not 0 <= token < high:
                raise wrong(f"{name}[{i}]", token, f"a token id from 0 to {high - 1}")
        return tuple(value)

    return reader


def keys(name: str, value: Any) -> tuple[int, ...]:
    """A list of 64-bit numbers."""
    if not isinstance(value, list):
        raise wrong(name, value, "a list of whole numbers")
    for i, key in enumerate(value):
        if type(key) is not int or not 0 <= key < 2**64:
            raise wrong(f"{name}[{i}]", key, "a whole number from 0 to 2^64 - 1")
    return tuple(value)


def stops(name: str, value: Any) -> tuple[str, ...]:
    """A string or a list of up to 16, none of them empty."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > 16:
        raise wrong(name, value, "a string or a list of at most 16")
    for i, item in enumerate(given):
        where = name if isinstance(value, str) else f"{name}[{i}]"
        if not text(where, item):
            raise wrong(where, item, "a string that is not empty")
        if len(item) > 1000:
            raise wrong(where, item, "a string of at most 1000 characters")
    return tuple(dict.fromkeys(given))
