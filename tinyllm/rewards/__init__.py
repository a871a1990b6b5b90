"""Rewards: verifier families, reward functions (module:function), and the judge that makes one verdict of their parts.

    base        what a verifier is, its self-test of a row, and how it is built from a spec
    functions   reward functions in the form TRL users have
    combine     the parts of a reward, and one verdict from the verdicts of the parts
    judge       RewardJudge: prompts and completions -> verdicts, what was logged
    pool, worker    worker processes with limits, for verifiers and functions without a bound of their own
    rowcheck    self-tests of all task rows at load
    probe       attacks on a verifier before training
    identity    hashes of what judges

Families: text/ (format, arithmetic, instructions), math/, json/, code/, gym/. No module of this package needs torch.
"""

from tinyllm.rewards.base import Verifier, build, verify
from tinyllm.rewards.identity import verifier_hash
from tinyllm.rewards.judge import RewardJudge, make_judge
from tinyllm.rewards.probe import probe_before_training
from tinyllm.rewards.rowcheck import self_test

__all__ = [
    "RewardJudge",
    "Verifier",
    "build",
    "make_judge",
    "probe_before_training",
    "self_test",
    "verifier_hash",
    "verify",
]
