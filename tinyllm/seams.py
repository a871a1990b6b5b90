"""The interfaces between the parts of a run, as protocols: any object with these methods can replace a part.

    prompts -> Engine.sample -> Judge -> Step (from a Source) -> Objective -> weights -> Engine.publish

The protocols that need tensors or a run's history are defined beside their users: `Runner` in engine/runner.py,
`Objective` in post/objectives.py, `Check` in health/checks.py. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tinyllm.records import Completion, Judged, Prompt, Revision, SamplingParams, Step


class Engine(Protocol):
    """Samples completions from the policy's weights, of the newest revision that was published to the engine."""

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of each prompt, in any order; a failed one has finish_reason "error" and a reason.

        Raises EngineError when the engine cannot sample at all any more.
        """
        ...

    def publish(self, revision: Revision) -> None:
        """Take over the policy's weights, now of this revision; every completion begun later is sampled from them."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Properties of this engine for the run's manifest."""
        ...

    def close(self) -> None:
        """End processes and close connections; safe to call twice."""
        ...


class Judge(Protocol):
    """Judges completions. May be called from several threads, one call at a time."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> Judged:
        """One verdict per completion, in order; a completion that cannot be judged is unscored, with the reason.

        prompts: the prompt of each completion, at the same index. step: training step, given to reward functions.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """Names, weights and settings of the reward's parts, for the run's manifest."""
        ...

    def close(self) -> None:
        """End worker processes; safe to call twice."""
        ...


class Source(Protocol):
    """Supplies the loop's steps: sampled and judged in this process, by a pool, or read back from the record."""

    def __iter__(self) -> Iterator[Step]:
        """The steps of the run, in order; the loop requests one after it trained and published the one before."""
        ...

    def publish(self, revision: Revision) -> None:
        """Announce the policy's weights after a training step to the sampler; the only data that flows back."""
        ...
