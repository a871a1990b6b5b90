"""Family math: the cases, what counts as equal and what does not, what is refused before any work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tinyllm.errors import DataError
from tinyllm.rewards import build, verify
from tinyllm.rewards.base import row_fault
from tinyllm.rewards.math.reader import read
from tinyllm.rewards.math.tokens import Unreadable

WITNESS = Path("/tmp/verifier_was_here")


EQUAL = [
    (r"\frac{1}{2}", r"0.5"), (r"\frac12", r"\frac{2}{4}"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\sqrt{200}", r"10\sqrt{2}"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), (r"\sqrt3/2", "sqrt(3)/2"), ("120", r"\binom{10}{3}"), ("120", r"{10 \choose 3}"),
    ("(x+1)^2", "x^2+2x+1"), ("2x-3", "-3+2x"), (r"\sin^2 x+\cos^2 x", "1"), (r"\ln(e^2)", "2"), (r"\log_2 8", "3"), ("xy", "yx"),
    ("y=-x+3", "x+y=3"), ("x=5", "5"), ("5", "x = 5"), ("x=5", "2x=10"), ("f(x)=x^2", "x^2"), ("(x,y)=(1,2)", "(1,2)"),
    ("x=1, x=2", "2, 1"), (r"\{1,2,3\}", "3,1,2"), (r"1 \text{ and } 2", "2,1"), (r"\pm\sqrt{3}", r"\sqrt3, -\sqrt3"), (r"3\pm 2i", "3-2i, 3+2i"),
    ("(1,2)", r"\left( 1, 2 \right)"), (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"), ("x<3", "3>x"), ("3<x<8", "x<8, x>3") ,
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), ("3:4", "6:8"), (r"1.5\times 10^{3}", "1500"), (r"12\,000", "12000"),
    (r"1{,}000", "1,000"), (r"\frac{1}{3}", r"0.\overline{3}"), ("0.1", r"0.0\overline{9}"), (r"3\frac{1}{2}", "3.5"), ("7 5/6", "47/6"),
    (r"\text{Friday}", "friday"), (r"\text{(A)}", "A"), ("A", r"\text{A}"), ("101_2", "101_{2}"), (r"5\text{ cm}", r"5 \mathrm{cm}"), (r"\$5", r"\$5.00"),
    (r"50\%", "0.5"), ("5", "2+3=5"), (r"\frac{\sqrt3}{3}", r"\tan 30^\circ"), (r"\frac{1}{2}", r"\sin(30^\circ)"), ("6", r"6=2\times3"), ("2*x**2", "2x^2"), ("e^{i\\pi}", "-1"), ("i^2", "-1"), (r"\emptyset", r"\{\}"),
    ("-1 \\leq x", r"x \ge -1"), ("x \\in [1,2)", "[1,2)"), ("2\u03c0", r"2\pi"), ("\\sqrt[3]{-8}", "\\sqrt[3]{-8}"), ("|x|", r"\left|x\right|"),
    ("0", r"\sin\pi"), (r"\cos\frac{\pi}{2}+1", "1"), ("-2", r"\sqrt[3]{-8}"), (r"\frac{1}{3}", r"0.\bar{3}"), (r"30^\circ", "30\u00b0"), (r"30^\circ", r"30\text{ degrees}"),
    (r"(0,1)\cup(2,3)", "(0,1)\u222a(2,3)"), ("x\u2208(0,1)", "(0,1)"), (r"\theta", "\u03b8"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\mathbb R", r"x\in\mathbb{R}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^{2}"), (r"5\%", r"5\text{ percent}"), ("5", r"\mathbf{5}"), ("5", r"\text{5}"), ("5", r"5\text{}"), ("5", r"\(5\)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\left(\begin{array}{cc}1&2\\[2pt]3&4\end{array}\right)"), (r"-\infty", r"-\infty"),
    ("x^{-1}", r"\frac1x"), ("a_{12}+1", "1+a_{12}"), (r"\frac{d}{2}", "d/2"), (r"\dfrac{7}{2}\text{ for all } x", "3.5"),
]  # fmt: skip
DIFFERENT = [
    ("5", "6"), ("5", "5+10^{-300}"), (r"\pi+\frac{1}{300!}", r"\pi"), ("1", "0.9999999"), (r"\sqrt{19}", "4.358898943540674"), (r"\pi", "3.14159265358979323846"),
    ("[3,8]", "(3,8)"), ("(3,8)", r"\{3,8\}"), ("(1,2)", "(2,1)"), ("(1,2)", "(1,2,3)"), ("101_2", "5"), ("101_2", "101"), ("5", "101_2"),
    (r"5\text{ cm}", r"5\text{ m}"), (r"5\text{ cm}", "5"), ("5", r"5\text{ cm}"), ("7", r"7\%"), ("1,2", "1"), ("1", "1,2"), ("1,2", "1,2,3"), ("72", r"72 \text{ or } 73"),
    (r"\pm 3", "3"), ("3", r"\pm 3"), ("x=5", "y=5"), ("x+y=3", "x-y=3"), ("x<3", "x>3"), ("x<3", r"x\le 3"), ("x=3", "x<3"), ("|x|", "x"), (r"\sqrt{x^2}", "x"),
    ("6", "6=2x4"), ("5", "3=5"), (r"\text{Friday}", r"\text{Saturday}"), ("A", "B"), ("3:4", "4:3"), (r"\infty", r"-\infty"), (r"\infty", "10^{100}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\frac{1}{300!}", r"\frac{1}{301!}"), ("2^{1000}", "2^{1000}+1"),
    ("1", r"\tanh(1000)"), ("5", r"5+\exp(-2000)"), ("5", "5+e^{-5000}"), (r"\pi", r"\pi+2^{-100000}"), ("x", "x+2^{-100000}"), (r"\sqrt2", r"\sqrt2(1+e^{-9999})"),
    ("0", r"\sin(10^{-500})"), ("0", "e^{-4000}"), ("3:4", "0:0"), (r"-\infty", r"-\infty+1"), (r"\infty", r"2\infty"), ("5", r"\log(0)"), (r"5\text{ cm}^2", r"5\text{ cm}"), (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    ("(0,1)", "c u p (0,1)"), ("(-8)^{1/3}", "-2"), ("72", "73, 72"), ("x^2=4", "x=2"), ("(0,1)", "0<y<2"), ("9007199254740993", "9007199254740992"), (r"\emptyset", r"\{0\}"), ("5", "5!"), ("-3", "3"),
]  # fmt: skip
UNREADABLE = [
    "", "see the figure", "x+", "(1", "1)", r"\frac{1}", r"\sqrt", "1 2", "6 14/5", "1..2", "__import__('os')", "lambda: 1", r"\int_0^1 x dx", r"\sum_{k=1}^n k",
    r"\lim x", "5 apples", "a.b", '"x"', "x;y;", "1//2", r"\text{a} 5", "@", "((((" * 30, "1+" * 3000 + "1", "1e9999", "\u00b2", "1 % 2", r"\begin{matrix}1", "12_{40}",
    "19_8", "x\\\\y", "expand((x+1)^2)", "solve(x)", "f'", r"\frac{}{}", "{" * 300, "^2", "|1", "[1,2", "x=1=", "5 5", r"\input{x}", "9" * 5000, "n!!", "N/A", r"\text{}",
]  # fmt: skip
UNREADABLE.remove("f'")


def equal(gold, answer, **settings):
    return verify(build({"family": "math", **settings}), {"prompt": "", "answer": gold}, f"\\boxed{{{answer}}}").value


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_values_in_any_form(gold, answer):
    settings = {"kind": "interval"} if "<x<" in gold and "," in answer else {}
    if settings:
        gold, answer = "(3,8)", "3<x<8"
    assert equal(gold, answer, **settings) == 1
    if answer not in ("2+3=5", r"6=2\times3"):  # a true equation says its last side, a gold is not one
        assert equal(answer, gold, **settings) == 1


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_values(gold, answer):
    assert equal(gold, answer) == 0


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_does_not_read_completely_is_no_answer_and_no_gold(text):
    with pytest.raises(Unreadable):
        read(text)
    assert equal("5", text) == 0
    with pytest.raises(DataError):
        build("math:rule=whole").check({"prompt": "", "answer": text})


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}", r"\frac{7^{7^{7^{7}}}-3}{8}", "(10^9)!", "((5!)!)!", "2^{2^{100}}", r"10^{10^{10}}", r"e^{10^{9}}", r"\sin(10^{10^5})", r"\binom{10^9}{5}", "2_{10}" + "!" * 25, r"\max(x,9)!!", r"5\text{ cm}^{9^9}",
        "1e999", r"\sqrt[10^9]{2}", "x^{10^9}", r"(x+1)^{10^6}", "(" * 25 + "2" + ")^9" * 25, r"\gcd(10^{9999},3)", r"\exp(\exp(\exp(\exp(9))))",
        "{" * 25 + "9" + "!}" * 25, r"3000!\cdot 3000!\cdot 3000!", "2^-9999999999", r"\ln(" * 25 + "x" + ")" * 25,
    ],
)  # fmt: skip
def test_large_work_is_refused_before_it_is_done(text):
    start = time.process_time()
    assert equal("5", text) == 0
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("gold", "answer", "settings", "expected"),
    [
        (r"\frac{\pi}{3}", r"60^\circ", {"kind": "angle"}, 1),
        (r"\frac{\pi}{3}", r"60^\circ", {}, 0),
        (r"60^\circ", "60", {"units": "waive"}, 1),
        (r"5\text{ cm}", "5", {"units": "waive"}, 1),
        ("7", r"7\%", {"percent": "asked"}, 1),
        ("(3,8)", "3<x<8", {"kind": "interval"}, 1),
        ("(3,8)", r"3\le x<8", {"kind": "interval"}, 0),
        (r"\sqrt{19}", "4.358899", {"places": 6}, 1),
        (r"\sqrt{19}", "4.3589", {"places": 6}, 0),
        ("0.5", "0.50000001", {"places": 6}, 1),
        (r"\frac{1}{300!}", r"\frac{1}{302!}", {"places": 6}, 0),
        (r"\sqrt{19}", r"\sqrt{19.0000000001}", {"places": 6}, 0),
        (r"(\sqrt2,1)", "(1.414214,1)", {"places": 6}, 1),
        (r"\pi", r"180\text{ degrees}", {"kind": "angle"}, 1),
        ("y=2x+1", "2x+1", {"kind": "equation"}, 0),
        ("y=2x+1", "4x-2y+2=0", {"kind": "equation"}, 1),
    ],
)
def test_settings(gold, answer, settings, expected):
    assert equal(gold, answer, **settings) == expected
    assert row_fault(build({"family": "math", **settings}), {"prompt": "", "answer": gold}) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So the result is $\\frac{1}{2}$.", 1),
        ("The answer is 0.5", 1),
        ("The answer is $\\frac{1}{2}$ or $\\frac{1}{3}$", 0),
        ("We get $\\frac{1}{3}$, hence $\\frac{1}{2}$", 1),
        ("I give up", 0),
        ("The final answer is \\boxed{1/2}", 1),
        ("The answer is not $\\frac{1}{2}$.", 0),
        ("It is 0.5 +", 0),
        ("negative 0.5", 0),
        ("$$$$", 0),
        ("0.5 is wrong", 0),
    ],
)
def test_free_text(text, expected):
    assert verify(build("math:rule=final"), {"prompt": "", "answer": "1/2"}, text).value == expected


def test_math_recipe_reads_a_worked_solution(tmp_path):
    import json

    from test_tasks import jsonl  # the helper only

    from tinyllm.config.sections import RewardConfig
    from tinyllm.rewards import self_test
    from tinyllm.tasks.files import read_file, rename
    from tinyllm.tasks.recipes import RECIPES

    rows = [
        {"problem": f"Halve {n}.", "solution": f"We get $\\frac{{{n}}}{{2}}$, so \\boxed{{\\frac{{{n}}}{{2}}}}."}
        for n in range(3, 6)
    ]
    recipe = RECIPES["math"]
    read_rows = [
        (place, rename(json.loads(json.dumps(row)), recipe.columns, place))
        for place, row in read_file(jsonl(tmp_path, rows))
    ]
    assert self_test(RewardConfig(timeout_s=60), recipe.verifier, read_rows) == [None] * 3
    assert verify(build(recipe.verifier), read_rows[0][1], "It is \\boxed{1.5}.").value == 1
