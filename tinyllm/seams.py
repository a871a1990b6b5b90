"""The seams of a run: what each part consumes and produces. Whatever has these methods can stand in its place.

    prompts -> Engine.sample -> Judge -> Step (from a Source) -> Objective -> weights -> Engine.publish

The seams that carry tensors or a run's history stand where those do: `Runner` in engine/runner.py, `Objective` in
post/objectives.py, `Check` in health/checks.py. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tinyllm.records import Completion, Judged, Prompt, Revision, SamplingParams, Step


class Engine(Protocol):
    """Samples completions from the weights of the newest revision that was published to it."""

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """params.n completions of each prompt, in any order; one that failed has finish_reason "error" and a reason.

        Raises EngineError where nothing can be sampled any more.
        """
        ...

    def publish(self, revision: Revision) -> None:
        """The policy's weights are now of this revision; every completion begun later is sampled from them."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What the run's manifest says of this engine."""
        ...

    def close(self) -> None:
        """Let go of processes and connections; safe to call twice."""
        ...


class Judge(Protocol):
    """Judges completions. May be called from several threads, one call at a time."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> Judged:
        """One verdict per completion, in order. A completion that cannot be judged is unscored, with the reason."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Names, weights and settings of the reward's parts, for the run's manifest."""
        ...

    def close(self) -> None:
        """End worker processes; safe to call twice."""
        ...


class Source(Protocol):
    """Where the loop's steps come from: sampled and judged inline, by a pool, or read back from the record."""

    def __iter__(self) -> Iterator[Step]:
        """The steps of the run, in order; the next one is asked for when the last one is trained and published."""
        ...

    def publish(self, revision: Revision) -> None:
        """The one edge back: the weights after the last step."""
        ...
