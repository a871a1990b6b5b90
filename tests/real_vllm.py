"""The rollout client against a real vLLM on this machine's processor; not collected by itself: `make test-vllm`.

It serves the bundled model with LoRA adapters. What it is asked: the whole contract of a rollout client, three
revisions and more of an adapter in five training steps, and its own death.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from tinyllm.callbacks import Callback
from tinyllm.config.io import make_config
from tinyllm.config.sections import GRPOConfig
from tinyllm.engine.head import pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.errors import EngineError
from tinyllm.model import models
from tinyllm.model.bundled import bundled_model
from tinyllm.post import run as runs
from tinyllm.records import Prompt, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from vllm_server import LORA, VLLMServer, processor_dtype, serve

MODEL = "smollm2-135m-instruct"
NEAR = 1e-3 if processor_dtype() == "float32" else 0.1
"""Nats: how far two engines of this precision may be apart on one token."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return bundled_model()


@pytest.fixture(scope="module")
def vllm(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with serve(folder, log, ("--enforce-eager", *LORA)) as server:
        yield server


@pytest.fixture(scope="module")
def policy(folder):
    return Policy(models.load_model(str(folder), processor_dtype(), "cpu").requires_grad_(False))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return models.load_tokenizer(str(folder))


def make_prompts(tokenizer, count):
    made = []
    for i in range(count):
        text, ids = models.render(tokenizer, [{"role": "user", "content": f"What is {i + 3} + {2 * i + 1}?"}], "chat")
        made.append(Prompt(f"p{i}", tuple(ids), text))
    return made


def test_it_keeps_the_contract_of_a_rollout_client(vllm, policy, tokenizer):
    client = HTTPRolloutClient([vllm.url], tokenizer=tokenizer, vocab_size=policy.vocab_size)
    (facts,) = client.capabilities()
    assert (facts["server"], facts["logprobs"], facts["seeds"]) == ("vllm", "after temperature", False)
    prompts = make_prompts(tokenizer, 8)
    stop = models.stop_token_ids(tokenizer, policy.causal)
    params = SamplingParams(max_new_tokens=24, n=4, temperature=0.8, stop_token_ids=stop)
    done = client.sample(prompts, params)
    assert [(c.prompt_id, c.sample) for c in done] == [(p.id, s) for p in prompts for s in range(4)]
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        assert (c.token_ids[-1] in stop) == (c.finish_reason == "stop"), "the stop token is kept"
        assert len(c.token_ids) == 24 or c.finish_reason == "stop"
    logp, _ = score(
        policy, pack_targets([(prompts[i // 4].token_ids, c.token_ids) for i, c in enumerate(done)], "cpu"), 0.8
    )
    sampled = torch.tensor([x for c in done for x in c.logprobs])
    assert len({c.token_ids for c in done}) > 16, "the samples of a prompt differ"
    assert (logp.detach() - sampled).abs().max() < NEAR


class Died(Callback):
    """Kills the engine after a step: the process behind the server, as an error inside it would."""

    def __init__(self, step: int, server: VLLMServer) -> None:
        self.step, self.server = step, server

    def on_step(self, metrics, timing, groups):
        if metrics["step"] == self.step:
            os.killpg(self.server.process.pid, signal.SIGKILL)


def options(folder, vllm, out, steps):
    return make_config(
        GRPOConfig(),
        model=str(folder),
        lora={"rank": 8, "alpha": 16.0},
        engine={"urls": (f"{vllm.url}#{folder}",), "deadline_s": 300.0},
        optimizer={"lr": 1e-4},
        sampling={"group_size": 4, "max_new_tokens": 16},
        train={"steps": steps, "prompts_per_step": 8},
        eval={"every": 0, "prompts": 8},
        run={"dir": str(out), "checkpoint_every": 2},
    )


def test_five_steps_with_an_adapter_per_revision_and_the_death_of_the_engine(vllm, folder, tmp_path):
    done = runs.train(options(folder, vllm, tmp_path / "whole", 5), reward=tiny.many_digits)
    rows = tiny.metrics(done.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["sampler_gap"] < NEAR and row["sampler_kl"] < NEAR for row in rows)
    hashes = set()
    for row in rows:
        revisions = {r.completion.revision for g in tiny.groups_of(done, row["step"]) for r in g.rollouts}
        assert {r.step for r in revisions} == {row["step"] - 1}, "every completion is of the adapter published last"
        hashes |= {r.hash for r in revisions}
    assert len(hashes) == 5, "each step changed the adapter"
    status, cards = vllm.json("GET", "/v1/models")
    adapters = [card["id"] for card in cards["data"] if card["id"] != str(folder)]
    assert status == 200 and 1 <= len(adapters) <= 3, f"older adapters are unloaded: {adapters}"

    with pytest.raises(EngineError, match="no server is left to sample on"):
        runs.train(options(folder, vllm, tmp_path / "dies", 5), reward=tiny.many_digits, callbacks=[Died(2, vllm)])
    assert [row["step"] for row in tiny.metrics(tmp_path / "dies")] == [1, 2]
    vllm.process.wait(30)
    alive = ["pgrep", "--runstates", "R,S,D,T", "-g", str(vllm.process.pid)]  # not those that nobody has waited for
    left = subprocess.run(alive, capture_output=True, text=True).stdout.split()
    assert not left, "no process is left of it"
