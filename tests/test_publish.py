"""Weights to servers: each kind of transfer's conversation, and what happens to a server that did not take the update."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripted import Reply, logprobs, scripted
from tiny import llama, weights

from tinyllm.engine.policy import Policy
from tinyllm.engine.remote.canary import Canary
from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import RetryPolicy
from tinyllm.engine.remote.publish import Publisher, SGLangDisk, TinyllmDisk, VLLMLora
from tinyllm.errors import EngineError
from tinyllm.model import models
from tinyllm.post.update import model_scorer
from tinyllm.records import Prompt, Revision, SamplingParams

PROMPT = Prompt("p", (3, 5, 7), "p")
PARAMS = SamplingParams(max_new_tokens=4, n=2)
QUICK = RetryPolicy(attempts=2, deadline_s=10.0, pause_s=0.002)


class Number:
    """Weights that are one number, written to a file and read by the scripted servers."""

    def __init__(self):
        self.shift = 0.0
        self.model = SimpleNamespace(peft_config={}, save_pretrained=self._save)

    def _save(self, folder, save_embedding_layers):
        (Path(folder) / "shift").write_text(str(self.shift))

    def score(self, prompt, ids):
        return logprobs(prompt, ids, self.shift)


SAME = Canary(PROMPT.token_ids, Number().score, 1e-4)
"""Of servers whose one number is 0."""


class OnDisk(TinyllmDisk):
    def write(self, update, policy):
        update.path.mkdir()
        (update.path / "shift").write_text(str(policy.shift))


class SGLangOnDisk(SGLangDisk):
    write = OnDisk.write


def revision(step):
    return Revision(step, f"{step:012x}" + "0" * 20)


def setup(folder, *servers, retry_policy=QUICK):
    policy = Number()
    client = HTTPRolloutClient([s.url for s in servers], retry_policy=retry_policy)
    for server in servers:
        server.sampled.clear()
    canary = Canary(PROMPT.token_ids, policy.score, 1e-4)
    transfer = {"tinyllm": OnDisk, "sglang": SGLangOnDisk, "vllm": VLLMLora}[servers[0].kind]()
    return client, Publisher(client.servers, transfer, folder / "weights", canary, retry_policy), policy


def publish(publisher, policy, step):
    policy.shift = step / 10
    publisher.publish(revision(step), policy)


def kept(publisher):
    return sorted(path.name.partition("-")[0] for path in publisher.folder.iterdir())


@pytest.mark.parametrize("kind", ["tinyllm", "sglang", "vllm"])
def test_an_update_reaches_the_server_and_rollouts_carry_its_revision(tmp_path, kind):
    """K1, K6: after each update the canary holds, and completions say the revision that the server confirmed."""
    with scripted(kind) as server:
        client, publisher, policy = setup(tmp_path, server)
        for step in (5, 6, 7):  # a run resumed at 5, with a server that still holds what it was started with
            publish(publisher, policy, step)
            assert client.servers.live
            done = client.sample([PROMPT], PARAMS)
            assert [c.revision for c in done] == [revision(step)] * 2
            assert list(done[0].logprobs) == pytest.approx(policy.score(PROMPT.token_ids, done[0].token_ids))


def test_the_conversation_with_tinyllm(tmp_path):
    with scripted() as server:
        _, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 5)
        path = str((tmp_path / "weights" / "v5-000000000005").resolve())
        assert server.admin == [("/update_weights_from_disk", {"model_path": path, "weight_version": "5:000000000005"})]


def test_the_conversation_with_sglang(tmp_path):
    with scripted("sglang") as server:
        _, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 5)
        assert [route for route, _ in server.admin] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ]
        assert server.admin[1][1]["flush_cache"] is True, "cached prompts are of the old weights"
        server.says["/update_weights_from_disk"] = Reply(500, {"success": False})
        with pytest.raises(EngineError, match="HTTP 500"):
            publish(publisher, policy, 6)
        assert server.admin[-1][0] == "/continue_generation", "it goes on after an update that failed"


def test_the_conversation_with_vllm_names_an_adapter_for_each_revision(tmp_path):
    with scripted("vllm") as server:
        client, publisher, policy = setup(tmp_path, server)
        for step in range(1, 7):
            publish(publisher, policy, step)
            client.sample([PROMPT], PARAMS)
            assert server.sampled[-1]["model"] == f"m-v{step}-{step:012x}"
            assert len(server.adapters) <= 3, "the newest three stay loaded"
        assert sorted(server.adapters) == [f"m-v{step}-{step:012x}" for step in (4, 5, 6)]
        assert kept(publisher) == ["v3", "v4", "v5", "v6"], "an unloaded adapter's files go one update later"
        loads = [body for route, body in server.admin if route == "/v1/load_lora_adapter"]
        assert all(body["load_inplace"] is False for body in loads) and len(loads) == 6


def test_an_adapter_that_is_loaded_already_is_the_same_one(tmp_path):
    """A load whose answer was lost, or a run that was resumed: the name has the hash of the weights."""
    with scripted("vllm") as server:
        _, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 5)
        client, again, policy = setup(tmp_path, server)
        publish(again, policy, 5)
        assert client.sample([PROMPT], PARAMS)[0].revision == revision(5)


# One server of several misses the update


@pytest.mark.parametrize("fault", ["500", "no answer", "ok without changing", "small change lost", "another label"])
def test_a_server_that_did_not_take_the_update_gets_no_requests(tmp_path, fault, caplog):
    """K7: no rollout carries a revision that its server did not confirm."""
    slow = RetryPolicy(attempts=1, deadline_s=1.0)
    with scripted() as good, scripted() as bad:
        client, publisher, policy = setup(tmp_path, good, bad, retry_policy=slow if fault == "no answer" else QUICK)
        publish(publisher, policy, 1)
        if fault == "500":
            bad.says["/update_weights_from_disk"] = Reply(500, {"error": "out of memory"})
        elif fault == "no answer":
            bad.says["/update_weights_from_disk"] = Reply(200, {"success": True}, delay_s=2.0)
        elif fault == "another label":
            bad.says["/weight_info"] = Reply(body={"weight_version": "1:000000000001"})
        else:
            bad.takes = False
        policy.shift = 0.1 + (5e-5 if fault == "small change lost" else 0.1)
        publisher.publish(revision(2), policy)
        assert [s.url for s in client.servers.live] == [good.url]
        assert f"{bad.url} gets no more requests: it did not take revision 2:000000000002" in caplog.text
        bad.sampled.clear()
        done = client.sample([PROMPT], SamplingParams(max_new_tokens=4, n=8))
        assert {c.revision for c in done} == {revision(2)} and not bad.sampled
        bad.says.clear()
        bad.takes = True
        publish(publisher, policy, 3)
        assert len(client.servers.live) == 2, "one that takes a later update is back"
        assert "gets requests again" in caplog.text


def test_a_canary_is_tried_again(tmp_path):
    """A server that is busy for a moment is not quarantined."""
    with scripted() as server:
        client, publisher, policy = setup(tmp_path, server)
        server.script = lambda number, *_: Reply(503, {"error": "busy"}) if number == 1 else None
        publish(publisher, policy, 1)
        assert len(server.sampled) == 2 and client.servers.live


def test_when_no_server_took_it_the_error_names_each_and_why(tmp_path):
    with scripted() as a, scripted() as b:
        _, publisher, policy = setup(tmp_path, a, b)
        a.says["/update_weights_from_disk"] = Reply(400, {"error": "shape of w"})
        b.takes = False
        policy.shift = 0.5
        with pytest.raises(EngineError) as caught:
            publisher.publish(revision(1), policy)
    text = str(caught.value)
    assert f"{a.url}: it did not take revision 1:000000000001 (HTTP 400" in text and "shape of w" in text
    assert f"{b.url}: it did not take" in text and "canary" in text and "\n" not in text


def test_a_server_of_another_revision_is_noticed_at_its_answers(tmp_path):
    """Restarted between updates: its answers name weights that were not published."""
    with scripted() as server:
        client, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 5)
        server.version, server.shift = "default", 0.0
        done = client.sample([PROMPT], PARAMS)
        assert [c.finish_reason for c in done] == ["error", "error"]
        assert "unconfirmed revision: sampled by 'default', published was '5:000000000005'" in str(done[0].error)


def test_an_update_during_a_completion_fails_it(tmp_path):
    with scripted() as server:
        client, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 5)
        spans = [{"version": "5:000000000005", "start": 0, "end": 2}, {"version": "6:x", "start": 2, "end": 4}]
        server.script = lambda *_: lambda a: a["choices"][0].update(weight_versions=spans)
        done = client.sample([PROMPT], SamplingParams(max_new_tokens=4))
        assert str(done[0].error).startswith("unconfirmed revision: sampled by '6:x', published was '5:000000000005'")


def test_admin_routes_that_are_closed_name_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYLLM_ADMIN_KEY", "open-sesame")
    monkeypatch.setenv("TINYLLM_API_KEY", "sesame")
    with scripted() as server:
        _, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 1)
        assert server.keys == {"Bearer sesame", "Bearer open-sesame"}
        server.says["/update_weights_from_disk"] = Reply(403, {"error": "open-sesame?"})
        with pytest.raises(EngineError, match="start the server with --admin-key and set TINYLLM_ADMIN_KEY") as caught:
            publish(publisher, policy, 2)
    assert "sesame" not in str(caught.value)


# Files


def test_weights_stay_until_they_are_loaded_and_one_update_longer(tmp_path):
    """K8: the load takes longer than the client waits, and the trainer goes on."""
    loaded = []

    def slow(path):
        time.sleep(0.5)
        loaded.append(float((Path(path) / "shift").read_text()))
        return loaded[-1]

    with scripted() as fast, scripted() as late:
        client, publisher, policy = setup(tmp_path, fast, late, retry_policy=RetryPolicy(1, 5.0))
        publish(publisher, policy, 1)
        late.weights = slow
        publisher.retry_policy = RetryPolicy(1, 0.3)
        publish(publisher, policy, 2)
        assert [s.url for s in client.servers.live] == [fast.url]
        assert kept(publisher) == ["v1", "v2"], "the late server still reads the second"
        deadline = time.monotonic() + 10
        while not loaded and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loaded == [0.2]
        late.weights = fast.weights
        publisher.retry_policy = QUICK
        publish(publisher, policy, 3)
        assert kept(publisher) == ["v2", "v3"] and len(client.servers.live) == 2


def test_what_a_killed_run_left_goes_once_servers_hold_newer_weights(tmp_path):
    (tmp_path / "weights" / "v7-abc").mkdir(parents=True)
    (tmp_path / "weights" / ".v8-def.tmp").mkdir()
    (tmp_path / "weights" / "mine").mkdir()
    with scripted() as server:
        _, publisher, policy = setup(tmp_path, server)
        publish(publisher, policy, 5)
        assert kept(publisher) == ["mine", "v5", "v7"]
        publish(publisher, policy, 6)
        assert kept(publisher) == ["mine", "v5", "v6"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_model_has_the_policys_weights(tmp_path, tied):
    """K2, K4: tied weights stay tied; adapters are merged once, and the policy keeps its own bits."""
    model = llama(tie_word_embeddings=tied)
    adapted = models.add_lora(llama(tie_word_embeddings=tied), 2, 8.0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    before = {name: p.clone() for name, p in adapted.state_dict().items()}
    with scripted() as server:
        server.weights = lambda path: 0.0
        for step, policy in enumerate((model, adapted), 1):
            client = HTTPRolloutClient([server.url])
            publisher = Publisher(client.servers, TinyllmDisk(), tmp_path / str(step), SAME, QUICK)
            publisher.publish(revision(step), Policy(policy))
            (folder,) = (tmp_path / str(step)).iterdir()
            assert ("lm_head.weight" in weights(folder)) is not tied
            loaded = Policy(models.load_model(str(folder), "float32", "cpu"))
            rows = [((3, 5, 7), (9, 4, 1))]
            ours, theirs = (model_scorer(p, 1.0, 64)(rows)[0] for p in (Policy(policy), loaded))
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(torch.equal(before[name], p) for name, p in adapted.state_dict().items())


def test_the_content_hash_must_be_the_trainers_where_it_is_offered(tmp_path):
    with scripted() as server:
        server.weights = lambda path: 0.0
        client = HTTPRolloutClient([server.url])
        publisher = Publisher(client.servers, TinyllmDisk(), tmp_path, SAME, QUICK)
        server.says["/weight_info"] = Reply(body={"weight_version": str(revision(1)), "weight_hash": "abc"})
        publisher.publish(revision(1), Policy(llama()), "abc")
        with pytest.raises(EngineError, match="content hash abc, the trainer's is def"):
            publisher.publish(revision(1), Policy(llama()), "def")


def test_adapters_are_written_alone_and_whole(tmp_path):
    adapted = models.add_lora(llama(), 2, 8.0)
    with scripted("vllm") as server:
        server.weights = lambda path: 0.0
        client = HTTPRolloutClient([server.url])
        publisher = Publisher(client.servers, VLLMLora(), tmp_path, SAME, QUICK)
        publisher.publish(revision(1), Policy(adapted))
        (folder,) = tmp_path.iterdir()
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in folder.iterdir()}
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
        with pytest.raises(EngineError, match="set lora.rank"):
            publisher.publish(revision(2), Policy(llama()))
