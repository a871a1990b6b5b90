"""Continuous batching on the exact runner: what a request draws does not depend on the others, to the bit."""

from dataclasses import replace

import pytest
import torch
from test_engine import Letters, count_rows, engine, make_policy, make_prompts, params

from tinyllm.engine.build import make_scheduler
from tinyllm.engine.head import pack_targets, score
from tinyllm.engine.scheduler import SampleRequest
from tinyllm.engine.seeds import seed_key
from tinyllm.records import Prompt, Revision, RevisionSpan

KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 7},
    {"top_p": 0.8, "max_new_tokens": 70},
    {"min_p": 0.1, "stop_token_ids": tuple(range(0, 61, 9))},
]


class Collected:
    """Requests with what became of them."""

    def __init__(self, scheduler):
        self.scheduler, self.done, self.heard = scheduler, {}, {}

    def submit(self, name, prompt, params, samples=2, **options):
        def on_finish(s):
            assert (name, s.sample) not in self.done
            assert [t for t, _ in self.heard[name, s.sample]] == list(s.token_ids)
            assert [x for _, x in self.heard[name, s.sample]] == list(s.logprobs)
            self.done[name, s.sample] = s

        def on_token(sample, token, logprob, top):
            assert len(top) == options.get("top_logprobs", 0)
            self.heard.setdefault((name, sample), []).append((token, logprob))

        keys = {s: seed_key(5, 2, prompt.id, prompt.draw, s) for s in range(samples)}
        self.scheduler.submit(SampleRequest(name, prompt, params, keys, on_finish, on_token, **options))

    def finish(self):
        steps = 0
        while self.scheduler.step():
            steps += 1
            assert steps < 2000
            assert self.scheduler.running <= self.scheduler.capacity


def blocks(run):
    """(shared blocks of the cache, those that are free)."""
    cache = run.scheduler.runner.cache
    assert len(set(cache.free_shared)) == len(cache.free_shared), "no block is free twice"
    return cache.shared.shape[2], len(cache.free_shared)


def blocks_of(prompt):
    return len(prompt.token_ids) // 64 + 1


def collected(policy=None, **options):
    return Collected(make_scheduler(policy or make_policy(), Letters(), **{"max_batch": 6} | options))


def expected(policy, prompt, given, samples=2):
    done = engine(policy).sample([prompt], replace(given, n=samples))
    return [(c.token_ids, c.logprobs, c.finish_reason, c.text) for c in done]


def plain(done):
    return (done.token_ids, done.logprobs, done.finish_reason, done.text)


GIVEN = [params(**KINDS[i % len(KINDS)]) for i in range(10)]


@pytest.fixture(scope="module")
def alone():
    """What each of ten prompts draws alone, with parameters of every kind."""
    policy = make_policy()
    return [expected(policy, prompt, given) for prompt, given in zip(make_prompts(10), GIVEN, strict=True)]


@pytest.mark.parametrize("max_batch", [1, 6, 40])
def test_requests_of_all_kinds_draw_together_what_each_draws_alone(alone, max_batch):
    prompts, given = make_prompts(10), GIVEN
    run = collected(make_policy(), max_batch=max_batch)
    for i in range(5):
        run.submit(str(i), prompts[i], given[i])
    for _ in range(3):  # the others come while these run
        run.scheduler.step()
    for i in range(5, 10):
        run.submit(str(i), prompts[i], given[i])
    run.finish()
    assert (run.scheduler.running, run.scheduler.waiting) == (0, 0)
    for i in range(10):
        assert [plain(run.done[str(i), s]) for s in range(2)] == alone[i]


def test_a_prompt_many_requests_want_is_computed_once_until_the_weights_change():
    policy = make_policy()
    rows = count_rows(policy)
    run = collected(policy, max_batch=8)
    prompt = make_prompts(5)[4]
    for i in range(5):
        run.submit(str(i), replace(prompt, draw=i), params(max_new_tokens=3))
    run.finish()
    run.submit("later", replace(prompt, draw=9), params(max_new_tokens=3))
    run.finish()
    assert rows.count(132) == 1  # 130 tokens, padded
    run.scheduler.publish(Revision(1, "new"))
    run.submit("after", replace(prompt, draw=10), params(max_new_tokens=3))
    run.finish()
    assert rows.count(132) == 2


def test_cached_prompts_give_way_to_new_ones():
    policy, prompts = make_policy(), make_prompts(30)
    run = collected(policy, max_batch=4)
    run.scheduler.keep_prompts = 3
    for i, prompt in enumerate(prompts * 2):
        run.submit(str(i), prompt, params(), samples=1)
    run.finish()
    there, free = blocks(run)
    assert there - free == sum(map(blocks_of, prompts[-3:]))
    for i, prompt in enumerate(prompts):
        (alone,) = expected(policy, prompt, params(), 1)
        assert plain(run.done[str(i), 0]) == plain(run.done[str(i + 30), 0]) == alone


def test_a_cancelled_request_frees_its_slots_and_is_heard_of_no_more():
    policy, prompts = make_policy(), make_prompts(6)
    run = collected(policy, max_batch=4)
    for i in range(4):
        run.submit(str(i), prompts[i], params(max_new_tokens=30))
    for _ in range(5):
        run.scheduler.step()
    heard = {name: len(tokens) for name, tokens in run.heard.items()}
    run.scheduler.cancel("0")
    run.scheduler.cancel("3")
    run.scheduler.cancel("nobody")
    assert run.scheduler.running == 2 and run.scheduler.waiting == 2
    run.finish()
    assert sorted(run.done) == [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    assert len(run.heard["0", 0]) == heard["0", 0] and ("3", 0) not in run.heard
    for i in (1, 2):
        assert [plain(run.done[str(i), s]) for s in range(2)] == expected(policy, prompts[i], params(max_new_tokens=30))
    there, free = blocks(run)
    assert there - free == sum(map(blocks_of, prompts[1:3])), "the cancelled one made room for the last"
    run.scheduler.publish(Revision(1, "new"))
    there, free = blocks(run)
    assert there == free


def test_spans_say_whose_weights_drew_which_tokens():
    policy, (prompt, other) = make_policy(), make_prompts(2)
    run = collected(policy, revision=Revision(4, "a"))
    run.submit("across", prompt, params(max_new_tokens=20), samples=1)
    for _ in range(6):
        run.scheduler.step()
    had = len(run.heard["across", 0])
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    with torch.no_grad():
        policy.causal.model.layers[0].self_attn.v_proj.weight.add_(0.5)
    run.scheduler.publish(Revision(5, "b"))
    run.submit("after", other, params(), samples=1)
    run.finish()
    across, after = run.done["across", 0], run.done["after", 0]
    assert across.spans == (RevisionSpan(Revision(4, "a"), 0, had), RevisionSpan(Revision(5, "b"), had, 20))
    assert after.all_spans == (RevisionSpan(Revision(5, "b"), 0, len(after.token_ids)),)
    assert plain(after) == expected(policy, other, params(), 1)[0]
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p.copy_(before[name])
    old = expected(policy, prompt, params(max_new_tokens=20), 1)[0]
    assert across.token_ids[:had] == old[0][:had] and across.logprobs[:had] == old[1][:had]
    assert across.logprobs != old[1]


def test_the_cache_grows_to_what_requests_need():
    policy = make_policy()
    run = collected(policy, max_batch=3)
    for i, (length, new) in enumerate([(5, 4), (200, 3), (70, 150), (6, 190), (64, 64), (128, 2)]):
        prompt = Prompt(str(i), tuple((i + j * j) % 61 for j in range(length)), "")
        run.submit(str(i), prompt, params(max_new_tokens=new), samples=1)
        run.scheduler.step()
    run.finish()
    for i, (length, new) in enumerate([(5, 4), (200, 3), (70, 150), (6, 190), (64, 64), (128, 2)]):
        prompt = Prompt(str(i), tuple((i + j * j) % 61 for j in range(length)), "")
        assert plain(run.done[str(i), 0]) == expected(policy, prompt, params(max_new_tokens=new), 1)[0]


def test_alternatives_are_the_most_probable_tokens_with_their_log_probabilities():
    policy, (prompt, other) = make_policy(), make_prompts(2)
    run, heard = collected(policy), []
    keys = {0: seed_key(5, 2, prompt.id, 0, 0)}
    given = params(max_new_tokens=8, temperature=0.7)
    run.submit("other", other, given)
    run.scheduler.submit(
        SampleRequest("top", prompt, given, keys, lambda s: None, lambda *token: heard.append(token), top_logprobs=61)
    )
    run.finish()
    ids = [token for _, token, _, _ in heard]
    for position, (_, token, logprob, top) in enumerate(heard):
        assert dict(top)[token] == logprob
        assert [x for _, x in top] == sorted((x for _, x in top), reverse=True)
        pairs = [((*prompt.token_ids, *ids[:position]), (t,)) for t, _ in top]
        logp, _ = score(policy, pack_targets(pairs, "cpu"), 0.7)
        torch.testing.assert_close(logp.detach(), torch.tensor([x for _, x in top]), atol=1e-5, rtol=1e-5)


def test_blocks_of_prompts_are_free_again_after_an_update():
    """Those that nothing ran on at once, those that something ran on when it ends."""
    run = collected(max_batch=4)
    prompts = make_prompts(6)
    for i, prompt in enumerate(prompts):
        run.submit(str(i), prompt, params(max_new_tokens=3 * i + 2), samples=1)
    for _ in range(8):
        run.scheduler.step()
    held = {name for name, _ in run.heard} - {name for name, _ in run.done}
    assert run.done and held
    run.scheduler.publish(Revision(1, "b"))
    there, free = blocks(run)
    assert there - free == sum(blocks_of(prompts[int(name)]) for name in held)
    run.finish()
    run.scheduler.publish(Revision(2, "c"))
    there, free = blocks(run)
    assert there == free


def test_a_cached_prompt_that_enters_keeps_its_blocks_though_others_need_room():
    policy = make_policy()
    run = collected(policy, max_batch=4)
    first, second = (Prompt(str(i), tuple((i + j * j) % 61 for j in range(130)), "") for i in (1, 2))
    run.submit("before", first, params(max_new_tokens=2), samples=1)
    run.finish()
    assert blocks(run) == (3, 0)
    run.submit("again", first, params(max_new_tokens=9), samples=1)
    run.submit("other", second, params(max_new_tokens=9), samples=1)
    run.finish()
    for name, prompt in (("again", first), ("other", second)):
        assert plain(run.done[name, 0]) == expected(policy, prompt, params(max_new_tokens=9), 1)[0]
