"""Servers as a pool's engines: revisions within a completion, faults on the way, a network that is cut."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
from clients import PARAMS, QUICK, connect, prompts
from scripted import Reply, scripted

from tinyllm.engine.remote.http import Portal, RetryPolicy
from tinyllm.errors import EngineError
from tinyllm.pool.driver import Driver
from tinyllm.pool.judging import JudgeWorker
from tinyllm.pool.served_workers import ServedWorker
from tinyllm.pool.state import GroupRequest
from tinyllm.pool.workers import ThreadWorker, WorkerGroup
from tinyllm.records import Revision, RevisionSpan, Verdict

WAIT_S = 300.0
OLD, NEW = Revision(4, "a" * 32), Revision(5, "b" * 32)


class ServedPool:
    """A driver whose engine is a client's servers, and what came out of it."""

    def __init__(self, portal, client, groups=8):
        self.done, self.errors, self.came = [], [], threading.Condition()
        self.client = client
        for server in client.servers.all:
            server.confirm(OLD, str(OLD))
        judge = JudgeWorker(lambda prompts, completions, step: [Verdict(1.0)] * len(completions))
        self.driver = Driver(
            WorkerGroup("servers", 1, lambda: ServedWorker(client, portal), groups),
            WorkerGroup("verifier", 1, lambda: ThreadWorker(judge), 1),
            lambda error: self._put(self.errors, error),
        )
        self.driver.publish(OLD)

    def _put(self, where, what):
        with self.came:
            where.append(what)
            self.came.notify_all()

    def submit(self, count):
        groups = [GroupRequest(5, i, prompt, PARAMS) for i, prompt in enumerate(prompts(count))]
        self.driver.submit(groups, lambda done: self._put(self.done, done))

    def completions(self, count):
        """Of so many groups, by prompt."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.done) >= count or self.errors, WAIT_S)
        assert not self.errors, self.errors
        return {d.request.prompt.id: [r.completion for r in d.judged.groups[0].rollouts] for d in self.done}


@contextmanager
def pool_on(*servers, retry_policy=QUICK, **options):
    portal = Portal()
    client = connect(*servers, retry_policy=retry_policy, max_lag=1, run=portal.run)
    pool = ServedPool(portal, client, **options)
    try:
        yield pool
    finally:
        pool.driver.close()
        portal.close()


def spans(*parts):
    """A script's edit: the answer's tokens are of these (version, start, end)."""

    def edit(answer):
        count = len(answer["choices"][0]["token_ids"])
        named = [{"version": v, "start": s, "end": count if e is None else min(e, count)} for v, s, e in parts]
        answer["choices"][0]["weight_versions"] = [span for span in named if span["start"] < span["end"]]

    return edit


def test_groups_are_asked_for_as_they_come_and_are_the_clients():
    with scripted("tinyllm", version=str(OLD)) as server, pool_on(server) as pool:
        pool.submit(20)
        found = pool.completions(20)
        alone = connect(server)
        for known in alone.servers.all:
            known.confirm(OLD, str(OLD))
        assert [c for p in prompts(20) for c in found[p.id]] == alone.sample(prompts(20), PARAMS)


def test_an_update_under_way_is_said_token_by_token():
    """Case M2."""
    with scripted("tinyllm", version=str(OLD)) as server, pool_on(server) as pool:
        pool.client.servers.all[0].confirm(NEW, str(NEW))
        server.script = lambda number, body, _: spans((str(OLD), 0, 1), (str(OLD), 1, 2), (str(NEW), 2, None))
        pool.submit(3)
        for done in (c for group in pool.completions(3).values() for c in group):
            count = len(done.token_ids)
            assert done.revision == OLD and done.finish_reason != "error"
            whole = (RevisionSpan(OLD, 0, min(2, count)), RevisionSpan(NEW, 2, count))
            assert done.all_spans == (whole if count > 2 else whole[:1])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (spans((str(OLD), 0, 1), ("9:cccc", 1, None)), "unconfirmed revision: sampled by '9:cccc'"),
        (spans((str(OLD), 1, None)), "mixed revisions"),
        (spans((str(OLD), 0, 1)), "mixed revisions"),
        (lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, None), "bad log-probability: log-probability of token 0 is None"),
        (lambda answer: answer["choices"][0]["logprobs"].pop("token_logprobs"), "no log-probabilities"),
        (lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].pop(), "ids and log-probabilities differ"),
        (lambda answer: answer["choices"][0].pop("token_ids"), "no token ids"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_used_fails_with_its_reason_and_no_other(edit, said):
    """Case D10: one of two samples of one group; it is data, and the run goes on."""

    def script(number, body, server):
        bad = body["prompt"] == [4, 5, 7] and body["request_id"].partition(".")[0].endswith("-1")
        return edit if bad else None

    with scripted("tinyllm", version=str(OLD)) as server, pool_on(server) as pool:
        server.script = script
        pool.submit(3)
        found = pool.completions(3)
        failed = [c for group in found.values() for c in group if c.finish_reason == "error"]
        assert [(c.prompt_id, c.sample) for c in failed] == [("p1", 1)] and said in failed[0].error


def test_answers_wait_for_an_update_to_be_settled():
    """Between a server's change of weights and its proof, an answer may name a version that nobody knows yet."""
    with scripted("tinyllm", version=str(NEW)) as server, pool_on(server) as pool:
        known = pool.client.servers.all[0]
        known.updating = True
        asked = threading.Event()
        server.script = lambda number, body, _: asked.set()
        pool.submit(1)
        assert asked.wait(WAIT_S) and not pool.done
        known.confirm(NEW, str(NEW))
        known.updating = False
        assert {c.revision for c in pool.completions(1)["p0"]} == {NEW}


def test_a_request_keeps_the_adapter_it_was_sent_with():
    """vLLM's answers name no version: the weights are those of the adapter that was asked."""
    with scripted("vllm") as server, pool_on(server) as pool:

        def script(number, body, _):
            pool.client.servers.all[0].confirm(NEW, str(NEW))  # published while the request is under way

        server.script = script
        pool.submit(1)
        assert pool.completions(1)["p0"][0].revision == OLD


def test_a_server_that_fails_for_good_ends_the_pool_with_its_reason():
    """Case L2, K7: the reason is there within the client's own bounds."""
    with scripted("tinyllm", version=str(OLD)) as server, pool_on(server) as pool:
        server.dead = True
        pool.submit(2)
        with pool.came:
            assert pool.came.wait_for(lambda: bool(pool.errors) or len(pool.done) == 2, WAIT_S)
        if pool.errors:
            assert isinstance(pool.errors[0], EngineError) and "no server is left" in str(pool.errors[0])
        else:
            assert all(c.error for group in pool.completions(2).values() for c in group)


class Proxy:
    """A TCP proxy that can be cut: bytes are no longer passed on, or connections are closed."""

    def __init__(self, port):
        self.port, self.mode = port, "open"
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            if self.mode == "closed":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.port))
            self.pairs.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source, target):
        try:
            while data := source.recv(1 << 16):
                if self.mode == "open":
                    target.sendall(data)
        except OSError:
            pass
        target.close()

    def cut(self, mode):
        self.mode = mode
        if mode == "closed":
            for pair in self.pairs:
                for end in pair:
                    end.close()

    def close(self):
        self.socket.close()
        for pair in self.pairs:
            for end in pair:
                end.close()


class Behind:
    """A scripted server as it is seen through a proxy."""

    def __init__(self, server, proxy):
        self.url, self.sampled = proxy.url, server.sampled


@pytest.mark.parametrize("mode", ["closed", "swallowed"])
def test_a_network_that_is_cut_does_not_hold_the_run_up(mode):
    """Case L5: connections closed, or open and silent; the other server does the work, or the reason is recorded."""
    with scripted("tinyllm", version=str(OLD)) as near, scripted("tinyllm", version=str(OLD)) as far:
        proxy = Proxy(far.server_port)
        retry_policy = RetryPolicy(attempts=3, deadline_s=16.0, pause_s=0.01)
        try:
            with pool_on(near, Behind(far, proxy), retry_policy=retry_policy) as pool:
                far.script = lambda number, body, server: proxy.cut(mode) if number == 2 else None
                pool.submit(8)
                found = pool.completions(8)
                assert sorted(found) == sorted(p.id for p in prompts(8)) and all(len(g) == 2 for g in found.values())
                done = [c for group in found.values() for c in group]
                assert sum(c.finish_reason != "error" for c in done) >= 8
                reasons = ("no answer in time", "the connection broke", "no connection")
                assert all(c.error.startswith(reasons) for c in done if c.finish_reason == "error")
        finally:
            proxy.close()


def test_a_hung_up_connection_is_asked_again():
    with scripted("tinyllm", version=str(OLD)) as server, pool_on(server) as pool:
        server.script = lambda number, body, _: Reply(hang_up=True) if number == 1 else None
        pool.submit(2)
        assert all(c.finish_reason != "error" for group in pool.completions(2).values() for c in group)
