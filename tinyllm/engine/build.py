"""Puts a scheduler on the runner that fits the policy: the one place that decides which runner samples."""

from __future__ import annotations

from tinyllm.engine.exact_runner import ExactRunner
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import Detokenizer, Scheduler
from tinyllm.records import Revision

START = Revision(0, "")
"""The revision of weights before the first `publish`."""


def make_scheduler(policy: Policy, tokenizer: Detokenizer, *, max_batch: int, revision: Revision = START) -> Scheduler:
    """A scheduler of at most max_batch running samples of `policy`; its cache grows to what the requests need."""
    return Scheduler(ExactRunner(policy, max_batch), tokenizer, max_batch=max_batch, revision=revision)
