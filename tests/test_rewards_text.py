"""Text verifiers: the cases of tests/data/verifiers.jsonl, the number grammar, the region rules, bounds and self-tests."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from tinyllm.errors import DataError
from tinyllm.rewards import build, verify
from tinyllm.rewards.base import row_fault
from tinyllm.rewards.text.numbers import last_number, read_number

ROW = {"prompt": "How many?", "answer": "12"}


def value(spec, text, **row):
    return verify(build(spec), {**ROW, **row}, text).value


NUMBERS = {
    "12": 12, "-8": -8, "\u22128": -8, "+3": 3, "5,485": 5485, "1\u2009000": 1000, "1,250.50": Fraction(2501, 2), ".5": Fraction(1, 2),
    "5.": 5, "3/8": Fraction(3, 8), "7 5/6": Fraction(47, 6), "-7 5/6": Fraction(-47, 6), "6e5": 600000, "6E-2": Fraction(3, 50),
    "45%": Fraction(9, 20), "45 percent": Fraction(9, 20), "$41.00": 41, "-$5": -5, "007": 7, "0": 0, "-0": 0,
}  # fmt: skip
NOT_NUMBERS = [
    "", " ", "2,5", "12,34", "1,2345", "1 000", "6 14/5", "3/0", "1e999999999", "1e1001", "NaN", "inf", "-inf", "1_000", "0x10", "\u00b2",
    "\u0664\u0662", "--5", "5..", "1.2.3", "5-", "five", "3=3", "1/2/3", "\u2013\u0035", "\u00bd", "9" * 10_001, "1e", "e5", "%", "$", "5%%",
]  # fmt: skip


def test_number_grammar():
    for text, expected in NUMBERS.items():
        assert read_number(text) is not None and read_number(text).value == expected, text
    for text in NOT_NUMBERS:
        assert read_number(text) is None, text


LAST = {
    "The answer is 12.": "12", "x = 17 - 5 = 12": "12", "12 + 5": "5", "**61**": "61", "$5,485.00$.": "$5,485.00", "is -8": "-8",
    "10 - 8": "8", "take x2 of 9 and x3": "9", "45 % of it": "45 percent", "Answer:12": "12", "(12)": "12", "7 5/6 cups": "7 5/6",
    "so 12\u2026": "12", "\u201c12\u201d!": "12", "12\n\nDone": "12",
}  # fmt: skip


def test_last_number_reads_whole_tokens_only():
    for text, expected in LAST.items():
        assert last_number(text) == expected, text
    for text in ("12+5", "at 17:30", "3-8", "12cm", "the 2nd", "none", "", "\u0664\u0662", "1.2.3", "5 or 6\u00b2"):
        assert last_number(text) is None, text


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        ("format", "thinking aloud</think><answer>12</answer>", 1),
        ("format:think_prefilled=true", "<answer>12</answer>", 0),
        ("format:think_prefilled=true", "hm</think><answer>12</answer>", 1),
        ("format", "<think><answer>12</answer>", 0),
        ("format", "<answer>12</answer><think>more", 1),
        ("format", "<answer>12</answer><answer>12</answer>", 0),
        ("format", "<answer>12", 0),
        ("format", "</answer>12<answer>", 0),
        ("format", "<answer> </answer>", 0),
        ("format", "12", 0),
        ("format", "<answer>12</answer></s><answer>13</answer>", 1),
        ("format:which=last", "<answer>12</answer> <answer>13", 0),
        ("format:rule=exact_format", "<think>x</think><answer>12</answer>", 1),
        ("format:rule=exact_format", "<think></think>\n<answer>12</answer>\n", 1),
        ("format:rule=exact_format", "Sure! <think>x</think><answer>12</answer>", 0),
        ("format:rule=exact_format", "<answer>12</answer><think>x</think>", 0),
        ("format:rule=exact_format", "<think>x<answer>12</answer></think>", 0),
        ("format:rule=exact_format", "<think>x</think>y<answer>12</answer>", 0),
        ("format:rule=exact_format", "<think>x</think><answer></answer>", 0),
        ("format:rule=exact_format,think_prefilled=true", "x</think><answer>12</answer>", 1),
        ("format:rule=boxed", "\\boxed{1\\boxed{12}}", 1),
        ("format:rule=boxed", "\\boxed{12} \\boxed{", 0),
        ("format:rule=boxed,agree=true", "\\boxed{12} \\boxed{13} \\boxed{12}", 0),
        ("format:rule=boxed", "\\boxed{\\}12", 0),
        ("format:rule=hash", "#### 12 apples", 0),
        ("format:rule=hash", "##### 12", 0),
        ("format:rule=marker", "**Answer: 12**", 1),
        ("format:rule=marker", "Answer: 12\nbye", 1),
        ("format:rule=marker", "Answer: 12 or 13", 0),
        ("format:rule=final", "I think it is 12 or 13", 0),
        ("format:rule=final", "The answer is 12", 1),
        ("format:rule=final", "Maybe 11, maybe 12", 0),
        ("format:rule=final", "It is 10, 11, 12", 0),
        ("format:rule=final", "The answer is not 12.", 0),
        ("format:rule=final", "It isn't 12", 0),
        ("format:rule=final", "It isn't 11 but 12", 1),
        ("format:rule=final", "12 is wrong.", 0),
        ("format:rule=final", "Is it 12?", 0),
        ("format:rule=final", "more than 12", 0),
        ("format:rule=final", "x + 12", 0),
        ("format:rule=final", "12 + x", 0),
        ("format:rule=final", "10 + 2 = 12 apples", 1),
        ("format:rule=final", "Answer - 12", 1),
        ("format:rule=final", "10 11 12", 0),
        ("format:rule=final", "10|11|12", 0),
        ("format:rule=final", "Thus $12$ apples", 1),
        ("format:choices=11|13", "<answer>12</answer>", None),
        ("format", "<answer>12</answer><eos>", 1),
        ("format:rule=whole", " 12 ", 1),
        ("format:rule=whole", "12 ok", 0),
    ],
)
def test_regions(spec, text, expected):
    assert value(spec, text) == expected


@pytest.mark.parametrize(
    ("spec", "gold", "text", "expected"),
    [
        ("arithmetic", "5 km", "5 km", 1),
        ("arithmetic", "5 km", "5 kilometers", 1),
        ("arithmetic", "5 km", "5 m", 0),
        ("arithmetic", "5 km", "5", 0),
        ("arithmetic:units=km", "5 km", "5", 1),
        ("arithmetic:units=km", "5", "5 km", 1),
        ("arithmetic:units=km|m", "5 km", "5 m", 0),
        ("arithmetic", "5", "5 apples", 0),
        ("arithmetic", "7", "7%", 0),
        ("arithmetic:percent=asked", "7", "7%", 1),
        ("arithmetic", "(1, 2)", "(2, 1)", 0),
        ("arithmetic", "(1, 2)", "[1, 2]", 0),
        ("arithmetic", "(1, 2)", "1, 2", 1),
        ("arithmetic", "17:30", "5:30 pm", 1),
        ("arithmetic", "17:30", "5:30", 0),
        ("arithmetic:abs_tol=0.1", "5", "5.1", 1),
        ("arithmetic:abs_tol=0.1", "5", "5.11", 0),
        ("arithmetic:abs_tol=0.1", "5", "nan", 0),
        ("arithmetic", "1/3", "0.333333", 0),
        ("arithmetic", "0.5", "1/2", 1),
        ("arithmetic:units=$", "41", r"\$41.00", 1),
        ("arithmetic", "45%", r"45\%", 1),
        ("arithmetic", "$41", "41", 0),
        ("arithmetic", "9007199254740993", "9007199254740992", 0),
    ],
)
def test_values_units_and_tolerance(spec, gold, text, expected):
    assert value(spec, f"<answer>{text}</answer>", answer=gold) == expected
    assert row_fault(build(spec), {"prompt": "", "answer": gold}) is None


def test_free_text_states_one_number():
    for gold, text, expected in (("72", "72 per day", 1), ("72 km", "72 km", 1), ("47/6", "So it is 7 5/6.", 1)):
        assert verify(build("arithmetic:rule=final"), {"prompt": "", "answer": gold}, text).value == expected


def test_nested_boxes_take_linear_time():
    text = "\\boxed{" * 40_000 + "12" + "}" * 40_000
    start = time.process_time()
    for spec in ("format:rule=boxed", "format:rule=boxed,agree=true"):
        assert value(spec, text) in (0, 1)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("gold", [None, "", "  ", True, [1], "see the figure", "$$", float("nan")])
def test_bad_golds_are_refused_never_scored(gold):
    row = {"prompt": "", "answer": gold}
    with pytest.raises(DataError):
        build("arithmetic").check(row)
    verdict = verify(build("arithmetic"), row, "<answer>3</answer>")
    assert verdict.value is None and verdict.reason.startswith("bad task:")


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 20_000, "<answer>" * 20_000, "</answer>" * 20_000, "\\boxed{" * 20_000, "{" * 100_000, "1" * 100_000, "1," * 50_000,
        "1/" * 50_000, "\\(" * 50_000, "answer is " * 20_000, "*" * 100_000, "-" * 100_000, "1\u2009" * 30_000, "Answer:" * 20_000, "$" * 100_000,
        "#### " * 20_000, "1 " * 50_000, "a" * 999_999, "7:" * 50_000, "1e" * 50_000, "or 1 " * 20_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("rule", ["tag", "boxed", "hash", "marker", "final", "last_number", "exact_format", "whole"])
def test_no_text_takes_long(rule, text):
    start = time.process_time()
    for spec in (f"format:rule={rule}", f"arithmetic:rule={rule}"):
        assert value(spec, text) in (0.0, 1.0)
    assert time.process_time() - start < 2
