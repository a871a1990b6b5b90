"""Family json: the cases, the strict reader, formats, and schemas that are refused at load."""

from __future__ import annotations

import time

import pytest

from tinyllm.errors import DataError
from tinyllm.rewards import build, verify
from tinyllm.rewards.json.formats import FORMATS
from tinyllm.rewards.json.reader import NotJson, read_json


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "nul", "{'a': 1}", "[1,]", '{"a":1,}', "// x\n1", "NaN", "[Infinity]", "01", "+1", ".5", "1.", '"\t"', '"\\ud800"', "1 2",
        "1e999", "[" * 257 + "]" * 257, "1" * 41, '{"a":1,"a":1}', '{"a":{"b":1,"b":2}}', "\ufeff1", '"\ud800"', "True", '"a', "[" * 100_000,
        '"' + '\\"' * 90_000, '"\\' * 60_000,
    ],
)  # fmt: skip
def test_reader_refuses(text):
    start = time.process_time()
    with pytest.raises(NotJson):
        read_json(text)
    assert time.process_time() - start < 1


def test_reader_reads():
    from decimal import Decimal

    assert read_json(' {"a": [1, 0.1, true, null, "x\\u00e9\\ud83d\\ude00]["]} ') == {
        "a": [1, Decimal("0.1"), True, None, "x\u00e9\U0001f600]["]
    }
    assert read_json("[" * 256 + "]" * 256)


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def value(schema, text, **settings):
    return verify(build({"family": "json", **settings}), {"prompt": "", "schema": schema}, text).value


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (SCHEMA, '{"x": 1}', 1),
        (SCHEMA, '{"x": 1.0}', 1),
        (SCHEMA, '{"x": 1.5}', 0),
        (SCHEMA, '{"x": true}', 0),
        (SCHEMA, '{"x": 1e300}', 1),
        (SCHEMA, '\u2003{"x": 1}', 0),
        (SCHEMA, '{"x": 1}\x1c', 0),
        ({"type": "string"}, '"<think> and </think>"', 1),
        ({"type": "array", "uniqueItems": True}, "[1, 1.0]", 0),
        ({"type": "array", "uniqueItems": True}, '[{"a": 1, "b": [2]}, {"b": [2], "a": 1}]', 0),
        ({"type": "array", "uniqueItems": True}, "[" + ",".join(f'{{"a":{i}}}' for i in range(10_000)) + "]", 1),
        ({"items": {"type": "integer"}}, '["2"]', 0),
        ({"multipleOf": 0.01}, "19.99", 1),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}, "[" * 250 + "null" + "]" * 250, 1),
        (SCHEMA, '<think>{"x": 0}</think>{"x": 1}<|im_end|>', 1),
        (SCHEMA, '```json\n{"x": 1}\n```', 0),
        ({"type": "number", "multipleOf": 0.1}, "0.3", 1),
        ({"type": "number", "multipleOf": 0.1}, "0.35", 0),
        ({"enum": [0.1]}, "0.1", 1),
        ({"enum": [1]}, "true", 0),
        ({"const": False}, "0", 0),
        ({"type": "array", "uniqueItems": True}, "[1, true]", 1),
        ({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}, '"' + "a" * 40_000 + '"', 0),
        ({"type": "string", "pattern": "^(a+)+$"}, '"' + "a" * 40_000 + '!"', 0),
        ({"type": "string", "pattern": "^x$"}, '"x\\n"', 0),
        ({"type": "string", "pattern": "^\\d$"}, '"\u0664"', 0),
        ({"type": "string", "pattern": "^\\u00e9$"}, '"\u00e9"', 1),
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, '{"ab": null}', 1),
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, '{"b": null}', 0),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, "null", 1),
        ('{"type": "null"}', "null", 1),
    ],
)  # fmt: skip
def test_validation(schema, text, expected):
    assert value(schema, text) == expected


def test_fence_is_allowed_where_the_task_says_so():
    for text, expected in (
        ('```json\n{"x": 1}\n```', 1),
        ('```\n{"x": 1}\n```', 1),
        ('Sure:\n```json\n{"x": 1}\n```', 0),
    ):
        assert value(SCHEMA, text, fence=True) == expected


@pytest.mark.parametrize(
    "schema",
    [
        None, 1, "{", True, {}, {"title": "x"}, {"type": "strng"}, {"type": "object", "requried": ["a"]}, {"$ref": "#/nowhere"},
        {"$ref": "http://example.org/schema"}, {"$ref": "#"}, {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(?=a)a"},
        {"type": "string", "format": "emial"}, {"$schema": "http://example.org/other", "type": "null"}, {"minimum": "3"},
        {"properties": {"a": {"nullable": True}}}, {"type": "object", "properties": {"a": {"$id": "x", "type": "null"}}},
        {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "minLength": 5, "maxLength": 3}, {"enum": []},
        {"type": "object", "required": ["a"], "additionalProperties": False}, {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": ["string", "number", "object", "array", "boolean", "null"]},
    ],
)  # fmt: skip
def test_broken_schemas_are_refused_at_load(schema):
    with pytest.raises(DataError):
        build("json").check({"prompt": "", "schema": schema})
    assert value(schema, "null") is None


GOOD_BAD = {
    "date": (["2024-02-29"], ["2023-02-29", "2024-2-9", "yesterday", "2024-01-01T", "\u0662024-01-01"]),
    "time": (["23:59:60Z", "01:02:03.4+05:30"], ["24:00:00Z", "01:02:03", "12:00:60Z"]),
    "date-time": (["2024-01-01T00:00:00Z"], ["2024-01-01 00:00:00Z", "2024-01-01"]),
    "duration": (["P3D", "PT1H30M", "P1Y2M", "P2W"], ["P", "PT", "3D", "P1D2Y"]),
    "email": (["a.b+c@example.org"], ["nobody", "@x.org", "a@", "a b@x.org", "a@-x.org", "a..b@x.org"]),
    "hostname": (["a.example-1.org"], ["", "-a", "a_b", "a" * 64]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::1", "2001:db8::1"], [":::1", "fe80::1%eth0", "12"]),
    "uri": (["http://a.org/b?c#d", "urn:x"], ["a.org", "http://a b", "http://a#b#c"]),
    "uri-reference": (["/a", "b?c"], ["a b", "\\"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["12", "123e4567e89b12d3a456426614174000"]),
    "json-pointer": (["", "/a/0/~0~1"], ["a", "/~2"]),
    "regex": (["^a$"], ["("]),
}  # fmt: skip


def test_formats():
    assert set(GOOD_BAD) == set(FORMATS)
    for name, (good, bad) in GOOD_BAD.items():
        assert [text for text in good if not FORMATS[name](text)] == [], name
        assert [text for text in bad if FORMATS[name](text)] == [], name
