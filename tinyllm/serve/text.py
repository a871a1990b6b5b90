"""Streamed text: the pieces that are sent concatenate to exactly the text of the whole completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CLEANED = 3
"""A tokenizer that tidies spaces (" n't" to "n't") may still change so many of the last characters."""


class TextStream:
    """Decodes a growing list of tokens and returns the text that later tokens cannot change.

    Held back: a character whose bytes are not all there, and an ending that may become a stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids: list[int] = []
        self.sent = ""
        self.unsettled = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further tokens make certain."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if self.unsettled:
            text = text[: -self.unsettled]
        return self._send(_before_stop(text.rstrip("\ufffd"), self.stops))

    def finish(self, text: str) -> str:
        """The rest, given the whole text."""
        return self._send(text)

    def _send(self, text: str) -> str:
        if not text.startswith(self.sent):  # a decoder that changed earlier text: nothing is sent until it agrees again
            return ""
        new, self.sent = text[len(self.sent) :], text
        return new


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """The text without an ending that is the beginning of a stop string."""
    longest = 0
    for stop in stops:
        size = min(len(stop) - 1, len(text))
        while size > longest and not text.endswith(stop[:size]):
            size -= 1
        longest = max(longest, size)
    return text[: len(text) - longest]
