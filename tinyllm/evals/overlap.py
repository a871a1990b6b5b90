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
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THRESHOLD = 0.8
PIECE = 5
_TEMPLATE_FROM = 20
"""Suites with fewer prompts have no template to speak of."""
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

    100,000 training prompts against 1,000 take seconds: a training prompt is compared only with prompts that have its
    numbers, and only if enough of its pieces are theirs.
    """
    plain = [_read(text) for text in suite]
    template = _template(plain)
    read = [_Read(one.text, one.numbers, one.pieces - template) for one in plain]
    exact: dict[str, list[int]] = {}
    buckets: dict[tuple[str, ...], dict[str, list[int]]] = {}  # numbers -> piece -> which prompts have it
    for index, one in enumerate(read):
        exact.setdefault(one.text, []).append(index)
        having = buckets.setdefault(one.numbers, {})
        for piece in one.pieces:
            having.setdefault(piece, []).append(index)
    best: dict[int, Match] = {}
    for text in train:
        normal = normalised(text)
        for index in exact.get(normal, ()):
            if index not in best or best[index].kind != "exact":
                best[index] = Match(index, "exact", 1.0, text)
        numbers = tuple(_NUMBER.findall(normal))
        if numbers in buckets:
            for index, similarity in _near(buckets[numbers], read, _pieces(normal) - template):
                if index not in best or best[index].similarity < similarity:
                    best[index] = Match(index, "near", similarity, text)
    return [best[index] for index in sorted(best)]


def normalised(text: str) -> str:
    """NFKC, case folded, whitespace joined, and none before a mark."""
    return _BEFORE_MARK.sub("", " ".join(unicodedata.normalize("NFKC", text).casefold().split()))


def _read(text: str) -> _Read:
    normal = normalised(text)
    return _Read(normal, tuple(_NUMBER.findall(normal)), _pieces(normal))


def _pieces(normal: str) -> frozenset[str]:
    padded = f"  {_NUMBER.sub('0', normal)}  "
    return frozenset(padded[i : i + PIECE] for i in range(max(1, len(padded) - PIECE + 1)))


def _template(suite: Sequence[_Read]) -> frozenset[str]:
    if len(suite) < _TEMPLATE_FROM:
        return frozenset()
    counts = Counter(piece for one in suite for piece in one.pieces)
    return frozenset(piece for piece, count in counts.items() if count > len(suite) / 2)


def _near(
    having: Mapping[str, list[int]], read: Sequence[_Read], pieces: frozenset[str]
) -> Iterable[tuple[int, float]]:
    """Prompts at least THRESHOLD similar.

    J >= t needs |A & B| >= t |A|, so of any |A| - t |A| + 1 + m pieces of A, m + 1 are in B: counted over the rarest
    ones, that leaves few candidates. Source: Chaudhuri, Ganti, Kaushik (2006), prefix filter.
    """
    needed = math.ceil(THRESHOLD * len(pieces))
    more = needed // 4
    if not pieces or len(pieces & having.keys()) < needed:
        return []
    rarest = sorted(pieces, key=lambda piece: len(having.get(piece, ())))[: len(pieces) - needed + 1 + more]
    counts = Counter(itertools.chain.from_iterable(having.get(piece, ()) for piece in rarest))
    found = []
    for index in (index for index, count in counts.items() if count > more):
        shared = len(pieces & read[index].pieces)
        similarity = shared / (len(pieces) + len(read[index].pieces) - shared)
        if similarity >= THRESHOLD:
            found.append((index, similarity))
    return found
