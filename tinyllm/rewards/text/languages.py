"""The language of a text, by py3langid: naive Bayes over byte sequences for 140 languages, on numpy, deterministic.

    the language of the whole text, if its probability is at least 0.5 and neither half is of another language

Otherwise the language is undecided, and a constraint on it is not followed. Accuracy on sentences of the 36 languages
that constraints may name: benchmarks/languages.py. Model and features: Lui and Baldwin, langid.py (ACL 2012 system
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
"""ISO 639-1 codes that a constraint may name; language_of may also return the code of another language."""
MIN_PROBABILITY = 0.5
MAX_CHARS = 4_000
"""Only so many characters at the start of a text are read."""
MIN_HALF_CHARS = 30
"""A half of a text with fewer characters is too short for its language to be compared."""


def language_of(text: str) -> str | None:
    """ISO 639-1 code of a text's language; None when the text is too short or too mixed to decide.

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
