"""`tinyllm serve` in trouble: an engine that fails, a server that stops, keys that are missing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import asking
import serving
import tiny
from asking import slowly, until
from serving import END

server, client = asking.server, asking.client


# Faults of the engine


def test_numbers_that_are_not_finite_fail_the_request_and_not_the_server():
    import torch

    made = serving.model()
    with serving.serving(made) as server:
        good = server.complete(prompt="ab", seed=1)["choices"]
        kept = made.lm_head.weight.detach().clone()
        with torch.no_grad():
            made.lm_head.weight.fill_(float("nan"))
        for stream in (False, True):
            status, answer = server.ask("POST", "/v1/completions", {"prompt": "abc", "stream": stream})
            assert status == 500 and "logits are not finite" in answer["error"]["message"]
            assert answer["error"]["type"] == "server_error"
        with torch.no_grad():
            made.lm_head.weight.copy_(kept)
        assert server.complete(prompt="ab", seed=1)["choices"] == good
        assert server.ask("GET", "/health")[0] == 200 and server.service.outstanding == 0


def test_requests_that_waited_are_served_after_a_failure(monkeypatch):
    with serving.serving() as server:
        alone = server.complete(prompt="ab", seed=1, max_tokens=5)["choices"]
        slowly(server, monkeypatch)
        scheduler = server.service.worker.scheduler
        with ThreadPoolExecutor(2) as pool:
            asked = {"prompt": "a", "n": 8, "max_tokens": 100, "ignore_eos": True}
            running = pool.submit(server.ask, "POST", "/v1/completions", asked)
            until(lambda: server.service.worker.running == 8)
            waiting = pool.submit(server.complete, prompt="ab", seed=1, max_tokens=5)
            until(lambda: server.service.worker.waiting == 1)

            def breaks():
                raise MemoryError("no memory left")

            monkeypatch.setattr(scheduler, "step", breaks)
            status, answer = running.result()
            assert status == 500 and "no memory left" in answer["error"]["message"]
            assert waiting.result()["choices"] == alone
        until(lambda: not server.service.worker._handles, "nothing left")


def test_a_prompt_that_finds_no_memory_fails_and_is_not_tried_for_ever(monkeypatch):
    def no_memory(self, blocks):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    with serving.serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr("tinyllm.engine.kv_cache.KVCache.grow_shared", no_memory)
            status, answer = server.ask("POST", "/v1/completions", {"prompt": "ab"})
        assert status == 500 and "can't allocate memory" in answer["error"]["message"]
        assert server.complete(prompt="ab")["choices"]


def test_a_dead_engine_is_told_by_health_and_to_every_request(monkeypatch, capfd):
    with serving.serving(admin_key="admin-key") as server:
        server.complete(prompt="a", max_tokens=1)

        def breaks():
            raise ValueError("a mistake of ours")

        monkeypatch.setattr(server.service.worker.scheduler, "step", breaks)
        status, answer = server.ask("POST", "/v1/completions", {"prompt": "a"})
        assert status == 500 and "a mistake of ours" in answer["error"]["message"]
        assert server.ask("GET", "/health") == (503, {"status": "failed", "reason": "ValueError: a mistake of ours"})
        assert server.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 503
        assert server.ask("POST", "/pause", None, serving.ADMIN)[0] == 503
    assert "a mistake of ours" in capfd.readouterr().err


# The end


def test_a_server_that_stops_finishes_what_runs_and_takes_nothing_new(monkeypatch):
    with serving.serving(max_batch=4, drain_s=300) as server:
        slowly(server, monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.complete, prompt="a", max_tokens=30, ignore_eos=True, n=6)
            until(lambda: server.service.worker.running == 4)
            server.loop.call_soon_threadsafe(server.stop.set)
            until(lambda: server.service.draining)
            status, answer = server.ask("POST", "/v1/completions", {"prompt": "a"})
            assert (status, answer["error"]["code"]) == (503, "shutting_down")
            assert server.ask("GET", "/health")[0] == 503
            assert [len(c["text"]) > 0 for c in running.result()["choices"]] == [True] * 6
        until(lambda: not server.service.worker.thread.is_alive())


def test_a_pause_that_comes_while_it_stops_holds_nothing_up(monkeypatch):
    with serving.serving(drain_s=60, admin_key="admin-key") as server:
        slowly(server, monkeypatch)
        with ThreadPoolExecutor(3) as pool:
            asked = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
            running = pool.submit(server.ask, "POST", "/v1/completions", asked)
            until(lambda: server.service.worker.running == 1)
            pool.submit(server.ask, "POST", "/pause?mode=wait", None, serving.ADMIN)
            until(lambda: server.service.worker._draining)
            held = pool.submit(server.ask, "POST", "/v1/completions", asked)
            until(lambda: server.service.outstanding == 2)
            begin = time.monotonic()
            server.loop.call_soon_threadsafe(server.stop.set)
            assert running.result()[0] == held.result()[0] == 200
            assert time.monotonic() - begin < 30


def test_what_takes_too_long_is_cut_off(monkeypatch):
    with serving.serving(drain_s=0.1) as server:
        slowly(server, monkeypatch, 0.05)
        with ThreadPoolExecutor(1) as pool:
            asked = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
            running = pool.submit(server.ask, "POST", "/v1/completions", asked)
            until(lambda: server.service.worker.running == 1)
            server.loop.call_soon_threadsafe(server.stop.set)
            status, answer = running.result()
            assert status == 503 and answer["error"]["message"] == "the server stops"


# Keys


def test_api_key(monkeypatch):
    with serving.serving(api_key="secret", admin_key="admin-key") as server:
        for headers in (None, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("GET", "/metrics"),
                ("GET", "/x"),
            ):
                status, answer = server.ask(method, path, None, headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        good = {"Authorization": "Bearer secret"}
        assert server.ask("GET", "/v1/models", None, good)[0] == server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/weight_info", None, good)[0] == 200
        assert server.ask("POST", "/pause", None, good)[0] == 403, "an API key changes no weights"
        assert server.ask("GET", "/v1/models", None, serving.ADMIN)[0] == 200


def test_without_an_admin_key_there_are_no_admin_routes(client):
    with serving.serving() as server:
        for path in ("/pause", "/resume", "/update_weights_from_disk"):
            status, answer = server.ask("POST", path, {}, serving.ADMIN)
            assert status == 404 and "start it with --admin-key" in answer["error"]["message"]
        assert threading.active_count() < 50 and tiny.EOS == END
