"""Finds docstring paragraphs with ragged lines and wraps them again at the margin.

    python scripts/reflow.py tinyllm            # lists them; exit code 1 when there are any
    python scripts/reflow.py --fix tinyllm      # wraps them again

A line is ragged when it follows a full line, is short, and yet its sentence goes on in the next line: what is left
when a text is wrapped a second time at a smaller margin. Only prose is touched: an indented block, a list, a line of a
table, "name: text" lines, a line that ends with its sentence and paragraphs of short lines stay as they are. Comments
and other strings are not looked at.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARGIN = 120
FULL, SHORT = 100, 70
"""Columns: a line that is full has at least so many, a short one at most."""
QUOTES = '"""'
_ITEM = re.compile(r"(?:[-*+|]|\d+[.)])\s")
_NAMED = re.compile(r"[`\w*., ]{1,40}: ")
_SENTENCE_END = re.compile(r"[.:;!?][)\"'`\u201d]*$")


@dataclass(frozen=True)
class Paragraph:
    """Lines [start, end) of a file that are one run of prose, all at one indentation."""

    start: int
    end: int
    indent: str


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings that stand as a statement of their own: docstrings, and those below an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def paragraphs(lines: Sequence[str], string: ast.Constant) -> Iterator[Paragraph]:
    """The runs of prose of a docstring of several lines, the first of which may follow the opening quotes."""
    first, last = string.lineno - 1, (string.end_lineno or string.lineno) - 1
    opening = lines[first].lstrip()
    if last == first or not opening.startswith((QUOTES, "r" + QUOTES)):
        return
    indent = lines[first][: len(lines[first]) - len(opening)]
    start: int | None = None
    for number in range(first, last + 1):
        text = prose(lines[number], indent, number == first)
        begins = number > first and text is not None and (_ITEM.match(text) or _NAMED.match(text))
        if start is not None and (text is None or begins):
            yield Paragraph(start, number, indent)
            start = None
        if text is None:
            continue
        if start is None and not (begins and _ITEM.match(text)):
            start = number
        if start is not None and ends_sentence(lines, number, last):
            yield Paragraph(start, number + 1, indent)
            start = None


def prose(line: str, indent: str, opens: bool) -> str | None:
    """The text of a line of prose at the docstring's own indentation; None for any other line."""
    text = line.removeprefix(indent)
    if opens:
        text = text.removeprefix("r").removeprefix(QUOTES)
    if not text.strip() or text.strip() == QUOTES or text[0].isspace() or re.search(r"\S\s{2,}\S| -> ", text):
        return None
    return text


def ends_sentence(lines: Sequence[str], number: int, last: int) -> bool:
    """Whether a line ends with its sentence where more would have fitted: a break that somebody meant."""
    if number == last:
        return True
    line = lines[number].rstrip()
    word = (lines[number + 1].split(maxsplit=1) or [""])[0]
    return bool(_SENTENCE_END.search(line)) and bool(word) and len(line) + 1 + len(word) <= MARGIN


def is_ragged(lines: Sequence[str], paragraph: Paragraph) -> bool:
    """Whether a line of the paragraph ends far before the margin, behind a full one; its last line may."""
    first = paragraph.start - 1 if paragraph.start and lines[paragraph.start - 1].strip() else paragraph.start
    lengths = [len(line.rstrip()) for line in lines[first : paragraph.end]]
    return any(before >= FULL and here <= SHORT for before, here in itertools.pairwise(lengths[:-1]))


def wrapped(lines: Sequence[str], paragraph: Paragraph) -> list[str]:
    """The paragraph's words, as many on each line as fit."""
    found: list[str] = []
    line = ""
    for word in " ".join(lines[paragraph.start : paragraph.end]).split():
        if line and len(line) + 1 + len(word) <= MARGIN:
            line = f"{line} {word}"
            continue
        found += [line] if line else []
        line = paragraph.indent + word
    return [*found, line]


def reflow(source: str) -> tuple[str, list[int]]:
    """The source with its ragged paragraphs wrapped again, and the lines (from 1) where those began."""
    lines = source.split("\n")
    strings = sorted(docstrings(ast.parse(source)), key=lambda string: string.lineno)
    ragged = [p for string in strings for p in paragraphs(lines, string) if is_ragged(lines, p)]
    for paragraph in reversed(ragged):
        lines[paragraph.start : paragraph.end] = wrapped(lines, paragraph)
    return "\n".join(lines), [paragraph.start + 1 for paragraph in ragged]


def main(argv: Sequence[str] | None = None) -> int:
    """Lists or mends the files of the given paths; returns 1 when ragged paragraphs are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="Python files, or folders of them")
    parser.add_argument("--fix", action="store_true", help="wrap the ragged paragraphs again")
    arguments = parser.parse_args(argv)
    files = [file for path in arguments.paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    left = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        mended, begins = reflow(source)
        for line in begins:
            print(f"{file}:{line}: ragged paragraph{', mended' if arguments.fix else ''}")
        if arguments.fix and begins:
            file.write_text(mended, encoding="utf-8")
        left += 0 if arguments.fix else len(begins)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
