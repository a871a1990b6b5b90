"""Requests to a server of the tests, and waiting for what they cause."""

from __future__ import annotations

import time

import openai
import pytest
import serving
from serving import BOS, END

from tinyllm.records import SamplingParams

PROMPT = (BOS, 40, 41, 42, 43, 44)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2? é"}]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 20, "stop_token_ids": (END,), **changes})


def ids_of(answer) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def slowly(server, monkeypatch, pause_s=0.02) -> None:
    """Every step takes a little, so that a test can act while a request runs."""
    scheduler = server.service.worker.scheduler
    step = scheduler.step

    def slow():
        time.sleep(pause_s)
        return step()

    monkeypatch.setattr(scheduler, "step", slow)


def until(condition, what="the condition", timeout_s=20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server():
    with serving.serving(max_queue=56, max_body_bytes=20_000, admin_key="admin-key") as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made
