"""Puts a scheduler on the runner that fits the policy: the one place that decides which runner samples."""

from __future__ import annotations

from tinyllm.engine.exact_runner import ExactRunner
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import Detokenizer, Scheduler
from tinyllm.records import Revision

START = Revision(0, "")
"""The weights that nobody has named yet."""


def make_scheduler(
    policy: Policy,
    tokenizer: Detokenizer,
    *,
    max_batch: int,
    revision: Revision = START,
    private_blocks: int = 0,
    shared_blocks: int = 0,
    keep_prompts: int = 64,
) -> Scheduler:
    """A scheduler of at most max_batch running samples of `policy`.

    private_blocks (of each slot) and shared_blocks (of prompts) are the cache to begin with; it grows to what the
    requests need. Up to keep_prompts prompts that nothing runs on stay cached, for requests that ask for the same.
    """
    runner = ExactRunner(policy, max_batch, private_blocks, shared_blocks)
    return Scheduler(runner, tokenizer, max_batch=max_batch, revision=revision, keep_prompts=keep_prompts)
