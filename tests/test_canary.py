"""The canary: what proves that a server runs the trainer's weights, and what it catches."""

from __future__ import annotations

import pytest
from scripted import STOP, Reply, logprobs, scripted

from tinyllm.engine.remote.canary import TOLERANCES, Canary, CanaryOutput
from tinyllm.engine.remote.client import HTTPRolloutClient
from tinyllm.engine.remote.http import InvalidResponse, run

PROMPT = (3, 5, 7)
TOLERANCE = TOLERANCES["float32"]


class Trainer:
    """Weights that are one number, as the scripted servers' are."""

    def __init__(self, shift=0.0):
        self.shift = shift

    def score(self, prompt, ids):
        return logprobs(prompt, ids, self.shift)


def sampled(server, trainer, canary=None):
    """(canary, server as the client sees it, its answer)."""
    known = HTTPRolloutClient([server.url]).servers.all[0]
    canary = canary or Canary(PROMPT, trainer.score, TOLERANCE)
    return canary, known, run(lambda http: canary.sample(http, known, 10.0))


@pytest.mark.parametrize("kind", ["tinyllm", "vllm", "sglang"])
def test_the_trainers_weights_pass_and_others_do_not(kind):
    with scripted(kind) as server:
        canary, known, output = sampled(server, Trainer())
        assert len(output.token_ids) == 16 and canary.judge(known, output) == 0.0
        (body,) = server.sampled[-1:]
        sampling = body.get("sampling_params", body)
        assert sampling["temperature"] == 0.0 and sampling["stop_token_ids"] == [] and sampling["ignore_eos"] is True
    for shift, passes in ((TOLERANCE / 2, True), (2 * TOLERANCE, False)):
        judge = Canary(PROMPT, Trainer(shift).score, TOLERANCE)
        if passes:
            assert judge.judge(known, output) == pytest.approx(shift)
        else:
            with pytest.raises(
                InvalidResponse, match="differ from the trainer's by up to 0.0002, more than the 0.0001"
            ):
                judge.judge(known, output)


def test_an_update_that_was_lost_is_caught_though_it_is_smaller_than_the_tolerance():
    trainer = Trainer()
    with scripted() as server:
        canary, known, before = sampled(server, trainer)
        canary.judge(known, before)
        trainer.shift = TOLERANCE / 2  # the trainer moved, the server says it did
        _, _, after = sampled(server, trainer, canary)
        with pytest.raises(InvalidResponse, match="still answers as before the update, to the last bit"):
            canary.judge(known, after)
        server.shift = TOLERANCE / 2
        _, _, taken = sampled(server, trainer, canary)
        assert canary.judge(known, taken) == pytest.approx(0.0, abs=1e-12)


def test_weights_that_did_not_move_need_no_other_answer():
    """Learning rate 0, or the same revision published again."""
    with scripted() as server:
        canary, known, output = sampled(server, Trainer())
        assert canary.judge(known, output) == canary.judge(known, output) == 0.0


def test_one_wrong_token_is_enough():
    output = CanaryOutput(tuple(range(1, 17)), tuple(logprobs(PROMPT, range(1, 17), 0.0)))
    off = CanaryOutput(output.token_ids, (*output.logprobs[:-1], output.logprobs[-1] - 0.01))
    with scripted() as server:
        known = HTTPRolloutClient([server.url]).servers.all[0]
    with pytest.raises(InvalidResponse, match="by up to 0.01,"):
        Canary(PROMPT, Trainer().score, TOLERANCE).judge(known, off)


def test_a_trainer_without_numbers_proves_nothing():
    with scripted() as server:
        known = HTTPRolloutClient([server.url]).servers.all[0]
    output = CanaryOutput((1, 2, 3), tuple(logprobs(PROMPT, (1, 2, 3), 0.0)))
    with pytest.raises(InvalidResponse, match="by up to nan"):
        Canary(PROMPT, lambda prompt, ids: (output.logprobs[0], float("nan"), output.logprobs[2]), TOLERANCE).judge(
            known, output
        )


def test_a_bad_answer_is_no_proof():
    def nan(answer):
        answer["choices"][0]["logprobs"]["token_logprobs"][3] = float("nan")

    with scripted() as server:
        canary, known, _ = sampled(server, Trainer())
        for script, kind in ((nan, "bad log-probability"), (Reply(raw=b"<html>"), "not JSON")):
            server.script = lambda *_, script=script: script
            with pytest.raises(Exception, match=kind):
                run(lambda http: canary.sample(http, known, 10.0))


def test_a_canary_of_another_revision_is_no_proof():
    with scripted(version="4:old") as server:
        canary, known, _ = sampled(server, Trainer())
        known.label = "5:new"
        with pytest.raises(InvalidResponse, match="sampled by '4:old', published was '5:new'"):
            run(lambda http: canary.sample(http, known, 10.0))
    assert STOP == 0
