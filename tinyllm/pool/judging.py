"""What a verifier of the pool does: sampled completions in, a verified group out; in a process or a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm import rewards
from tinyllm.config.sections import RewardConfig
from tinyllm.pool.state import GroupRequest
from tinyllm.post.grpo import collect_groups
from tinyllm.records import Completion, Group, Logged, Prompt, SamplingParams, Verdict


@dataclass(frozen=True)
class Judged:
    """A verified group, and what reward functions logged for it."""

    group: Group
    logged: Logged
    samples: tuple[int, ...]
    """Those that were judged, in the order of the logged columns."""


@dataclass(frozen=True)
class _Given:
    """Completions that are there already, as a rollout client."""

    completions: Sequence[Completion]

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        return list(self.completions)


class Judge:
    """Verifies one group after another; `work` is that of cluster/pool/workers.py."""

    def __init__(self, verify: Any) -> None:
        self.verify = verify

    def work(self, new: Sequence[tuple[int, Any]], budget_s: float) -> list[tuple[int, Judged]]:
        """The groups of these (name, (work, completions)), each verified once."""
        return [(name, self._judge(work, completions)) for name, (work, completions) in new]

    def _judge(self, work: GroupRequest, completions: Sequence[Completion]) -> Judged:
        samples: list[int] = []
        logged = Logged()

        def verify(prompts: list[Prompt], done: list[Completion]) -> list[Verdict]:
            nonlocal logged
            samples.extend(c.sample for c in done)
            verdicts, logged = judge_once(self.verify, prompts, done, work.step)
            return verdicts

        (group,) = collect_groups(_Given(completions), [work.prompt], work.params, verify)
        return Judged(group, logged, tuple(samples))


def judge_once(verify: Any, prompts: Any, completions: Any, step: int) -> tuple[list[Verdict], Logged]:
    """One call of verify, with what its reward functions logged."""
    judged = verify(prompts, completions, step)
    return list(judged.verdicts), judged.logged


def build_judge(reward: RewardConfig, data: Any) -> Judge:
    """A verifier of its own; data: the task's, of which one row is enough (its columns are checked)."""
    return Judge(rewards.make_judge(reward, data))


def without_verdict(work: GroupRequest, completions: Sequence[Completion], why: str) -> Judged:
    """The group of completions that nobody could verify: every one is unscored, with the reason."""

    def verify(prompts: list[Prompt], done: list[Completion]) -> list[Verdict]:
        return [Verdict(None, why)] * len(done)

    (group,) = collect_groups(_Given(completions), [work.prompt], work.params, verify)
    return Judged(group, Logged(), ())
