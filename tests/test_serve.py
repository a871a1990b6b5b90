"""`tinyllm serve` asked over real HTTP: what OpenAI's client sees, the same tokens as in process, every refusal named."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import asking
import openai
import pytest
import serving
from asking import CHAT, PROMPT, ids_of, params, slowly, until
from serving import BOS, MAX_LENGTH, key_of, sample_alone, tokenizer

from tinyllm.model import models
from tinyllm.serve.text import TextStream

server, client = asking.server, asking.client


# OpenAI's client


def test_openai_client_lists_the_model(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "tinyllm"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")


def test_openai_client_completes(client):
    extra = {"return_token_ids": True, "top_k": 0}
    answer = client.completions.create(
        model="tiny", prompt="ab", max_tokens=9, n=2, seed=5, logprobs=3, extra_body=extra
    )
    assert [c.index for c in answer.choices] == [0, 1] and answer.object == "text_completion"
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length")
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == len(choice.token_ids)
        assert all(1 <= len(top) <= 4 for top in choice.logprobs.top_logprobs)
    sizes = [len(c.token_ids) for c in answer.choices]
    assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == sum(sizes)
    assert answer.usage.total_tokens == 3 + sum(sizes) and answer.seed == 5


def test_openai_client_chats(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=7, seed=2, logprobs=True, top_logprobs=2, temperature=0.7
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert 1 <= len(choice.logprobs.content) <= 7 and len(choice.logprobs.content[0].top_logprobs) == 2
    best = choice.logprobs.content[0].top_logprobs[0].logprob
    assert best >= choice.logprobs.content[0].logprob
    assert answer.object == "chat.completion" and answer.usage.completion_tokens == len(choice.logprobs.content)


def test_openai_client_streams(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 30, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [texts[0], texts[1]] == [c.message.content for c in whole.choices]
    assert [reasons[0], reasons[1]] == [c.finish_reason for c in whole.choices]
    assert usage == whole.usage


def test_openai_client_reads_our_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="ab", presence_penalty=0.5)
    assert caught.value.param == "presence_penalty" and caught.value.type == "invalid_request_error"
    assert "presence_penalty is not supported; leave it out (accepted: 0)" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="ab")
    assert missing.value.code == "model_not_found"


# The same tokens as in process


def test_tokens_are_those_of_the_engine_alone(server):
    keys = [key_of(11, 0, i) for i in range(4)]
    expected = sample_alone(serving.model(), PROMPT, params(temperature=0.8, top_k=30), keys)
    asked = {"prompt": list(PROMPT), "max_tokens": 20, "temperature": 0.8, "top_k": 30, "n": 4, "seed": 11}
    answer = server.complete(**asked, logprobs=0, return_token_ids=True)
    assert ids_of(answer) == [list(s.token_ids) for s in expected]
    assert [tuple(c["logprobs"]["token_logprobs"]) for c in answer["choices"]] == [s.logprobs for s in expected]
    assert [c["text"] for c in answer["choices"]] == [s.text for s in expected]
    assert [c["finish_reason"] for c in answer["choices"]] == [s.finish_reason for s in expected]
    assert all(c["logprobs"]["top_logprobs"] is None for c in answer["choices"])
    by_key = server.complete(**{**asked, "n": 2, "seed": 999}, seed_keys=keys[2:], return_token_ids=True)
    assert ids_of(by_key) == ids_of(answer)[2:]


def test_a_request_alone_and_among_thirty_others_is_the_same(server):
    asked = {"prompt": "the same", "max_tokens": 40, "seed": 77, "logprobs": 2, "n": 2, "return_token_ids": True}
    alone = server.complete(**asked)["choices"]
    others = random.Random(0)

    def other(i):
        text = "x" * others.randrange(1, 60)
        return server.complete(prompt=text, max_tokens=others.randrange(1, 60), seed=i, temperature=1 + i / 30)

    with ThreadPoolExecutor(31) as pool:
        under_load = [pool.submit(other, i) for i in range(15)]
        mine = pool.submit(server.complete, **asked)
        under_load += [pool.submit(other, i) for i in range(15, 30)]
        assert mine.result()["choices"] == alone
        assert all(future.result()["choices"] for future in under_load)


def test_without_a_seed_one_is_drawn_and_told(server):
    asked = {"prompt": "ab", "max_tokens": 12, "return_token_ids": True}
    first, second = server.complete(**asked), server.complete(**asked)
    assert first["seed"] != second["seed"] and 0 <= first["seed"] < 2**53
    assert server.complete(**asked, seed=first["seed"])["choices"] == first["choices"]


def test_prompts_of_every_kind_are_prompt_major(server):
    ids = [list(PROMPT), [BOS, 50, 51]]
    answer = server.complete(prompt=ids, n=2, seed=4, max_tokens=8, return_token_ids=True)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [ids[0], ids[0], ids[1], ids[1]]
    for number, prompt in enumerate(ids):
        expected = sample_alone(
            serving.model(), prompt, params(max_new_tokens=8), [key_of(4, number, i) for i in (0, 1)]
        )
        assert ids_of(answer)[2 * number : 2 * number + 2] == [list(s.token_ids) for s in expected]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 3, "each prompt counts once"
    texts = server.complete(prompt=["ab", "c"], seed=4, max_tokens=3, return_token_ids=True)
    wanted = [list(models.render(tokenizer(), text, "raw")[1]) for text in ("ab", "c")]
    assert [c["prompt_token_ids"] for c in texts["choices"]] == wanted and wanted[0][0] == BOS
    empty = server.complete(prompt="", max_tokens=1, return_token_ids=True)
    assert empty["choices"][0]["prompt_token_ids"] == [BOS], "what the tokenizer makes of nothing"


def test_the_chat_template_is_applied_once(server):
    _, expected = models.render(tokenizer(), CHAT, "chat")
    assert expected[:2] == (BOS, serving.TURN) and expected.count(BOS) == 1
    asked = {"max_tokens": 15, "seed": 8, "return_token_ids": True, "logprobs": True}
    status, answer = server.ask("POST", "/v1/chat/completions", {"messages": CHAT, **asked})
    (choice,) = answer["choices"]
    assert status == 200 and choice["prompt_token_ids"] == list(expected)
    raw = server.complete(prompt=list(expected), max_tokens=15, seed=8, return_token_ids=True, logprobs=0)
    assert ids_of(raw) == [choice["token_ids"]]
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == raw["choices"][0]["logprobs"]["token_logprobs"]
    chunk = server.events("/v1/chat/completions", messages=CHAT, **asked)[0]["choices"][0]
    assert chunk["prompt_token_ids"] == list(expected)
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
    _, in_parts = server.ask("POST", "/v1/chat/completions", {"messages": parts, **asked})
    assert in_parts["choices"] == answer["choices"]


def test_stops(server):
    free = server.complete(prompt="ab", max_tokens=60, seed=21, ignore_eos=True, return_token_ids=True)["choices"][0]
    assert free["finish_reason"] == "length" and len(free["token_ids"]) == 60
    at = free["token_ids"][10]
    first = free["token_ids"].index(at)
    asked = {"prompt": "ab", "max_tokens": 60, "seed": 21, "ignore_eos": True, "return_token_ids": True}
    by_id = server.complete(**asked, stop_token_ids=[at])["choices"][0]
    assert (by_id["finish_reason"], by_id["token_ids"]) == ("stop", free["token_ids"][: first + 1])
    text = free["text"]
    word = next(text[i : i + 2] for i in range(5, 50) if "\ufffd" not in text[i : i + 2])
    for stop in (word, ["never there", word]):
        by_text = server.complete(**asked, stop=stop)["choices"][0]
        assert (by_text["finish_reason"], by_text["text"]) == ("stop", text[: text.index(word)])
    assert (
        server.complete(**asked, temperature=0)["choices"]
        == server.complete(**asked | {"seed": 1}, temperature=0)["choices"]
    )


# Streams


def test_a_stream_is_the_whole_in_parts(server):
    for seed in range(12):
        asked = {"prompt": "a", "max_tokens": 50, "seed": seed, "logprobs": 1, "n": 2, "return_token_ids": True}
        if seed % 2:
            asked["stop"] = ["e", "\ufffd\ufffd", "#$"]
        whole = server.complete(**asked)
        events = server.events(**asked, stream_options={"include_usage": True})
        assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
        for index, choice in enumerate(whole["choices"]):
            parts = [c for e in events for c in e["choices"] if c["index"] == index]
            assert "".join(p["text"] for p in parts) == choice["text"]
            assert [i for p in parts for i in p["token_ids"]] == choice["token_ids"]
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                joined = [x for p in parts if p["logprobs"] for x in p["logprobs"][name]]
                assert joined == choice["logprobs"][name], name
            assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
            assert parts[-1]["weight_versions"] == choice["weight_versions"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_text_held_back_is_only_what_may_change():
    numbers = random.Random(1)
    for trial in range(300):
        word = "grüße, 世界 🙂 stop ".encode()
        ids = tokenizer()(word.decode(), add_special_tokens=False).input_ids
        for _ in range(numbers.randrange(6)):  # broken characters too
            del ids[numbers.randrange(len(ids))]
        stops = [["stop"], ["世", "!!"], ["xyz"], []][trial % 4]
        whole = tokenizer().decode(ids, skip_special_tokens=True)
        cut = min([whole.find(s) for s in stops if s in whole], default=len(whole))
        stream, sent = TextStream(tokenizer(), stops), ""
        for token in ids[:-1]:
            grown = sent + stream.push([token])
            if any(s in tokenizer().decode(stream.ids) for s in stops):
                break
            assert whole.startswith(grown)
            sent = grown
        assert sent + stream.finish(whole[:cut]) == whole[:cut]
    stream = TextStream(tokenizer(), ["stop"])
    given = [stream.push([i]) for i in tokenizer()("a stép", add_special_tokens=False).input_ids]
    assert given == ["a", " ", "", "", "", "sté", "p"], "a beginning of a stop string waits for what follows"


# Refusals


def bad(field, **body):
    return pytest.param(field, {"prompt": "ab", **body}, id=f"{field}={json.dumps(body)[:40]}")


@pytest.mark.parametrize(
    ("field", "body"),
    [
        bad("temprature", temprature=1),
        bad("temperature", temperature="1"),
        bad("temperature", temperature=-0.1),
        bad("temperature", temperature=1e-300),
        bad("temperature", temperature=10**400),
        bad("temperature", temperature=True),
        bad("top_p", top_p=0),
        bad("top_p", top_p=1.01),
        bad("top_k", top_k=1.5),
        bad("min_p", min_p=2),
        bad("n", n=0),
        bad("n", n=65),
        bad("n", n=10**30),
        bad("max_tokens", max_tokens=0),
        bad("max_tokens", max_tokens=[]),
        bad("seed", seed="7"),
        bad("seed", seed=2**64),
        bad("seed_keys", seed_keys=[1, 2]),
        bad("seed_keys[0]", seed_keys=[-1]),
        bad("stop", stop=""),
        bad("stop[1]", stop=["a", 3]),
        bad("stop", stop=["a"] * 17),
        bad("stop_token_ids[0]", stop_token_ids=[serving.VOCABULARY]),
        bad("stop_token_ids[0]", stop_token_ids=[True]),
        bad("logprobs", logprobs=21),
        bad("logprobs", logprobs=True),
        bad("ignore_eos", ignore_eos=1),
        bad("stream", stream="yes"),
        bad("stream_options", stream_options={"include_usage": True}),
        bad("logit_bias", logit_bias={"5": 1}),
        bad("best_of", best_of=2),
        bad("echo", echo=True),
        bad("suffix", suffix="x"),
        bad("repetition_penalty", repetition_penalty=1.1),
        bad("response_format", response_format={"type": "json_object"}),
        bad("request_id", request_id="two words"),
        bad("user", user="\ud800"),
        bad("prompt", prompt=[]),
        bad("prompt", prompt=7),
        bad("prompt", prompt={"a": 1}),
        bad("prompt", prompt=[[]]),
        bad("prompt", prompt="half \ud83d"),
        bad("prompt[1]", prompt=["a", 5]),
        bad("prompt[1]", prompt=[5, "a"]),
        bad("prompt[1]", prompt=[5, -1]),
        bad("prompt[0]", prompt=[serving.VOCABULARY]),
        bad("prompt[1][0]", prompt=[[5], [True]]),
        bad("prompt", prompt=None),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(server, field, body):
    status, answer = server.ask("POST", "/v1/completions", body)
    error = answer["error"]
    assert status == 400 and error["param"] == field, answer
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages[0]", {"messages": ["hi"]}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "user", "content": 5}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}),
        ("logprobs", {"messages": CHAT, "logprobs": 1}),
        ("top_logprobs", {"messages": CHAT, "top_logprobs": 1}),
        ("tools", {"messages": CHAT, "tools": [{}]}),
        ("max_tokens", {"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2}),
        ("prompt", {"messages": CHAT, "prompt": "a"}),
    ],
)
def test_a_chat_that_cannot_be_honoured_is_named(server, field, body):
    status, answer = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == field, answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON: it is empty"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is a list, not a JSON object"),
        (b"null", "the body is null, not a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a number of JSON"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is not a number of JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature is Infinity"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8 text"),
        (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deeply"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt[0][0] is a list"),
        (b'{"logit_bias": ' + b"[" * 500 + b"]" * 500 + b"}", "logit_bias is not supported"),
    ],
)
def test_a_body_that_is_no_request(server, body, message):
    status, data, _ = server.exchange("POST", "/v1/completions", body)
    assert status == 400 and message in json.loads(data)["error"]["message"], data


def test_too_many_completions_are_refused_before_there_is_a_key_for_each(server, monkeypatch):
    monkeypatch.setattr("tinyllm.serve.protocol.seed_key", None)
    status, answer = server.ask("POST", "/v1/completions", {"prompt": ["a"] * 3000, "n": 4096})
    assert status == 400 and answer["error"]["message"].startswith("12288000 completions are asked for; one request")


def test_the_nearest_field_is_named(server):
    _, answer = server.ask("POST", "/v1/completions", {"prompt": "a", "max_token": 5})
    assert answer["error"]["message"] == "unknown field \"max_token\"; did you mean 'max_tokens'?"


def test_neutral_values_change_nothing(server):
    asked = {"prompt": "ab", "max_tokens": 9, "seed": 6, "return_token_ids": True}
    plain = server.complete(**asked)["choices"]
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    neutral |= {"best_of": 1, "echo": False, "suffix": None, "user": "me", "top_k": -1, "top_p": 1, "min_p": 0}
    neutral |= {"n": 1.0, "temperature": 1, "stop": None, "logprobs": None, "stream_options": None, "metadata": {}}
    assert server.complete(**asked, **neutral)["choices"] == plain


def test_sixteen_tokens_unless_said_and_what_fits_in_a_chat(server):
    whole = server.complete(prompt="ab", ignore_eos=True, return_token_ids=True)["choices"][0]
    assert len(whole["token_ids"]) == 16
    near = server.complete(prompt=[40] * (MAX_LENGTH - 3), ignore_eos=True, return_token_ids=True)["choices"][0]
    assert len(near["token_ids"]) == 3
    status, answer = server.ask("POST", "/v1/chat/completions", {"messages": CHAT, "ignore_eos": True})
    assert status == 200 and answer["usage"]["total_tokens"] == MAX_LENGTH


@pytest.mark.parametrize("body", [{"prompt": [40] * MAX_LENGTH}, {"prompt": [40] * 100, "max_tokens": 29}])
def test_what_cannot_fit_is_refused(server, body):
    status, answer = server.ask("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert f"together with the completion {MAX_LENGTH} fit" in answer["error"]["message"]


def test_a_large_body_is_refused(server):
    status, data, _ = server.exchange("POST", "/v1/completions", b"{" + b" " * 20_000)
    assert status == 413 and json.loads(data)["error"]["code"] == "body_too_large"


def test_a_full_queue_says_when_to_come_back(server):
    server.ask("POST", "/pause", None, serving.ADMIN)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, prompt="a", n=60, max_tokens=2)
            until(lambda: server.service.outstanding == 60)
            status, data, headers = server.exchange("POST", "/v1/completions", {"prompt": "a", "n": 5})
            assert status == 429 and json.loads(data)["error"]["code"] == "queue_full"
            assert int(headers["Retry-After"]) >= 1
            assert server.metric("tinyllm_waiting") == 60
            server.ask("POST", "/resume", None, serving.ADMIN)
            assert len(waiting.result()["choices"]) == 60
    finally:
        server.ask("POST", "/resume", None, serving.ADMIN)
    assert server.service.outstanding == 0


def test_unknown_routes_and_methods(server):
    assert server.ask("GET", "/v2")[0] == 404
    status, answer = server.ask("GET", "/v1/completions")
    assert status == 405 and answer["error"]["message"] == "GET /v1/completions: this route takes another method"


def test_a_request_is_answered_under_its_name(server):
    status, data, headers = server.exchange("POST", "/v1/completions", {"prompt": "a", "request_id": "r-1"})
    assert (status, json.loads(data)["id"], headers["X-Request-Id"]) == (200, "r-1", "r-1")
    _, data, headers = server.exchange("POST", "/v1/completions", {"prompt": "a"}, {"X-Request-Id": "r-2"})
    assert (json.loads(data)["id"], headers["X-Request-Id"]) == ("r-2", "r-2")
    _, _, headers = server.exchange("POST", "/v1/completions", {"prompt": 5}, {"X-Request-Id": "r-3"})
    assert headers["X-Request-Id"] == "r-3"


# Clients that hang up


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slots(server, stream, monkeypatch):
    import socket

    slowly(server, monkeypatch)
    dropped = server.metric("tinyllm_dropped_clients_total")
    body = json.dumps({"prompt": "a", "max_tokens": 120, "n": 4, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        until(lambda: server.service.worker.running == 4, "4 running")
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: server.service.worker.running == 0, "0 running", 2.0)
    assert server.service.outstanding == 0 and not server.service.handles and not server.service.worker._handles
    until(lambda: server.metric("tinyllm_dropped_clients_total") == dropped + 1)


# What it says of itself


def test_version_says_what_a_client_must_know(server):
    status, answer = server.ask("GET", "/version")
    assert status == 200 and answer["server"] == "tinyllm" and answer["dtype"] == "float32"
    assert answer["logprobs"] == "after temperature, top-k, top-p, min-p"
    assert answer["seeds"] and answer["revision_spans"] and answer["limits"]["max_length"] == MAX_LENGTH


def test_log_probabilities_are_after_temperature_and_top_k(server):
    answer = server.complete(prompt="ab", max_tokens=10, temperature=0.5, top_k=2, seed=1, logprobs=20)
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) <= 2 and sum(map(pow, [2.718281828459045] * len(top), top.values())) <= 1 + 1e-5
    _, by_id = server.ask(
        "POST", "/v1/completions", {"prompt": "ab", "logprobs": 0, "return_tokens_as_token_ids": True}
    )
    assert all(name.startswith("token_id:") for name in by_id["choices"][0]["logprobs"]["tokens"])


def test_metrics_count(server):
    before = server.metric('tinyllm_requests_total{route="/v1/completions",status="200"}')
    tokens = server.metric("tinyllm_completion_tokens_total")
    answer = server.complete(prompt="ab", n=2)
    assert server.metric('tinyllm_requests_total{route="/v1/completions",status="200"}') == before + 1
    assert server.metric("tinyllm_completion_tokens_total") == tokens + answer["usage"]["completion_tokens"]
    assert server.metric("tinyllm_running") == 0 and server.metric("tinyllm_time_to_first_token_seconds_count") > 0
    version, content = answer["choices"][0]["weight_versions"][0]["version"], server.service.worker.revision.hash
    assert server.metric(f'tinyllm_revision_info{{hash="{content}",version="{version}"}}') == 1
