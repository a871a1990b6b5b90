"""Section 3: rollout client."""

from dataclasses import replace

import pytest

from tinyllm.errors import RewardError
from tinyllm.records import Completion, Prompt, Revision, SamplingParams, Verdict

EOS = 3
PROMPTS = [Prompt("a", (5,), "one?"), Prompt("b", (6,), "two?")]
PARAMS = SamplingParams(max_new_tokens=4, n=2, stop_token_ids=(EOS,))


class Backwards:
    """A client that answers in reverse order, as a pool of servers may; `edit` changes one completion."""

    def __init__(self, edit=None):
        self.edit = edit or {}

    def sample(self, prompts, params):
        made = [
            Completion(p.id, p.draw, s, (0, 1, EOS), (-0.1, -0.2, -0.3), "stop", 0, Revision(0, "x"), f"{p.id}{s}")
            for p in prompts
            for s in range(params.n)
        ]
        return [replace(c, **self.edit.get(c.text, {})) for c in reversed(made)]


def score(prompts, completions):
    """1 when the completion belongs to the prompt it came with."""
    return [Verdict(float(c.text.startswith(p.id))) for p, c in zip(prompts, completions, strict=True)]


def test_completions_meet_their_own_prompt(grpo):
    """Why: a reward computed against another prompt's answer is noise that looks like a reward."""
    groups = grpo.collect_groups(Backwards(), PROMPTS, PARAMS, score)
    assert [g.prompt for g in groups] == PROMPTS
    assert [[r.completion.text for r in g.rollouts] for g in groups] == [["a0", "a1"], ["b0", "b1"]]
    assert [r.reward for g in groups for r in g.rollouts] == [1.0] * 4


def test_completions_keep_their_stop_token(grpo):
    """Why: the stop token is a token like any other. Dropped, stopping is never learned; so a client that lost it is
    noticed, and its completion is not trained on.
    """
    groups = grpo.collect_groups(Backwards(), PROMPTS, PARAMS, score)
    assert all(r.completion.token_ids == (0, 1, EOS) for g in groups for r in g.rollouts)
    assert all(len(r.completion.logprobs) == 3 for g in groups for r in g.rollouts)
    lost = Backwards({"a1": {"token_ids": (0, 1), "logprobs": (-0.1, -0.2)}})
    bad = grpo.collect_groups(lost, PROMPTS, PARAMS, score)[0].rollouts[1]
    assert bad.verdict.value is None and "stop token" in bad.verdict.reason and bad.completion.token_ids == ()


@pytest.mark.parametrize(
    "edit",
    [
        {"finish_reason": "error", "error": "server answered 503"},
        {"logprobs": (-0.1, None, -0.3)},
        {"logprobs": (-0.1, -0.2)},
        {"token_ids": (), "logprobs": ()},
    ],
)
def test_a_failure_is_a_record_and_not_a_zero(grpo, edit):
    """Why: a network error is not a wrong answer. Scored 0 it would teach the policy to avoid what it sampled; raised
    it would throw away the other rollouts. It is recorded, with its reason, and left out.
    """
    asked = []

    def verify(prompts, completions):
        asked.extend(c.text for c in completions)
        return score(prompts, completions)

    groups = grpo.collect_groups(Backwards({"b0": edit}), PROMPTS, PARAMS, verify)
    bad = groups[1].rollouts[0]
    assert bad.verdict.value is None and bad.verdict.reason
    assert sorted(asked) == ["a0", "a1", "b1"]
    assert [r.reward for g in groups for r in g.rollouts if r is not bad] == [1.0] * 3


@pytest.mark.parametrize("count", [1, 3, 5])
def test_one_verdict_for_each_completion(grpo, count):
    """Why: one value for four completions, silently broadcast, gives every one of them the same reward."""
    with pytest.raises(RewardError, match=f"{count} .*4"):
        grpo.collect_groups(Backwards(), PROMPTS, PARAMS, lambda p, c: [Verdict(1.0)] * count)
