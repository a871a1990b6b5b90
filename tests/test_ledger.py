"""Who a pool lost: counts, quarters, and warnings where what was dropped differs from what was trained on."""

import pytest
import tiny

from tinyllm.health.ledger import ledger_line, selection

FACTS = {"revision": 0, "queued_s": 0.0, "sampling_s": 1.0, "verifying_s": 0.5, "engine": "engine 1", "faults": 0}


def line(number, step=1, tokens=10, dropped=0, reward=0.5, seconds=1.0, prompt=None):
    return {
        **FACTS,
        "step": step,
        "group": f"{number}#0",
        "prompt": prompt or str(number),
        "sampling_s": seconds,
        "requested": 4,
        "failed": 0,
        "dropped": dropped,
        "reasons": {"timed out": dropped} if dropped else {},
        "tokens_mean": float(tokens),
        "tokens_max": tokens,
        "reward_mean": None if dropped == 4 else reward,
    }


def test_a_line_tells_what_became_of_a_group():
    group = tiny.group(
        "a", [1, None, 0, None], ids=[(2, 3, 0), (4, 0), (), (5, 6, 7, 0)], reasons=["stop", "stop", "error", "stop"]
    )
    found = ledger_line(3, group, FACTS)
    assert (found["step"], found["group"], found["requested"], found["failed"], found["dropped"]) == (3, "a#0", 4, 1, 2)
    assert (found["tokens_mean"], found["tokens_max"], found["reward_mean"]) == (3.0, 4, 0.5)
    assert found["reasons"] == {"unscored on purpose": 2} and found["engine"] == "engine 1"


def test_counts_are_of_trained_steps_and_of_the_last_attempt():
    lines = [line(i) for i in range(8)] + [line(0, dropped=1), line(20, step=2)]
    found = selection(lines, last_step=1)
    assert (found.requested, found.trained, found.dropped) == (32, 31, 1)
    assert {q.axis for q in found.quartiles} == {"length", "difficulty", "time"}
    assert all(sum(q.requested for q in found.quartiles if q.axis == axis) == 32 for axis in ("length", "time"))


def test_nothing_is_said_where_next_to_nothing_was_dropped():
    lines = [line(i, tokens=i) for i in range(100)] + [line(200, tokens=900, dropped=4)]
    assert selection(lines, 1).warnings == () and selection(lines, 1).dropped == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 40}, "dropped groups were longer than those trained on (40 against 10 tokens), so training leans towards short completions"),
        ({"tokens": 2}, "were shorter than"),
        ({"seconds": 30.0}, "were slower than those trained on (30.5 against 1.5 seconds), so training leans towards quick groups"),
        ({"prompt": "3"}, "were harder than those trained on (0.1 against 0.443 mean reward), so training leans towards easy prompts"),
    ],
)  # fmt: skip
def test_what_differs_is_said_in_plain_words(change, said):
    """A dropped group has no reward; its prompt is as difficult as it was in other steps."""
    lines = [line(i, reward=0.1 if i == 3 else 0.5) for i in range(7)]
    found = selection([*lines, line(9, step=2, dropped=4, **change)], 2)
    assert found.warnings[0] == "12.5% of the completions were dropped; most often because: timed out"
    assert len(found.warnings) == 2 and said in found.warnings[1]


def test_dropped_groups_like_the_others_are_said_to_be_dropped_and_no_more():
    found = selection([*(line(i) for i in range(9)), line(9, dropped=4)], 1)
    assert found.warnings == ("10.0% of the completions were dropped; most often because: timed out",)
