"""What a page is made of: sections of blocks, each block plain data that the page knows how to draw.

Whoever makes a report of their own (a pipeline of several stages, say) adds sections built from these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Block = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One page behind one entry of the navigation."""

    title: str
    blocks: list[Block] = field(default_factory=list)


def heading(text: str, note: str = "") -> Block:
    """A heading with a line of explanation under it."""
    return {"type": "heading", "text": text, "note": note}


def text(words: str) -> Block:
    """A paragraph."""
    return {"type": "text", "text": words}


def tiles(items: Sequence[tuple[str, str, str]]) -> Block:
    """Figures at a glance: (name, value, note)."""
    return {"type": "tiles", "items": [list(map(str, item)) for item in items]}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], wide: bool = False) -> Block:
    """A table; numbers stand right-aligned. wide: its texts keep their line breaks."""
    cells = [[cell if isinstance(cell, (int, float, str)) else str(cell) for cell in row] for row in rows]
    return {"type": "table", "head": list(head), "rows": cells, "wide": wide}


def command(words: str) -> Block:
    """A command line to copy."""
    return {"type": "command", "text": words}


def notes(items: Sequence[dict[str, Any]]) -> Block:
    """Findings: {level: bad, warn or ok; text; filter: rollouts it speaks of}; see health.findings."""
    return {"type": "notes", "items": list(items)}


def charts(items: Sequence[dict[str, Any]]) -> Block:
    """A grid of charts; see curves."""
    return {"type": "charts", "charts": list(items)}


def browser() -> Block:
    """The rollouts of all runs of the page."""
    return {"type": "browser"}
