"""Where the loop's groups come from: sampled and verified now, or read back from the record.

A source yields (step, groups) and takes the new weights' revision back; that is all the loop knows of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tinyllm.config.sections import GRPOConfig, TrainConfig
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.errors import TrainingStopped
from tinyllm.post.batch import BatchRules, has_signal
from tinyllm.post.grpo import collect_groups
from tinyllm.records import Completion, Group, Prompt, Revision, SamplingParams, Verdict
from tinyllm.rewards.functions import Logged


class Source(Protocol):
    """Groups, step after step, and the edge back."""

    @property
    def seconds(self) -> dict[str, float]:
        """Where the last step's time went."""
        ...

    @property
    def logged(self) -> Logged:
        """What reward functions logged for the last step; extras have one value per rollout."""
        ...

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]: ...

    def publish(self, revision: Revision) -> None: ...


class PromptOrder:
    """Prompts in a seeded order, a new permutation each epoch; each position of it is taken once."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, position: int = 0) -> None:
        assert prompts
        self.prompts, self.seed = prompts, seed
        self.position = position
        """The first that is not taken."""
        self.trained = position
        """How many prompts were handed to training: all there is to save."""
        self._ahead: set[int] = set()
        """Taken positions beyond the first that is not."""
        self._order: dict[int, list[int]] = {}

    def take(self, count: int, draws: dict[str, int]) -> list[Prompt]:
        """The next prompts; `draws` counts how often each row was drawn within the step."""
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self.prompts))
            prompt = self.prompts[self._permutation(epoch)[index]]
            taken.append(replace(prompt, draw=draws.get(prompt.id, 0)))
            draws[prompt.id] = taken[-1].draw + 1
            self._mark(self.position)
        return taken

    def take_recorded(self, ids: Sequence[str]) -> None:
        """Prompts that the record has: each is the first position of its row that is not taken.

        So the record alone tells which positions are, also where refills of a step came before its successor's prompts.
        """
        numbers = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        for name in ids:
            epoch = self.position // len(self.prompts)
            while True:
                position = epoch * len(self.prompts) + self._permutation(epoch).index(numbers[name])
                if position >= self.position and position not in self._ahead:
                    break
                epoch += 1
            self._mark(position)

    def _mark(self, position: int) -> None:
        self._ahead.add(position)
        while self.position in self._ahead:
            self._ahead.remove(self.position)
            self.position += 1

    def _permutation(self, epoch: int) -> list[int]:
        if epoch not in self._order:
            for old in [e for e in self._order if e < self.position // len(self.prompts)]:
                del self._order[old]
            order = self._order[epoch] = list(range(len(self.prompts)))
            random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return self._order[epoch]


class Logbook:
    """What reward functions log over the calls of one step: columns of all its groups, means of its numbers."""

    def __init__(self) -> None:
        self.logged = Logged()
        self._kept = 0
        self._numbers: dict[str, list[float]] = {}

    def add(self, logged: Logged, judged: Sequence[Completion], groups: Sequence[Group]) -> None:
        """Adds what one call logged for these groups; a rollout that was not judged has None."""
        rows = {(c.prompt_id, c.draw, c.sample): row for row, c in enumerate(judged)}
        places = [rows.get((c.prompt_id, c.draw, c.sample)) for c in (r.completion for g in groups for r in g.rollouts)]
        for name in {**self.logged.extras, **logged.extras}:
            values = logged.extras.get(name, [None] * len(judged))
            earlier = self.logged.extras.get(name, [None] * self._kept)
            self.logged.extras[name] = earlier + [None if place is None else values[place] for place in places]
        self._kept += len(places)
        for name, number in logged.metrics.items():
            if not math.isfinite(number):  # not measured: it must neither erase the mean nor reach JSON
                continue
            self._numbers.setdefault(name, []).append(number)
            self.logged.metrics[name] = sum(self._numbers[name]) / len(self._numbers[name])


def missing_groups(groups: Sequence[Group], rules: BatchRules, train: TrainConfig) -> int:
    """How many further groups a step with dynamic sampling needs."""
    return max(0, train.prompts_per_step - sum(has_signal(g, rules) for g in groups))


def require_signal(step: int, groups: Sequence[Group], rules: BatchRules, refills: int) -> None:
    """Raises TrainingStopped when none of a step's groups, refills included, has something to learn from."""
    if not any(has_signal(g, rules) for g in groups):
        raise TrainingStopped(
            f"step {step}: none of {len(groups)} groups in {refills + 1} draws has members with "
            "different rewards, so there is nothing to learn from; use easier or harder prompts, more completions "
            "per prompt (sampling.group_size), or train.dynamic_sampling = false"
        )


class InlineSource:
    """Samples with the policy as it is when the step begins, verifies, and hands the groups on.

    With dynamic sampling, groups without signal are replaced by those of further prompts, at most stop.refills
    times; every group drawn is handed on and recorded, and make_batch keeps those with signal. On several ranks each
    samples and verifies its share of the prompts, and hands on the groups of all.
    """

    def __init__(
        self,
        engine: Any,
        order: PromptOrder,
        params: SamplingParams,
        verify: Callable[..., list[Verdict]],
        config: GRPOConfig,
        *,
        first_step: int = 1,
        on_phase: Callable[[str], None] = lambda phase: None,
        ranks: Ranks = SOLO,
    ) -> None:
        self.engine, self.order, self.params, self.verify = engine, order, params, verify
        self.ranks = ranks
        self.train, self.rules = config.train, BatchRules.of(config)
        self.refills = config.stop.refills
        self.first_step, self.on_phase = first_step, on_phase
        self.seconds: dict[str, float] = {}
        self._book = Logbook()

    @property
    def logged(self) -> Logged:
        return self._book.logged

    def publish(self, revision: Revision) -> None:
        self.engine.publish(revision)

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        for step in range(self.first_step, self.train.steps + 1):
            groups = self._groups(step)
            self.order.trained += len(groups)
            yield step, groups

    def _groups(self, step: int) -> list[Group]:
        self.seconds = {"sample_s": 0.0, "verify_s": 0.0}
        self._book = Logbook()
        draws: dict[str, int] = {}
        groups = self._collect(step, self.order.take(self.train.prompts_per_step, draws))
        if not self.rules.dynamic_sampling:
            return groups
        for _ in range(self.refills):
            missing = missing_groups(groups, self.rules, self.train)
            if not missing:
                return groups
            groups += self._collect(step, self.order.take(missing, draws))
        require_signal(step, groups, self.rules, self.refills)
        return groups

    def _collect(self, step: int, prompts: list[Prompt]) -> list[Group]:
        judged: list[Completion] = []

        def verify(prompts: list[Prompt], completions: list[Completion]) -> list[Verdict]:
            begin = time.perf_counter()
            self.on_phase("verifying")
            judged.extend(completions)
            try:
                return self.verify(prompts, completions, step)
            finally:
                self.seconds["verify_s"] += time.perf_counter() - begin

        begin, before = time.perf_counter(), self.seconds["verify_s"]
        self.on_phase("sampling")
        params = replace(self.params, step=step)
        groups = self.ranks.share(prompts, lambda share: collect_groups(self.engine, share, params, verify))
        self.seconds["sample_s"] += time.perf_counter() - begin - (self.seconds["verify_s"] - before)
        logged: Logged = getattr(self.verify, "logged", Logged()) if judged else Logged()
        completions, logged = _joined(self.ranks.gather((judged, logged)))
        self._book.add(logged, completions, groups)
        return groups


def _joined(parts: Sequence[tuple[list[Completion], Logged]]) -> tuple[list[Completion], Logged]:
    """What the ranks judged and logged, one after the other: the columns joined, a number the mean of theirs."""
    if len(parts) == 1:
        return parts[0]
    completions = [c for judged, _ in parts for c in judged]
    extras = {
        name: [x for judged, own in parts for x in own.extras.get(name, [None] * len(judged))]
        for name in dict.fromkeys(name for _, own in parts for name in own.extras)
    }
    numbers: dict[str, list[float]] = {}
    for _, own in parts:
        for name, number in own.metrics.items():
            if math.isfinite(number):
                numbers.setdefault(name, []).append(number)
    return completions, Logged({name: sum(x) / len(x) for name, x in numbers.items()}, extras)
