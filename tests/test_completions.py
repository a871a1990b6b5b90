"""What makes a completion fit for training, whoever sampled it; and where its text ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinyllm.engine.text import cut_at_stop
from tinyllm.records import Completion, Prompt, SamplingParams, fault_of, is_logprob

PARAMS = SamplingParams(max_new_tokens=3, stop_token_ids=(0,))


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "label"),
    [
        ((5, 0), (-1.0, -2.0), "stop", None),
        ((5, 6, 7), (-1.0, 0.0, 1e-4), "length", None),
        (np.array([5, 0]), np.array([-1.0, -2.0]), "stop", None),
        ((5,), (-1.0,), "abort", "cut short"),
        ((), (), "length", "empty"),
        ((5, 6), (-1.0,), "length", "ids and log-probabilities differ"),
        ((5, True), (-1.0, -1.0), "length", "bad token id"),
        ((5, 44), (-1.0, -1.0), "length", "bad token id"),
        ((5,), (None,), "length", "bad log-probability"),
        ((5,), (math.nan,), "length", "bad log-probability"),
        ((5,), (0.5,), "length", "bad log-probability"),
        ((5, 6, 7, 8), (-1.0,) * 4, "length", "too long"),
        ((5, 6), (-1.0,) * 2, "stop", "stop token dropped"),
    ],
)
def test_a_fault_has_a_label_to_count_by(ids, logprobs, reason, label):
    fault = fault_of(ids, logprobs, reason, PARAMS, vocab_size=44)
    assert (fault and fault[0]) == label


def test_tokens_of_the_environment_have_no_log_probability_and_do_not_count():
    ids, logprobs, sampled = (5, 6, 7, 8, 0), (-1.0, None, None, -1.0, -1.0), (True, False, False, True, True)
    assert fault_of(ids, logprobs, "stop", PARAMS, sampled=sampled) is None
    for wrong in ((-1.0, -2.0, None, -1.0, -1.0), (None, None, None, -1.0, -1.0)):
        label, _ = fault_of(ids, wrong, "stop", PARAMS, sampled=sampled)
        assert label == "bad log-probability"


def test_a_log_probability_is_a_finite_number_not_above_0():
    assert all(is_logprob(x) for x in (-1.5, 0, np.float32(-2), 1e-3))
    assert not any(is_logprob(x) for x in (None, "-1", True, math.inf, -math.inf, -(10**400), 0.01))


def test_text_ends_before_the_first_stop_string():
    assert cut_at_stop("a; b. c", (".", ";")) == "a"
    assert cut_at_stop("a b", (".", ";")) is None and cut_at_stop("", ()) is None


def test_a_failed_completion_has_a_reason_and_nothing_to_train_on():
    failed = Completion.failed(Prompt("p", (1,), "", draw=2), 3, 7, "it died")
    assert (failed.prompt_id, failed.draw, failed.sample, failed.seed_key) == ("p", 2, 3, 7)
    assert (failed.finish_reason, failed.error, failed.token_ids, failed.sampled) == ("error", "it died", (), ())
