"""Family gym: the cases, every data set of the table on real rows of its generator, and our own checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyllm.errors import DataError
from tinyllm.rewards import build, verify
from tinyllm.rewards.base import row_fault
from tinyllm.rewards.gym.checks import CHECKS
from tinyllm.rewards.gym.readers import arithmetic
from tinyllm.tasks import gym

WITNESS = Path("/tmp/verifier_was_here")


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_rows_of_the_generator(name, monkeypatch):
    monkeypatch.setattr(gym, "TRAIN", 4)
    monkeypatch.setattr(gym, "HELD_OUT", 2)
    train, held_out = gym.generate(name)
    assert train and gym.generate(name)[0] == train
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    verifier = build("gym")
    for row in train:
        assert row_fault(verifier, row) is None
        for wrong in (
            "",
            "banana",
            "nan",
            "0x0",
            "[]",
            "None",
            row["answer"] + " or never",
            "9" * 50,
            "\u0664",
            "()" * 200,
            "[[[[",
        ):
            if wrong != row["answer"]:
                assert verify(verifier, row, f"<answer>{wrong}</answer>").value == 0, wrong
        assert verify(verifier, row, row["answer"]).value == 0  # the answer without its block


def judge(dataset, answer, gold="none", **metadata):
    row = {"prompt": "", "dataset": dataset, "answer": gold, "metadata": metadata}
    return verify(build("gym"), row, f"<answer>{answer}</answer>").value


@pytest.mark.parametrize(
    ("dataset", "answer", "expected", "metadata"),
    [
        ("countdown", "94*4 - 61 - 6 = 309", 1, {"numbers": [6, 61, 94, 4], "target": 309}),
        ("countdown", "94*4 - 61 - 6 = 310", 0, {"numbers": [6, 61, 94, 4], "target": 309}),
        ("countdown", "(2+3)", 1, {"numbers": [2, 3], "target": 5}),
        ("countdown", "2+3+0", 0, {"numbers": [2, 3], "target": 5}),
        ("countdown", "23-18", 0, {"numbers": [2, 3, 18], "target": 5}),
        ("countdown", "2**3", 0, {"numbers": [2, 3], "target": 8}),
        ("countdown", "7//2", 0, {"numbers": [7, 2], "target": 3}),
        ("countdown", "2/0", 0, {"numbers": [2, 0], "target": 3}),
        ("puzzle24", "(7-1)*(7-3)", 1, {"numbers": [7, 1, 7, 3]}),
        ("simple_integration", "x**2 + C", 1, {"integrand": "2*x", "variable": "x"}),
        ("simple_integration", "x**2", 1, {"integrand": "2*x", "variable": "x"}),
        ("simple_integration", "x**2 + x", 0, {"integrand": "2*x", "variable": "x"}),
        ("simple_integration", "x**2 + C*x", 0, {"integrand": "2*x", "variable": "x"}),
        ("simple_integration", "|x|*x", 0, {"integrand": "3*x", "variable": "x"}),
        ("intermediate_integration", "2*sin(2*X) + C", 1, {"integrand": "4*cos(2*X)", "variable": "X"}),
        ("propositional_logic", "P", 0, {"variables": ["P", "Q"], "premises": ["P"]}),
        ("propositional_logic", "P | Q", 1, {"variables": ["P", "Q"], "premises": ["P"]}),
        ("propositional_logic", "Q", 0, {"variables": ["P", "Q"], "premises": ["P"]}),
        ("propositional_logic", "P | !P", 0, {"variables": ["P", "Q"], "premises": ["Q"]}),
        ("propositional_logic", "Q", 1, {"variables": ["P", "Q"], "premises": ["P", "(P \u2192 Q)"]}),
        ("rubiks_cube", "R'", 1, {"cube_size": 3, "scramble_moves": "R"}),
        ("rubiks_cube", "R R R", 1, {"cube_size": 3, "scramble_moves": "R"}),
        ("rubiks_cube", "R", 0, {"cube_size": 3, "scramble_moves": "R"}),
        ("n_queens", "_ Q\nQ _", 1, {"valid_answers": ["_ Q\nQ _"]}),
    ],
)  # fmt: skip
def test_checks_by_meaning(dataset, answer, expected, metadata):
    assert judge(dataset, answer, **metadata) == expected


def test_exact_checks():
    assert judge("prime_factorization", "11 x 7", gold="7 \u00d7 11") == 1
    assert judge("prime_factorization", "77", gold="7 \u00d7 11") == 0
    assert judge("number_sorting", "[['1', '2']]", gold="['1', '2']") == 0
    assert judge("game_of_life", "[[0, 1], [1, 0]]", gold="[[0,1],[1,0]]") == 1
    assert judge("game_of_life_halting", "false", gold="False") == 1
    assert judge("complex_arithmetic", "3i - 15", gold="-15.0 + 3.0i") == 1
    assert arithmetic("1+" * 200 + "1") == (201, [1] * 201)
    assert arithmetic("(" * 400 + "1" + ")" * 90) is None


@pytest.mark.parametrize(
    "row",
    [
        {"dataset": "sokoban", "answer": "L"},
        {"dataset": "gcd", "answer": "many"},
        {"dataset": "gcd", "answer": None},
        {"dataset": "countdown", "answer": "none", "metadata": {}},
        {"dataset": "countdown", "answer": "none", "metadata": "{"},
        {"dataset": "simple_integration", "answer": "x", "metadata": {"integrand": "open(x)", "variable": "x"}},
        {"dataset": "propositional_logic", "answer": "none", "metadata": {"variables": ["P"], "premises": ["P P"]}},
        {"dataset": "propositional_logic", "answer": "none", "metadata": {"variables": ["P"], "premises": ["P", "!P"]}},
        {"dataset": "n_queens", "answer": "none", "metadata": {"valid_answers": []}},
        {"dataset": "countdown", "answer": "none", "metadata": {"numbers": ["a"], "target": 1}},
        {"dataset": "countdown", "answer": "none", "metadata": {"numbers": 5, "target": 1}},
        {"dataset": "propositional_logic", "answer": "none", "metadata": {"variables": 5, "premises": ["P"]}},
        {"dataset": "rubiks_cube", "answer": "none", "metadata": {"cube_size": 2, "scramble_moves": "banana"}},
        {"dataset": "intermediate_integration", "answer": "Integral(2*x, x) + C", "metadata": {"integrand": "2*x", "variable": "x"}},
        {"dataset": "simple_integration", "answer": "x**3 + C", "metadata": {"integrand": "2*x", "variable": "x"}},
        {"dataset": "prime_factorization", "answer": "4 \u00d7 3"},
        {"dataset": "prime_factorization", "answer": "2 \u00d7 3", "metadata": {"number": 12}},
        {"dataset": "gcd", "answer": "7", "metadata": {"numbers": [12, 18]}},
        {"dataset": "lcm", "answer": "12", "metadata": {"numbers": [12, 18]}},
        {"dataset": "count_bits", "answer": "3", "metadata": {"number": 8}},
        {"dataset": "number_sorting", "answer": "[3, 1]", "metadata": {"original_numbers": ["3", "1"], "direction": "ascending"}},
        {"dataset": "spell_backward", "answer": "abc", "metadata": {"word": "abc"}},
        {"dataset": "chain_sum", "answer": "5", "metadata": {"expression": "2 + 2"}},
    ],
)  # fmt: skip
def test_rows_that_cannot_be_judged_are_refused(row):
    with pytest.raises(DataError):
        build("gym").check({"prompt": "", **row})


def test_unknown_data_sets_name_the_nearest():
    with pytest.raises(DataError, match="did you mean 'countdown'"):
        gym.generate("coutdown")
