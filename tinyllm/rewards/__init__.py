"""Rewards: verifiers (our own families), reward functions (module:function), and how they become one verdict."""

from tinyllm.rewards.base import Verifier, build, verify
from tinyllm.rewards.combine import Verify, make_judge, make_verify, self_test, verdict_metrics
from tinyllm.rewards.identity import importable_name, verifier_hash
from tinyllm.rewards.probe import probe_before_training

__all__ = [
    "Verifier",
    "Verify",
    "build",
    "make_judge",
    "make_verify",
    "importable_name",
    "verifier_hash",
    "probe_before_training",
    "self_test",
    "verdict_metrics",
    "verify",
]
