"""Verifier workers of the pool, each in a process or a thread: they turn sampled completions into judged groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tinyllm import rewards
from tinyllm.config.sections import RewardConfig
from tinyllm.pool.state import GroupRequest
from tinyllm.post.grpo import check_completions, group_rollouts, judge_completions
from tinyllm.post.source import JudgedGroups
from tinyllm.records import Completion, Logged, Verdict
from tinyllm.seams import Judge
from tinyllm.tasks import TaskData


class JudgeWorker:
    """Judges one group after another; has the `work` method that pool/workers.py calls."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def work(
        self, new: Sequence[tuple[int, tuple[GroupRequest, Sequence[Completion]]]], budget_s: float
    ) -> list[tuple[int, JudgedGroups]]:
        """(name, judged group) of each (name, (request, completions)); budget_s is not used: every group is judged."""
        return [(name, self._judged(request, completions)) for name, (request, completions) in new]

    def _judged(self, request: GroupRequest, returned: Sequence[Completion]) -> JudgedGroups:
        prompts = [request.prompt]
        completions = check_completions(returned, prompts, request.params)
        judged = judge_completions(partial(self.judge, step=request.step), prompts, completions)
        return JudgedGroups(tuple(group_rollouts(prompts, completions, judged.verdicts)), judged.logged)


def build_judge_worker(reward: RewardConfig, data: TaskData) -> JudgeWorker:
    """A worker with its own judge. data: the task's data; one row is enough, since only its columns are checked."""
    return JudgeWorker(rewards.make_judge(reward, data))


def unjudged(request: GroupRequest, returned: Sequence[Completion], why: str) -> JudgedGroups:
    """A group that no verifier could judge: every completion is unscored, for its own error or else for `why`."""
    prompts = [request.prompt]
    completions = check_completions(returned, prompts, request.params)
    verdicts = [Verdict(None, c.error if c.finish_reason == "error" else why) for c in completions]
    return JudgedGroups(tuple(group_rollouts(prompts, completions, verdicts)), Logged())
