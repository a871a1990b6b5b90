"""The scheduler alone, over a runner of plain Python: what it asks for, in which order, and what it hands on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from plain_runner import Letters, PlainRunner, drawn_alone

from tinyllm.engine.scheduler import SampleRequest, Scheduler
from tinyllm.engine.seeds import seed_key
from tinyllm.records import Prompt, Revision, RevisionSpan, SamplingParams

SHARED = (1, 2, 3)


class Run:
    """A scheduler, its runner, and what became of the requests."""

    def __init__(self, max_batch=4, room=10_000):
        self.runner = PlainRunner(max_batch, room)
        self.scheduler = Scheduler(self.runner, Letters(), max_batch=max_batch, revision=Revision(0, "w0"))
        self.done, self.heard = {}, {}

    def submit(self, name, prompt=SHARED, samples=2, top_logprobs=0, **params):
        def on_finish(sampled):
            assert (name, sampled.sample) not in self.done
            assert self.heard[name, sampled.sample] == list(zip(sampled.token_ids, sampled.logprobs, strict=True))
            self.done[name, sampled.sample] = sampled

        def on_token(sample, token, logprob, top):
            assert len(top) == top_logprobs
            self.heard.setdefault((name, sample), []).append((token, logprob))

        given = SamplingParams(**{"max_new_tokens": 6} | params)
        keys = {sample: key(name, sample) for sample in range(samples)}
        self.scheduler.submit(
            SampleRequest(name, Prompt(name, tuple(prompt), ""), given, keys, on_finish, on_token, top_logprobs)
        )
        return given

    def steps(self, count):
        for _ in range(count):
            self.scheduler.step()

    def finish(self):
        for _ in range(1000):
            assert self.scheduler.running <= self.scheduler.capacity
            if not self.scheduler.step():
                assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
                return
        raise AssertionError("the scheduler does not come to an end")

    def tokens(self, name, sample):
        return list(self.done[name, sample].token_ids)


def key(name, sample):
    return seed_key(7, 0, name, 0, sample)


def alone(given, name, sample, prompt=SHARED, weights=0):
    return drawn_alone(weights, prompt, given, key(name, sample))


def test_samples_fork_when_they_draw_different_tokens_and_share_what_is_equal():
    run = Run(max_batch=8)
    given = run.submit("a", samples=8, max_new_tokens=9)
    run.finish()
    drawn = [alone(given, "a", s) for s in range(8)]
    for s in range(8):
        assert (run.tokens("a", s), list(run.done["a", s].logprobs)) == drawn[s]
    histories = [len({tuple(tokens[:length]) for tokens, _ in drawn}) for length in range(1, 9)]
    assert run.runner.rows == histories and 1 < histories[0] < 8, "one row for each distinct history"


def test_greedy_samples_are_one_sequence():
    run = Run()
    run.submit("a", samples=4, temperature=0.0)
    run.finish()
    assert run.runner.rows == [1] * 5 and len({run.done["a", s].token_ids for s in range(4)}) == 1


def test_requests_that_come_and_go_draw_what_each_draws_alone():
    """Slots are freed in the middle, filled again, forked and moved; a group may be larger than the batch."""
    run = Run(max_batch=5)
    given = {}
    for i in range(14):
        name, prompt = f"r{i}", (1, i % 3, *range(i % 5))
        given[name] = (run.submit(name, prompt, samples=1 + i % 7, max_new_tokens=1 + (3 * i) % 8), prompt, 1 + i % 7)
        run.steps(i % 3)
    run.finish()
    for name, (params, prompt, samples) in given.items():
        for s in range(samples):
            tokens, logprobs = alone(params, name, s, prompt)
            done = run.done[name, s]
            assert (list(done.token_ids), list(done.logprobs), done.finish_reason) == (tokens, logprobs, "length")
            assert done.text == Letters().decode(tokens, skip_special_tokens=True)


def test_a_stop_token_ends_a_sample_and_stays_in_it():
    run = Run(max_batch=8)
    given = run.submit("a", samples=8, max_new_tokens=12, stop_token_ids=(0, 5))
    run.finish()
    reasons = set()
    for s in range(8):
        done = run.done["a", s]
        assert list(done.token_ids) == alone(given, "a", s)[0]
        assert done.finish_reason == ("stop" if done.token_ids[-1] in (0, 5) else "length")
        assert not {0, 5} & set(done.token_ids[:-1])
        reasons.add(done.finish_reason)
    assert "stop" in reasons


def test_a_stop_string_ends_the_text_before_it_and_keeps_its_tokens():
    whole = alone(SamplingParams(max_new_tokens=12), "a", 0)[0]
    text = Letters().decode(whole, skip_special_tokens=False)
    stop = text[4:6]
    end = text.index(stop) + 2
    run = Run()
    run.submit("a", samples=1, max_new_tokens=12, stop_strings=("never", stop))
    run.finish()
    done = run.done["a", 0]
    assert 0 not in whole[:end] and list(done.token_ids) == whole[:end]
    assert (done.finish_reason, done.text) == ("stop", text[: end - 2])


def test_one_token_needs_no_slot():
    run = Run()
    given = run.submit("a", samples=3, max_new_tokens=1)
    run.finish()
    assert [run.tokens("a", s) for s in range(3)] == [alone(given, "a", s)[0] for s in range(3)]
    assert not run.runner.rows


def test_a_cancelled_request_frees_its_slots_and_is_heard_of_no_more():
    run = Run(max_batch=4)
    given = run.submit("long", samples=2, max_new_tokens=20)
    run.submit("gone", (4, 4), samples=2, max_new_tokens=20)
    run.submit("never", (5,), samples=2)
    assert run.scheduler.not_begun == {"long", "gone", "never"}
    run.steps(3)
    assert run.scheduler.not_begun == {"never"} and (run.scheduler.running, run.scheduler.waiting) == (4, 2)
    heard = len(run.heard["gone", 0])
    for name in ("gone", "never", "nobody"):
        run.scheduler.cancel(name)
    assert (run.scheduler.running, run.scheduler.waiting) == (2, 0) and not run.scheduler.not_begun
    run.finish()
    assert sorted(run.done) == [("long", 0), ("long", 1)] and len(run.heard["gone", 0]) == heard
    assert [run.tokens("long", s) for s in range(2)] == [alone(given, "long", s)[0] for s in range(2)]


def test_spans_say_which_weights_drew_which_tokens():
    run = Run()
    given = run.submit("across", samples=1, max_new_tokens=8)
    run.steps(3)
    had = len(run.heard["across", 0])
    run.scheduler.publish(Revision(1, "w1"))
    after = run.submit("after", samples=1)
    run.finish()
    across = run.done["across", 0]
    assert across.spans == (RevisionSpan(Revision(0, "w0"), 0, had), RevisionSpan(Revision(1, "w1"), had, 8))
    assert list(across.token_ids) == alone(given, "across", 0, weights=[0] * had + [1] * (8 - had))[0]
    assert run.done["after", 0].all_spans == (RevisionSpan(Revision(1, "w1"), 0, 6),)
    assert run.tokens("after", 0) == alone(after, "after", 0, weights=1)[0]


def test_forks_after_an_update_have_the_spans_of_their_history():
    run = Run(max_batch=8)
    given = run.submit("a", samples=8, max_new_tokens=6)
    run.steps(1)
    run.scheduler.publish(Revision(1, "w1"))
    run.finish()
    spans = (RevisionSpan(Revision(0, "w0"), 0, 2), RevisionSpan(Revision(1, "w1"), 2, 6))
    assert {run.done["a", s].spans for s in range(8)} == {spans}
    for s in range(8):
        assert run.tokens("a", s) == alone(given, "a", s, weights=[0, 0, 1, 1, 1, 1])[0]


def test_a_prompt_is_computed_once_until_the_weights_change():
    run = Run(max_batch=2)
    for i in range(4):
        run.submit(f"r{i}", samples=3)
    run.finish()
    run.submit("later")
    run.finish()
    assert run.runner.prefilled == [SHARED]
    run.scheduler.publish(Revision(1, "w1"))
    run.submit("after")
    run.finish()
    assert run.runner.prefilled == [SHARED] * 2
    run.scheduler.publish(Revision(2, "w2"))
    assert not run.runner.held


def test_a_prompt_of_old_weights_is_freed_when_its_last_sample_ends():
    run = Run()
    run.submit("old", samples=1, max_new_tokens=9)
    run.steps(2)
    run.scheduler.publish(Revision(1, "w1"))
    run.submit("new", samples=1, max_new_tokens=3)
    run.steps(1)
    assert sorted(run.runner.held.values()) == [SHARED, SHARED]
    run.finish()
    assert list(run.runner.held.values()) == [SHARED]


def test_prompts_used_last_stay_cached():
    run = Run()
    run.scheduler.keep_prompts = 2
    for number in (1, 2, 3, 2, 4):
        run.submit(f"r{number}{len(run.done)}", (number,), samples=1)
        run.finish()
    assert set(run.runner.held.values()) == {(2,), (4,)}
    assert run.runner.prefilled == [(1,), (2,), (3,), (4,)]


def test_unused_prompts_make_room_and_those_in_use_or_entering_do_not():
    run = Run(max_batch=3, room=24)
    first, second, third = ((n,) * 10 for n in (1, 2, 3))
    for name, prompt in (("a", first), ("b", second)):
        run.submit(name, prompt, samples=1)
        run.finish()
    run.submit("again", first, samples=1)
    run.submit("other", third, samples=1)
    run.finish()
    assert run.runner.prefilled == [first, second, third] and run.runner.most_held == 20
    assert set(run.runner.held.values()) == {first, third}


def test_no_tensor_library_is_needed():
    """Everything above, in a process of its own."""
    program = (
        "import sys, test_scheduler_plain as tests\n"
        "for name in dir(tests):\n"
        "    if name.startswith('test_') and name != 'test_no_tensor_library_is_needed':\n"
        "        getattr(tests, name)()\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
        "print('done')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
