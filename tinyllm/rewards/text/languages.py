"""Which language a text is in, by py3langid: naive Bayes over byte sequences of 140 languages, on numpy, deterministic.

    the language of the whole text, when its probability is at least 0.5 and neither half is of another one

Else the language is not told, and a constraint on it is not followed. Accuracy on sentences of the 36 languages that
constraints may ask for: benchmarks/languages.py. Model and features: Lui and Baldwin, langid.py (ACL 2012 system
demonstrations).
"""

from __future__ import annotations

import functools
from typing import Any

from tinyllm.errors import require_extra

LANGUAGES = frozenset(
    "ar bg bn de el en es fa fi fr gu he hi hy it ja ka kn ko ml mr ne nl pa pl pt ru sv sw ta te th tr uk ur vi zh"
    .split()
)  # fmt: skip
"""ISO 639-1 codes that a constraint may ask for; a text may also be told to be of another language."""
MIN_PROBABILITY = 0.5
MAX_CHARS = 4_000
"""The start of a text decides."""
MIN_HALF_CHARS = 30
"""A shorter half of a text says too little about its language."""


def language_of(text: str) -> str | None:
    """The code of the language that a text is in; None when the text is too short or too mixed to tell.

    Raises MissingExtra where py3langid is not installed.
    """
    text = " ".join(text[:MAX_CHARS].split())
    language = _told(text)
    if language is None:
        return None
    middle = len(text) // 2
    split = text.rfind(" ", 0, middle) if " " in text[:middle] else middle  # Thai and Chinese have no spaces
    halves = [half for half in (text[:split], text[split:]) if len(half) >= MIN_HALF_CHARS]
    return language if all(_told(half) in (language, None) for half in halves) else None


def _told(text: str) -> str | None:
    if not any(map(str.isalpha, text)):
        return None
    language, probability = detector().classify(text)
    return language if probability >= MIN_PROBABILITY else None


@functools.cache
def detector() -> Any:
    """py3langid's classifier with its own model, loaded once. Raises MissingExtra."""
    require_extra("instructions", "a constraint on a text's language")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
