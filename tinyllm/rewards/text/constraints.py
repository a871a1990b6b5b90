"""The closed registry of constraints: a name, checked arguments, and a function from arguments to a text's check."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.rewards.json.reader import NotJson, fenced, read_json
from tinyllm.rewards.text.languages import LANGUAGES, detector, language_of

Check = Callable[[str], bool]
COMMAS = ",\u060c\u3001\uff0c\ufe50\ufe51\ufe10\ufe11\u055d\u07f8\u1363\u1802\u1808\ua4fe\ua60d\ua6f5\uff64\u201a"
COMMAS += "\u2e32\u2e34\u2e41\u2e49\u2e4c\U0001144d\U0001145a\U00016e97\U0001da87"
"""Commas of every script, all banned by "no commas"."""
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
    """One constraint. `arguments` maps a name to a check that returns what is wrong with a value, or ""."""

    build: Callable[..., Check]
    arguments: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    consistent: Callable[[Mapping[str, Any]], str] = lambda values: ""


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
    """Words: runs of letters and digits, with apostrophes and hyphens inside."""
    return _WORD.findall(text)


def sentences(text: str) -> int:
    """Sentences: ends of sentences that are no abbreviations, and a last one without a mark."""
    count, end = 0, 0
    for match in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[max(0, match.start() - 8) : match.start() + 1]):
            count, end = count + bool(words(text[end : match.start()])), match.end()
    return count + bool(words(text[end:]))


def paragraphs(text: str, mark: str = r"\n[ \t]*\n") -> list[str]:
    """Parts between blank lines (or another mark) that are not blank."""
    return [part.strip() for part in re.split(mark, text) if part.strip()]


def occurrences(text: str, keyword: str) -> int:
    """How often a keyword stands as a whole word (or words), in any case."""
    keyword = r"\s+".join(map(re.escape, unicodedata.normalize("NFC", keyword).split()))
    return len(re.findall(rf"(?<!\w){keyword}(?!\w)", unicodedata.normalize("NFC", text), re.IGNORECASE))


def compare(number: int, relation: str, bound: float) -> bool:
    """IFEval's two relations."""
    return number >= bound if relation == "at least" else number < bound


# Constraints


def _keywords(keywords: list[str]) -> Check:
    return lambda text: all(occurrences(text, keyword) for keyword in keywords)


def _frequency(keyword: str, frequency: float, relation: str) -> Check:
    return lambda text: compare(occurrences(text, keyword), relation, frequency)


def _forbidden(forbidden_words: list[str]) -> Check:
    return lambda text: not any(occurrences(text, word) for word in forbidden_words)


def _letters(letter: str, let_frequency: float, let_relation: str) -> Check:
    return lambda text: compare(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def _paragraphs(num_paragraphs: float) -> Check:
    return lambda text: len(paragraphs(text, r"\*\*\*")) == num_paragraphs


def _first_word(num_paragraphs: float, nth_paragraph: float, first_word: str) -> Check:
    def check(text: str) -> bool:
        parts = paragraphs(text)
        if len(parts) != num_paragraphs:
            return False
        first = words(parts[int(nth_paragraph) - 1])
        return bool(first) and first[0].casefold() == first_word.casefold()

    return check


def _postscript(postscript_marker: str) -> Check:
    """The marker starts the last paragraph; text before it and after it."""

    def check(text: str) -> bool:
        last = max(text.rfind("\n" + postscript_marker), text.rfind("\n\n" + postscript_marker))
        tail = text[last:].strip()
        return last > 0 and bool(text[:last].strip()) and len(paragraphs(tail)) == 1 and tail != postscript_marker

    return check


def _bullets(num_bullets: float) -> Check:
    return lambda text: len(_BULLET.findall(_RULE.sub("", text))) == num_bullets


def _options(options: list[str]) -> Check:
    def check(text: str) -> bool:
        return sum(text.casefold().count(option.casefold()) for option in options) == 1

    return check


def _highlights(num_highlights: float) -> Check:
    return lambda text: len(_HIGHLIGHT.findall(text)) >= num_highlights


def _sections(section_spliter: str, num_sections: float) -> Check:
    pattern = re.compile(rf"^[ \t#*]*{re.escape(section_spliter)}[ \t]+(?:[0-9]+|[IVXLC]+)\b", re.MULTILINE)
    return lambda text: len(pattern.findall(text)) >= num_sections


def _json_format() -> Check:
    def check(text: str) -> bool:
        try:
            document = read_json(fenced(text) or text)
        except NotJson:
            return False
        return isinstance(document, (dict, list)) and bool(document)

    return check


def _two_responses() -> Check:
    def check(text: str) -> bool:
        parts = [part.strip() for part in text.split("******")]
        return len(parts) == 2 and all(parts) and parts[0] != parts[1]

    return check


def _repeat(prompt_to_repeat: str) -> Check:
    wanted = " ".join(prompt_to_repeat.split()).casefold()

    def check(text: str) -> bool:
        text = " ".join(text.split()).casefold()
        return text.startswith(wanted) and len(words(text[len(wanted) :])) > 0

    return check


def _capitals(capital_frequency: float, capital_relation: str) -> Check:
    return lambda text: compare(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


def _response_language(language: str) -> Check:
    detector()  # a library that is missing is found when the rows are loaded
    return lambda text: language_of(text) == language


def _case(upper: bool) -> Check:
    detector()

    def check(text: str) -> bool:
        letters = [char for char in text if char.isalpha()]
        cased = text == (text.upper() if upper else text.lower())
        return bool(letters) and cased and language_of(text.lower()) == "en"

    return check


def _ends(end_phrase: str) -> Check:
    phrase = end_phrase.strip().casefold()

    def check(text: str) -> bool:
        before, found, after = text.strip().strip('"').casefold().rpartition(phrase)
        whole = not (phrase[0].isalnum() and before[-1:].isalnum())  # "weekend" does not end in "end"
        return bool(found) and not after and whole

    return check


def _quotation() -> Check:
    def check(text: str) -> bool:
        text = text.strip()
        return len(text) > 2 and _QUOTES.get(text[0]) == text[-1] and bool(text[1:-1].strip())

    return check


def _title() -> Check:
    return lambda text: any(title.strip(" <>") for title in re.findall(r"<<([^\n<>]+)>>", text))


def _placeholders(num_placeholders: float) -> Check:
    return lambda text: len(re.findall(r"\[[^\[\]\n]*[^\[\]\s][^\[\]\n]*\]", text)) >= num_placeholders


def _range(min_words: float, max_words: float) -> Check:
    return lambda text: min_words <= len(words(text)) <= max_words


def _relation_of(measure: Callable[[str], int], count: str) -> Callable[..., Check]:
    return lambda relation, **values: lambda text: compare(measure(text), relation, values[count])


_NUMBER = {"relation": _relation}
REGISTRY: dict[str, Constraint] = {
    "keywords:existence": Constraint(_keywords, {"keywords": _texts}),
    "keywords:frequency": Constraint(_frequency, {"keyword": _text, "frequency": _positive, **_NUMBER}),
    "keywords:forbidden_words": Constraint(_forbidden, {"forbidden_words": _texts}),
    "keywords:letter_frequency": Constraint(
        _letters, {"letter": _letter, "let_frequency": _positive, "let_relation": _relation}
    ),
    "language:response_language": Constraint(_response_language, {"language": _language}),
    "length_constraints:number_words": Constraint(
        _relation_of(lambda text: len(words(text)), "num_words"), {"num_words": _positive, **_NUMBER}
    ),
    "length_constraints:number_sentences": Constraint(
        _relation_of(sentences, "num_sentences"), {"num_sentences": _positive, **_NUMBER}
    ),
    "length_constraints:number_paragraphs": Constraint(_paragraphs, {"num_paragraphs": _positive}),
    "length_constraints:nth_paragraph_first_word": Constraint(
        _first_word,
        {"num_paragraphs": _positive, "nth_paragraph": _positive, "first_word": _text},
        consistent=lambda values: (
            "nth_paragraph is beyond num_paragraphs" if values["nth_paragraph"] > values["num_paragraphs"] else ""
        ),
    ),
    "count:word_count_range": Constraint(
        _range,
        {"min_words": _count, "max_words": _positive},
        consistent=lambda values: "min_words is above max_words" if values["min_words"] > values["max_words"] else "",
    ),
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
    "change_case:english_capital": Constraint(lambda: _case(True)),
    "change_case:english_lowercase": Constraint(lambda: _case(False)),
    "change_case:capital_word_frequency": Constraint(
        _capitals, {"capital_frequency": _positive, "capital_relation": _relation}
    ),
    "punctuation:no_comma": Constraint(lambda: lambda text: not any(comma in text for comma in COMMAS)),
    "startend:end_checker": Constraint(_ends, {"end_phrase": _text}),
    "startend:quotation": Constraint(_quotation),
}
