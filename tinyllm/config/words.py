"""The words of a command line as a record of the command's own arguments, and as options of a configuration.

    tinyllm eval a b --task arithmetic --samples 4 -o out
                 ^^^ own, positional   ^^^ options of SuiteConfig, by name

Both are fields of frozen dataclasses (sections.opt), read and checked by options.py. Every command is parsed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args, get_origin

from tinyllm.config.io import data_source
from tinyllm.config.options import (
    BOOLEANS,
    Option,
    coerce,
    describe_type,
    options,
    parse_text,
    plain_type,
    resolve_name,
    split_list,
)
from tinyllm.errors import ConfigError, nearest


@dataclass(frozen=True)
class NoArguments:
    """The arguments of a command that has none of its own."""


Own = TypeVar("Own")
_LOOKS_LIKE_AN_OPTION = re.compile(r"--|-[a-zA-Z]$")


def own_options(own: type[Any]) -> dict[str, Option]:
    """A command's own arguments by field, under the names that help has: --max-batch, or MODEL (positional)."""
    named = {}
    for name, option in options(own).items():
        typed = option.shown or name.upper() if option.place else "--" + name.replace("_", "-")
        named[name] = replace(option, name=typed)
    return named


def parse_words(
    words: Sequence[str], own: type[Own], kind: Any = None, command: str = "tinyllm"
) -> tuple[Own, dict[str, Any]]:
    """(own arguments, options of a configuration class by dotted name), each value checked. Raises ConfigError.

    `--name value` or `--name=value`; a true|false option alone means true; a list may be given again.
    """
    known = own_options(own)
    by_name = {option.name: field for field, option in known.items() if not option.place}
    by_name |= {f"-{option.short}": field for field, option in known.items() if option.short}
    places: list[str] = []
    given: dict[str, list[str]] = {}
    flat: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("-") or word == "-":
            places.append(word)
            continue
        name, equals, text = word.partition("=")
        rest = [text] if equals else queue
        field = by_name.get(name.replace("_", "-"))
        if field is not None:
            given.setdefault(field, []).append(_take(known[field].name, known[field], rest))
        elif kind is None or not name.startswith("--"):
            raise ConfigError(f"{command}: unknown option {name!r}; {nearest(name, by_name)} (see: {command} --help)")
        elif name == "--data":
            flat |= data_source(_take(name, _DATA, rest))
        else:
            option = options(kind)[resolve_name(name[2:], kind)]
            flat[option.name] = parse_text(option, _take(name, option, rest))
    values = {field: _own_value(known[field], texts) for field, texts in given.items()}
    values |= _by_place({field: option for field, option in known.items() if option.place}, places, command)
    for field, option in known.items():
        if option.default is ... and field not in values:
            raise ConfigError(f"{command}: {option.name} is missing (see: {command} --help)")
    return own(**values), flat


_DATA = Option("data", str, None, shown="file or dataset")


def _take(name: str, option: Option, rest: list[str]) -> str:
    """The text of an option's value, taken from the words that follow the name."""
    if plain_type(option.type)[0] is bool and (not rest or rest[0].lower() not in (*BOOLEANS, "none")):
        return "true"
    if not rest or _LOOKS_LIKE_AN_OPTION.match(rest[0]):
        raise ConfigError(f"{name} needs a value ({option.shown or describe_type(option.type)})")
    return rest.pop(0)


def _own_value(option: Option, texts: Sequence[str]) -> Any:
    hint, _ = plain_type(option.type)
    if get_origin(hint) is tuple and get_args(hint)[0] is str:
        return coerce(option, [item for text in texts for item in split_list(text)])
    return parse_text(option, texts[-1])


def _by_place(known: Mapping[str, Option], places: Sequence[str], command: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    left = list(places)
    for field, option in known.items():
        if get_origin(plain_type(option.type)[0]) is tuple:
            values[field] = coerce(option, left)
            left = []
        elif left:
            values[field] = parse_text(option, left.pop(0))
    if left:
        raise ConfigError(f"unexpected {left[0]!r}; options are written --name value (see: {command} --help)")
    return values
