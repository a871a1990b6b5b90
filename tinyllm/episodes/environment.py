"""What a tool or an environment must do. One turn of the policy is text; what comes back is text or token ids.

    class Calculator(Environment[None]):
        def reset(self, prompt, sample): ...
        def respond(self, state, text, token_ids):
            call = re.search(r"<calc>(.*)</calc>", text)
            return None if call is None else f"= {compute(call[1])}"
        def end(self, state): ...
        def close(self): ...

Whatever reset, respond or end raises is data: the rollout that it was called for fails with the reason and is not
scored, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from tinyllm.records import Prompt

State = TypeVar("State")

Reply: TypeAlias = str | Sequence[int]
"""What the policy reads before its next turn: text, still to be rendered, or token ids, appended as they are. Never
empty: two turns have a given token between them, so that the record shows where one ends."""

Render: TypeAlias = Callable[[Sequence[int], str], Sequence[int]]
"""(token ids of a turn, the reply's text) -> token ids to append after that turn, up to where the next turn begins:
separators, the marks of a chat template, and the end mark where the turn drew none. Text from an environment must not
become a template's special tokens."""


class Environment(Protocol[State]):
    """Answers the turns of rollouts. Each rollout has a state of its own, from reset to end.

    All rollouts of a step have their states at the same time; methods are called one at a time, and nothing bounds
    their seconds. What a method answers depends on its arguments alone, never on which other rollouts there are.
    """

    def reset(self, prompt: Prompt, sample: int) -> State:
        """The state of a new episode, before its first turn."""
        ...

    def respond(self, state: State, text: str, token_ids: Sequence[int]) -> Reply | None:
        """The answer to a turn, or None: the episode is over. Not asked after a turn that a length limit cut.

        text: the turn without special tokens and without a trailing stop string; token_ids: the same turn, whole.
        """
        ...

    def end(self, state: State) -> None:
        """Let go of what the episode holds. Called once for every state, whatever happened to its rollout."""
        ...

    def close(self) -> None:
        """Let go of what all episodes share; safe to call twice."""
        ...
