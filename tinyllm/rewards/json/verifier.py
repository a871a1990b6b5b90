"""Family "json": the whole output is one JSON document, read strictly, and valid under the row's JSON Schema.

Document: RFC 8259, one document, no duplicate keys, no NaN or Infinity, finite numbers of at most `max_digits` digits
(kept exactly, as decimals), nesting of at most `max_depth`, valid Unicode. Types are not converted: true is not 1, "45"
is not 45.

Schema: a row is refused when its schema has unknown keywords or formats, dangling references, broken patterns, or
references to other documents. Formats are checked; patterns run on RE2, in linear time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from tinyllm.errors import DataError, RewardError, require_extra
from tinyllm.records import Verdict
from tinyllm.rewards.base import Row, SelfTest, Verifier, correct
from tinyllm.rewards.json.formats import FORMATS
from tinyllm.rewards.json.reader import NotJson, fenced, read_json
from tinyllm.rewards.text.extract import after_think, cut

try:
    import jsonschema
    import re2
    from jsonschema import validators
    from jsonschema.exceptions import SchemaError, ValidationError
except ImportError:
    require_extra("json", "verifier 'json'")
    raise

_ECMA_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u([0-9a-fA-F]{4})")
MAX_FRAMES = 15_000
"""Recursion limit while jsonschema validates: it uses several frames for each level of the document."""
_BLANK = " \t\r\n"
"""The white space characters of JSON."""
_ONE = frozenset(
    "additionalProperties additionalItems contains not if then else propertyNames unevaluatedItems "
    "unevaluatedProperties items".split()
)
"""Keywords whose value is a schema; _LISTS: a list of schemas; _MAPS: schemas by name."""
_LISTS = frozenset("allOf anyOf oneOf prefixItems items".split())
_MAPS = frozenset("properties patternProperties $defs definitions dependentSchemas dependencies".split())
_NOTES = frozenset(
    "$schema $id $anchor $defs definitions $comment title description default examples deprecated readOnly writeOnly "
    "then else minContains maxContains id".split()
)
"""Valid keywords that jsonschema has no check for."""
_BOUNDS = [("minimum", "maximum"), *((f"min{what}", f"max{what}") for what in ("Length", "Items", "Properties"))]
_ANYTHING = [None, True, 0, 1.5, 0.1234567, -(10**30), 10**30, "", "x" * 10_000, [], [1, 1], ["x"], {}, {"x": 1}]
"""Documents of every type: a schema that accepts all of them tests nothing, and is refused."""


@contextmanager
def _deep() -> Iterator[None]:
    """A higher recursion limit within the block, for a deep document under a schema that refers to itself."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, MAX_FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@dataclass(frozen=True)
class JsonVerifier(Verifier):
    """Settings of the family."""

    family: ClassVar[str] = "json"
    in_process: ClassVar[bool] = False
    schema: str = "schema"
    """Column of the JSON Schema (an object, or its text)."""
    gold: str | None = None
    """Column of a document that must be valid, used in the self-test."""
    fence: bool = False
    """Whether the document may be in one ```json block; the text as a whole is tried first."""
    think_prefilled: bool = False
    max_depth: int = 256
    max_digits: int = 40

    def __post_init__(self) -> None:
        for name, low, high in (("max_depth", 1, 500), ("max_digits", 1, 1000)):
            if not low <= getattr(self, name) <= high:
                raise RewardError(f"json.{name} = {getattr(self, name)}; give {low} to {high}")

    def check(self, row: Row) -> Any:
        """The validator for the row's schema. Raises DataError for a missing or unusable schema."""
        schema = row.get(self.schema)
        if schema is None:
            raise DataError(f"the row has no column {self.schema!r} with a JSON Schema; columns are {', '.join(row)}")
        return _compiled(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))

    def judge(self, row: Row, text: str) -> Verdict:
        validator = self.check(row)
        document, why = self._document(text)
        with _deep():
            return correct(not why and validator.is_valid(document), text.strip())

    def explain(self, row: Row, text: str) -> str:
        document, why = self._document(text)
        with _deep():
            fault = None if why else next(self.check(row).iter_errors(document), None)
        return why or (f"{fault.json_path}: {fault.message[:200]}" if fault else "")

    def probes(self, row: Row) -> list[SelfTest]:
        if self.gold is None:
            return []
        gold = row.get(self.gold)
        text = gold if isinstance(gold, str) else json.dumps(gold)
        return [SelfTest("gold", text, 1), SelfTest("the gold and more", text + text, 0)]

    def _document(self, text: str) -> tuple[Any, str]:
        """(document, ""), or (None, the reason): read from the whole text, else from the text after the think block."""
        text = cut(text)
        document, why = (None, "reasoning") if self.think_prefilled else self._read(text.strip(_BLANK))
        return (document, "") if not why else self._read(after_think(text, self.think_prefilled).strip(_BLANK))

    def _read(self, text: str) -> tuple[Any, str]:
        candidates = [text]
        inside = fenced(text) if self.fence else None
        if inside is not None:
            candidates.append(inside)
        why = ""
        for candidate in candidates:
            try:
                return read_json(candidate, self.max_depth, self.max_digits), ""
            except NotJson as error:
                why = str(error)
        return None, why


@lru_cache(maxsize=1024)
def _compiled(text: str) -> Any:
    """The validator for a schema. Raises DataError for a schema that would accept or reject documents by mistake."""
    try:
        schema = read_json(text)
    except NotJson as error:
        raise DataError(f"schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise DataError(f"schema is {type(schema).__name__}, not an object")
    base = validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    if "$schema" in schema and validators.validator_for(schema, default=None) is None:
        raise DataError(f"schema has $schema {schema['$schema']!r}, which is not known")
    try:
        base.check_schema(json.loads(text))
    except SchemaError as error:
        raise DataError(f"schema is broken at {error.json_path}: {error.message[:200]}") from None
    known = set(base.VALIDATORS) | set(_NOTES)
    for place, part in _parts(schema, "$"):
        _check_part(place, part, known, schema)
    kind = validators.extend(base, _KEYWORDS, type_checker=base.TYPE_CHECKER.redefine("integer", _is_integer))
    validator = kind(schema, format_checker=_FORMAT_CHECKER)
    try:
        if all(validator.is_valid(document) for document in _ANYTHING):
            raise DataError("schema accepts documents of every type, so it tests nothing")
    except RecursionError:
        raise DataError("schema refers to itself without end") from None
    return validator


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from _parts(part, f"{place}.{key}.{name}")
        elif key in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _parts(part, f"{place}.{key}[{index}]")
        elif key in _ONE:
            yield from _parts(value, f"{place}.{key}")


def _check_part(place: str, part: Mapping[str, Any], known: set[str], root: Mapping[str, Any]) -> None:
    for key in part:
        if key not in known or key in ("$dynamicRef", "$recursiveRef"):
            raise DataError(f"schema has an unknown keyword {key!r} at {place}; check its spelling")
    if place != "$" and ("$id" in part or "id" in part and isinstance(part["id"], str)):
        raise DataError(f"schema has an embedded $id at {place}; only one document can be used")
    name = part.get("format")
    if name is not None and name not in FORMATS:
        raise DataError(f"schema has an unknown format {name!r} at {place}; known are {', '.join(FORMATS)}")
    for low, high in _BOUNDS:
        if low in part and high in part and part[low] > part[high]:
            raise DataError(f"schema has {low} above {high} at {place}, so no document is valid")
    names = part.get("properties", {})
    missing = [name for name in part.get("required", ()) if names.get(name, part.get("additionalProperties")) is False]
    if missing and not part.get("patternProperties") and part.get("type") == "object":
        raise DataError(f"schema requires and forbids {missing[0]!r} at {place}, so no document is valid")
    if part.get("enum") == []:
        raise DataError(f"schema has an empty enum at {place}, so no document is valid")
    patterns = [*part.get("patternProperties", ()), *([part["pattern"]] if "pattern" in part else ())]
    for pattern in patterns:
        _pattern(pattern, place)
    if "patternProperties" in part and "unevaluatedProperties" in part:
        raise DataError(f"schema has patternProperties beside unevaluatedProperties at {place}, which is not supported")
    if "$ref" in part and _resolve(root, str(part["$ref"])) is None:
        raise DataError(f"schema has a dangling $ref {part['$ref']!r} at {place}")


def _resolve(root: Any, reference: str) -> Any:
    """The part of the schema that a local reference names; None when there is none."""
    if reference == "#":
        return root
    if reference.startswith("#/"):
        for piece in reference[2:].split("/"):
            name = piece.replace("~1", "/").replace("~0", "~").replace("%25", "%")
            if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
                root = root[int(name)]
            elif isinstance(root, dict) and name in root:
                root = root[name]
            else:
                return None
        return root if isinstance(root, (dict, bool)) else None
    anchors = [part for _, part in _parts(root, "$") if reference == f"#{part.get('$anchor')}"]
    return anchors[0] if anchors else None


@lru_cache(maxsize=1024)
def _pattern(pattern: str, place: str = "") -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(_ECMA_ESCAPE.sub(r"\1\\x{\2}", pattern), options)
    except re2.error as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
        raise DataError(
            f"schema has a pattern {pattern!r} at {place} that no linear-time reader takes ({why}); "
            "write it without look-around and back-references"
        ) from None


# Keywords that jsonschema itself would check with `re` or with floats


def _is_integer(_: Any, value: Any) -> bool:
    whole = isinstance(value, Decimal) and value == value.to_integral_value()
    return whole or (isinstance(value, int) and not isinstance(value, bool))


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and not _pattern(pattern).search(value):
        yield ValidationError(f"does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "object"):
        for pattern, part in patterns.items():
            for name, item in value.items():
                if _pattern(pattern).search(name):
                    yield from validator.descend(item, part, path=name, schema_path=pattern)


def _check_additional(validator: Any, rule: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    for name, item in value.items():
        if name in schema.get("properties", {}):
            continue
        if any(_pattern(pattern).search(name) for pattern in schema.get("patternProperties", {})):
            continue
        if rule is False:
            yield ValidationError(f"{name!r} is not allowed")
        elif rule is not True:
            yield from validator.descend(item, rule, path=name)


def _check_multiple(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "number") and Fraction(value) % Fraction(divisor):
        yield ValidationError(f"is not a multiple of {divisor}")


def _check_unique(validator: Any, unique: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """uniqueItems in linear time; jsonschema compares every pair."""
    if unique is True and validator.is_type(value, "array") and len(set(map(_key, value))) < len(value):
        yield ValidationError("has an item twice")


def _key(value: Any) -> Any:
    """A hashable value that is equal for equal documents only; true and 1 differ."""
    if isinstance(value, list):
        return ("array", tuple(map(_key, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return ("number" if type(value) in (int, Decimal) else type(value).__name__, value)


_KEYWORDS = {
    "uniqueItems": _check_unique,
    "pattern": _check_pattern,
    "patternProperties": _check_pattern_properties,
    "additionalProperties": _check_additional,
    "multipleOf": _check_multiple,
}
_FORMAT_CHECKER = jsonschema.FormatChecker(formats=())
for _name, _check in FORMATS.items():
    _FORMAT_CHECKER.checkers[_name] = (lambda value, check=_check: not isinstance(value, str) or check(value), ())
