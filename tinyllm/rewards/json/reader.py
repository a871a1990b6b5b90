"""A strict reader of JSON: RFC 8259 without the extensions that Python's own reader accepts. Standard library only."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

MAX_CHARS = 200_000
"""A longer text raises NotJson."""
_MARKS = re.compile(r'["\[\]{}]|\\.', re.DOTALL)


class NotJson(ValueError):
    """The text is not a JSON document, or exceeds a limit; the message says why."""


def read_json(text: str, max_depth: int = 256, max_digits: int = 40) -> Any:
    """The document that the whole text is; numbers with a fraction or exponent become Decimal. Raises NotJson.

    max_depth: levels of nesting; max_digits: digits of one number.
    """
    if len(text) > MAX_CHARS:
        raise NotJson(f"longer than {MAX_CHARS} characters")
    depth, inside = 0, False
    for match in _MARKS.finditer(text):
        if match[0] == '"':
            inside = not inside
        elif not inside:
            depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > max_depth:
            raise NotJson(f"nested deeper than {max_depth}")

    def number(digits: str, kind: type) -> Any:
        if sum(map(str.isdigit, digits)) > max_digits:
            raise NotJson(f"a number has more than {max_digits} digits")
        value = kind(digits)
        if kind is Decimal and abs(float(value)) == float("inf"):
            raise NotJson("a number is not finite")
        return value

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            raise NotJson("a key stands twice in one object")
        return found

    def constant(name: str) -> Any:
        raise NotJson(f"{name} is not JSON")

    try:
        document = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_constant=constant,
            parse_int=lambda digits: number(digits, int),
            parse_float=lambda digits: number(digits, Decimal),
        )
        text.encode("utf-8")
        json.dumps(document, ensure_ascii=False, default=str).encode("utf-8")  # escaped lone surrogates
    except UnicodeEncodeError:
        raise NotJson("not valid Unicode") from None
    except NotJson:
        raise
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise NotJson(str(error)[:100]) from None
    return document


def fenced(text: str) -> str | None:
    """The content of a text that is one ``` or ```json block; None for other texts."""
    text = text.strip()
    head, newline, rest = text.partition("\n")
    if not newline or head.strip().lower() not in ("```", "```json") or not rest.endswith("```"):
        return None
    body, newline, last = rest.rpartition("\n")
    return body if newline and last.strip() == "```" else None
