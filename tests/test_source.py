"""Where groups come from: the order of prompts, dynamic sampling with a scripted engine, failures as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import EOS, ScriptedEngine, sampling

from tinyllm.config.io import make_config
from tinyllm.errors import TrainingStopped
from tinyllm.post.source import InlineSource, PromptOrder
from tinyllm.records import Judged, Logged, Prompt, Revision, Verdict

PROMPTS = [Prompt(f"p{i}", (5, 6, 7 + i), str(i)) for i in range(10)]


def judge_by_prompt(useful):
    """Samples of a useful prompt get 1 and 0 in turn; of others 0."""

    def judge(prompts, completions, step):
        by_id = {(p.id, p.draw): p for p in prompts}
        return Judged(
            tuple(Verdict(float(useful(by_id[c.prompt_id, c.draw], step) and c.sample % 2 == 0)) for c in completions)
        )

    return judge


def make_source(useful, prompts=PROMPTS, first_step=1, position=0, refills=4, **train):
    config = make_config(
        sampling={"group_size": 2},
        train={"steps": 4, "prompts_per_step": 3, "dynamic_sampling": True, **train},
        stop={"refills": refills},
    )
    engine = ScriptedEngine(lambda p, s, params: (2 + s, EOS))
    order = PromptOrder(prompts, 0, position)
    return InlineSource(engine, order, sampling(n=2), judge_by_prompt(useful), config, first_step=first_step), engine


def ids(groups) -> list[str]:
    return [g.prompt.id for g in groups]


# The order of prompts


def test_every_epoch_is_another_permutation():
    order = PromptOrder(PROMPTS, seed=3)
    epochs = [[p.id for p in order.take(10, {})] for _ in range(3)]
    assert all(sorted(e) == sorted(p.id for p in PROMPTS) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [p.id for p in PromptOrder(PROMPTS, seed=4).take(10, {})] != epochs[0]


@pytest.mark.parametrize("position", [0, 4, 9, 10, 11, 27])
def test_the_order_goes_on_from_a_position(position):
    """Case J2: also at the very end of an epoch."""
    whole = PromptOrder(PROMPTS, seed=0)
    expected = [p.id for p in whole.take(30, {})][position:]
    assert [p.id for p in PromptOrder(PROMPTS, 0, position).take(30 - position, {})] == expected


def test_a_prompt_that_comes_twice_in_a_step_has_two_draws():
    taken = PromptOrder(PROMPTS[:3], seed=0).take(7, draws := {})
    assert sorted((p.id, p.draw) for p in taken) == sorted((p, d) for p, n in draws.items() for d in range(n))
    assert sum(draws.values()) == 7 and len({(p.id, p.draw) for p in taken}) == 7


def test_the_record_tells_which_positions_are_taken():
    """Refills that were drawn after the next step's prompts leave gaps; a resumed order fills them."""
    whole = PromptOrder(PROMPTS[:4], seed=1)
    taken = [whole.take(count, {}) for count in (2, 2, 1, 3)]  # step 1, step 2, a refill of step 1, step 3
    order = PromptOrder(PROMPTS[:4], seed=1)
    order.take_recorded([p.id for p in (*taken[0], *taken[2])])
    assert order.position == 2
    assert [p.id for p in order.take(2, {})] == [p.id for p in taken[1]]
    assert [p.id for p in order.take(3, {})] == [p.id for p in taken[3]] and order.position == 8


def test_a_record_without_gaps_is_a_position():
    for count in (0, 3, 10, 17, 30):
        order = PromptOrder(PROMPTS, seed=2)
        order.take_recorded([p.id for p in PromptOrder(PROMPTS, seed=2).take(count, {})])
        assert order.position == count
        assert [p.id for p in order.take(7, {})] == [p.id for p in PromptOrder(PROMPTS, 2, count).take(7, {})]


# Dynamic sampling


def test_groups_without_signal_are_replaced_by_further_prompts():
    dull = {p.id for p in PromptOrder(PROMPTS, 0).take(3, {})[:2]}
    source, engine = make_source(lambda p, step: p.id not in dull)
    step = next(iter(source))
    groups = step.groups
    assert step.number == 1 and step.prompts == len(groups) == 5 and [len(a) for a in engine.asked] == [3, 2]
    assert ids(groups) == [p.id for p in PromptOrder(PROMPTS, 0).take(5, {})], "every group drawn is handed on"
    assert source.order.position == 5


def test_a_full_step_draws_nothing_more():
    source, engine = make_source(lambda p, step: True)
    steps = {step.number: step.groups for step in source}
    assert list(steps) == [1, 2, 3, 4] and [len(a) for a in engine.asked] == [3] * 4
    trained = [i for groups in steps.values() for i in ids(groups)]
    assert trained == [p.id for p in PromptOrder(PROMPTS, 0).take(12, {})]


def test_no_signal_at_all_stops_after_bounded_draws():
    """Case H1."""
    source, engine = make_source(lambda p, step: step == 1, refills=4)
    steps = iter(source)
    assert next(steps).number == 1
    with pytest.raises(
        TrainingStopped, match=r"step 2: none of 15 groups in 5 draws .* train.dynamic_sampling = false"
    ):
        next(steps)
    assert [len(a) for a in engine.asked] == [3] + [3] * 5


def test_what_has_signal_is_kept_when_replacements_run_out():
    """Case H2."""
    useful = {p.id for p in PromptOrder(PROMPTS, 0).take(3, {})[:2]}
    source, engine = make_source(lambda p, step: p.id in useful, refills=2)
    groups = next(iter(source)).groups
    assert [len(a) for a in engine.asked] == [3, 1, 1] and len(groups) == 5
    assert set(ids(groups)[:3]) > useful


def test_refills_may_come_round_to_the_same_prompt():
    """Fewer prompts than draws: the second draw of a prompt is another group."""
    source, engine = make_source(lambda p, step: p.draw == 2, prompts=PROMPTS[:3], refills=3)
    groups = next(iter(source)).groups
    assert len({g.id for g in groups}) == len(groups) == 9
    assert sum(len({r.reward for r in g.rollouts}) == 2 for g in groups) == 3


def test_without_dynamic_sampling_nothing_is_replaced():
    source, engine = make_source(lambda p, step: False, dynamic_sampling=False)
    assert [len(step.groups) for step in source] == [3] * 4 and len(engine.asked) == 4


# The rest


def test_each_step_samples_under_its_own_number_and_the_published_weights():
    seen = []
    source, engine = make_source(lambda p, step: True)
    source.engine.what_ids = lambda p, s, params: seen.append((params.step, params.n, params.seed)) or (2, EOS)
    source.params = replace(source.params, seed=7)
    for step in source:
        source.publish(Revision(step.number, "x"))
    assert sorted(set(seen)) == [(s, 2, 7) for s in (1, 2, 3, 4)]
    assert [r.step for r in engine.revisions] == [1, 2, 3, 4]


def test_a_resumed_source_starts_at_its_step_and_position():
    whole, _ = make_source(lambda p, step: True)
    rest, _ = make_source(lambda p, step: True, first_step=3, position=6)
    assert [(s.number, ids(s.groups)) for s in whole][2:] == [(s.number, ids(s.groups)) for s in rest]


def test_a_failed_completion_is_a_record_with_its_reason():
    """Cases C2, D10: a stop without its stop token is no completion; the rest of the group is."""
    source, engine = make_source(lambda p, step: True, dynamic_sampling=False)
    engine.what_ids = lambda p, s, params: (2, 3) if s == 0 else (2, EOS)
    groups = next(iter(source)).groups
    for group in groups:
        bad, good = group.rollouts
        assert bad.verdict.value is None and "stop token" in bad.verdict.reason and bad.completion.token_ids == ()
        assert good.verdict.value == 0.0 and good.completion.token_ids == (2, EOS)


def test_what_was_logged_stands_beside_its_own_completion():
    """One value per rollout over all draws of a step; None where nothing was judged; numbers are the mean of draws."""
    source, engine = make_source(lambda p, step: p.id in ("p0", "p1", "p2"), prompts=PROMPTS[:6], refills=8)
    engine.what_ids = lambda p, s, params: (2, 3) if s == 0 and p.id == "p1" else (2 + s, EOS)

    calls = 0
    source_judge = source.judge

    def judge(prompts, completions, step):
        nonlocal calls
        calls += 1
        extras = {"who": [f"{c.prompt_id}/{c.sample}" for c in completions]}
        verdicts = source_judge(prompts, completions, step).verdicts
        return Judged(verdicts, Logged({"f/calls": float(calls)}, extras))

    source.judge = judge
    step = next(iter(source))
    rollouts = [r for g in step.groups for r in g.rollouts]
    wanted = [None if r.completion.finish_reason == "error" else f"{r.completion.prompt_id}/{r.completion.sample}"
              for r in rollouts]  # fmt: skip
    assert step.logged.extras == {"who": wanted} and None in wanted
    assert calls > 1 and step.logged.metrics == {"f/calls": (1 + calls) / 2}


def test_a_verifier_that_raises_leaves_its_step_unscored():
    source, _ = make_source(lambda p, step: 1 / 0, dynamic_sampling=False)
    groups = next(iter(source)).groups
    reasons = {r.verdict.reason for g in groups for r in g.rollouts}
    assert reasons == {"verifier raised ZeroDivisionError: division by zero"}
