"""Read, check and write configurations: TOML files, command-line overrides, Python keywords. Keys are strict.

Every source is first made a flat mapping from dotted name to value, then laid over a base and checked once.
A mistake raises ConfigError in one line: the field, the value, and the remedy.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tinyllm.config import SHORTCUTS, GRPOConfig
from tinyllm.errors import ConfigError

DATA_SUFFIXES = (".jsonl", ".parquet")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One leaf of a configuration class."""

    name: str
    """Dotted: sampling.group_size."""
    type: Any
    default: Any
    help: str
    bounds: Mapping[str, float]


@cache
def options(kind: Any, prefix: str = "") -> dict[str, Option]:
    """All leaves of a configuration class by dotted name, in the order of the source."""
    found: dict[str, Option] = {}
    types_ = typing.get_type_hints(kind)
    default = kind()
    for item in fields(kind):
        name, hint = prefix + item.name, types_[item.name]
        if is_dataclass(hint):
            found |= options(typing.cast(type, hint), name + ".")
        else:
            meta = item.metadata
            found[name] = Option(name, hint, getattr(default, item.name), meta["help"], meta["bounds"])
    return found


def _kind(config: Any) -> Any:
    return type(config)


# Names


def resolve_name(name: str, kind: Any = GRPOConfig) -> str:
    """The dotted name an option goes by: dashes count as underscores, and the section may be left out where one fits.

    Raises ConfigError with the nearest valid name.
    """
    known = options(kind)
    name = name.replace("-", "_")
    if name in known:
        return name
    if name in SHORTCUTS and SHORTCUTS[name] in known:
        return SHORTCUTS[name]
    fits = [full for full in known if full.endswith("." + name)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ConfigError(f"option {name!r} could be {' or '.join(fits)}; give the whole name")
    raise ConfigError(f"unknown option {name!r}; {_nearest(name, known)}")


def _nearest(name: str, known: Mapping[str, Option]) -> str:
    leaf = name.rpartition(".")[2]
    by_leaf: dict[str, str] = {}
    for full in known:
        by_leaf.setdefault(full.rpartition(".")[2], full)
    for wanted, pool in ((name, {n: n for n in known}), (leaf, by_leaf)):
        if close := difflib.get_close_matches(wanted, pool, n=1, cutoff=0.72 if pool is by_leaf else 0.8):
            return f"did you mean {pool[close[0]]!r}?"
    sections = {full.rpartition(".")[0] for full in known}
    if close := difflib.get_close_matches(name.partition(".")[0], sections - {""}, n=1):
        inside = [full.rpartition(".")[2] for full in known if full.startswith(close[0] + ".")]
        return f"[{close[0]}] has: {', '.join(inside)}"
    return "see: tinyllm grpo --help"


# Values


def _plain_type(hint: Any) -> tuple[Any, bool]:
    """A type without its `| None`, and whether it had one."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return rest[0], True
    return hint, False


def describe_type(hint: Any) -> str:
    """What to write for an option of this type, in words; choices are joined by |."""
    hint, _ = _plain_type(hint)
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return "|".join(args)
    if get_origin(hint) is tuple:
        one = describe_type(args[0])
        return f"{one},..." if args[-1] is Ellipsis else ",".join(describe_type(arg) for arg in args)
    if hint is bool:
        return "true or false"
    return {int: "whole number", float: "number", str: "text"}.get(hint, "key=value,...")


def coerce(option: Option, value: Any) -> Any:
    """A value as the option's type, from TOML, JSON or Python (no text is parsed here). Raises ConfigError."""
    hint, optional = _plain_type(option.type)
    if value is None and optional:
        return None
    try:
        result = _coerce(hint, value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{option.name} = {_show(value)}: expected {describe_type(hint)}") from None
    for item in result if isinstance(result, tuple) else (result,):
        _check_bounds(option, item)
    return result


def _coerce(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
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
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if hint is str and isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item):
        return dict(value)
    raise TypeError


def _check_bounds(option: Option, value: Any) -> None:
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option.name} = {value}: must be a finite number")
    for bound, limit in option.bounds.items():
        holds = {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[bound]
        if not holds:
            remedy = f"set it to {_show(option.default)}, the default" if option.default is not None else "leave it out"
            raise ConfigError(f"{option.name} = {_show(value)}: must be {words[bound]} {limit:g}; {remedy}")


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def to_text(value: Any) -> str:
    """A value as it is typed on the command line; - for none and for the empty list."""
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, tuple):
        return ",".join(to_text(item) for item in value)
    return value if isinstance(value, str) else _show(value)


def parse_text(option: Option, text: str) -> Any:
    """A value from what was typed after an option. Lists are a,b,c or a TOML array; maps are key=value,key=value."""
    hint, optional = _plain_type(option.type)
    if optional and text.lower() == "none":
        return None
    try:
        return coerce(option, _parse(hint, text))
    except ValueError:
        raise ConfigError(f"{option.name} = {_show(text)}: expected {describe_type(hint)}") from None


def _parse(hint: Any, text: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        if text.startswith("["):
            return tomllib.loads(f"x = {text}")["x"]
        return [_parse(args[0], part.strip()) for part in text.split(",")] if text else []
    if hint is bool:
        return BOOLEANS.get(text.lower(), text)
    if hint is int:
        return int(text.replace("_", ""))
    if hint is float:
        return float(text)
    if origin is not Literal and hint is not str:
        pairs = [part.partition("=") for part in text.split(",") if part]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError
        return {key.strip(): value.strip() for key, _, value in pairs}
    return text


# Building


def make_config(base: GRPOConfig | None = None, /, **given: Any) -> GRPOConfig:
    """A checked configuration from Python keywords, laid over `base` (or the defaults).

    Each keyword is a whole section (`lora=LoraConfig(rank=8)` or `lora={"rank": 8}`), or any option by the name the
    command line takes: `model="folder"`, `data="rows.jsonl"`, `steps=10`. Raises ConfigError.
    """
    config: Any = base or GRPOConfig()
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if is_dataclass(value) and hasattr(config, name):
            config = replace(config, **{name: value})
        elif name in ("model", "data", "reward") and not isinstance(value, Mapping):
            flat |= shortcut(name, value)
        else:
            flat |= flatten({name: value}, loose=True)
    return overlay(config, flat)


def shortcut(name: str, value: Any) -> dict[str, Any]:
    """What the short names stand for; `data` is a file or the name of a dataset by its suffix."""
    if name == "data":
        is_file = str(value).endswith(DATA_SUFFIXES)
        return {"data.file": value, "data.dataset": None} if is_file else {"data.file": None, "data.dataset": value}
    return {SHORTCUTS[name]: value}


def flatten(nested: Mapping[str, Any], kind: Any = GRPOConfig, *, loose: bool = False) -> dict[str, Any]:
    """A nested mapping (a TOML file) as dotted name -> value. Unknown keys raise ConfigError naming the nearest one.

    With loose, names at the top may leave out their section.
    """
    known = options(kind)
    sections = {".".join(parts[:i]) for parts in (name.split(".") for name in known) for i in range(1, len(parts))}

    def walk(prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in part.items():
            name = prefix + str(key)
            if name in sections and isinstance(value, Mapping):
                yield from walk(name + ".", value)
            elif name in known:
                yield name, value
            elif name in sections:
                raise ConfigError(f"{name} = {_show(value)}: [{name}] is a section; {_nearest(name, known)}")
            elif loose:
                yield resolve_name(name, kind), value
            else:
                raise ConfigError(f"unknown option {name!r}; {_nearest(name, known)}")

    return dict(walk("", nested))


def overlay(base: Any, flat: Mapping[str, Any]) -> Any:
    """`base` with the values of a flat mapping in place, each checked, then the whole. Raises ConfigError."""
    known = options(_kind(base))
    result = _replace(base, {name: coerce(known[name], value) for name, value in flat.items()})
    check(result)
    return result


def _replace(base: Any, flat: Mapping[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        head, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    for head, part in inner.items():
        changes[head] = _replace(getattr(base, head), part)
    return replace(base, **changes)


def check(config: Any) -> None:
    """Every value against its type and bounds, then values against each other. Raises ConfigError."""
    for name, option in options(_kind(config)).items():
        coerce(option, value_of(config, name))
    if isinstance(config, GRPOConfig):
        _check_together(config)


def _check_together(c: GRPOConfig) -> None:
    if c.data.file and c.data.dataset:
        raise ConfigError(f"data.file = {c.data.file!r} and data.dataset = {c.data.dataset!r}: give one of them")
    if c.reward.weights and len(c.reward.weights) != len(c.reward.functions):
        count = len(c.reward.functions)
        raise ConfigError(f"reward.weights = {_show(c.reward.weights)}: give one per function, {count} in all, or none")
    if c.optimizer.warmup_steps > c.train.steps:
        raise ConfigError(
            f"optimizer.warmup_steps = {c.optimizer.warmup_steps}: more than train.steps = {c.train.steps}; lower it"
        )
    low, high = c.objective.clip_low, c.objective.clip_high
    if low is not None and low > 1:
        raise ConfigError(f"objective.clip_low = {low}: a ratio cannot fall by more than 1; set it to 0.2")
    if high is not None and low is not None and high < low and c.objective.preset != "cispo":
        raise ConfigError(f"objective.clip_high = {high}: below clip_low = {low}; set it to {low} or more")


# Files and dictionaries


def value_of(config: Any, name: str) -> Any:
    """The value at a dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values (lists for tuples), fit for JSON; None included."""
    result: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        result[item.name] = value
    return result


def from_dict(nested: Mapping[str, Any], base: Any = None) -> Any:
    """The inverse of to_dict; keys left out keep the value of `base` (or the default). Raises ConfigError."""
    start = base or GRPOConfig()
    return overlay(start, flatten(nested, _kind(start)))


def to_toml(config: Any, *, sparse: bool = False) -> str:
    """A configuration as TOML; from_toml gives the same one back. With sparse, only what differs from the defaults.

    None cannot be written in TOML and is always the default, so it is left out.
    """
    lines: dict[str, list[str]] = {}
    for name, option in options(_kind(config)).items():
        value = value_of(config, name)
        section, _, leaf = name.rpartition(".")
        if value is not None and not (sparse and value == option.default):
            lines.setdefault(section, []).append(f"{leaf} = {_toml(value)}")
    blocks = ["\n".join(([f"[{section}]"] if section else []) + part) for section, part in lines.items()]
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def from_toml(text: str, base: Any = None, *, where: str = "TOML") -> Any:
    """A configuration from sparse TOML text, laid over `base` (or the defaults). Raises ConfigError naming `where`."""
    try:
        return from_dict(tomllib.loads(text), base)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_toml(path: str | Path, base: Any = None) -> Any:
    """A configuration from a TOML file. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: {reason}; give a TOML file") from None
    return from_toml(text, base, where=str(path))


def parse_overrides(words: Sequence[str], kind: Any = GRPOConfig) -> dict[str, Any]:
    """Command-line words `--section.field value` (or `--section.field=value`) as dotted name -> checked value.

    A bare `--flag` sets a true|false option. Raises ConfigError.
    """
    known = options(kind)
    flat: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected {word!r}; options are written --name value (see: tinyllm grpo --help)")
        name, equals, text = word[2:].partition("=")
        full = name if name == "data" else resolve_name(name, kind)
        if not equals:
            if queue and not queue[0].startswith("--"):
                text = queue.pop(0)
            elif full != "data" and _plain_type(known[full].type)[0] is bool:
                text = "true"
            else:
                hint = "file or dataset" if full == "data" else describe_type(known[full].type)
                raise ConfigError(f"--{name} needs a value ({hint})")
        flat |= shortcut("data", text) if full == "data" else {full: parse_text(known[full], text)}
    return flat
