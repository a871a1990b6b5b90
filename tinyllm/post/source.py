"""Sources of the loop's steps: sampled and judged in this process, or read back from the run directory.

They implement the protocol `Source` of seams.py: yield `Step`s, and publish the revision of the new weights.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from tinyllm.config.sections import GRPOConfig, TrainConfig
from tinyllm.distributed.ranks import SOLO, Ranks
from tinyllm.errors import TrainingStopped
from tinyllm.post.batch import BatchRules, has_signal
from tinyllm.post.grpo import check_completions, group_rollouts, judge_completions
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Logged, Prompt, Revision, SamplingParams, Step
from tinyllm.seams import Engine, Judge, Source


class PromptOrder:
    """Prompts in a seeded order, with a new permutation each epoch; each position of the order is taken once."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, position: int = 0) -> None:
        assert prompts
        self.prompts, self.seed = prompts, seed
        self.position = position
        """The first position that is not taken; counts on over epochs."""
        self._ahead: set[int] = set()
        """Taken positions above `position`."""
        self._order: dict[int, list[int]] = {}

    def take(self, count: int, draws: dict[str, int]) -> list[Prompt]:
        """The next `count` prompts; `draws` (row id -> times drawn within the step) is updated."""
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self.prompts))
            prompt = self.prompts[self._permutation(epoch)[index]]
            taken.append(replace(prompt, draw=draws.get(prompt.id, 0)))
            draws[prompt.id] = taken[-1].draw + 1
            self._mark(self.position)
        return taken

    def take_recorded(self, ids: Sequence[str]) -> None:
        """Mark recorded prompts as taken: for each row id, the first position of the row that is not taken yet.

        So the record alone determines the taken positions, even where a pool drew a step's refills after the prompts of
        the next step.
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


def missing_groups(groups: Sequence[Group], rules: BatchRules, train: TrainConfig) -> int:
    """The number of groups with signal that a step with dynamic sampling still lacks."""
    return max(0, train.prompts_per_step - sum(has_signal(g, rules) for g in groups))


def require_signal(step: int, groups: Sequence[Group], rules: BatchRules, refills: int) -> None:
    """Raises TrainingStopped when none of a step's groups, refills included, has signal (different rewards)."""
    if not any(has_signal(g, rules) for g in groups):
        raise TrainingStopped(
            f"step {step}: none of {len(groups)} groups in {refills + 1} draws has members with "
            "different rewards, so there is nothing to learn from; use easier or harder prompts, more completions "
            "per prompt (sampling.group_size), or train.dynamic_sampling = false"
        )


class InlineSource:
    """Samples each step with the weights published last, judges it, and yields it.

    With dynamic sampling, further prompts replace groups without signal, in at most stop.refills rounds; the step holds
    every group drawn, so that all are recorded, and make_batch keeps the groups with signal. Each of several ranks
    samples and judges a share of the prompts, and yields the groups of all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        order: PromptOrder,
        params: SamplingParams,
        judge: Judge,
        config: GRPOConfig,
        *,
        first_step: int = 1,
        on_phase: Callable[[str], None] = lambda phase: None,
        ranks: Ranks = SOLO,
    ) -> None:
        self.engine, self.order, self.params, self.judge = engine, order, params, judge
        self.ranks = ranks
        self.train, self.rules = config.train, BatchRules.of(config)
        self.refills = config.stop.refills
        self.first_step, self.on_phase = first_step, on_phase

    def publish(self, revision: Revision) -> None:
        self.engine.publish(revision)

    def __iter__(self) -> Iterator[Step]:
        collect = self._collect if self.ranks.count == 1 else self._collect_on_all_ranks
        dynamic = self.rules.dynamic_sampling
        for number in range(self.first_step, self.train.steps + 1):
            timing = Timing(self.on_phase)
            draws: dict[str, int] = {}
            drawn = [collect(number, self.order.take(self.train.prompts_per_step, draws), timing)]
            for _ in range(self.refills if dynamic else 0):
                missing = missing_groups([g for part in drawn for g in part.groups], self.rules, self.train)
                if not missing:
                    break
                drawn.append(collect(number, self.order.take(missing, draws), timing))
            groups = tuple(group for part in drawn for group in part.groups)
            if dynamic:
                require_signal(number, groups, self.rules, self.refills)
            logged = drawn[0].logged if len(drawn) == 1 else joined_logs(drawn)
            yield Step(number, groups, logged, timing.seconds, prompts=len(groups))

    def _collect(self, number: int, prompts: Sequence[Prompt], timing: Timing) -> JudgedGroups:
        """Sample and judge the groups of these prompts, in this process."""
        params = replace(self.params, step=number)
        with timing("sample_s", "sampling"):
            completions = check_completions(self.engine.sample(prompts, params), prompts, params)
        with timing("verify_s", "verifying"):
            judged = judge_completions(partial(self.judge, step=number), prompts, completions)
        logged = Logged(_means([judged.logged.metrics]), judged.logged.extras)
        return JudgedGroups(tuple(group_rollouts(prompts, completions, judged.verdicts)), logged)

    def _collect_on_all_ranks(self, number: int, prompts: Sequence[Prompt], timing: Timing) -> JudgedGroups:
        """_collect on a share of the prompts; returns all ranks' groups, and logged numbers averaged over ranks."""

        def work(share: Sequence[Prompt]) -> list[JudgedGroups]:
            part = self._collect(number, share, timing)
            found, start = [], 0
            for group in part.groups:
                end = start + len(group.rollouts)
                columns = {name: list(column[start:end]) for name, column in part.logged.extras.items()}
                found.append(JudgedGroups((group,), Logged(part.logged.metrics, columns)))
                start = end
            return found

        each = self.ranks.share(prompts, work)
        metrics = _means([part.logged.metrics for part in each[: self.ranks.count]])  # the first of each rank
        return JudgedGroups(
            tuple(group for part in each for group in part.groups), Logged(metrics, joined_logs(each).extras)
        )


@dataclass(frozen=True)
class JudgedGroups:
    """Groups judged in one call, and the values that reward functions logged (columns in the order of the rollouts)."""

    groups: tuple[Group, ...]
    logged: Logged


def joined_logs(parts: Sequence[JudgedGroups]) -> Logged:
    """The values logged in several calls of one step, merged: the mean of each number, the columns joined in order.

    A column has None for every rollout of a part that did not log it.
    """
    names = dict.fromkeys(name for part in parts for name in part.logged.extras)
    counts = [sum(len(group.rollouts) for group in part.groups) for part in parts]
    extras = {
        name: [x for part, n in zip(parts, counts, strict=True) for x in part.logged.extras.get(name, [None] * n)]
        for name in names
    }
    return Logged(_means([part.logged.metrics for part in parts]), extras)


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the parts that have it; numbers that are not finite are left out."""
    numbers: dict[str, list[float]] = {}
    for part in parts:
        for name, number in part.items():
            if math.isfinite(number):
                numbers.setdefault(name, []).append(number)
    return {name: sum(values) / len(values) for name, values in numbers.items()}


class Timing:
    """Wall-clock seconds by part: `with timing("sample_s", "sampling"):` adds to a part and announces the phase."""

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._begin = time.perf_counter()

    def elapsed_s(self) -> float:
        """Wall-clock seconds since this object was created."""
        return time.perf_counter() - self._begin

    @contextmanager
    def __call__(self, name: str, phase: str | None = None) -> Iterator[None]:
        if phase is not None:
            self._on_phase(phase)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


@dataclass(frozen=True)
class RecordedSource:
    """Yields the recorded steps, read back from the run directory, then the steps of another source."""

    run: RunDir
    recorded: Sequence[int]
    further: Source

    def publish(self, revision: Revision) -> None:
        self.further.publish(revision)

    def __iter__(self) -> Iterator[Step]:
        for number in self.recorded:
            yield self.run.read_step(number)
        yield from self.further
