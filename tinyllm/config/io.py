"""Configurations from and to TOML files, command-line overrides, dictionaries and Python keywords. Keys are strict.

Every source is first made a flat mapping from dotted name to value, then laid over a base and checked once.
A mistake raises ConfigError in one line: the field, the value, and the remedy.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from tinyllm.config.options import (
    coerce,
    nearest_name,
    options,
    resolve_name,
    show_value,
    unknown_option,
)
from tinyllm.config.sections import SHORTCUTS, DPOConfig, GRPOConfig, SFTConfig
from tinyllm.errors import ConfigError

DATA_SUFFIXES = (".jsonl", ".parquet")


# Building


def make_config(base: Any = None, /, **given: Any) -> Any:
    """A checked configuration from Python keywords, laid over `base` (or the defaults). Raises ConfigError."""
    config = base or GRPOConfig()
    return overlay(config, flat_keywords(given, type(config)))


def flat_keywords(given: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Python keywords as dotted name -> value.

    Each keyword is a whole section (`lora=LoraConfig(rank=8)` or `lora={"rank": 8}`), or any option by the name that
    the command line takes: `model="folder"`, `data="rows.jsonl"`, `steps=10`. Raises ConfigError.
    """
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name == "data" and isinstance(value, str | Path | None):
            flat |= data_source(value)
        else:
            nested = to_dict(value) if is_dataclass(value) else value
            flat |= flatten({name: nested}, kind, loose=True)
    return flat


def data_source(value: Any) -> dict[str, Any]:
    """The options that `data` stands for: a file, or the name of a dataset, told by the suffix."""
    is_file = str(value).endswith(DATA_SUFFIXES) or Path(str(value)).is_file()  # reading says what is supported
    return {"data.file": value, "data.dataset": None} if is_file else {"data.file": None, "data.dataset": value}


def flatten(nested: Mapping[str, Any], kind: Any, *, loose: bool = False) -> dict[str, Any]:
    """A nested mapping (a TOML file) as dotted name -> value. Unknown keys raise ConfigError naming the nearest one.

    With loose, names at the top may be short names, or leave out their section.
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
            elif name in sections and not (loose and name in SHORTCUTS):
                raise ConfigError(f"{name} = {show_value(value)}: [{name}] is a section; {nearest_name(name, kind)}")
            elif loose:
                yield resolve_name(name, kind), value
            else:
                raise ConfigError(unknown_option(name, kind))

    return dict(walk("", nested))


def overlay(base: Any, flat: Mapping[str, Any]) -> Any:
    """`base` with the values of a flat mapping in place, each checked, then the whole. Raises ConfigError."""
    known = options(type(base))
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
    """Check every value against its type and bounds, then options against each other. Raises ConfigError."""
    for name, option in options(type(config)).items():
        coerce(option, attrgetter(name)(config))
    if isinstance(config, GRPOConfig | SFTConfig | DPOConfig):
        _check_run(config)
    if isinstance(config, GRPOConfig):
        _check_grpo(config)
    if isinstance(config, SFTConfig) and config.model.reference is not None:
        raise ConfigError(f"model.reference = {config.model.reference!r}: SFT has no reference policy; leave it out")


def _check_run(c: GRPOConfig | SFTConfig | DPOConfig) -> None:
    if c.data.file and c.data.dataset:
        raise ConfigError(f"data.file = {c.data.file!r} and data.dataset = {c.data.dataset!r}: give one of them")
    if c.optimizer.warmup_steps > c.train.steps and (c.kind == "grpo" or c.train.steps):
        raise ConfigError(
            f"optimizer.warmup_steps = {c.optimizer.warmup_steps}: more than train.steps = {c.train.steps}; lower it"
        )
    if isinstance(c.data.held_out, str) and not c.data.held_out.endswith(DATA_SUFFIXES):
        raise ConfigError(
            f"data.held_out = {show_value(c.data.held_out)}: give a share of your rows (0.1) or a file "
            f"({' or '.join(DATA_SUFFIXES)})"
        )


def _check_grpo(c: GRPOConfig) -> None:
    if c.reward.weights and len(c.reward.weights) != len(c.reward.functions):
        count = len(c.reward.functions)
        raise ConfigError(
            f"reward.weights = {show_value(c.reward.weights)}: give one per function, {count} in all, or none"
        )
    _check_pool(c)
    _check_overlong(c.train.overlong)
    low, high = c.objective.clip_low, c.objective.clip_high
    if low is not None and low > 1:
        raise ConfigError(f"objective.clip_low = {low}: a ratio cannot fall by more than 1; set it to 0.2")
    if high is not None and low is not None and high < low and c.objective.axes.clip != "cispo":
        raise ConfigError(f"objective.clip_high = {high}: below clip_low = {low}; set it to {low} or more")


def _check_pool(c: GRPOConfig) -> None:
    pool = c.pool
    if pool.engines and c.engine.urls:
        raise ConfigError(f"pool.engines = {pool.engines} and engine.urls: servers are engines too; give one of them")
    if pool.engines or c.engine.urls:
        return
    for name in ("max_lag", "verifiers"):
        if value := getattr(pool, name):
            raise ConfigError(
                f"pool.{name} = {value}: nothing samples beside the trainer; set pool.engines to 1 or more"
            )


def _check_overlong(value: float | str | None) -> None:
    word, comma, share = str(value).partition(",")
    fits = word == "mask" and (not comma or (_is_number(share) and 0 <= float(share) < 1))
    if isinstance(value, str) and not fits:
        raise ConfigError(
            f"train.overlong = {show_value(value)}: give a share of sampling.max_new_tokens (0.2; 0 = off), mask, or "
            "both (mask,0.2)"
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


# Files and dictionaries


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values (lists for tuples), fit for JSON; None included."""
    return json.loads(json.dumps(asdict(config)))


def from_dict(nested: Mapping[str, Any], base: Any = None) -> Any:
    """The inverse of to_dict; keys left out keep the value of `base` (or the default). Raises ConfigError."""
    start = base or GRPOConfig()
    return overlay(start, flatten(nested, type(start)))


def to_toml(config: Any, *, sparse: bool = False) -> str:
    """A configuration as TOML; from_toml gives the same one back. With sparse, only what differs from the defaults.

    None cannot be written in TOML and is always the default, so it is left out.
    """
    lines: dict[str, list[str]] = {}
    for name, option in options(type(config)).items():
        value = attrgetter(name)(config)
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
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number with thousands of digits
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_toml(path: str | Path, base: Any = None) -> Any:
    """A configuration from a TOML file. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: {reason}; give a TOML file") from None
    return from_toml(text, base, where=str(path))
