"""Sections of a page and the blocks they are built from. A block is plain data that app.js draws.

A report of one's own, such as that of a pipeline of several stages, adds sections built from these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tinyllm.health.finding import Finding
from tinyllm.view.curves import Chart

Block = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """The content of one tab of the page."""

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


def notes(items: Sequence[Finding], run: str) -> Block:
    """Findings on a run of this name, each with a button that shows the rollouts of the finding."""
    return {"type": "notes", "items": [_note(item, run) for item in items]}


def _note(finding: Finding, run: str) -> dict[str, Any]:
    note: dict[str, Any] = {"level": finding.level, "step": finding.step}
    note |= {"text": sentence(finding.text), "remedy": sentence(finding.remedy)}
    if finding.rows is None:
        return note
    shown: dict[str, Any] = {"run": run, "verdict": finding.rows.verdict}
    shown["step"] = None if finding.rows.first_step is None else [finding.rows.first_step, finding.rows.last_step]
    return note | {"filter": {name: value for name, value in shown.items() if value is not None}}


def sentence(words: str) -> str:
    """Words with a capital letter and a full stop; an empty text stays empty."""
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def charts(items: Sequence[Chart]) -> Block:
    """A grid of charts; see view/curves.py."""
    return {"type": "charts", "charts": [asdict(chart) | {"zero": chart.zero} for chart in items]}


def browser() -> Block:
    """The rollouts of all runs of the page."""
    return {"type": "browser"}
