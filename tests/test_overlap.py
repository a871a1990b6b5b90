"""Training prompts in a suite: copies are found, questions that only look alike are not."""

from __future__ import annotations

import random

import pytest

from tinyllm.evals.overlap import find_overlap, prompt_text
from tinyllm.tasks.arithmetic import ArithmeticConfig, generate

LONG = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?"


def kinds(suite, train):
    return [(match.prompt, match.kind) for match in find_overlap(suite, train)]


def test_case_and_whitespace_do_not_hide_a_copy():
    assert kinds(["What is\n 3 + 4?", "Other"], ["what IS 3 +  4? "]) == [(0, "exact")]
    assert kinds(["What is 3 + 4?"], ["What is 3 + 5?"]) == [], "another number, another question"
    assert kinds(["ﬁve apples"], ["five apples"]) == [(0, "exact")], "a ligature is two letters"


def test_similarity_by_hand():
    """Sets of pieces of five, two blanks before and after, numbers written as 0."""
    (near,) = find_overlap([LONG], [LONG.replace("clips to", "clips, to")])
    assert near.kind == "near" and near.train == LONG.replace("clips to", "clips, to")
    a, b = ("  " + LONG.casefold().replace("48", "0") + "  ", "  " + near.train.casefold().replace("48", "0") + "  ")
    pieces = [{text[i : i + 5] for i in range(len(text) - 4)} for text in (a, b)]
    assert near.similarity == pytest.approx(len(pieces[0] & pieces[1]) / len(pieces[0] | pieces[1]))
    assert kinds(["abcdefgh"], ["abcdefgx"]) == [], "8 pieces each, 5 shared: 5 / 11"


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (LONG + " Explain.", True),
        (LONG.replace("Natalia", "Nadia"), True),
        (LONG.replace("48", "49"), False),
        ("48 " + LONG.replace("48", "many"), True),
        (LONG.replace("48", "48 or 50"), False),
        ("How many clips did she sell to 48 friends in April and May, if half as many in May?", False),
    ],
)
def test_near_is_other_wording_with_the_same_numbers(other, found):
    assert bool(find_overlap([LONG], [other])) is found
    assert bool(find_overlap([other], [LONG])) is found


def test_the_threshold_is_reached_from_both_sides():
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = letters[:20]
    for more in range(1, 10):
        other = letters[: 20 + more]
        a, b = ({f"  {t}  "[i : i + 5] for i in range(len(t))} for t in (text, other))
        assert bool(find_overlap([text], [other])) is (len(a & b) / len(a | b) >= 0.8), more


def test_the_order_of_numbers_is_part_of_the_question():
    assert kinds(["Take 5 from 12, please, and write it down."], ["Take 12 from 5, please, and write it down."]) == []


def test_a_template_does_not_make_two_questions_one():
    """Long instructions around one word: only the word counts. An exact copy is still found."""
    lead = "Read the following word carefully, think step by step, and then spell it backwards in capital letters: "
    words = ["orange", "banana", "cherry", "damson", "elder", "feijoa", "guava", "honeydew", "imbe", "jujube"]
    suite = [lead + word for word in [*words, *(w + "s" for w in words)]]
    assert kinds(suite, [lead + "kumquat", lead + "lychee"]) == []
    assert (2, "exact") in kinds(suite, [lead + "cherry"])


def test_the_arithmetic_split_has_no_overlap_and_another_seed_has():
    train, held_out = ([row["prompt"] for row in rows] for rows in generate(ArithmeticConfig()))
    assert find_overlap(held_out, train) == []
    found = find_overlap(held_out, [row["prompt"] for row in generate(ArithmeticConfig(seed=1))[0]])
    assert {held_out[m.prompt] for m in found} == {m.train for m in found} and len(found) > 100
    spaced = find_overlap(held_out[:50], [held_out[3].replace("?", " ?")])
    assert [(m.prompt, m.kind) for m in spaced] == [(3, "exact")]


def test_the_best_training_prompt_is_named():
    other, closer = LONG.replace("Natalia sold", "Nadia has sold"), LONG + "!"
    (match,) = find_overlap([LONG], [other, closer, other])
    assert match.train == closer and match.kind == "near"
    (match,) = find_overlap([LONG], [closer, LONG.upper(), closer])
    assert match.kind == "exact" and match.similarity == 1.0


def test_all_pairs_by_brute_force():
    """Random sentences with edits: what the index finds is what comparing all pairs finds."""
    generator = random.Random(0)
    words = ["red", "green", "blue", "cat", "dog", "runs", "jumps", "over", "under", "the", "a", "7", "12"]
    base = [" ".join(generator.choices(words, k=14)) for _ in range(15)]
    edited = [" ".join(w if generator.random() > 0.06 else generator.choice(words) for w in b.split()) for b in base]

    def pieces(text):
        padded = "  " + " ".join("0" if w.isdigit() else w for w in text.split()) + "  "
        return {padded[i : i + 5] for i in range(len(padded) - 4)}

    def numbers(text):
        return [w for w in text.split() if w.isdigit()]

    wanted = []
    for i, one in enumerate(base):
        alike = [
            len(pieces(one) & pieces(other)) / len(pieces(one) | pieces(other))
            for other in edited
            if numbers(one) == numbers(other)
        ]
        if max(alike, default=0) >= 0.8:
            wanted.append((i, max(alike)))
    assert len(wanted) > 3
    assert [(m.prompt, m.similarity) for m in find_overlap(base, edited)] == [
        (i, pytest.approx(value)) for i, value in wanted
    ]


def test_chats_are_compared_by_what_the_user_says():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    assert prompt_text(chat) == "What is 3 + 4?" == prompt_text("What is 3 + 4?")
