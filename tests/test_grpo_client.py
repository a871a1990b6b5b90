"""Section 3 of post/grpo.py with a scripted client: a failure is a record, a broken contract an error."""

import math
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from tinyllm.errors import EngineError, RewardError
from tinyllm.post.grpo import collect_groups
from tinyllm.record.rollouts import read_table, write_table
from tinyllm.records import Completion, Prompt, Revision, SamplingParams, Step, Verdict

EOS = 3
PARAMS = SamplingParams(max_new_tokens=4, n=4, stop_token_ids=(EOS,))


def prompts(n):
    return [Prompt(f"p{i}", (i, i + 1), f"prompt {i}", row={"gold": str(i)}) for i in range(n)]


def completion(prompt, sample, ids=(0, EOS), **changes):
    text = f"{prompt.id} {prompt.draw} {sample}"
    made = Completion(
        prompt.id, prompt.draw, sample, tuple(ids), (-0.5,) * len(ids), "stop", sample, Revision(2, "abc"), text
    )
    return replace(made, **changes)


class Script:
    """A client that returns what `edit` makes of a well-formed answer."""

    def __init__(self, edit=lambda completions: completions):
        self.edit = edit

    def sample(self, prompts, params):
        return self.edit([completion(p, s) for p in prompts for s in range(params.n)])


class Verifier:
    """Scores by the sample index and remembers what it was asked."""

    def __init__(self):
        self.seen = []

    def __call__(self, prompts, completions):
        assert len(prompts) == len(completions)
        self.seen += zip(prompts, completions, strict=True)
        return [Verdict(float(c.sample), answer=p.id) for p, c in zip(prompts, completions, strict=True)]


def one_bad(**changes):
    """Edit sample 1 of prompt p1."""
    return lambda cs: [replace(c, **changes) if (c.prompt_id, c.sample) == ("p1", 1) else c for c in cs]


def test_groups_come_back_in_prompt_order_with_samples_in_order():
    verify = Verifier()
    groups = collect_groups(Script(), prompts(3), PARAMS, verify)
    assert [g.id for g in groups] == ["p0#0", "p1#0", "p2#0"]
    assert [[r.completion.sample for r in g.rollouts] for g in groups] == [[0, 1, 2, 3]] * 3
    assert [[r.reward for r in g.rollouts] for g in groups] == [[0, 1, 2, 3]] * 3
    assert len(verify.seen) == 12
    assert collect_groups(Script(), [], PARAMS, verify) == []


def test_completions_are_matched_by_id_whatever_their_order():
    """200 rollouts in random order, one prompt drawn twice: each meets its own prompt, once."""

    def shuffled(cs):
        random.Random(7).shuffle(cs)
        return cs

    asked = [*prompts(49), Prompt("p7", (7, 8), "prompt 7", draw=1)]
    verify = Verifier()
    groups = collect_groups(Script(shuffled), asked, PARAMS, verify)
    assert [g.prompt for g in groups] == asked
    for g in groups:
        for s, r in enumerate(g.rollouts):
            assert r.completion.text == f"{g.prompt.id} {g.prompt.draw} {s}"
            assert (r.reward, r.verdict.answer) == (s, g.prompt.id)
    assert len(verify.seen) == len({(p.id, p.draw, c.sample) for p, c in verify.seen}) == 200
    assert all((p.id, p.draw) == (c.prompt_id, c.draw) for p, c in verify.seen)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": (-0.5, None)}, "log-probability of token 1 is None"),
        ({"logprobs": (math.nan, -0.5)}, "log-probability of token 0 is nan"),
        ({"logprobs": (-0.5, -math.inf)}, "log-probability of token 1 is -inf"),
        ({"logprobs": (0.5, -0.5)}, r"log-probability of token 0 is 0\.5"),
        ({"logprobs": (-0.5,)}, "2 token ids with 1 log-probabilities"),
        ({"logprobs": ()}, "2 token ids with 0 log-probabilities"),
        ({"logprobs": None}, "2 token ids with 0 log-probabilities"),
        ({"token_ids": None}, "0 token ids with 2 log-probabilities"),
        ({"token_ids": (), "logprobs": ()}, "0 token ids with 0 log-probabilities"),
        ({"token_ids": (0, 1)}, "its last token 1 is no stop token"),
        (
            {"token_ids": (0,) * 5, "logprobs": (-1.0,) * 5, "finish_reason": "length"},
            "5 tokens, but max_new_tokens is 4",
        ),
        ({"finish_reason": "error", "error": "server answered 503"}, "server answered 503"),
        ({"finish_reason": "error"}, "failed without a reason"),
    ],
)
def test_one_bad_completion_is_unscored_with_its_reason_and_the_others_train(changes, reason):
    verify = Verifier()
    groups = collect_groups(Script(one_bad(**changes)), prompts(2), PARAMS, verify)
    bad = groups[1].rollouts[1]
    assert bad.verdict.value is None and math.isnan(bad.reward)
    assert bad.completion.finish_reason == "error" and bad.completion.token_ids == bad.completion.logprobs == ()
    assert bad.verdict.reason == bad.completion.error
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(bad.verdict.reason)
    rest = [r for g in groups for r in g.rollouts if r is not bad]
    assert len(rest) == len(verify.seen) == 7 and all(r.verdict.value is not None for r in rest)


def test_what_may_be_trained_on_stays_as_it_was_returned():
    """A completion cut by the limit, a lone stop token, one that a stop string ended, rounding just above 0."""
    cut = one_bad(token_ids=(0, 1, 2, 0), logprobs=(-1.0, -2.0, -1e-9, 1e-7), finish_reason="length")
    lone = one_bad(token_ids=(EOS,), logprobs=(-3.0,))
    by_string = one_bad(token_ids=(0, 1))
    for edit, params in ((cut, PARAMS), (lone, PARAMS), (by_string, replace(PARAMS, stop_strings=("!",)))):
        rollout = collect_groups(Script(edit), prompts(2), params, Verifier())[1].rollouts[1]
        assert rollout.verdict.value == 1.0
        assert rollout.completion == edit([completion(prompts(2)[1], 1)])[0]


def test_a_missing_completion_is_a_shortfall_on_record():
    groups = collect_groups(Script(lambda cs: cs[1:]), prompts(2), PARAMS, Verifier())
    lost = groups[0].rollouts[0]
    assert lost.verdict.reason == "the client returned no completion" and lost.completion.revision.step == -1
    assert (lost.completion.prompt_id, lost.completion.sample) == ("p0", 0)
    assert sum(r.verdict.value is not None for g in groups for r in g.rollouts) == 7


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda cs: [*cs, cs[3]], "prompt 'p0' draw 0 sample 3 twice"),
        (lambda cs: [*cs[:-1], replace(cs[-1], prompt_id="p9")], "prompt 'p9' draw 0 sample 3 without being asked"),
        (lambda cs: [*cs[:-1], replace(cs[-1], draw=1)], "prompt 'p1' draw 1 sample 3 without being asked"),
        (lambda cs: [*cs, replace(cs[-1], sample=4)], "prompt 'p1' draw 0 sample 4 without being asked"),
        (
            lambda cs: [replace(c, logprobs=()) for c in cs],
            "no usable completion for 8 asked .*2 token ids with 0 log-prob",
        ),
        (lambda cs: [replace(c, token_ids=(), logprobs=()) for c in cs], "no usable completion for 8 asked"),
        (lambda cs: [], "no usable completion for 8 asked .it returned nothing"),
    ],
)
def test_a_client_that_breaks_its_contract_is_an_error(edit, message):
    verify = Verifier()
    with pytest.raises(EngineError, match=message) as error:
        collect_groups(Script(edit), prompts(2), PARAMS, verify)
    assert "\n" not in str(error.value) and not verify.seen


def test_when_every_request_failed_the_groups_say_so_and_nothing_is_verified():
    verify = Verifier()
    down = Script(lambda cs: [replace(c, finish_reason="error", error="connection refused") for c in cs])
    groups = collect_groups(down, prompts(2), PARAMS, verify)
    assert {r.verdict.reason for g in groups for r in g.rollouts} == {"connection refused"} and not verify.seen


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_wrong_number_of_verdicts_names_both_counts(count):
    with pytest.raises(RewardError, match=f"returned {count} verdicts for 4 completions"):
        collect_groups(Script(), prompts(1), PARAMS, lambda p, c: [Verdict(1.0)] * count)


@pytest.mark.parametrize("answer", [None, [1.0, 0.0, 1.0, 1.0], (v for v in [])])
def test_something_other_than_verdicts_is_refused(answer):
    with pytest.raises(RewardError, match="for 4 completions: return one Verdict for each"):
        collect_groups(Script(), prompts(1), PARAMS, lambda p, c: answer)


def test_a_verifier_that_raises_leaves_its_rollouts_unscored_with_what_it_raised():
    def verify(prompts, completions):
        raise KeyError("gold\nanswer")

    groups = collect_groups(Script(), prompts(2), PARAMS, verify)
    verdicts = [r.verdict for g in groups for r in g.rollouts]
    assert {v.value for v in verdicts} == {None}
    assert {v.reason for v in verdicts} == {r"verifier raised KeyError: 'gold\nanswer'"}
    assert groups[0].rollouts[0].completion.token_ids == (0, EOS)

    def broken(prompts, completions):
        raise RewardError("reward length: returned 3 values for 8 completions")

    with pytest.raises(RewardError, match="reward length"):
        collect_groups(Script(), prompts(2), PARAMS, broken)


def test_an_unscored_verdict_is_kept_with_its_reason():
    groups = collect_groups(Script(), prompts(1), PARAMS, lambda p, c: [Verdict(None, reason="timed out")] * 4)
    assert [r.verdict.reason for r in groups[0].rollouts] == ["timed out"] * 4
    assert all(math.isnan(r.reward) for r in groups[0].rollouts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": "abort"}, "finish reason 'abort'"),
        ({"finish_reason": None}, "finish reason None"),
        ({"token_ids": (None, EOS)}, "id of token 0 is None"),
        ({"token_ids": (-1, EOS)}, "id of token 0 is -1"),
        ({"token_ids": (0.5, EOS)}, "id of token 0 is 0.5"),
        ({"token_ids": (2**40, EOS)}, f"id of token 0 is {2**40}"),
        ({"logprobs": (-1.0, "-1.0")}, "log-probability of token 1 is '-1.0'"),
    ],
)
def test_what_no_sampler_means_to_return_is_a_failure_with_its_reason(changes, reason):
    groups = collect_groups(Script(one_bad(**changes)), prompts(2), PARAMS, Verifier())
    bad = groups[1].rollouts[1]
    assert bad.completion.finish_reason == "error" and bad.completion.token_ids == ()
    assert bad.verdict.value is None and reason in bad.verdict.reason
    assert sum(r.verdict.value is None for g in groups for r in g.rollouts) == 1


def test_one_wild_reward_is_unscored_and_the_others_count():
    def verify(prompts, completions):
        return [Verdict(1e200 if c.sample == 2 else float(c.sample)) for c in completions]

    (group,) = collect_groups(Script(), prompts(1), PARAMS, verify)
    assert [r.verdict.value for r in group.rollouts] == [0.0, 1.0, None, 3.0]
    assert group.rollouts[2].verdict.reason == "reward 1e+200 is beyond 1e+100"


@pytest.mark.parametrize("one", [1, True, np.float32(1), np.int64(1), Fraction(1)])
def test_the_recorded_verdict_is_the_trained_one(one, tmp_path):
    """Numbers that are not floats, and text that UTF-8 cannot hold, are made plain before they are used."""
    verdict = Verdict(one, answer="\ud800", parts=(("correct", one),))
    groups = collect_groups(Script(), prompts(1), PARAMS, lambda p, c: [verdict] * len(c))
    assert type(groups[0].rollouts[0].reward) is float
    path = tmp_path / "1.parquet"
    path.write_bytes(write_table(Step(1, groups)))
    back = read_table(path)
    assert back.changed == [] and back.groups[0].rollouts == groups[0].rollouts
