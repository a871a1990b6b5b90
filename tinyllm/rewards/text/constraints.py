"""The registry of constraints: for each name the checks of its arguments and the test whether a text follows it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.rewards.json.reader import NotJson, fenced, read_json
from tinyllm.rewards.text.languages import LANGUAGES, detector, language_of

COMMAS = ",\u060c\u3001\uff0c\ufe50\ufe51\ufe10\ufe11\u055d\u07f8\u1363\u1802\u1808\ua4fe\ua60d\ua6f5\uff64\u201a"
COMMAS += "\u2e32\u2e34\u2e41\u2e49\u2e4c\U0001144d\U0001145a\U00016e97\U0001da87"
"""Commas of every script; punctuation:no_comma forbids them all."""
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_BULLET = re.compile(r"^[ \t]*[*+-][ \t]+(?=\S)(.*)$", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<![\w*])(\*\*?)(?![\s*])([^*\n]+)(?<![\s*])\1(?![\w*])")
_SENTENCE_END = re.compile(r"(?<![.!?\u3002\uff01\uff1f])[.!?\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]]*(?=\s|$)")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|No|[A-Z])\.$")
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u00ab": "\u00bb", "\u201e": "\u201c", "\u300c": "\u300d"}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@dataclass(frozen=True)
class Constraint:
    """One constraint: the test of a text, and the checks of its arguments."""

    follows: Callable[..., bool]
    """follows(text, **arguments): whether the text follows the constraint."""
    arguments: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """Name of an argument -> check of its value: returns the remedy for a wrong value, "" for a right one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of arguments that a row may leave out."""
    consistent: Callable[[Mapping[str, Any]], str] = lambda values: ""
    """Check of all arguments together: returns the fault, or ""."""


# Checks of arguments


def _count(value: Any) -> str:
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return "" if whole and 0 <= value <= 100_000 else "give a whole number"


def _positive(value: Any) -> str:
    return _count(value) or ("" if value > 0 else "give a number above 0")


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and value.strip() else "give a text"


def _texts(value: Any) -> str:
    good = isinstance(value, list) and value and all(isinstance(item, str) and item.strip() for item in value)
    return "" if good else "give a list of texts"


def _letter(value: Any) -> str:
    return "" if isinstance(value, str) and len(value) == 1 and not value.isspace() else "give one letter"


def _relation(value: Any) -> str:
    return "" if value in ("at least", "less than") else "give 'at least' or 'less than'"


def _language(value: Any) -> str:
    return "" if isinstance(value, str) and value in LANGUAGES else f"give one of {', '.join(sorted(LANGUAGES))}"


# Measures of a text


def words(text: str) -> list[str]:
    """The words of a text: runs of letters and digits, with apostrophes and hyphens inside."""
    return _WORD.findall(text)


def sentences(text: str) -> int:
    """Number of sentences; an abbreviation's full stop ends none, and the last sentence needs no mark at its end."""
    count, end = 0, 0
    for match in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[max(0, match.start() - 8) : match.start() + 1]):
            count, end = count + bool(words(text[end : match.start()])), match.end()
    return count + bool(words(text[end:]))


def paragraphs(text: str, mark: str = r"\n[ \t]*\n") -> list[str]:
    """The parts of a text between blank lines (or another mark, a regular expression), without empty parts."""
    return [part.strip() for part in re.split(mark, text) if part.strip()]


def occurrences(text: str, keyword: str) -> int:
    """How often a keyword (one or more whole words) occurs in a text, in upper or lower case."""
    keyword = r"\s+".join(map(re.escape, unicodedata.normalize("NFC", keyword).split()))
    return len(re.findall(rf"(?<!\w){keyword}(?!\w)", unicodedata.normalize("NFC", text), re.IGNORECASE))


def compare(number: int, relation: str, bound: float) -> bool:
    """Whether number >= bound ("at least") or number < bound ("less than"), IFEval's two relations."""
    return number >= bound if relation == "at least" else number < bound


# Constraints: whether a text follows one, given its arguments


def _keywords(text: str, keywords: list[str]) -> bool:
    return all(occurrences(text, keyword) for keyword in keywords)


def _frequency(text: str, keyword: str, frequency: float, relation: str) -> bool:
    return compare(occurrences(text, keyword), relation, frequency)


def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(occurrences(text, word) for word in forbidden_words)


def _letters(text: str, letter: str, let_frequency: float, let_relation: str) -> bool:
    return compare(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def _words(text: str, relation: str, num_words: float) -> bool:
    return compare(len(words(text)), relation, num_words)


def _range(text: str, min_words: float, max_words: float) -> bool:
    return min_words <= len(words(text)) <= max_words


def _sentences(text: str, relation: str, num_sentences: float) -> bool:
    return compare(sentences(text), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: float) -> bool:
    return len(paragraphs(text, r"\*\*\*")) == num_paragraphs


def _first_word(text: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    parts = paragraphs(text)
    if len(parts) != num_paragraphs:
        return False
    first = words(parts[int(nth_paragraph) - 1])
    return bool(first) and first[0].casefold() == first_word.casefold()


def _postscript(text: str, postscript_marker: str) -> bool:
    """Whether the marker starts the last paragraph, with text before and after the marker."""
    last = max(text.rfind("\n" + postscript_marker), text.rfind("\n\n" + postscript_marker))
    tail = text[last:].strip()
    return last > 0 and bool(text[:last].strip()) and len(paragraphs(tail)) == 1 and tail != postscript_marker


def _bullets(text: str, num_bullets: float) -> bool:
    return len(_BULLET.findall(_RULE.sub("", text))) == num_bullets


def _options(text: str, options: list[str]) -> bool:
    return sum(text.casefold().count(option.casefold()) for option in options) == 1


def _highlights(text: str, num_highlights: float) -> bool:
    return len(_HIGHLIGHT.findall(text)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: float) -> bool:
    heading = rf"^[ \t#*]*{re.escape(section_spliter)}[ \t]+(?:[0-9]+|[IVXLC]+)\b"
    return len(re.findall(heading, text, re.MULTILINE)) >= num_sections


def _json_format(text: str) -> bool:
    try:
        document = read_json(fenced(text) or text)
    except NotJson:
        return False
    return isinstance(document, (dict, list)) and bool(document)


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat(text: str, prompt_to_repeat: str) -> bool:
    text, wanted = (" ".join(part.split()).casefold() for part in (text, prompt_to_repeat))
    return text.startswith(wanted) and len(words(text[len(wanted) :])) > 0


def _capitals(text: str, capital_frequency: float, capital_relation: str) -> bool:
    return compare(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


def _response_language(text: str, language: str) -> bool:
    return language_of(text) == language


def _english_capital(text: str) -> bool:
    return any(map(str.isalpha, text)) and text == text.upper() and language_of(text.lower()) == "en"


def _english_lowercase(text: str) -> bool:
    return any(map(str.isalpha, text)) and text == text.lower() and language_of(text) == "en"


def _ends(text: str, end_phrase: str) -> bool:
    phrase = end_phrase.strip().casefold()
    before, found, after = text.strip().strip('"').casefold().rpartition(phrase)
    whole = not (phrase[0].isalnum() and before[-1:].isalnum())  # "weekend" does not end in "end"
    return bool(found) and not after and whole


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and _QUOTES.get(text[0]) == text[-1] and bool(text[1:-1].strip())


def _title(text: str) -> bool:
    return any(title.strip(" <>") for title in re.findall(r"<<([^\n<>]+)>>", text))


def _placeholders(text: str, num_placeholders: float) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*[^\[\]\s][^\[\]\n]*\]", text)) >= num_placeholders


def _no_comma(text: str) -> bool:
    return not any(comma in text for comma in COMMAS)


# Checks of arguments together


def _nth_exists(values: Mapping[str, Any]) -> str:
    return "nth_paragraph is beyond num_paragraphs" if values["nth_paragraph"] > values["num_paragraphs"] else ""


def _in_order(values: Mapping[str, Any]) -> str:
    return "min_words is above max_words" if values["min_words"] > values["max_words"] else ""


def _can_tell_language(values: Mapping[str, Any]) -> str:
    detector()  # raises MissingExtra when the rows are loaded, not at the first verdict
    return ""


REGISTRY: dict[str, Constraint] = {
    "keywords:existence": Constraint(_keywords, {"keywords": _texts}),
    "keywords:frequency": Constraint(_frequency, {"keyword": _text, "frequency": _positive, "relation": _relation}),
    "keywords:forbidden_words": Constraint(_forbidden, {"forbidden_words": _texts}),
    "keywords:letter_frequency": Constraint(
        _letters, {"letter": _letter, "let_frequency": _positive, "let_relation": _relation}
    ),
    "language:response_language": Constraint(
        _response_language, {"language": _language}, consistent=_can_tell_language
    ),
    "length_constraints:number_words": Constraint(_words, {"num_words": _positive, "relation": _relation}),
    "length_constraints:number_sentences": Constraint(_sentences, {"num_sentences": _positive, "relation": _relation}),
    "length_constraints:number_paragraphs": Constraint(_paragraphs, {"num_paragraphs": _positive}),
    "length_constraints:nth_paragraph_first_word": Constraint(
        _first_word,
        {"num_paragraphs": _positive, "nth_paragraph": _positive, "first_word": _text},
        consistent=_nth_exists,
    ),
    "count:word_count_range": Constraint(_range, {"min_words": _count, "max_words": _positive}, consistent=_in_order),
    "detectable_content:number_placeholders": Constraint(_placeholders, {"num_placeholders": _positive}),
    "detectable_content:postscript": Constraint(_postscript, {"postscript_marker": _text}),
    "detectable_format:number_bullet_lists": Constraint(_bullets, {"num_bullets": _positive}),
    "detectable_format:constrained_response": Constraint(_options, {"options": _texts}, {"options": list(OPTIONS)}),
    "detectable_format:number_highlighted_sections": Constraint(_highlights, {"num_highlights": _positive}),
    "detectable_format:multiple_sections": Constraint(_sections, {"section_spliter": _text, "num_sections": _positive}),
    "detectable_format:json_format": Constraint(_json_format),
    "detectable_format:title": Constraint(_title),
    "combination:two_responses": Constraint(_two_responses),
    "combination:repeat_prompt": Constraint(_repeat, {"prompt_to_repeat": _text}),
    "change_case:english_capital": Constraint(_english_capital, consistent=_can_tell_language),
    "change_case:english_lowercase": Constraint(_english_lowercase, consistent=_can_tell_language),
    "change_case:capital_word_frequency": Constraint(
        _capitals, {"capital_frequency": _positive, "capital_relation": _relation}
    ),
    "punctuation:no_comma": Constraint(_no_comma),
    "startend:end_checker": Constraint(_ends, {"end_phrase": _text}),
    "startend:quotation": Constraint(_quotation),
}
