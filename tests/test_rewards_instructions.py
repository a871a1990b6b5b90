"""Family instructions: every constraint of the registry, followed and not followed, and arguments refused at load."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tinyllm.errors import DataError, MissingExtra
from tinyllm.rewards import build, verify
from tinyllm.rewards.base import row_fault
from tinyllm.rewards.text.constraints import REGISTRY
from tinyllm.rewards.text.languages import LANGUAGES, detector, language_of

EXAMPLES = {
    "keywords:existence": ({"keywords": ["tea", "hot water"]}, ["Tea in hot\nwater."], ["Steam, hot water.", "teas and hot water"]),
    "keywords:frequency": ({"keyword": "tea", "frequency": 2, "relation": "at least"}, ["tea Tea"], ["tea teapot"]),
    "keywords:forbidden_words": ({"forbidden_words": ["ton"]}, ["Cotton."], ["A ton.", ""]),
    "keywords:letter_frequency": ({"letter": "z", "let_frequency": 3, "let_relation": "at least"}, ["Zoo zz"], ["zoo"]),
    "language:response_language": (
        {"language": "de"}, ["Der Hund ist nicht hier und die Katze auch."],
        ["The dog is here.", "Hm", "Der Hund ist nicht hier und die Katze auch. The dog is not here, and the cat is not either."],
    ),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, ["one two three"], ["one well-known", "- - - -"]),
    "length_constraints:number_sentences": ({"num_sentences": 3, "relation": "less than"}, ["Dr. No said so. Yes!"], ["Aa. Bb. Cc d e."]),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, ["a\n***\nb"], ["a", "a\n***\nb\n***\nc", "a***"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"}, ["a\n\nWell, b"], ["well\n\na", "a\n\nwellness", "a"],
    ),
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, ["a b", "a b c"], ["a", "a b c d"]),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[a] and [b]"], ["[a]", "[] []", "[[a]]", "[ ] [ ]"]),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, ["Hi.\n\nP.S. bye"], ["P.S. bye", "Hi P.S.", "Hi.\nP.S.", "a\nP.S. b\n\nc"]),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, ["* a\n- b", "* a\n* b\n* * *"], ["* a", "*a*\n*b*", "- a\n- b\n- c"]),
    "detectable_format:constrained_response": ({}, ["My answer is yes."], ["yes", "My answer is yes. My answer is yes."]),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, ["*a* and **b c**"], ["*a*", "2*3*4*5*6", "* a * b *"]),
    "detectable_format:multiple_sections": ({"section_spliter": "Part", "num_sections": 2}, ["Part 1\na\n**Part 2**\nb"], ["Part 1", "a Part 1 Part 2"]),
    "detectable_format:json_format": ({}, ['{"a": 1}', '```json\n[1]\n```'], ["{}", "1", "{'a': 1}", '{"a": NaN}']),
    "detectable_format:title": ({}, ["<<A song>>\nla"], ["<<>>", "<< >>", "<A>"]),
    "combination:two_responses": ({}, ["a******b"], ["a", "a******a", "a******b******c", "******b"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Name a river."}, ["Name a  river.\nThe Danube."], ["The Danube.", "Name a river."]),
    "change_case:english_capital": ({}, ["THE END OF IT"], ["The end", "123", "DER DIE DAS UND NICHT", "XQZ", "QWRTP ZXCVB"]),
    "change_case:english_lowercase": ({}, ["the end of it."], ["The end", "123", "xqz", "nous allons au marché ce matin"]),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, ["NO WAY"], ["NO way"]),
    "punctuation:no_comma": ({}, ["a b"], ["a, b", "a\u060c b", "a\uff0cb", "a\u3001b", "a\u2e32b", ""]),
    "startend:end_checker": ({"end_phrase": "Bye now."}, ["So, bye now."], ["Bye now. Or not.", "Goodbye now."]),
    "startend:quotation": ({}, ['"Hi."', "\u201cHi\u201d"], ['"', '""', '"a', "\u201ca\u201c", '" "']),
}  # fmt: skip


def row(name, kwargs, prompt=""):
    return {"prompt": prompt, "constraints": [{"id": name, "kwargs": kwargs}]}


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_constraint(name):
    kwargs, followed, broken = EXAMPLES[name]
    verifier = build("instructions")
    verifier.check(row(name, kwargs))
    assert [text for text in followed if verify(verifier, row(name, kwargs), text).value != 1] == []
    assert [text for text in broken if verify(verifier, row(name, kwargs), text).value != 0] == []
    for text in ("", " ", "<think>all of it</think>"):
        assert verify(verifier, row(name, kwargs), text).value == 0


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_arguments_are_closed(name):
    kwargs = EXAMPLES[name][0]
    verifier = build("instructions")
    verifier.check(row(name, {**kwargs, "unused": None}))  # data sets fill what they do not use with null
    with pytest.raises(DataError, match="has no argument 'wrong'"):
        verifier.check(row(name, {**kwargs, "wrong": 1}))
    for key in kwargs:
        with pytest.raises(DataError, match=f"lacks its argument '{key}'"):
            verifier.check(row(name, {**kwargs, key: None}))
        with pytest.raises(DataError, match=f"{key} = "):
            verifier.check(row(name, {**kwargs, key: {}}))


@pytest.mark.parametrize(
    ("prompt", "relation", "count", "agrees"),
    [
        ("Write at least 10 words.", "at least", 10, True),
        ("Write at least 10 words.", "at least", 6, False),
        ("Write at least ten words about 6 words of mine.", "at least", 6, False),
        ("Use fewer than 10 words.", "less than", 10, True),
        ("Use at most 9 words.", "less than", 10, True),
        ("Use at most 9 words.", "less than", 5, False),
        ("Tell me about words.", "at least", 6, True),
        ("Write 100 words or more.", "at least", 10, False),
        ("Write at least twenty words.", "at least", 10, False),
        ("Answer in 10+ words.", "at least", 10, True),
        ("Use at least 10 words.", "less than", 10, False),
        ("Use at least 5 words but less than 10 words.", "less than", 10, True),
    ],
)
def test_text_and_arguments_must_agree(prompt, relation, count, agrees):
    given = row("length_constraints:number_words", {"num_words": count, "relation": relation}, prompt)
    if agrees:
        build("instructions").check(given)
        return
    with pytest.raises(DataError, match="but the prompt says"):
        build("instructions").check(given)


@pytest.mark.parametrize(
    "constraints",
    [
        [("change_case:english_capital", {}), ("change_case:english_lowercase", {})],
        [
            ("keywords:existence", {"keywords": ["a", "Tea"]}),
            ("keywords:forbidden_words", {"forbidden_words": ["tea"]}),
        ],
        [
            ("length_constraints:number_words", {"relation": "less than", "num_words": 5}),
            ("length_constraints:number_words", {"relation": "at least", "num_words": 5}),
        ],
        [("keywords:frequency", {"keyword": "a", "frequency": float("nan"), "relation": "at least"})],
        [("keywords:frequency", {"keyword": "a", "frequency": float("inf"), "relation": "at least"})],
        [(["punctuation:no_comma"], {})],
        [("punctuation:no_comma", ["a"])],
    ],
)
def test_constraints_that_no_text_can_follow_or_that_do_not_read_are_refused(constraints):
    given = {"prompt": "", "constraints": [{"id": name, "kwargs": kwargs} for name, kwargs in constraints]}
    with pytest.raises(DataError):
        build("instructions").check(given)
    assert verify(build("instructions"), given, "x").reason.startswith("bad task: ")


def test_bounds_that_leave_room_and_composed_letters_are_fine():
    bounds = [{"relation": "at least", "num_words": 2}, {"relation": "less than", "num_words": 3}]
    both = [{"id": "length_constraints:number_words", "kwargs": kwargs} for kwargs in bounds]
    assert verify(build("instructions"), {"prompt": "", "constraints": both}, "a b").value == 1
    assert (
        verify(build("instructions"), row("keywords:existence", {"keywords": ["caf\u00e9"]}), "cafe\u0301").value == 1
    )
    many = row("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"})
    assert verify(build("instructions"), many, ". . . !").value == 0


def test_ifeval_columns_and_reasoning():
    given = {"prompt": "", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
    verifier = build("instructions")
    assert verify(verifier, given, "<think>a, b</think>a b<|im_end|>,").value == 1
    for wrong in ({"prompt": ""}, {"constraints": []}, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}):
        with pytest.raises(DataError):
            verifier.check(wrong)


LANGUAGE_SAMPLES = {
    "en": "This is the way that it was for them.", "fr": "Le chat est dans la maison et il ne veut pas sortir.",
    "es": "El perro est\u00e1 en la casa y no quiere salir.", "it": "Il cane \u00e8 nella casa e non vuole uscire per il freddo.",
    "ru": "\u042d\u0442\u043e \u0431\u044b\u043b \u043d\u0435 \u043e\u043d, \u043d\u043e \u0432\u0441\u0435 \u0437\u043d\u0430\u043b\u0438, \u0447\u0442\u043e \u043e\u043d \u043f\u0440\u0438\u0434\u0451\u0442.", "ja": "\u3053\u308c\u306f\u732b\u3067\u3059\u3002", "zh": "\u8fd9\u662f\u4e00\u53ea\u732b\u3002",
    "ko": "\uc774\uac83\uc740 \uace0\uc591\uc774\uc785\ub2c8\ub2e4.", "hi": "\u092f\u0939 \u090f\u0915 \u092c\u093f\u0932\u094d\u0932\u0940 \u0939\u0948 \u0914\u0930 \u0935\u0939 \u0918\u0930 \u092e\u0947\u0902 \u0939\u0948\u0964", "th": "\u0e19\u0e35\u0e48\u0e04\u0e37\u0e2d\u0e41\u0e21\u0e27", "ar": "\u0647\u0630\u0627 \u0647\u0648 \u0627\u0644\u0628\u064a\u062a \u0627\u0644\u0630\u064a \u0643\u0627\u0646 \u0641\u064a \u0627\u0644\u0645\u062f\u064a\u0646\u0629.",
}  # fmt: skip


def test_languages_are_told_the_same_way_every_time_or_not_at_all():
    assert {code: language_of(text) for code, text in LANGUAGE_SAMPLES.items()} == {
        code: code for code in LANGUAGE_SAMPLES
    }
    for text in (
        "",
        "123",
        "xqz",
        "a b c d e",
        "def f(x): return x",
        "\U0001f600",
        LANGUAGE_SAMPLES["ru"] + LANGUAGE_SAMPLES["th"] * 2 + LANGUAGE_SAMPLES["en"],
    ):
        assert language_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "." * 100_000 + "x",
        " " * 100_000 + "x",
        "*" * 100_000,
        "\n" * 100_000 + "x",
        "<<" * 50_000,
        "a'" * 50_000,
        "[" * 100_000,
    ],
)
def test_no_text_takes_long(text):
    start = time.process_time()
    for name, (kwargs, _, _) in EXAMPLES.items():
        assert verify(build("instructions"), row(name, kwargs), "x " + text).value in (0, 1)
    assert time.process_time() - start < 4


def test_accuracy_of_languages_on_the_sentences_of_the_benchmark(monkeypatch):
    """The numbers of docs/verifiers.md, as bounds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import languages

    short, line, two_lines = (languages.counts(language_of, places)[:3] for _, places in languages.LENGTHS)
    assert languages.SENTENCES.keys() == LANGUAGES
    assert short[0] >= 62 and short[1] <= 3 and line[0] >= 72 and line[1] <= 1 and two_lines == (37, 0, 0)
    assert not [text for text in languages.NONE if language_of(text) in LANGUAGES]


def test_a_missing_detector_is_named_when_rows_are_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    detector.cache_clear()
    try:
        build("instructions").check(row("punctuation:no_comma", {}))
        with pytest.raises(MissingExtra, match=r"pip install 'tinyllm\[instructions\]'"):
            row_fault(build("instructions"), row("language:response_language", {"language": "de"}))
    finally:
        detector.cache_clear()
