"""The text of help: usage, options with their defaults, tables that fit the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.config.options import Option, describe_type, options, plain_type, to_text
from tinyllm.config.sections import SHORTCUTS
from tinyllm.config.words import own_options


@dataclass(frozen=True)
class Command:
    """One command: what it does, in a line; what it takes; the function that runs it and returns the exit code."""

    about: str
    example: str
    run: Callable[[Any, Mapping[str, Any]], int]
    own: type[Any]
    """Its own arguments, a dataclass of options."""
    kind: Any = None
    """The configuration whose options it takes too."""
    more: str = ""
    """A part of its help, below the usage: forms of the command, or what its arguments mean."""


def overview(commands: Mapping[str, Command]) -> str:
    """`tinyllm --help`."""
    rows = [(name, command.about) for name, command in commands.items()]
    examples = [command.example for command in commands.values() if "--" in command.example]
    return "\n".join(
        [
            "tinyllm: train language models with GRPO on verifiable rewards; every number can be derived again.",
            "",
            bold("Commands"),
            table(rows, indent=2),
            "",
            bold("Examples"),
            "  tinyllm grpo                          the bundled model on arithmetic: ten minutes on two cores",
            *(f"  {example}" for example in examples[:3]),
            "",
            "Each command explains itself: tinyllm COMMAND --help",
        ]
    )


def command_help(name: str, command: Command) -> str:
    """`tinyllm NAME --help`: the command's own arguments, then every option with its default, section by section."""
    known = own_options(command.own)
    places = [_place(option) for option in known.values() if option.place]
    usage = " ".join([f"tinyllm {name}", *places, *(["[--name VALUE ...]"] if len(known) > len(places) else [])])
    if command.kind is not None:
        usage += " [--section.option VALUE ...]"
    lines = [textwrap.fill(command.about, width()), "", f"  {usage}", f"  example: {command.example}"]
    if command.more:
        lines += ["", *(part for line in command.more.splitlines() for part in textwrap.wrap(line, width()) or [""])]
    rows = [row for option in known.values() for row in _own_row(option)]
    lines += ["", table(rows, indent=2)] if rows else []
    if command.kind is None:
        return "\n".join(lines)
    short = ", ".join(
        f"--{name}" for name in ("data", *(n for n, full in SHORTCUTS.items() if full in options(command.kind)))
    )
    told = (
        f"A section may be left out where only one has the option: --max-new-tokens 64. Shorter still: {short}. "
        "Lists are a,b,c; a true|false option alone means true; none unsets. "
        "A TOML file has the same sections and names; the command line wins over it."
    )
    return "\n".join([*lines, "", textwrap.fill(told, width()), *option_lines(command.kind)])


def _place(option: Option) -> str:
    name = option.name + (" ..." if describe_type(option.type).endswith("...") else "")
    return name if option.default is ... else f"[{name}]"


def _own_row(option: Option) -> list[tuple[str, str]]:
    """One row of help: what is typed; what the argument means, with its default."""
    what = describe_type(option.type)
    typed = option.name
    if not option.place and plain_type(option.type)[0] is not bool:
        typed += " " + (
            option.shown or (what if "|" in what else {"whole number": "N", "number": "X"}.get(what, "TEXT"))
        )
    typed = f"-{option.short}, {typed}" if option.short else typed
    told = option.default not in (None, ..., False, (), "")
    return [(typed, option.help + (f" (default: {to_text(option.default)})" if told else ""))]


def option_lines(kind: Any) -> list[str]:
    """Every option of a configuration class with its default and meaning, section by section."""
    lines: list[str] = []
    section = None
    rows: list[tuple[str, ...]] = []
    for name, option in options(kind).items():
        part, _, leaf = name.rpartition(".")
        if part != section:
            lines += [table(rows, indent=2)] if rows else []
            title = part or "general"
            heading = textwrap.fill(f"{title}  {_section_help(kind, part)}", width(), subsequent_indent="  ")
            lines += ["", bold(title) + heading.removeprefix(title)]
            section, rows = part, []
        what = describe_type(option.type)
        telling = "|" in what or (option.default is None and what != "text")
        rows.append((leaf, to_text(option.default), option.help + (f" ({what})" if telling else "")))
    return [*lines, table(rows, indent=2)]


def _section_help(kind: Any, section: str) -> str:
    part: Any = kind()
    for name in section.split(".") if section else ():
        part = getattr(part, name)
    return type(part).__doc__ or ""


def table(rows: Sequence[Sequence[str]], *, indent: int = 0, widths: Sequence[int] = ()) -> str:
    """Columns aligned, the last one wrapped to the terminal."""
    if not rows:
        return ""
    count = len(rows[0])
    sizes = list(widths) or [max(len(row[i]) for row in rows) for i in range(count - 1)]
    lines = []
    for row in rows:
        lead = " " * indent + "".join(f"{cell:<{size}}  " for cell, size in zip(row, sizes, strict=False))
        column = " " * (indent + sum(sizes) + 2 * len(sizes))
        room = max(width() - len(column), 30)
        wrapped = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [(lead + wrapped[0]).rstrip(), *(column + line for line in wrapped[1:])]
    return "\n".join(lines)


def width() -> int:
    """Columns to fill: the terminal's, at most 130."""
    return min(shutil.get_terminal_size((120, 24)).columns, 130)


def bold(text: str) -> str:
    """Bold in a terminal."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text
