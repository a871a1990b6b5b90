"""JSON bodies, read field by field: a mistake is a 4xx that names the field, its value, and the values it may have.

A supported field has a reader. A field of OpenAI or vLLM that is not supported has neutral values: those that change
nothing, the only ones accepted. Every other field is unknown and refused. null counts as absent everywhere.
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
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
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


def checked(reader: Reader, holds: Callable[[Any], object], expected: str) -> Reader:
    """What `reader` reads, where `holds` is true of it; expected: these values in words."""

    def read_checked(name: str, value: Any) -> Any:
        found = reader(name, value)
        if not holds(found):
            raise wrong(name, value, expected)
        return found

    return read_checked


def one_of(*choices: str) -> Reader:
    """One of some strings."""
    return checked(text, choices.__contains__, " or ".join(map(repr, choices)))


def list_of(reader: Reader, what: str) -> Reader:
    """A list, each of its items read by `reader`; what: the items in words."""

    def read_list(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise wrong(name, value, f"a list of {what}")
        return tuple(reader(f"{name}[{i}]", item) for i, item in enumerate(value))

    return read_list


def tokens(vocabulary: int) -> Reader:
    """A list of token ids."""
    return list_of(whole(0, vocabulary - 1), "token ids")


_stop = checked(text, lambda stop: 0 < len(stop) <= 1000, "a string of 1 to 1000 characters")


def stops(name: str, value: Any) -> tuple[str, ...]:
    """A string or a list of up to 16, none of them empty."""
    if isinstance(value, str):
        return (_stop(name, value),)
    if not isinstance(value, list) or len(value) > 16:
        raise wrong(name, value, "a string or a list of at most 16")
    return tuple(dict.fromkeys(list_of(_stop, "strings")(name, value)))
