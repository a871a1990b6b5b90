"""How the command line speaks: help, tables, widths."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.config.options import describe_type, options, to_text
from tinyllm.config.sections import SHORTCUTS


@dataclass(frozen=True)
class Command:
    """One command: what it does, in a line; its arguments; the function that runs it and returns the exit code."""

    about: str
    example: str
    run: Callable[[Sequence[str]], int]


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
            "  tinyllm grpo                          the bundled model on arithmetic, about ten minutes on two cores",
            *(f"  {example}" for example in examples[:3]),
            "",
            "Each command explains itself: tinyllm COMMAND --help",
        ]
    )


def training_help(kind: Any, about: str) -> str:
    """`tinyllm grpo --help`: every option with its default and meaning, section by section."""
    known = options(kind)
    short = ", ".join(f"--{name}" for name in ("data", *(n for n, full in SHORTCUTS.items() if full in known)))
    lines = [
        about,
        "",
        f"  tinyllm {kind.kind} [--config FILE.toml] [--section.option VALUE ...]",
        f"  tinyllm {kind.kind} --resume RUN" + (" [--engine.urls URL ...]" if "engine.urls" in known else ""),
        "",
        textwrap.fill(
            f"A section may be left out where only one has the option: --lr 1e-5. Shorter still: {short}. "
            "Lists are a,b,c; a true|false option alone means true; none unsets. "
            "A TOML file has the same sections and names; the command line wins over it.",
            width(),
        ),
    ]
    return "\n".join([*lines, *option_lines(kind)])


def option_lines(kind: Any) -> list[str]:
    """Every option of a configuration class with its default and meaning, section by section."""
    lines: list[str] = []
    section = None
    rows: list[tuple[str, ...]] = []
    for name, option in options(kind).items():
        part, _, leaf = name.rpartition(".")
        if part != section:
            lines += [table(rows, indent=2, widths=WIDTHS)] if rows else []
            lines += ["", bold(part or "general") + f"  {_section_help(kind, part)}"]
            section, rows = part, []
        what = describe_type(option.type)
        telling = "|" in what or (option.default is None and what != "text")
        rows.append((leaf, to_text(option.default), option.help + (f" ({what})" if telling else "")))
    return [*lines, table(rows, indent=2, widths=WIDTHS)]


WIDTHS = (22, 21)


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
