"""Multi-turn rollouts: which tokens, spans and reasons come out, what limits and failures do, and one run to the bit.

First with a scripted engine, one token per character, then with the embedded engine and a real update.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from tinyllm.config.io import make_config
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.policy import Policy
from tinyllm.engine.seeds import seed_key
from tinyllm.episodes.episodes import Episodes
from tinyllm.errors import EngineError
from tinyllm.model.models import content_hash
from tinyllm.post.grpo import collect_groups
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.source import InlineSource, PromptOrder
from tinyllm.post.update import Updater
from tinyllm.record.rollouts import read_table, write_table
from tinyllm.records import Completion, Judged, Prompt, Revision, RevisionSpan, SamplingParams, Verdict

NOW = Revision(3, "w3")
PARAMS = SamplingParams(max_new_tokens=40, n=2, stop_token_ids=(ord("|"),), seed=7, step=4)


def ids(text):
    return tuple(map(ord, text))


class Characters:
    """One token per character; "|" ends a turn and is special."""

    def decode(self, token_ids, /, *, skip_special_tokens):
        return "".join(chr(i) for i in token_ids if not (skip_special_tokens and chr(i) == "|"))


class Scripted:
    """Says what a script holds: (prompt, sample) -> one text per turn. Answers in reverse order."""

    def __init__(self, script, change=lambda turn, completion: completion, positions=10_000):
        self.script, self.change, self.positions = script, change, positions
        self.calls, self.closed = [], 0

    def sample(self, prompts, params):
        self.calls.append((list(prompts), params))
        assert all(len(p.token_ids) + params.max_new_tokens <= self.positions for p in prompts)
        done = [self.say(p, sample, params) for p in prompts for sample in range(params.n)]
        return [c for c in reversed(done) if c is not None]

    def say(self, prompt, sample, params):
        row, *later = prompt.id.split("\x1f")
        number, turn = map(int, later) if later else (sample, 0)
        whole = ids(self.script[row, number][turn])
        said = whole[: params.max_new_tokens]
        key = seed_key(params.seed, params.step, prompt.id, prompt.draw, sample)
        text = Characters().decode(said, skip_special_tokens=True)
        reason = "stop" if said == whole else "length"
        drawn = logprobs(said, turn)
        done = Completion(prompt.id, prompt.draw, sample, said, drawn, reason, key, NOW, text)
        return self.change(turn, done)

    def publish(self, revision):
        self.revision = revision

    def facts(self):
        return {"engine": "scripted"}

    def close(self):
        self.closed += 1


def logprobs(token_ids, turn):
    return tuple(-0.5 - turn - i / 8 for i in range(len(token_ids)))


class Calculator:
    """Answers "17+4?" with the sum, and "again?" with a count that shows that no two rollouts share a state."""

    def __init__(self, **answers):
        self.answers = answers
        self.states, self.ended, self.heard, self.closed = [], [], [], 0

    def reset(self, prompt, sample):
        if (prompt.id, sample) == self.answers.get("no_reset"):
            raise OSError("no room\nat all")
        self.states.append({"name": (prompt.id, sample), "count": 0})
        return self.states[-1]

    def respond(self, state, text, token_ids):
        assert Characters().decode(token_ids, skip_special_tokens=True) == text
        self.heard.append((*state["name"], text))
        state["count"] += 1
        if found := re.search(r"(\d+)\+(\d+)\?$", text):
            return f"{int(found[1]) + int(found[2])};"
        if text.endswith("again?"):
            return ids(f"<{state['count']}>")
        if text.endswith("break?"):
            raise ZeroDivisionError("division by zero")
        return self.answers.get(text)

    def end(self, state):
        self.ended.append(state["name"])
        if state["name"] == self.answers.get("no_end"):
            raise RuntimeError("stuck")

    def close(self):
        self.closed += 1


def render(turn, text):
    """A separator, then the text; the end mark first where the turn drew none."""
    return ids(("" if turn[-1] == ord("|") else "|") + "\n" + text)


def make(script, environment=None, change=lambda turn, completion: completion, positions=10_000, **limits):
    engine = Scripted(script, change, positions)
    environment = environment or Calculator()
    return Episodes(engine, environment, render, Characters(), vocab_size=128, **limits), engine, environment


def prompts_of(script):
    return [Prompt(row, ids(f"{row}:"), f"{row}:", messages=({"role": "user", "content": row},), draw=5) for row in
            dict.fromkeys(row for row, _ in script)]  # fmt: skip


def rollouts(script, environment=None, params=PARAMS, **options):
    """What came out, by (prompt, sample); every state must have been ended once."""
    episodes, engine, environment = make(script, environment, **options)
    prompts = prompts_of(script)
    found = episodes.sample(prompts, params)
    by_name = {(c.prompt_id, c.sample): c for c in found}
    assert len(by_name) == len(found) == len(prompts) * params.n
    assert sorted(environment.ended) == sorted(state["name"] for state in environment.states)
    return by_name, engine, environment


def one(*turns, environment=None, params=PARAMS, **options):
    found, engine, environment = rollouts({("a", 0): turns}, environment, replace(params, n=1), **options)
    return found["a", 0], engine, environment


# Tokens


def test_a_rollout_is_its_turns_with_the_replies_between_them():
    script = {
        ("a", 0): ["17+4?|", "2+2?|", "so 21|"],
        ("a", 1): ["8|"],
        ("b", 0): ["again?|", "again?|", "done|"],
        ("b", 1): ["1+1?|", "two|"],
    }
    found, engine, environment = rollouts(script)
    told = found["a", 0]
    assert told.token_ids == ids("17+4?|\n21;2+2?|\n4;so 21|")
    assert told.logprobs == (
        *logprobs("17+4?|", 0), *[None] * 4, *logprobs("2+2?|", 1), *[None] * 3, *logprobs("so 21|", 2)
    )  # fmt: skip
    assert told.spans == (
        RevisionSpan(NOW, 0, 6),
        RevisionSpan(None, 6, 10),
        RevisionSpan(NOW, 10, 15),
        RevisionSpan(None, 15, 18),
        RevisionSpan(NOW, 18, 24),
    )
    assert (told.prompt_id, told.draw, told.sample, told.finish_reason) == ("a", 5, 0, "stop")
    assert (told.text, told.revision, told.error) == ("17+4?\n21;2+2?\n4;so 21", NOW, None)
    assert told.seed_key == seed_key(7, 4, "a", 5, 0)
    # Token ids of a reply are appended as they are; every rollout has a state of its own
    assert found["b", 0].token_ids == ids("again?|<1>again?|<2>done|")
    assert found["b", 1].token_ids == ids("1+1?|\n2;two|")
    assert found["a", 1].token_ids == ids("8|") and found["a", 1].spans == ()


def test_later_turns_are_prompts_of_their_own():
    _, engine, _ = rollouts({("a", 0): ["17+4?|", "so 21|"], ("a", 1): ["1+1?|", "again?|", "yes|"]})
    first, second, third = engine.calls
    assert [p.id for p in first[0]] == ["a"] and first[1] == PARAMS
    assert [p.token_ids for p in second[0]] == [ids("a:17+4?|\n21;"), ids("a:1+1?|\n2;")]
    assert [p.text for p in second[0]] == ["a:17+4?|\n21;", "a:1+1?|\n2;"]
    assert [(p.id, p.draw, p.messages) for p in third[0]] == [("a\x1f1\x1f2", 5, None)]
    assert second[1] == replace(PARAMS, n=1, max_new_tokens=35), "of the rollout with the most left"
    assert third[1].max_new_tokens == 40 - 5 - 7


def test_without_a_reply_a_rollout_is_what_the_engine_returned():
    script = {("a", 0): ["8|"], ("a", 1): ["9|"]}
    found, _, environment = rollouts(script)
    expected = {c.sample: c for c in Scripted(script).sample(prompts_of(script), PARAMS)}
    assert [found["a", s] for s in (0, 1)] == [expected[0], expected[1]]
    assert environment.heard == [("a", 0, "8"), ("a", 1, "9")]


def test_weights_that_change_within_a_turn_stay_where_they_drew():
    new = Revision(4, "w4")

    def split(turn, c):
        return replace(c, spans=(RevisionSpan(NOW, 0, 2), RevisionSpan(new, 2, len(c.token_ids)))) if turn else c

    told, _, _ = one("1+1?|", "two|", change=split)
    assert told.spans == (
        RevisionSpan(NOW, 0, 5), RevisionSpan(None, 5, 8), RevisionSpan(NOW, 8, 10), RevisionSpan(new, 10, 12)
    )  # fmt: skip


# Limits


@pytest.mark.parametrize(
    ("limits", "expected", "calls"),
    [
        ({"max_turns": 1}, "again?|", 1),
        ({"max_turns": 2}, "again?|<1>again?|", 2),
        ({"max_given_tokens": 5}, "again?|<1>again?|", 2),
        ({"max_given_tokens": 6}, "again?|<1>again?|<2>done|", 3),
        ({"max_given_tokens": 0}, "again?|", 1),
        ({"params": replace(PARAMS, max_new_tokens=14)}, "again?|<1>again?|", 2),
        ({"params": replace(PARAMS, max_new_tokens=19)}, "again?|<1>again?|<2>done|", 3),
    ],
)
def test_a_limit_ends_a_rollout_after_a_whole_turn(limits, expected, calls):
    """The environment sees every whole turn; a reply that no turn will follow is dropped."""
    told, engine, environment = one("again?|", "again?|", "done|", **limits)
    assert told.token_ids == ids(expected) and told.finish_reason == "stop"
    assert len(engine.calls) == len(environment.heard) == calls


@pytest.mark.parametrize(("tokens", "expected"), [(16, "again?|<1>again?|<2>do"), (10, "again?|<1>aga"), (3, "aga")])
def test_a_turn_cut_by_length_is_the_last(tokens, expected):
    """max_new_tokens counts the sampled tokens of all turns; the environment is not asked about a part of a turn."""
    told, _, environment = one("again?|", "again?|", "done|", params=replace(PARAMS, max_new_tokens=tokens))
    assert told.token_ids == ids(expected) and told.finish_reason == "length"
    assert told.text == expected.replace("|", "")
    assert len(environment.heard) == expected.count("?|")
    assert sum(told.sampled) == tokens


def test_a_turn_is_cut_where_its_own_rollout_ends():
    """Sample 0 has 3 tokens left and is sampled beside one that has more; a stop within what is left is a stop."""
    script = {("a", 0): ["1111+2?|", "113 then|"], ("a", 1): ["1+1?|", "two...|"], ("a", 2): ["1111+2?|", "ok|"]}
    for change in (lambda turn, c: c, lambda turn, c: replace(c, spans=(RevisionSpan(NOW, 0, len(c.token_ids)),))):
        found, engine, _ = rollouts(script, params=replace(PARAMS, max_new_tokens=11, n=3), change=change)
        assert [call[1].max_new_tokens for call in engine.calls] == [11, 6]
        told = found["a", 0]
        assert (told.token_ids, told.finish_reason) == (ids("1111+2?|\n1113;113"), "length")
        assert told.text == "1111+2?\n1113;113" and told.logprobs[-3:] == logprobs("113", 1)
        assert told.spans[-1] == RevisionSpan(NOW, 14, 17)
        assert (found["a", 1].token_ids, found["a", 1].finish_reason) == (ids("1+1?|\n2;two..."), "length")
        assert (found["a", 2].token_ids, found["a", 2].finish_reason) == (ids("1111+2?|\n1113;ok|"), "stop")


def test_no_call_asks_for_more_positions_than_a_rollout_needs():
    """A long rollout with little left, a short one with much: the engine has room for 2 + 20 + 12 positions, no more."""
    script = {("a", 0): ["111111111+1?|", "ok|"], ("a", 1): ["1+1?|", "two|"]}
    params = replace(PARAMS, max_new_tokens=20)
    found, engine, _ = rollouts(script, params=params, positions=2 + 20 + 12, max_given_tokens=12)
    assert found["a", 0].text.endswith("ok") and found["a", 1].text.endswith("two")
    assert [(len(prompts), params.max_new_tokens) for prompts, params in engine.calls] == [(1, 20), (1, 15), (1, 7)]


# Failures


@pytest.mark.parametrize(
    ("turns", "answers", "reason"),
    [
        (["hm|"], {"no_reset": ("a", 0)}, "reset: the environment raised OSError: no room at all"),
        (["break?|"], {}, "turn 1: the environment raised ZeroDivisionError: division by zero"),
        (["1+1?|", "break?|"], {}, "turn 2: the environment raised ZeroDivisionError: division by zero"),
        (["hm|"], {"no_end": ("a", 0)}, "end: the environment raised RuntimeError: stuck"),
        (["hm|"], {"hm": ()}, "turn 1: the environment raised ValueError: an empty reply: return None when the"),
        (["hm|"], {"hm": (1, 128)}, "turn 1: the environment raised ValueError: the reply is no token ids: id of token 1"),
        (["hm|"], {"hm": (1.0,)}, "turn 1: .* the reply is no token ids: id of token 0 is 1.0"),
        (["hm|"], {"hm": (True,)}, "turn 1: .* the reply is no token ids: id of token 0 is True"),
        (["hm|"], {"hm": 7}, "turn 1: the environment raised TypeError"),
    ],
)  # fmt: skip
def test_what_an_environment_does_wrong_is_the_reason_of_its_rollout_alone(turns, answers, reason):
    script = {("a", 0): turns, ("a", 1): ["1+1?|", "two|"]}
    episodes, _, environment = make(script, Calculator(**answers))
    judged = []

    def verify(prompts, completions):
        judged.extend(c.sample for c in completions)
        return [Verdict(1.0)] * len(completions)

    (group,) = collect_groups(episodes, prompts_of(script), PARAMS, verify)
    bad, good = group.rollouts
    assert bad.verdict.value is None and re.match(reason, bad.verdict.reason), bad.verdict.reason
    assert (bad.completion.finish_reason, bad.completion.token_ids) == ("error", ())
    assert bad.completion.seed_key == seed_key(7, 4, "a", 5, 0)
    assert good.verdict.value == 1.0 and good.completion.token_ids == ids("1+1?|\n2;two|") and judged == [1]
    assert sorted(environment.ended) == sorted(state["name"] for state in environment.states)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"finish_reason": "error", "error": "server away"}, "turn 2: server away"),
        ({"finish_reason": "abort"}, "turn 2: finish reason 'abort': only 'stop' and 'length' are whole"),
        ({"logprobs": ()}, "turn 2: 4 token ids with 0 log-probabilities"),
        ({"token_ids": ids("two."), "finish_reason": "stop"}, "turn 2: it stopped, but its last token 46 is no stop"),
        (None, "turn 2: the engine returned no completion"),
    ],
)
def test_a_later_turn_that_nothing_can_be_trained_on_fails_the_rollout(change, reason):
    def changed(turn, completion):
        if turn == 0 or completion.prompt_id.startswith("b"):
            return completion
        return None if change is None else replace(completion, **change)

    script = {("a", 0): ["1+1?|", "two|"], ("b", 0): ["1+2?|", "three|"]}
    found, _, _ = rollouts(script, params=replace(PARAMS, n=1), change=changed)
    assert found["a", 0].finish_reason == "error" and found["a", 0].error.startswith(reason)
    assert found["a", 0].token_ids == () and found["b", 0].text.endswith("three")


def test_a_first_turn_that_failed_is_handed_on_as_the_engine_returned_it():
    """So that whoever checks completions tells one bad completion from a bad engine, as without an environment."""
    script = {("a", 0): ["1+1?|"], ("a", 1): ["1+1?|"]}
    episodes, _, environment = make(script, change=lambda turn, c: replace(c, finish_reason="abort"))
    with pytest.raises(EngineError, match="no usable completion for 2 asked .*abort"):
        collect_groups(episodes, prompts_of(script), PARAMS, lambda prompts, completions: [])
    assert environment.heard == [] and len(environment.ended) == 2


@pytest.mark.parametrize("wrong", ["twice", "without being asked"])
def test_an_engine_that_returns_something_else_is_an_error(wrong):
    episodes, engine, environment = make({("a", 0): ["1+1?|", "two|"], ("a", 1): ["1+1?|", "two|"]})
    plain = engine.sample

    def sample(prompts, params):
        done = plain(prompts, params)
        return done if len(engine.calls) == 1 else [*done, done[0] if wrong == "twice" else replace(done[0], sample=1)]

    engine.sample = sample
    with pytest.raises(EngineError, match=wrong):
        episodes.sample(prompts_of(engine.script), PARAMS)
    assert sorted(environment.ended) == [("a", 0), ("a", 1)]


@pytest.mark.parametrize("error", [EngineError("all servers are away"), KeyboardInterrupt()])
def test_episodes_are_ended_when_sampling_cannot_go_on(error):
    """Also where ending one raises: what stopped the call is the error that is seen."""
    script = {("a", 0): ["1+1?|", "two|"], ("a", 1): ["again?|", "yes|"], ("b", 0): ["8|"], ("b", 1): ["again?|", "-|"]}
    episodes, engine, environment = make(script, Calculator(no_end=("a", 0)))

    def fail(turn, completion):
        if turn:
            raise error
        return completion

    engine.change = fail
    with pytest.raises(type(error)):
        episodes.sample(prompts_of(script), PARAMS)
    assert sorted(environment.ended) == sorted(script)


# As an engine


def test_it_is_an_engine_over_another():
    episodes, engine, environment = make({}, max_turns=3)
    episodes.publish(NOW)
    assert engine.revision == NOW and episodes.sample([], PARAMS) == []
    assert episodes.facts() == {
        "engine": "scripted",
        "episodes": {"environment": "test_episodes.Calculator", "max_turns": 3, "max_given_tokens": 1024},
    }
    episodes.close()
    assert (environment.closed, engine.closed) == (1, 1)
    environment.close = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        episodes.close()
    assert engine.closed == 2


def test_no_torch_is_needed():
    program = "import sys, tinyllm.episodes.episodes; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "set()\n"), ended.stderr


# The embedded engine


class Hint:
    """Inserts fixed tokens after the first turn, and after the second where that is short."""

    def reset(self, prompt, sample):
        return []

    def respond(self, state, text, token_ids):
        state.append(text)
        if len(state) == 1:
            return (30, 31, 32, 33)
        return " then?" if len(state) == 2 and len(token_ids) < 6 else None

    def end(self, state):
        pass

    def close(self):
        pass


STOPS = (tiny.EOS, *tiny.STOPS)
REAL = SamplingParams(max_new_tokens=24, n=5, stop_token_ids=STOPS, seed=11)
ROWS = [Prompt(f"r{i}", tuple(2 + (3 * i + k) % 12 for k in range(3 + 30 * i)), str(i)) for i in range(3)]


def encode(turn, text):
    return tiny.tokenizer().encode(text, add_special_tokens=False)


def embedded(policy, **options):
    return Episodes(EmbeddedEngine(policy, tiny.tokenizer(), **options), Hint(), encode, tiny.tokenizer(),
                    vocab_size=policy.vocab_size)  # fmt: skip


def keyed(completions):
    return {(c.prompt_id, c.draw, c.sample): c for c in completions}


def test_a_rollout_does_not_depend_on_what_is_sampled_beside_it():
    """Alone, in another order, with other slots and fewer samples: the same tokens, log-probabilities and reasons."""
    policy = Policy(tiny.llama())
    whole = keyed(embedded(policy).sample(ROWS, REAL))
    turns = {key: sum(span.revision is None for span in c.spans) + 1 for key, c in whole.items()}
    reasons = {c.finish_reason for c in whole.values()}
    assert set(turns.values()) == {1, 2, 3} and reasons == {"stop", "length"}, "the case is too easy"
    assert keyed(embedded(policy, max_batch=5).sample(ROWS[::-1], REAL)) == whole
    for row in ROWS:
        alone = keyed(embedded(policy, max_batch=2).sample([row], replace(REAL, n=3)))
        assert alone == {key: whole[key] for key in alone} and len(alone) == 3
    again = keyed(embedded(policy).sample([replace(row, draw=1) for row in ROWS], REAL))
    assert all(again[name, 1, s].token_ids != whole[name, 0, s].token_ids for name, _, s in whole)


def test_turns_draw_with_numbers_of_their_own():
    """Two samples with one history (greedy first turns would have it) still draw different second turns."""
    policy = Policy(tiny.llama(spread=0.02))
    engine = embedded(policy)
    params = replace(REAL, stop_token_ids=tuple(range(0, 44, 2)))
    second = {}
    for done in engine.sample(ROWS[:1], replace(params, n=64)):
        if len(done.spans) > 1:
            first = done.token_ids[: done.spans[0].end]
            second.setdefault(first, set()).add(done.token_ids[done.spans[1].end :])
    shared = [turns for turns in second.values() if len(turns) > 1]
    assert shared, "no two samples drew the same first turn"


def test_greedy_turns_are_those_of_one_dense_pass():
    policy = Policy(tiny.llama())
    (done,) = embedded(policy).sample(ROWS[1:2], replace(REAL, n=1, temperature=0.0))
    assert len(done.spans) > 1
    dense = tiny.dense_logprobs(policy, ROWS[1].token_ids, done.token_ids)
    sampled = torch.tensor(done.sampled)
    assert not sampled.all() and [x is None for x in done.logprobs] == (~sampled).tolist()
    got = torch.tensor([x for x in done.logprobs if x is not None])
    torch.testing.assert_close(got, dense.detach()[sampled], atol=1e-5, rtol=1e-5)


class DigitJudge:
    """One for every digit that was sampled; it reads what was decoded."""

    def __call__(self, prompts, completions, step=0):
        return Judged(tuple(Verdict(float(sum(x.isdigit() for x in c.text))) for c in completions))


def learner():
    config = make_config(
        sampling={"group_size": REAL.n, "max_new_tokens": REAL.max_new_tokens},
        optimizer={"name": "sgd", "lr": 0.1, "clip_norm": 0.0},
        train={"steps": 2, "prompts_per_step": 3},
    )
    policy = Policy(tiny.llama())
    return config, policy, Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config)


def test_a_run_of_two_steps_is_on_policy_to_the_bit_and_replays(tmp_path):
    """Sampled, judged, recorded, trained; then derived again from the record alone, without engine or environment."""
    config, policy, updater = learner()
    source = InlineSource(embedded(policy), PromptOrder(ROWS, 0), REAL, DigitJudge(), config)
    revision = Revision(0, content_hash(policy.model))
    source.publish(revision)
    trained, seen = [], set()
    for step in source:
        (tmp_path / f"{step.number}.parquet").write_bytes(write_table(step))
        batch = updater.objective.batch(step.groups, revision)
        result = updater(batch, 0.1)
        completions = [r.completion for g in step.groups for r in g.rollouts]
        sampled = sum(sum(c.sampled) for c in completions)
        given = sum(len(c.token_ids) for c in completions) - sampled
        assert given > 40 and int(batch.mask.sum()) == sampled
        assert result.stats.sampler_equal_share == 1.0 and result.stats.ratio_max == 1.0
        assert 0 < result.stats.gap_tokens == result.stats.tokens <= sampled and result.stats.sampler_gap == 0.0
        for row, logp in result.logprobs.items():
            assert logp.tolist() == batch.recorded(row).tolist(), "the record holds the trainer's own numbers"
        revision = Revision(step.number, content_hash(policy.model))
        source.publish(revision)
        trained.append((batch, result, revision))
        seen |= {c.revision for c in completions}
    assert {r.step for r in seen} == {0, 1} and len({r.hash for *_, r in trained}) == 2

    _, policy, updater = learner()
    revision = Revision(0, content_hash(policy.model))
    for number, (was, result, after) in enumerate(trained, 1):
        recorded = read_table(tmp_path / f"{number}.parquet")
        assert recorded.changed == [] and tuple(recorded.groups) == was.groups
        batch = updater.objective.batch(recorded.groups, revision)
        assert torch.equal(batch.mask, was.mask) and torch.equal(batch.advantages, was.advantages)
        assert (batch.microbatches, batch.denominator) == (was.microbatches, was.denominator)
        assert updater(batch, 0.1).hashes == result.hashes
        revision = Revision(number, content_hash(policy.model))
        assert revision == after
