"""Weights of a running server: pause, update from disk, resume; spans say who sampled what; a failed update changes no bit."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import serving
import torch
from safetensors.torch import load_file, save_file
from serving import ADMIN, BOS, END, key_of, sample_alone
from test_serve import slowly, until

from tinyllm.model.models import content_hash
from tinyllm.records import SamplingParams

PROMPT = [BOS, *range(40, 110)]
"""Longer than a block of the cache, so that cached prompts are used."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("weights")
    return [serving.save(home / str(seed), seed) for seed in (0, 1)]


@pytest.fixture
def server():
    with serving.serving(admin_key="admin-key") as served:
        yield served


def update(server, path, **more):
    return server.ask("POST", "/update_weights_from_disk", {"model_path": str(path), **more}, ADMIN)


def alone(seed, **changes):
    params = SamplingParams(**{"max_new_tokens": 20, "stop_token_ids": (END,), **changes})
    (sampled,) = sample_alone(serving.model(seed), PROMPT, params, [key_of(3)])
    return list(sampled.token_ids)


def ask(server, **more):
    asked = {"prompt": PROMPT, "seed": 3, "max_tokens": 20, "return_token_ids": True, **more}
    return server.complete(**asked)["choices"][0]


def test_after_an_update_tokens_are_those_of_the_new_weights(server, folders):
    before = server.service.worker.revision.hash
    assert before == content_hash(serving.model(0))
    assert server.ask("GET", "/weight_info")[1] == {
        "weight_version": f"0:{before[:12]}",
        "weight_hash": before,
        "paused": False,
    }
    assert ask(server)["token_ids"] == alone(0)
    status, answer = update(server, folders[1], weight_version="7")
    new = content_hash(serving.model(1))
    assert status == 200 and answer["success"] is True
    assert (answer["weight_version"], answer["weight_hash"]) == ("7", new)
    after = ask(server)  # the prompt was cached under the old weights
    assert after["token_ids"] == alone(1) != alone(0)
    assert after["weight_versions"] == [{"version": "7", "start": 0, "end": len(after["token_ids"])}]
    assert server.service.worker.revision.step == 7
    assert server.metric(f'tinyllm_revision_info{{hash="{new}",version="7"}}') == 1
    _, answer = update(server, folders[0] / "model.safetensors")
    assert answer["weight_version"] == f"8:{before[:12]}", "without a label the step counts on"
    _, answer = update(server, folders[0], weight_version="9:abc")
    assert answer["weight_version"] == "9:abc" and server.service.worker.revision.step == 9
    _, answer = update(server, folders[0], weight_version="policy-v3")
    assert answer["weight_version"] == "policy-v3" and server.service.worker.revision.step == 9
    assert ask(server)["token_ids"] == alone(0)


def test_what_runs_during_an_update_keeps_its_tokens_and_says_so(server, folders, monkeypatch):
    slowly(server, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server, max_tokens=50, ignore_eos=True)
        until(lambda: server.service.worker.running == 1)
        assert server.ask("POST", "/pause?mode=keep", None, ADMIN) == (200, {"status": "paused", "is_paused": True})
        assert server.ask("GET", "/is_paused", None, ADMIN) == (200, {"is_paused": True})
        steps = server.service.worker.steps
        assert update(server, folders[1], weight_version="1")[0] == 200
        assert server.ask("GET", "/weight_info")[1]["paused"] is True
        assert server.service.worker.steps == steps and not running.done(), "nothing is sampled while paused"
        server.ask("POST", "/resume", None, ADMIN)
        choice = running.result()
    first, second = choice["weight_versions"]
    assert first["start"] == 0 and first["end"] == second["start"] and second["end"] == 50
    assert first["version"].startswith("0:") and second["version"] == "1"
    assert choice["token_ids"][: first["end"]] == alone(0, max_new_tokens=50, stop_token_ids=())[: first["end"]]


def test_a_pause_that_waits_lets_what_runs_end(server, monkeypatch):
    slowly(server, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, server, max_tokens=30, ignore_eos=True)
        until(lambda: server.service.worker.running == 1)
        assert server.ask("POST", "/pause?mode=wait", None, ADMIN)[0] == 200
        assert server.service.outstanding == 0 and len(running.result()["token_ids"]) == 30
        later = pool.submit(ask, server)
        until(lambda: server.service.outstanding == 1)
        assert not later.done() and server.metric("tinyllm_waiting") == 1
        server.ask("POST", "/resume", None, ADMIN)
        assert later.result()["token_ids"] == alone(0)
    status, answer = server.ask("POST", "/pause?mode=abort", None, ADMIN)
    assert status == 400 and "'keep' or 'wait'" in answer["error"]["message"]


def damaged(folder, home, how):
    """A copy of a model folder with one fault."""
    path = home / "update"
    shutil.copytree(folder, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "half":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "no header":
        file.write_bytes(b"\xff" * 100)
    elif how == "gone":
        file.unlink()
    elif how == "lora":
        file.unlink()
        (path / "config.json").unlink()
        (path / "adapter_config.json").write_text("{}")
        save_file(
            {"base_model.model.model.layers.0.lora_A.weight": torch.zeros(2, 2)}, path / "adapter_model.safetensors"
        )
    elif how == "index":
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "part-2.safetensors"}}))
    else:
        if how == "nan":
            tensors[name][3, 3] = float("nan")
        elif how == "shape":
            tensors[name] = tensors[name].T.contiguous()
        elif how == "missing":
            del tensors[name]
        elif how == "unknown":
            tensors["model.layers.7.up.weight"] = tensors[name].clone()
        elif how == "whole numbers":
            tensors[name] = tensors[name].to(torch.int32)
        save_file(tensors, file)
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half", "is not whole safetensors"),
        ("no header", "is not whole safetensors"),
        ("gone", "has no weights"),
        ("lora", "holds a LoRA adapter; merge it into its base"),
        ("index", "part-2.safetensors, which model.safetensors.index.json names, is missing"),
        ("nan", "model.layers.1.mlp.up_proj.weight has values that are not finite"),
        ("shape", "model.layers.1.mlp.up_proj.weight is [32, 48], the model's is [48, 32]"),
        ("missing", "lacks the weight model.layers.1.mlp.up_proj.weight"),
        ("unknown", "the model has no weight model.layers.7.up.weight"),
        ("whole numbers", "is torch.int32, the model's is torch.float32"),
    ],
)
def test_a_failed_update_says_why_and_changes_no_bit(shared, folders, tmp_path, how, message):
    before = shared.ask("GET", "/weight_info")[1]
    status, answer = update(shared, damaged(folders[1], tmp_path, how), weight_version="5")
    assert status == 400 and message in answer["error"]["message"], answer
    assert answer["error"]["param"] == "model_path"
    assert shared.ask("GET", "/weight_info")[1] == before
    assert content_hash(shared.service.policy.model) == before["weight_hash"]
    assert ask(shared)["token_ids"] == alone(0)


@pytest.fixture(scope="module")
def shared():
    with serving.serving(admin_key="admin-key") as served:
        yield served


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model_path"),
        ({"model_path": "/nowhere"}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"model_path": 5}, "model_path"),
        ({"model_path": "x", "weight_version": ""}, "weight_version"),
        ({"model_path": "x", "weight_version": 5}, "weight_version"),
        ({"model_path": "x", "flush_cache": False}, "flush_cache"),
        ({"model_path": "x", "weight_versoin": "1"}, "weight_versoin"),
    ],
)
def test_an_update_that_cannot_be_read(shared, body, param):
    status, answer = shared.ask("POST", "/update_weights_from_disk", body, ADMIN)
    assert status == 400 and answer["error"]["param"] == param, answer


def test_tied_weights_stay_tied(tmp_path):
    old, new = (serving.model(seed, tie_word_embeddings=True) for seed in (0, 1))
    new.save_pretrained(tmp_path / "new")
    assert "lm_head.weight" not in load_file(tmp_path / "new" / "model.safetensors")
    with serving.serving(old, admin_key="admin-key") as server:
        status, answer = update(server, tmp_path / "new")
        assert status == 200 and answer["weight_hash"] == content_hash(new)
        assert old.lm_head.weight.data_ptr() == old.model.embed_tokens.weight.data_ptr()
        tensors = load_file(tmp_path / "new" / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        save_file(tensors, tmp_path / "new" / "model.safetensors")
        status, again = update(server, tmp_path / "new")
        assert status == 400 and "are one tensor in this model, and differ here" in again["error"]["message"]
        assert server.ask("GET", "/weight_info")[1]["weight_hash"] == answer["weight_hash"]


def test_weights_in_several_files_and_another_float_type(server, tmp_path):
    made = serving.model(1)
    made.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    status, answer = update(server, tmp_path)
    assert status == 200 and answer["weight_hash"] == content_hash(made.float())


def test_a_client_that_hangs_up_while_paused_leaves_the_queue(server):
    import socket

    server.ask("POST", "/pause", None, ADMIN)
    body = b'{"prompt": "a"}'
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        until(lambda: server.service.outstanding == 1)
        with socket.create_connection(("127.0.0.1", server.port)) as other:
            other.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: server.metric("tinyllm_waiting") == 2)
        until(lambda: server.metric("tinyllm_waiting") == 1, "the other still waits")
    until(lambda: server.service.outstanding == server.metric("tinyllm_waiting") == 0)
