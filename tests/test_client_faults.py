"""The rollout client when servers are late, lie, refuse or die: attempts, quarantine, the end with each reason."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter

import pytest
from clients import PARAMS, connect, one, prompts
from scripted import Reply, scripted

from tinyllm.engine.remote.http import Portal, RetryPolicy
from tinyllm.engine.seeds import seed_key
from tinyllm.errors import EngineError
from tinyllm.records import SamplingParams

# Trying again


def test_a_late_answer_is_cut_off_and_never_a_second_rollout():
    """L1: the first answer comes after its deadline; the request goes again under a new id."""
    seen = []

    def script(number, body, server):
        seen.append(body["request_id"])
        return Reply(200, {}, delay_s=1.0) if number == 1 else None

    params = SamplingParams(max_new_tokens=6, seed=3)
    done, client, server = one(script=script, params=params, retry_policy=RetryPolicy(3, 0.8, 0.01))
    assert len(done) == 1 and done[0].finish_reason == "length" and len(set(seen)) == 2
    assert len(seen) == 2


def test_an_answer_with_another_id_is_refused():
    """A duplicate or a crossed answer: only the one that carries the request's own id is taken."""
    first = []

    def script(number, body, server):
        first.append(body["request_id"])
        return (lambda a: a.update(id=first[0])) if number == 2 else None

    done, _, server = one(script=script)
    assert len(server.sampled) == 3 and all(c.finish_reason != "error" for c in done)


def test_where_ids_are_not_echoed_the_exchange_is_the_match():
    done, client, _ = one("vllm", echo=False)
    assert client.capabilities()[0]["echoes_id"] is False
    assert all(c.finish_reason != "error" for c in done)


@pytest.mark.parametrize(
    ("status", "sent"), [(503, 3), (500, 3), (429, 3), (408, 3), (400, 1), (401, 1), (404, 1), (422, 1)]
)
def test_attempts_are_as_many_as_configured_and_a_refusal_is_final(status, sent):
    """L2."""
    done, client, server = one(
        script=lambda *_: Reply(status, {"error": "no"}), params=SamplingParams(max_new_tokens=6)
    )
    assert len(server.sampled) == sent
    assert done[0].finish_reason == "error" and str(done[0].error).startswith(f"HTTP {status}")
    assert client.servers.live, "its /health says that it works"


def test_a_request_that_succeeds_later_succeeds():
    done, client, server = one(
        script=lambda n, *_: Reply(503) if n < 3 else None, params=SamplingParams(max_new_tokens=6)
    )
    assert done[0].finish_reason == "length" and len(server.sampled) == 3


def test_retry_after_is_honoured_within_the_deadline():
    wait = Reply(429, headers={"Retry-After": "1"})
    begin = time.monotonic()
    done, client, _ = one(script=lambda n, *_: wait if n == 1 else None, params=SamplingParams(max_new_tokens=6))
    assert done[0].finish_reason == "length" and time.monotonic() - begin >= 1.0
    wait.headers["Retry-After"] = "3600"
    begin = time.monotonic()
    done, client, server = one(script=lambda *_: wait, params=SamplingParams(max_new_tokens=6))
    assert done[0].finish_reason == "error" and len(server.sampled) == 1, "the deadline would be over"


def test_a_request_that_is_never_answered_does_not_hold_up_the_step(caplog):
    """L5: 1 of 16 hangs on its first try, and one for good."""
    never = seed_key(3, 5, "p6", 0, 1)
    once = seed_key(3, 5, "p2", 0, 0)
    tried = Counter()

    def script(number, body, server):
        key = body["seed_keys"][0]
        tried[key] += 1
        hangs = key == never or (key == once and tried[key] == 1)
        return Reply(hang_up=True, delay_s=3.0) if hangs else None

    with caplog.at_level(logging.WARNING):
        done, client, _ = one(script=script, count=8, retry_policy=RetryPolicy(2, 1.2, 0.01))
    assert [c.finish_reason for c in done].count("error") == 1 and tried[once] == 2
    assert str(done[13].error).startswith("no answer in time")
    assert "1 of 16 completions failed, the first that of prompt 'p6', sample 1: no answer in time" in caplog.text


# Several servers


def test_requests_are_spread_over_servers():
    def script(number, body, server):
        time.sleep(0.01)

    with scripted() as a, scripted() as b:
        client = connect(a, b, max_concurrent=8)
        a.script = b.script = script
        done = client.sample(prompts(20), PARAMS)
    assert all(c.finish_reason != "error" for c in done)
    assert 12 <= len(a.sampled) <= 28 and len(a.sampled) + len(b.sampled) == 40


def test_a_server_that_dies_is_quarantined_and_the_others_do_its_work(caplog):
    with scripted() as a, scripted() as b:
        client = connect(a, b, max_concurrent=8)

        def script(number, body, server):
            server.dead = True
            return Reply(500, {"error": "EngineDeadError"})

        a.script = script
        done = client.sample(prompts(20), PARAMS)
    assert all(c.finish_reason != "error" for c in done)
    assert [s.url for s in client.servers.live] == [b.url]
    assert len(a.sampled) + len(b.sampled) <= 40 + 8, "only what was under way there goes again"
    assert f"{a.url} gets no more requests: it does not work any more" in caplog.text


def test_when_no_server_is_left_the_call_ends_with_each_reason():
    with scripted() as a, scripted("tinyllm") as b:
        client = connect(a, b)
    with pytest.raises(EngineError, match="no server is left") as caught:
        client.sample(prompts(4), PARAMS)
    assert a.url in str(caught.value) and b.url in str(caught.value)


# The event loop of a portal


def test_a_portal_that_closes_cuts_off_its_requests_and_its_thread_ends():
    portal, begun = Portal(), threading.Event()

    def script(number, body, server):
        begun.set()
        return Reply(delay_s=2.0, hang_up=True)

    with scripted() as server:
        client = connect(server, run=portal.run)
        server.script = script
        waiting = portal.begin(lambda http: client.sample_within(http, asyncio.Semaphore(4), prompts(1), PARAMS))
        assert begun.wait(60.0)
        portal.close()
        assert waiting.cancelled()
        portal.close()
        assert not any(thread is portal._thread for thread in threading.enumerate())
