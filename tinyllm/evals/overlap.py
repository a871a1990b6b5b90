"""Training prompts that stand in a suite too: the same text, or the same but for a few characters.

    exact   equal after Unicode NFKC, case folding and joining of whitespace (none before ? ! . , ; :)
    near    the same numbers in the same order, and J >= 0.8, where J = |A & B| / |A | B| of the sets of 5-character
            pieces of the two texts, numbers written as 0, without the pieces that over half of the suite's prompts have

Numbers must agree because "What is 3 + 4?" and "What is 3 + 5?" are two questions however alike they read; what most
prompts share (a template, an instruction) says nothing about which question it is. This finds copies with small edits,
as Lee et al., arXiv:2107.06499, do; no n-gram finds a paraphrase.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THRESHOLD = 0.8
PIECE = 5
_TEMPLATE_FROM = 20
"""Fewest prompts of a suite in which pieces common to over half of the prompts are left out."""
_BEFORE_MARK = re.compile(r" (?=[?!.,;:])")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Match:
    """A prompt of the suite with the training prompt that is most like it."""

    prompt: int
    """Its place in the suite, from 0."""
    kind: str
    """exact or near."""
    similarity: float
    train: str
    """Text of the training prompt."""


@dataclass(frozen=True)
class _Read:
    text: str
    numbers: tuple[str, ...]
    pieces: frozenset[str]


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as one text: the user's messages of a chat."""
    if isinstance(prompt, str):
        return prompt
    asked = [m for m in prompt if m.get("role") == "user"] or prompt
    return "\n".join(str(message["content"]) for message in asked)


def find_overlap(suite: Sequence[str], train: Iterable[str]) -> list[Match]:
    """The suite's prompts that are among the training prompts, in order; each with its most similar one.

    An index from (numbers, piece) to the suite's prompts gives |A & B| for all B at once, so 100,000 training prompts
    against 1,000 take seconds to a minute.
    """
    read = [_read(text) for text in suite]
    frequency = Counter(piece for one in read for piece in one.pieces)
    template: frozenset[str] = frozenset()
    if len(suite) >= _TEMPLATE_FROM:
        template = frozenset(piece for piece, count in frequency.items() if count > len(suite) / 2)
    exact: dict[str, list[int]] = {}
    keys: dict[tuple[str, ...], dict[str, list[int]]] = {}  # numbers -> piece -> the prompts that have both
    for index, one in enumerate(read):
        exact.setdefault(one.text, []).append(index)
        of_numbers = keys.setdefault(one.numbers, {})
        for piece in one.pieces - template:
            of_numbers.setdefault(piece, []).append(index)
    sizes = [len(one.pieces - template) for one in read]
    best: dict[int, Match] = {}
    for text in train:
        normal = normalised(text)
        for index in exact.get(normal, ()):
            if index not in best or best[index].kind != "exact":
                best[index] = Match(index, "exact", 1.0, text)
        having = keys.get(tuple(_NUMBER.findall(normal)))
        if having is None:
            continue
        pieces = _pieces(normal) - template
        counts = Counter(itertools.chain.from_iterable(having[piece] for piece in pieces & having.keys()))
        for index, shared in counts.items():
            similarity = shared / (len(pieces) + sizes[index] - shared)
            if similarity >= THRESHOLD and (index not in best or best[index].similarity < similarity):
                best[index] = Match(index, "near", similarity, text)
    return [best[index] for index in sorted(best)]


def normalised(text: str) -> str:
    """The text after Unicode NFKC and case folding, whitespace joined, without whitespace before ? ! . , ; :"""
    return _BEFORE_MARK.sub("", " ".join(unicodedata.normalize("NFKC", text).casefold().split()))


def _read(text: str) -> _Read:
    normal = normalised(text)
    return _Read(normal, tuple(_NUMBER.findall(normal)), _pieces(normal))


def _pieces(normal: str) -> frozenset[str]:
    padded = f"  {_NUMBER.sub('0', normal)}  "
    return frozenset(padded[i : i + PIECE] for i in range(max(1, len(padded) - PIECE + 1)))
