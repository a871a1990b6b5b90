"""What a verifier of the pool does: sampled completions in, a judged group out; in a process or a thread."""

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
    """Judges one group after another; `work` is that of pool/workers.py."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def work(
        self, new: Sequence[tuple[int, tuple[GroupRequest, Sequence[Completion]]]], budget_s: float
    ) -> list[tuple[int, JudgedGroups]]:
        """The groups of these (name, (request, completions)), each judged once."""
        return [(name, self._judged(request, completions)) for name, (request, completions) in new]

    def _judged(self, request: GroupRequest, returned: Sequence[Completion]) -> JudgedGroups:
        prompts = [request.prompt]
        completions = check_completions(returned, prompts, request.params)
        judged = judge_completions(partial(self.judge, step=request.step), prompts, completions)
        return JudgedGroups(tuple(group_rollouts(prompts, completions, judged.verdicts)), judged.logged)


def build_judge_worker(reward: RewardConfig, data: TaskData) -> JudgeWorker:
    """A worker with a judge of its own; data: the task's, of which one row is enough (its columns are checked)."""
    return JudgeWorker(rewards.make_judge(reward, data))


def unjudged(request: GroupRequest, returned: Sequence[Completion], why: str) -> JudgedGroups:
    """The group of completions that nobody could judge: every one is unscored, with the reason."""
    prompts = [request.prompt]
    completions = check_completions(returned, prompts, request.params)
    verdicts = [Verdict(None, c.error if c.finish_reason == "error" else why) for c in completions]
    return JudgedGroups(tuple(group_rollouts(prompts, completions, verdicts)), Logged())
