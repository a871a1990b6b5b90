"""A client connected to scripted servers, and one call of it."""

from __future__ import annotations

from scripted import STOP, VOCABULARY, scripted

from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import RetryPolicy
from tinyllm.records import Prompt, SamplingParams

PARAMS = SamplingParams(max_new_tokens=6, n=2, stop_token_ids=(STOP,), seed=3, step=5)
QUICK = RetryPolicy(attempts=3, deadline_s=20.0, pause_s=0.002)


def connect(*servers, retry_policy=QUICK, **options):
    urls = [s.url for s in servers]
    client = HTTPRolloutClient(urls, vocab_size=VOCABULARY, retry_policy=retry_policy, **options)
    for server in servers:
        server.sampled.clear()
    return client


def prompts(count):
    return [Prompt(f"p{i}", (3 + i % 40, 5, 7 + i // 40), f"prompt {i}") for i in range(count)]


def one(kind="tinyllm", script=None, params=PARAMS, count=1, retry_policy=QUICK, **options):
    """(completions, client, server) of one call."""
    with scripted(kind, None, **options) as server:
        client = connect(server, retry_policy=retry_policy)
        server.script = script or server.script
        done = client.sample(prompts(count), params)
        assert [(c.prompt_id, c.sample) for c in done] == [(p.id, i) for p in prompts(count) for i in range(params.n)]
        return done, client, server
