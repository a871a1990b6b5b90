"""The rollout client against scripted servers of three dialects: each fault that clients have had is a test."""

from __future__ import annotations

import asyncio
import math
import random
import time

import pytest
from clients import PARAMS, connect, one, prompts
from scripted import STOP, VOCABULARY, Reply, draw, scripted
from tiny import tokenizer

from tinyllm.engine.remote.capabilities import AFTER_TEMPERATURE, RAW
from tinyllm.engine.remote.client import HTTPRolloutClient, parse_label
from tinyllm.engine.remote.http import RetryPolicy
from tinyllm.engine.seeds import seed_key
from tinyllm.errors import EngineError
from tinyllm.post.grpo import collect_groups
from tinyllm.records import Revision, SamplingParams, Verdict

KINDS = ("tinyllm", "vllm", "sglang")
# What is sent


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampling_field_is_explicit(kind):
    _, _, server = one(kind, params=SamplingParams(max_new_tokens=6, stop_token_ids=(STOP,)))
    (body,) = server.sampled
    sent = body["sampling_params"] if kind == "sglang" else body
    off = -1 if kind == "sglang" else 0
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"], sent["n"]) == (1.0, 1.0, off, 0.0, 1)
    assert (sent["presence_penalty"], sent["frequency_penalty"], sent["stop_token_ids"]) == (0.0, 0.0, [STOP])
    assert kind == "tinyllm" or sent["repetition_penalty"] == 1.0
    assert sent["max_new_tokens" if kind == "sglang" else "max_tokens"] == 6 and body["stream"] is False
    if kind == "sglang":
        assert body["return_logprob"] is True and body["input_ids"] == [3, 5, 7]
        assert sent["ignore_eos"] is False, "SGLang heeds no stop token with ignore_eos"
    else:
        assert body["logprobs"] == 0 and body["return_token_ids"] is True and body["prompt"] == [3, 5, 7]
        assert body["ignore_eos"] is True, "the run's stop tokens are the only ones"


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_one_request_with_its_own_key_and_id(kind):
    done, _, server = one(kind, count=3)
    assert len(server.sampled) == 6
    ids = [body.get("rid") or body["request_id"] for body in server.sampled]
    keys = {c.seed_key for c in done}
    sent = {
        "tinyllm": [b.get("seed_keys", [0])[0] for b in server.sampled],
        "vllm": [b.get("seed") for b in server.sampled],
        "sglang": [b.get("sampling_params", {}).get("sampling_seed") for b in server.sampled],
    }[kind]
    assert len(set(ids)) == 6 and set(sent) == keys and len(keys) == 6
    assert done[3].seed_key == seed_key(3, 5, "p1", 0, 1), "the embedded engine's key for the same sample"
    assert all(len(i) <= 128 and i.isascii() for i in ids)


def test_equal_seeds_give_equal_tokens_and_others_differ():
    first, second, again = (one(params=SamplingParams(max_new_tokens=20, n=4, seed=s))[0] for s in (1, 2, 1))
    assert [c.token_ids for c in first] == [c.token_ids for c in again] != [c.token_ids for c in second]


def test_keys_come_from_the_environment_and_stand_nowhere(monkeypatch, caplog):
    monkeypatch.setenv("TINYLLM_API_KEY", "sesame")
    for refused in (
        Reply(400, {"error": "the key sesame is wrong"}),
        Reply(400, raw=b"x" * 297 + b"sesame"),  # where the message is cut
        Reply(200, raw=b"<html>Bearer sesame"),
    ):
        done, client, server = one(script=lambda *_, refused=refused: refused)
        assert server.keys == {"Bearer sesame"}
        assert "***" in str(done[0].error)
        assert "ses" not in repr(client.capabilities()) + repr(done) + caplog.text
    with pytest.raises(EngineError, match="set TINYLLM_API_KEY") as caught:
        HTTPRolloutClient(["http://me:password@127.0.0.1:1"])
    assert "password" not in str(caught.value)


# What comes back


@pytest.mark.parametrize("kind", KINDS)
def test_200_rollouts_with_random_delays_are_each_their_own(kind):
    """L4: prompts not in equal blocks, answers in any order; ids, log-probabilities and text belong to the prompt."""
    delays = random.Random(0)

    def script(number, body, server):
        time.sleep(delays.uniform(0, 0.02))

    with scripted(kind) as server:
        client = connect(server, max_concurrent=32)
        server.script = script
        asked = prompts(50)
        random.Random(1).shuffle(asked)
        params = SamplingParams(max_new_tokens=6, n=4, stop_token_ids=(STOP,), seed=9)
        done = client.sample(asked, params)
    assert len(done) == 200 and server.peak <= 32
    for i, c in enumerate(done):
        prompt = asked[i // 4]
        ids, logps, reason = draw(prompt.token_ids, seed_key(9, 0, prompt.id, 0, i % 4), 6, [STOP], 0.0)
        assert (c.prompt_id, c.sample) == (prompt.id, i % 4)
        assert (list(c.token_ids), list(c.logprobs), c.finish_reason) == (ids, logps, reason)
        assert c.text == "".join(chr(48 + t) for t in ids)
    assert len(server.sampled) == 200


def edit_choice(**changes):
    def act(answer):
        answer["choices"][0].update(changes)

    return act


def edit_logprobs(change):
    def act(answer):
        change(answer["choices"][0]["logprobs"]["token_logprobs"])

    return act


def set_at(position, value):
    return lambda items: items.__setitem__(position, value)


BAD = {
    "a null log-probability": (edit_logprobs(set_at(0, None)), "bad log-probability"),
    "NaN": (edit_logprobs(set_at(-1, math.nan)), "bad log-probability"),
    "minus infinity": (edit_logprobs(set_at(-1, -math.inf)), "bad log-probability"),
    "a positive one": (edit_logprobs(set_at(-1, 0.5)), "bad log-probability"),
    "a text": (edit_logprobs(set_at(0, "-1.0")), "bad log-probability"),
    "a number too large for a float": (edit_logprobs(set_at(0, -(10**400))), "bad log-probability"),
    "a list one too short": (edit_logprobs(lambda x: x.pop()), "ids and log-probabilities differ"),
    "no log-probabilities": (edit_choice(logprobs=None), "no log-probabilities"),
    "no ids": (edit_choice(token_ids=None), "no token ids"),
    "an id outside": (lambda a: a["choices"][0]["token_ids"].__setitem__(0, VOCABULARY), "bad token id"),
    "a negative id": (lambda a: a["choices"][0]["token_ids"].__setitem__(0, -1), "bad token id"),
    "true for an id": (lambda a: a["choices"][0]["token_ids"].__setitem__(0, True), "bad token id"),
    "aborted": (edit_choice(finish_reason="abort"), "cut short"),
    "no finish reason": (edit_choice(finish_reason=None), "cut short"),
    "the stop token dropped": (edit_choice(finish_reason="stop"), "stop token dropped"),
    "cut by the server": (
        lambda a: (a["choices"][0]["token_ids"].pop(), a["choices"][0]["logprobs"]["token_logprobs"].pop()),
        "cut short",
    ),
    "a stop token passed over": (lambda a: a["choices"][0]["token_ids"].__setitem__(1, STOP), "stop token ignored"),
    "empty": (edit_choice(token_ids=[], logprobs={"token_logprobs": []}), "empty"),
    "two choices": (lambda a: a["choices"].append(a["choices"][0]), "several answers"),
    "no choices": (lambda a: a.pop("choices"), "no choices"),
    "another model": (lambda a: a.update(model="other"), "wrong model"),
    "mixed revisions": (
        edit_choice(weight_versions=[{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 6}]),
        "mixed revisions",
    ),
    "spans that leave tokens out": (
        edit_choice(weight_versions=[{"version": "a", "start": 0, "end": 2}]),
        "mixed revisions",
    ),
    "spans that are none": (edit_choice(weight_versions=[{"of": 1}]), "bad revision spans"),
    "HTML": (Reply(raw=b"<html>gateway</html>"), "the answer is not JSON"),
    "half a JSON": (Reply(raw=b'{"choices": [{"tex'), "the answer is not JSON"),
    "a body shorter than announced": (Reply(raw=b"{}", headers={"Content-Length": "90"}), "the connection broke"),
    "a list": (Reply(body=[1]), "no choices"),
    "null": (Reply(body=None, raw=b"null"), "no choices"),
    "too deep": (Reply(raw=b"[" * 100_000), "the answer is not JSON"),
}


def test_a_bad_answer_is_a_failed_completion_with_its_reason():
    """D10, C2, C3: one of two samples is bad each time; the other stays, nothing is filled in."""
    params = SamplingParams(max_new_tokens=6, n=2, seed=1)  # no stop tokens: every completion has 6 tokens
    stopping = SamplingParams(max_new_tokens=6, n=2, seed=1, stop_token_ids=(STOP,))
    with scripted() as server:
        client = connect(server, retry_policy=RetryPolicy(1, 5.0))
        for name, (act, kind) in BAD.items():
            bad_key = seed_key(1, 0, "p0", 0, 1)
            server.script = lambda n, body, s, act=act, bad=bad_key: act if body["seed_keys"] == [bad] else None
            good, bad = client.sample(prompts(1), stopping if "stop token" in name else params)
            assert good.finish_reason == "length" and len(good.logprobs) == 6, name
            assert bad.finish_reason == "error" and bad.token_ids == () == bad.logprobs, name
            assert str(bad.error).startswith(kind) and server.url in str(bad.error), (name, bad.error)
    assert client.servers.live, "a server that answers badly is not dead"


@pytest.mark.parametrize("what", ["null", "short", "id"])
def test_sglang_pairs_each_logprob_with_its_own_id(what):
    def act(answer):
        pairs = answer["meta_info"]["output_token_logprobs"]
        if what == "null":
            pairs[0][0] = None
        elif what == "short":
            pairs.pop(0)
        else:
            answer["output_ids"][0] = (answer["output_ids"][0] + 1) % VOCABULARY

    done, client, _ = one("sglang", lambda *_: act)
    assert [c.finish_reason for c in done] == ["error", "error"]


def test_sglang_may_leave_the_stop_token_out_of_output_ids():
    done, _, _ = one("sglang", lambda *_: lambda a: a["output_ids"].pop(), SamplingParams(max_new_tokens=6))
    assert done[0].finish_reason == "length" and len(done[0].token_ids) == 6


def test_a_stop_token_that_is_the_last_that_fits_counts_as_stop():
    """vLLM says "length" there, the embedded engine "stop"."""
    last = lambda a: a["choices"][0]["token_ids"].__setitem__(5, STOP)  # noqa: E731
    params = SamplingParams(max_new_tokens=6, stop_token_ids=(STOP,), seed=1)
    done, _, server = one("vllm", lambda *_: last, params)
    assert done[0].finish_reason == "stop" and done[0].token_ids[-1] == STOP


def test_ids_are_decoded_here_when_a_tokenizer_is_given():
    with scripted() as server:
        client = connect(server, tokenizer=tokenizer())
        params = SamplingParams(max_new_tokens=20, seed=4, stop_strings=("5",))
        (done,) = client.sample(prompts(1), params)
    whole = tokenizer().decode(list(done.token_ids), skip_special_tokens=True)
    assert done.text == whole.partition("5")[0]


# Capabilities


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_server_gives_is_recorded(kind):
    with scripted(kind) as server:
        (facts,) = connect(server).capabilities()
    assert (facts["server"], facts["model"], facts["url"]) == (kind, "m", server.url)
    assert (facts["logprobs"], facts["seeds"], facts["echoes_id"]) == (AFTER_TEMPERATURE, True, True)
    assert facts["spans"] is (kind != "vllm") and facts["max_length"] == 512 and facts["version"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_convention_is_found_by_two_likeliest_tokens_at_two_temperatures(kind):
    for convention in (RAW, AFTER_TEMPERATURE):
        with scripted(kind, convention=convention) as server:
            assert connect(server).capabilities()[0]["logprobs"] == convention


def test_vllm_says_its_convention_where_it_is_in_development_mode():
    for mode, known in (("raw_logprobs", RAW), ("processed_logprobs", AFTER_TEMPERATURE)):
        with scripted("vllm", mode=mode, convention="raw") as server:
            client = HTTPRolloutClient([server.url])
            assert client.capabilities()[0]["logprobs"] == known
            assert all(body["logprobs"] == 0 for body in server.sampled), "nothing was left to probe"
    with scripted("vllm", mode="raw_logits") as server, pytest.raises(EngineError, match="processed_logprobs"):
        connect(server)


def test_raw_log_probabilities_are_refused_unless_the_temperature_is_1():
    with scripted("vllm", mode="raw_logprobs") as server:
        client = connect(server)
        assert client.sample(prompts(1), SamplingParams(max_new_tokens=4))[0].finish_reason == "length"
        with pytest.raises(EngineError, match="before temperature.*--logprobs-mode processed_logprobs"):
            client.sample(prompts(1), SamplingParams(max_new_tokens=4, temperature=0.7))
        assert len(server.sampled) == 1


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_another_support_than_the_trainers_is_refused(changes):
    with scripted() as server:
        client = connect(server)
        with pytest.raises(EngineError, match="top-k, top-p or min-p is on"):
            client.sample(prompts(1), SamplingParams(max_new_tokens=4, **changes))
        assert not server.sampled


def test_alternatives_that_are_no_numbers_are_refused():
    for kind in ("vllm", "sglang"):

        def null(answer):
            tops = answer["choices"][0]["logprobs"] if "choices" in answer else answer["meta_info"]
            if "top_logprobs" in tops:
                tops["top_logprobs"] = [{"a": None, "b": -1.0}]
            if "output_top_logprobs" in tops:
                tops["output_top_logprobs"] = [[[None, 1, "a"], []]]

        with scripted(kind, lambda *_: null) as server, pytest.raises(EngineError, match="bad alternatives"):
            connect(server)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"script": lambda *_: edit_choice(logprobs=None)}, "no log-probabilities"),
        ({"script": lambda *_: edit_choice(token_ids=None)}, "no token ids"),
        ({"script": lambda *_: Reply(400, {"error": "return_token_ids is unknown"})}, "return_token_ids is unknown"),
        ({"names": ("a", "b")}, "has 2 models \\(a, b\\); name one, as in http://.*#NAME"),
        ({"says": {"/v1/models": Reply(401)}}, "refuses the key; set TINYLLM_API_KEY"),
        ({"says": {"/v1/models": Reply(body={"models": []})}}, "did not answer with a list of models"),
        ({"says": {"/v1/models": Reply(body={"data": [{"id": "m", "owned_by": "me"}]})}}, "calls itself 'me'"),
    ],
)
def test_what_a_server_cannot_give_is_refused_at_the_start(options, said):
    with scripted(options.pop("kind", "vllm"), **options) as server, pytest.raises(EngineError, match=said) as caught:
        connect(server)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)


def test_addresses_and_names():
    with scripted(names=("a", "b")) as server:
        assert HTTPRolloutClient([f"{server.url}/v1/#b"]).capabilities()[0]["model"] == "b"
        with pytest.raises(EngineError, match="has no model 'c'; it has: a, b"):
            HTTPRolloutClient([f"{server.url}#c"])
        with pytest.raises(EngineError, match="give each server once"):
            HTTPRolloutClient([server.url, f"{server.url}/v1"])
    with pytest.raises(EngineError, match="no connection.*is a server running there"):
        HTTPRolloutClient([server.url], retry_policy=RetryPolicy(attempts=1))
    with pytest.raises(EngineError, match="is no address; write it as in"):
        HTTPRolloutClient(["localhost:8000"])


def test_seeds_are_asked_for_once_and_last():
    for seeds in (True, False):
        with scripted("vllm", seeds=seeds) as server:
            client = HTTPRolloutClient([server.url])
            assert client.capabilities()[0]["seeds"] is seeds
            asked = ["seed" in body for body in server.sampled]
            assert sum(asked) == 3 and asked[-3:] == [True] * 3
            server.sampled.clear()
            client.sample(prompts(1), PARAMS)
            assert all(("seed" in body) is seeds for body in server.sampled)


def test_a_server_that_dies_of_a_seed_is_named_with_the_remedy():
    with scripted("vllm", seeds="dies") as server:
        with pytest.raises(EngineError, match="died of a request with a seed.*another version"):
            connect(server)
    with scripted("vllm", seeds="dies", cpu=True) as server:
        assert connect(server).capabilities()[0]["seeds"] is False, "vLLM's CPU engine is not asked"


def test_prompts_that_do_not_fit_are_refused_before_any_request():
    with scripted(max_length=8) as server:
        client = connect(server)
        with pytest.raises(EngineError, match="'p0' has 3 tokens and may grow by 6, more than the 8"):
            client.sample(prompts(1), PARAMS)
        assert not server.sampled


# Its place


def test_it_is_a_rollout_client():
    with scripted() as server:
        client = connect(server)
        server.script = lambda n, *_: edit_choice(finish_reason="abort") if n == 3 else None
        groups = collect_groups(client, prompts(3), PARAMS, lambda p, c: [Verdict(1.0) for _ in c])
    rollouts = [r for g in groups for r in g.rollouts]
    assert len(rollouts) == 6 and sum(r.verdict.value is None for r in rollouts) == 1


def test_it_works_inside_an_event_loop():
    """A notebook has one running."""

    async def cell():
        return one()[0]

    assert all(c.finish_reason != "error" for c in asyncio.run(cell()))


def test_labels_are_read_as_revisions():
    assert parse_label("12:1a2b") == Revision(12, "1a2b") and parse_label("7") == Revision(7, "")
    assert parse_label("default") == Revision(-1, "default")
