"""Any text at all: every text verifier gives 0 or 1, in its time. 500 texts each, 10,000 when slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verifier_cases import CASES

from tinyllm.rewards import build, verify

PIECES = sorted(
    {
        "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "\\frac", "\\sqrt", "#### ", "Answer: ", "answer is ", "12", "-12",
        "1,234", "3/4", "7 5/6", "45%", "$", "\\text{", "^", "_", "!", "(", ")", "[", "]", ",", ";", " or ", " and ", "=", "<", ">", "x", "pi", "e", "1e9",
        "\n", " ", "\u2212", "\u0664", "\u00b2", "\u2009", '"', "\\", "null", "true", "```json\n", "\n```", "<|im_end|>", "nan", "inf", "0.5", "9" * 50,
        "\\pm ", "\\cup ", "|", "*", "**", "/", "\\left", "\\begin{matrix}", "&", "\\\\", "\\end{matrix}", "%", "\ud800", "\x00", "{'a': 1}", '{"a":',
    }
    | {case["completion"][:200] for case in CASES if case["family"] != "code"}
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    st.text(max_size=200),
    st.builds(lambda piece, count: piece * count, st.sampled_from(PIECES), st.integers(0, 60)),
)
ROW = {
    "prompt": "How many?",
    "answer": "12",
    "schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$", "format": "date"}}, "required": ["a"]},
    "constraints": [{"id": "punctuation:no_comma", "kwargs": {}}, {"id": "language:response_language", "kwargs": {"language": "en"}}],
    "dataset": "countdown",
    "metadata": {"numbers": [6, 2], "target": 12},
}  # fmt: skip
SPECS = {
    "format": [f"format:rule={rule}" for rule in ("tag", "boxed", "exact_format", "final")],
    "arithmetic": [f"arithmetic:rule={rule}" for rule in ("tag", "hash", "marker", "last_number", "final", "whole")],
    "math": [f"math:rule={rule}" for rule in ("boxed", "whole", "final")],
    "json": ["json:fence=true"],
    "instructions": ["instructions"],
    "gym": ["gym"],
}
BOUND_S = 2.0
QUIET = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def check(spec, text):
    verifier = build(spec)
    start = time.process_time()
    verdict = verify(verifier, ROW, text)
    assert time.process_time() - start < BOUND_S
    assert verdict.value in (0.0, 1.0) and type(verdict.value) is float
    assert verdict.parts == (("correct", verdict.value),) and verdict.reason is None


def fuzz(specs, examples):
    @settings(parent=QUIET, max_examples=examples)
    @given(spec=st.sampled_from(specs), text=TEXTS)
    def run(spec, text):
        check(spec, text)

    run()


@pytest.mark.parametrize("family", SPECS)
def test_any_text(family):
    fuzz(SPECS[family], 500)


@pytest.mark.slow
@pytest.mark.parametrize("family", SPECS)
def test_any_text_at_length(family):
    fuzz(SPECS[family], 10_000)


@given(text=TEXTS, other=TEXTS)
@settings(parent=QUIET, max_examples=300)
def test_a_gold_in_its_place_scores_1_and_trailing_junk_after_the_turn_changes_nothing(text, other):
    verifier = build("arithmetic:rule=tag")
    clean = text.replace("answer", "").replace("think", "").replace("<|", "").replace("</s>", "")
    assert verify(verifier, ROW, f"{clean}<answer>12</answer>{clean}<|im_end|>{other}").value == 1
