"""The options of a configuration: names, types, bounds, help; and how a value that is typed or read is checked.

A mistake raises ConfigError in one line: the field, the value, and the remedy.
"""

from __future__ import annotations

import json
import math
import operator
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from tinyllm.config.old import MOVED
from tinyllm.config.sections import SHORTCUTS
from tinyllm.errors import ConfigError, closest, nearest

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One leaf of a configuration class."""

    name: str
    """Dotted, as in sampling.group_size; of a command's own arguments as typed: --max-batch."""
    type: Any
    default: Any
    """... where the user must give a value."""
    help: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    may_be_empty: bool = True
    place: bool = False
    short: str = ""
    shown: str = ""

    def told(self, value: Any) -> str:
        """The option with a value, as an error message has them."""
        return f"{self.name} {to_text(value)}" if self.name.startswith("-") else f"{self.name} = {show_value(value)}"


def options(kind: Any) -> dict[str, Option]:
    """All leaves of a dataclass by dotted name, in the order of the source."""
    return _options(kind)


@cache  # behind a function, since mypy does not take type[Any] for hashable
def _options(kind: Any) -> dict[str, Option]:
    return _leaves(kind, None, "")


def _leaves(kind: Any, instance: Any, prefix: str) -> dict[str, Option]:
    """instance: of a section, whose defaults may differ from those of its class."""
    found: dict[str, Option] = {}
    types_ = typing.get_type_hints(kind)
    for item in fields(kind):
        name = prefix + item.name
        default = getattr(instance, item.name) if instance is not None else _default(item)
        if is_dataclass(default):
            found |= _leaves(type(default), default, name + ".")
        else:
            found[name] = Option(name, types_[item.name], default, **item.metadata)
    return found


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return ... if item.default is MISSING else item.default


# Names


def resolve_name(name: str, kind: Any) -> str:
    """The dotted name of an option: dashes count as underscores, and the section may be left out where one fits.

    Raises ConfigError with the nearest valid name.
    """
    known = options(kind)
    name = name.replace("-", "_")
    if name in known:
        return name
    if SHORTCUTS.get(name) in known:
        return SHORTCUTS[name]
    fits = [full for full in known if full.endswith("." + name)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ConfigError(f"option {name!r} could be {' or '.join(fits)}; give the whole name")
    raise ConfigError(unknown_option(name, kind))


def unknown_option(name: str, kind: Any) -> str:
    """The message for an unknown name: where the option went, if an earlier version had it; else the nearest one."""
    for old, now in MOVED.items():
        if (old == name or old.endswith("." + name)) and (now.option is None or now.option in options(kind)):
            return f"option {old!r} {now}"
    return f"unknown option {name!r}; {nearest_name(name, kind)}"


def nearest_name(name: str, kind: Any) -> str:
    """A hint for an unknown name: the nearest option, or the options of the nearest section."""
    known = options(kind)
    by_leaf = {full.rpartition(".")[2]: full for full in reversed(known)}  # of equal leaves the first
    if close := closest(name, known, cutoff=0.8):
        return f"did you mean {close!r}?"
    if close := closest(name.rpartition(".")[2], by_leaf, cutoff=0.72):
        return f"did you mean {by_leaf[close]!r}?"
    sections = {full.rpartition(".")[0] for full in known} - {""}
    if section := closest(name.partition(".")[0], sections):
        inside = [full.rpartition(".")[2] for full in known if full.startswith(section + ".")]
        return f"[{section}] has: {', '.join(inside)}"
    return f"see: tinyllm {kind.kind} --help"


# Values


def plain_type(hint: Any) -> tuple[Any, bool]:
    """A type without its `| None`, and whether it had one; of several types their union."""
    if not _is_union(hint):
        return hint, False
    rest = [arg for arg in get_args(hint) if arg is not type(None)]
    return typing.Union[tuple(rest)], len(rest) < len(get_args(hint))  # noqa: UP007  made from a list


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (types.UnionType, typing.Union)


def describe_type(hint: Any) -> str:
    """What to write for an option of this type, in words; choices are joined by |."""
    hint, _ = plain_type(hint)
    args = get_args(hint)
    if _is_union(hint):
        return " or ".join(map(describe_type, args))
    if get_origin(hint) is Literal:
        return "|".join(args)
    if get_origin(hint) is tuple:
        one = describe_type(args[0])
        return f"{one},..." if args[-1] is Ellipsis else ",".join(describe_type(arg) for arg in args)
    if hint is bool:
        return "true or false"
    return {int: "whole number", float: "number", str: "text"}.get(hint, "key=value,...")


def coerce(option: Option, value: Any, typed: str | None = None) -> Any:
    """A value as the option's type, from TOML, JSON or Python (no text is parsed here). Raises ConfigError.

    typed: the text that the value was read from, which an error repeats.
    """
    hint, optional = plain_type(option.type)
    if value is None and optional:
        return None
    try:
        result = _coerce(hint, value)
    except (TypeError, ValueError, OverflowError):
        shown = option.told(value if typed is None else typed)
        raise ConfigError(f"{shown}: expected {describe_type(hint)}") from None
    for item in result if isinstance(result, tuple) else (result,):
        _check_text(option, item) if isinstance(item, str) else _check_bounds(option, item)
    return result


def _coerce(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if _is_union(hint):
        for kind in args[:-1]:
            with suppress(TypeError, ValueError):
                return _coerce(kind, value)
        return _coerce(args[-1], value)
    if origin is tuple:
        if isinstance(value, str) and args[-1] is Ellipsis:
            value = (value,)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise ValueError
        return tuple(_coerce(args[0], item) for item in value)
    if origin is Literal:
        if value not in args:
            raise ValueError
        return value
    if hint in (int, float) and isinstance(value, (int, hint)) and not isinstance(value, bool):
        return hint(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if hint is str and isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item):
        return dict(value)
    raise TypeError


def _check_text(option: Option, value: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in value):  # so arguments of a command hold other bytes
        raise ConfigError(f"{option.name} = {value!a}: has bytes that are not UTF-8 text; rename or rewrite it")
    if value == "" and not option.may_be_empty:  # as from an unset shell variable; never "not set"
        raise ConfigError(f'{option.name} = "": must not be empty; give a value or leave it out')


_BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("more than", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("less than", operator.lt),
}


def _check_bounds(option: Option, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option.told(value)}: must be a finite number")
    for bound, limit in option.bounds.items():
        words, holds = _BOUNDS[bound]
        if not holds(value, limit):
            given = option.default not in (None, ...)
            remedy = f"set it to {show_value(option.default)}, the default" if given else "leave it out"
            raise ConfigError(f"{option.told(value)}: must be {words} {limit:g}; {remedy}")


def show_value(value: Any) -> str:
    """A value as an error message has it: text in quotes, lists in brackets."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def to_text(value: Any) -> str:
    """A value as it is typed on the command line; - for none and for the empty list."""
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, tuple):
        return ",".join(to_text(item) for item in value)
    return value if isinstance(value, str) else show_value(value)


# Texts


def parse_text(option: Option, text: str) -> Any:
    """A value from what was typed after an option. Lists are a,b,c or a TOML array; maps are key=value,key=value."""
    hint, optional = plain_type(option.type)
    if optional and text.lower() == "none":
        return None
    if get_origin(hint) is not tuple:
        return coerce(option, _parse(hint, text))
    if not text.startswith("["):
        return coerce(option, [_parse(get_args(hint)[0], part.strip()) for part in split_list(text)], text)
    try:
        return coerce(option, tomllib.loads(f"x = {text}")["x"], text)
    except ValueError:
        raise ConfigError(f"{option.told(text)}: expected {describe_type(hint)}") from None


def _parse(hint: Any, text: str) -> Any:
    """A text as the value that TOML would have for it; one that does not fit stays text, which coerce refuses."""
    kinds = get_args(hint) if _is_union(hint) else (hint,)
    if hint is bool:
        return BOOLEANS.get(text.lower(), text)
    for kind in (int, float):
        if kind in kinds:
            with suppress(ValueError):
                return kind(text)
    if not {int, float, str} & set(kinds) and get_origin(hint) is not Literal:
        pairs = [part.partition("=") for part in text.split(",") if part]
        if all(equals for _, equals, _ in pairs):
            return {key.strip(): value.strip() for key, _, value in pairs}
    return text


Settings = TypeVar("Settings")


def read_settings(kind: type[Settings], given: Mapping[str, Any], name: str) -> Settings:
    """The frozen dataclass of a spec's settings: values as JSON has them, or texts (elements of a list between |).

    Raises ConfigError naming the setting, the value and the remedy.
    """
    known = options(kind)
    values = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{name!r} has no setting {key!r}; {nearest(key, known)}")
        values[key] = read_setting(replace(known[key], name=f"{name}.{key}"), value)
    return kind(**values)


def read_setting(option: Option, value: Any) -> Any:
    """One setting of a spec, from a text or a value as JSON has it. Raises ConfigError."""
    hint, optional = plain_type(option.type)
    if not isinstance(value, str):
        return coerce(option, value)
    if optional and not value:
        return None
    if get_origin(hint) is tuple:
        return coerce(option, [_parse(get_args(hint)[0], item) for item in value.split("|") if item], value)
    return parse_text(option, value)


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """ "name:key=value,key=value" as (name, settings). Raises ConfigError."""
    name, _, rest = spec.partition(":")
    found = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"{spec!r}: {item!r} is not key=value; write {name}:key=value,key=value")
        found[key.strip()] = value
    return name.strip(), found


_SETTING = re.compile(r"\s*\w+=")


def split_list(text: str) -> list[str]:
    """The elements of a,b,c. A key=value belongs to the spec before it: math:rule=boxed,units=waive is one element."""
    if text.startswith("{"):  # a spec as JSON
        return [text]
    found: list[str] = []
    for part in text.split(",") if text else ():
        if found and ":" in found[-1] and _SETTING.match(part):
            found[-1] += "," + part
        else:
            found.append(part)
    return found
