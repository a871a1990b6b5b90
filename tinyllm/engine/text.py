"""Stop strings in the text of completions, for every engine. No torch here."""

from __future__ import annotations

from collections.abc import Sequence


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str | None:
    """The text before the first stop string, or None when the text has none."""
    found = [position for stop in stop_strings if (position := text.find(stop)) >= 0]
    return text[: min(found)] if found else None
