"""A source of steps whose groups a pool of engines and verifiers samples ahead of training, by a bounded lag.

The prompts of each batch are fixed before sampling: step t trains the prompts that a run without a pool would train,
whichever groups finish first. The pool changes only when they are sampled. Step t is admitted to the pool once the
weights of revision t - 1 - max_lag are published, so no trained token was sampled from older weights, and no completion
is discarded. With max_lag 0 a step is admitted when the step before is trained: the same bits as without a pool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tinyllm.config.sections import GRPOConfig, RewardConfig
from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.remote.served import ServedEngine
from tinyllm.errors import ConfigError
from tinyllm.health.ledger import ledger_line
from tinyllm.pool.driver import Driver
from tinyllm.pool.engine_worker import EngineWorker, to_arrays, trained_parameters
from tinyllm.pool.judging import JudgeWorker, build_judge_worker
from tinyllm.pool.ray_workers import RayCluster
from tinyllm.pool.served_workers import served_group
from tinyllm.pool.state import GroupRequest, GroupResult
from tinyllm.pool.workers import ThreadWorker, WorkerGroup
from tinyllm.post.batch import BatchRules
from tinyllm.post.source import JudgedGroups, PromptOrder, joined_logs, missing_groups, require_signal
from tinyllm.record.rundir import RunDir
from tinyllm.records import Group, Prompt, Revision, SamplingParams, Step
from tinyllm.seams import Judge
from tinyllm.tasks import TaskData

GROUP_ATTEMPTS = 3
"""Attempts at a group whose worker dies or hangs. After the third it is given up, as the likely cause of the deaths."""
_LOOK_S = 0.5
"""Seconds between two reports of the workers' states to the display."""


def is_pooled(config: GRPOConfig) -> bool:
    """Whether a run uses a pool: engine workers, verifier workers, or sampling ahead of training (max_lag above 0)."""
    return bool(config.pool.engines or config.pool.verifiers or config.pool.max_lag)


def doing(groups: str, states: Mapping[str, Sequence[str]]) -> str:
    """The state of a pool as text for the display: the phase, a line about the groups, one for each kind of worker."""
    lines = ["sampling", f"{'groups':10} {groups}"]
    for kind, each in states.items():
        told = [f"{number}: {state}" for number, state in enumerate(each, 1)] if len(each) > 1 else each
        lines.append(f"{kind.removesuffix('s') + 's':10} {'   '.join(told)}")
    return "\n".join(lines)


class Pool:
    """The engine and verifier workers of one run, and the driver that assigns groups to them."""

    def __init__(
        self,
        config: GRPOConfig,
        engine: EmbeddedEngine | ServedEngine,
        judge: Judge,
        reward: RewardConfig,
        data: TaskData,
        params: SamplingParams,
    ) -> None:
        prompts = [*data.train, *data.held_out]
        self.config, self.engine = config, engine
        self.cluster: RayCluster | None = None
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        settings = config.pool
        try:
            if settings.engines or settings.verifiers:
                trained = trained_parameters(engine.policy.model).values() if settings.engines else ()
                size = sum(p.numel() * p.element_size() for p in trained)
                self.cluster = RayCluster(settings.ray_address, settings.engines + settings.verifiers, size)
            engines, verifiers = self._engines(prompts, params), self._verifiers(judge, reward, data)
            self.driver = Driver(engines, verifiers, self._failed, attempts=GROUP_ATTEMPTS)
        except BaseException:
            if self.cluster is not None:
                self.cluster.close()
            raise

    def _engines(self, prompts: Sequence[Prompt], params: SamplingParams) -> WorkerGroup:
        config, settings = self.config, self.config.pool
        if isinstance(self.engine, ServedEngine):
            groups = max(1, config.engine.max_concurrent // config.sampling.group_size)
            return served_group(self.engine, groups)
        if self.engine.policy.device.type != "cpu":
            raise ConfigError(
                f"pool.engines = {settings.engines}: they sample on CPUs, and the model is on "
                f"{self.engine.policy.device}; start servers there (tinyllm serve) and give engine.urls"
            )
        assert self.cluster is not None
        slots = min(self.engine.max_batch, len(prompts) * params.n)
        build = partial(EngineWorker, config.model, config.lora, config.seed, slots)
        make = partial(self.cluster.worker, build)
        capacity = -(-slots // params.n)
        deadline_s = config.engine.deadline_s
        return WorkerGroup("engine", settings.engines, make, capacity, deadline_s, takes_weights=True)

    def _verifiers(self, judge: Judge, reward: RewardConfig, data: TaskData) -> WorkerGroup:
        settings = self.config.pool
        if not settings.verifiers:  # no deadline: a thread cannot be killed
            return WorkerGroup("verifier", 1, lambda: ThreadWorker(JudgeWorker(judge)), capacity=1)
        assert self.cluster is not None
        build = partial(build_judge_worker, reward, replace(data, train=data.train[:1], held_out=()))
        self.cluster.require_portable(
            build, "the reward function", "give it as module:function, or leave out pool.verifiers"
        )
        make = partial(self.cluster.worker, build)
        return WorkerGroup("verifier", settings.verifiers, make, 1, self.config.engine.deadline_s)

    def publish(self, revision: Revision) -> None:
        """Send the policy's current weights to the engine workers, which sample from them from now on."""
        weights = None
        if isinstance(self.engine, EmbeddedEngine):
            assert self.cluster is not None
            weights = self.cluster.put(to_arrays(trained_parameters(self.engine.policy.model)))
        self.driver.publish(revision, weights)

    def _failed(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def close(self) -> None:
        """End all workers."""
        self.driver.close()
        if self.cluster is not None:
            self.cluster.close()


@dataclass
class _StepInFlight:
    """The prompts of a step whose groups are being sampled and judged, and the groups that are ready."""

    prompts: list[Prompt] = field(default_factory=list)
    draws: dict[str, int] = field(default_factory=dict)
    judged: dict[int, JudgedGroups] = field(default_factory=dict)
    refills: int = 0
    complete: bool = False

    @property
    def groups(self) -> list[Group]:
        """All groups in the order of the prompts; only once every group is judged."""
        return [group for number in range(len(self.prompts)) for group in self.judged[number].groups]


class PoolSource:
    """The `Source` of a run with a pool; see the head of this file, and post/source.py for the source without one.

    first_step: the first step to sample. revision: of the policy's weights now. on_phase: told the pool's state.
    """

    def __init__(
        self,
        run: RunDir,
        pool: Pool,
        order: PromptOrder,
        params: SamplingParams,
        config: GRPOConfig,
        *,
        first_step: int,
        revision: Revision,
        on_phase: Callable[[str], None],
    ) -> None:
        self.run, self.pool, self.order, self.params = run, pool, order, params
        self.refills = config.stop.refills
        self.train, self.rules, self.max_lag = config.train, BatchRules.of(config), config.pool.max_lag
        self.first_step, self.on_phase = first_step, on_phase
        self._admitted = first_step - 1
        self._steps: dict[int, _StepInFlight] = {}
        self._lines: list[dict[str, Any]] = []
        self._busy, self._clock = pool.driver.busy_seconds(), time.monotonic()
        self._admit(revision)

    def publish(self, revision: Revision) -> None:
        self.pool.engine.publish(revision)
        self._admit(revision)

    def __iter__(self) -> Iterator[Step]:
        for number in range(self.first_step, self.train.steps + 1):
            yield self._wait(number)

    # -- admitting steps --------------------------------------------------------------------------------------------

    def _admit(self, revision: Revision) -> None:
        self.pool.publish(revision)
        last = min(self.train.steps, revision.step + 1 + self.max_lag)
        with self.pool.changed:
            while self._admitted < last:
                self._admitted += 1
                self._steps[self._admitted] = _StepInFlight()
                self._draw(self._admitted, self.train.prompts_per_step)

    def _draw(self, number: int, count: int) -> None:
        """Submit further prompts of a step to the pool."""
        step = self._steps[number]
        first = len(step.prompts)
        step.prompts += self.order.take(count, step.draws)
        params = replace(self.params, step=number)
        self.pool.driver.submit(
            [GroupRequest(number, i, step.prompts[i], params) for i in range(first, len(step.prompts))], self._done
        )

    def _done(self, done: GroupResult) -> None:
        """Takes a judged group from the driver; runs in the driver's thread."""
        (group,) = done.judged.groups
        with self.pool.changed:
            step = self._steps[done.request.step]
            step.judged[done.request.number] = done.judged
            self._lines.append(ledger_line(done.request.step, group, vars(done.trace)))
            if len(step.judged) == len(step.prompts):
                self._settle(done.request.step, step)
            self.pool.changed.notify_all()

    def _settle(self, number: int, step: _StepInFlight) -> None:
        """Called when all groups of a step are judged: dynamic sampling draws more prompts, or the step is complete."""
        missing = missing_groups(step.groups, self.rules, self.train) if self.rules.dynamic_sampling else 0
        if missing and step.refills < self.refills:
            step.refills += 1
            self._draw(number, missing)
        else:
            step.complete = True

    # -- yielding steps ---------------------------------------------------------------------------------------------

    def _wait(self, number: int) -> Step:
        begin = time.monotonic()
        with self.pool.changed:
            while not (step := self._steps[number]).complete:
                if self.pool.error is not None:
                    raise self.pool.error
                self.on_phase(self._doing(number))
                self.pool.changed.wait(_LOOK_S)
            del self._steps[number]
            lines, self._lines = self._lines, []
        seconds = self._account(time.monotonic() - begin)
        self.run.log_ledger(lines)
        groups = tuple(step.groups)
        if self.rules.dynamic_sampling:
            require_signal(number, groups, self.rules, self.refills)
        self._require_lag(number, groups)
        logged = joined_logs([step.judged[place] for place in range(len(step.prompts))])
        return Step(number, groups, logged, seconds, prompts=len(groups))

    def _doing(self, number: int) -> str:
        ahead = sum(len(step.judged) for later, step in self._steps.items() if later > number)
        step = self._steps[number]
        groups = f"{len(step.judged)} of {len(step.prompts)} there, {ahead} of later steps"
        return doing(groups, self.pool.driver.states())

    def _account(self, waited_s: float) -> dict[str, float]:
        """Seconds that the trainer waited, and idle shares of trainer and workers since the last step."""
        now, busy = time.monotonic(), self.pool.driver.busy_seconds()
        passed = max(1e-9, now - self._clock)
        account = {"wait_s": waited_s, "trainer_idle": min(1.0, waited_s / passed)}
        counts = {workers.name: workers.count for workers in self.pool.driver.worker_groups}
        for name, seconds in busy.items():
            share = (seconds - self._busy[name]) / (passed * counts[name])
            account[f"{name}_idle"] = min(1.0, max(0.0, 1.0 - share))
        self._busy, self._clock = busy, now
        return account

    def _require_lag(self, number: int, groups: Sequence[Group]) -> None:
        for group in groups:
            for rollout in group.rollouts:
                for span in rollout.completion.all_spans if rollout.completion.token_ids else ():
                    if span.revision is None:  # inserted by the environment
                        continue
                    lag = number - 1 - span.revision.step
                    assert 0 <= lag <= self.max_lag, (number, group.id, span, self.max_lag)
