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
from dataclasses import dataclass, replace
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

    J >= t needs |A & B| >= t |B|, so of any |B| - t |B| + 1 + m pieces of B, m + 1 are in A. Counted over the rarest
    pieces of each prompt of the suite, that leaves few candidates, so 100,000 training prompts against 1,000 take
    seconds to a minute. Source: Chaudhuri, Ganti, Kaushik (2006), prefix filter.
    """
    plain = [_read(text) for text in suite]
    frequency = Counter(piece for one in plain for piece in one.pieces)
    template: frozenset[str] = frozenset()
    if len(suite) >= _TEMPLATE_FROM:
        template = frozenset(piece for piece, count in frequency.items() if count > len(suite) / 2)
    read = [replace(one, pieces=one.pieces - template) for one in plain]
    more = [len(one.pieces) // 5 for one in read]  # m, the larger the fewer candidates
    least = min(more, default=0)
    exact: dict[str, list[int]] = {}
    keys: dict[tuple[str, ...], dict[str, list[int]]] = {}  # numbers -> rare piece -> the prompts it is a key of
    for index, one in enumerate(read):
        exact.setdefault(one.text, []).append(index)
        of_numbers = keys.setdefault(one.numbers, {})
        needed = math.ceil(THRESHOLD * len(one.pieces))
        rarest = sorted(one.pieces, key=lambda piece: (frequency[piece], piece))
        for piece in rarest[: len(rarest) - needed + 1 + more[index]]:
            of_numbers.setdefault(piece, []).append(index)
    best: dict[int, Match] = {}
    for text in train:
        normal = normalised(text)
        for index in exact.get(normal, ()):
            if index not in best or best[index].kind != "exact":
                best[index] = Match(index, "exact", 1.0, text)
        having = keys.get(tuple(_NUMBER.findall(normal)))
        if having is None:
            continue
        pieces = _pieces(normal)
        counts = Counter(itertools.chain.from_iterable(having[piece] for piece in pieces & having.keys()))
        if max(counts.values(), default=0) <= least:
            continue
        for index in [index for index, count in counts.items() if count > more[index]]:
            similarity = _similarity(pieces - template, read[index].pieces)
            if similarity >= THRESHOLD and (index not in best or best[index].similarity < similarity):
                best[index] = Match(index, "near", similarity, text)
    return [best[index] for index in sorted(best)]


def _similarity(a: frozenset[str], b: frozenset[str]) -> float:
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def normalised(text: str) -> str:
    """NFKC, case folded, whitespace joined, and none before a mark."""
    return _BEFORE_MARK.sub("", " ".join(unicodedata.normalize("NFKC", text).casefold().split()))


def _read(text: str) -> _Read:
    normal = normalised(text)
    return _Read(normal, tuple(_NUMBER.findall(normal)), _pieces(normal))


def _pieces(normal: str) -> frozenset[str]:
    padded = f"  {_NUMBER.sub('0', normal)}  "
    return frozenset(padded[i : i + PIECE] for i in range(max(1, len(padded) - PIECE + 1)))
