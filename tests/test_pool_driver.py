"""The pool's driver with workers that a test plays: deaths, hangs, late answers, order; and what is refused at the start."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from concurrent.futures import Future

import pytest
import tiny

from tinyllm.commands import cli
from tinyllm.errors import ConfigError, DataError, EngineError, MissingExtra, ModelError
from tinyllm.pool.driver import Driver
from tinyllm.pool.judging import JudgeWorker
from tinyllm.pool.state import GroupRequest
from tinyllm.pool.workers import ThreadWorker, WorkerDied, WorkerGroup
from tinyllm.post import run as runs
from tinyllm.records import Judged, Logged, Prompt, Revision, Verdict

WAIT_S = 300.0
NEVER = object()
REVISION = Revision(0, "a")


class Played:
    """A worker whose answers come from play(worker, method, arguments): a result, an exception to raise, or NEVER."""

    def __init__(self, made, play):
        self.play, self.number, self.killed, self.open = play, len(made), False, []
        made.append(self)

    def call(self, method, *arguments):
        outcome = Future()
        answer = None if method == "start" else self.play(self, method, arguments)
        if isinstance(answer, BaseException):
            outcome.set_exception(answer)
        elif answer is NEVER:
            self.open.append(outcome)
        else:
            outcome.set_result(answer)
        return outcome

    def kill(self):
        self.killed = True


class PlayedPool:
    """A driver of played workers, and what came out of it."""

    def __init__(self, engine, verifier=None, engines=1, verifiers=1, attempts=3, deadline_s=None, capacity=8):
        self.engines, self.verifiers, self.done, self.errors = [], [], [], []
        self.came = threading.Condition()
        judge = JudgeWorker(lambda prompts, completions, step: [Verdict(1.0)] * len(completions))
        verifier = verifier or (lambda worker, method, arguments: judge.work(*arguments))
        self.driver = Driver(
            WorkerGroup(
                "engine", engines, lambda: Played(self.engines, engine), capacity, deadline_s, takes_weights=True
            ),
            WorkerGroup("verifier", verifiers, lambda: Played(self.verifiers, verifier), 1, deadline_s),
            self._failed,
            attempts=attempts,
        )
        self.driver.publish(REVISION, "weights")

    def _done(self, done):
        with self.came:
            self.done.append(done)
            self.came.notify_all()

    def _failed(self, error):
        with self.came:
            self.errors.append(error)
            self.came.notify_all()

    def run(self, count):
        """Submits so many groups and waits until all have come out, once each."""
        self.driver.submit(requests(count), self._done)
        with self.came:
            assert self.came.wait_for(lambda: len(self.done) >= count or self.errors, WAIT_S)
        assert not self.errors, self.errors
        assert Counter(done.request.number for done in self.done) == Counter(range(count))
        return sorted(self.done, key=lambda done: done.request.number)

    def error(self):
        with self.came:
            assert self.came.wait_for(lambda: bool(self.errors), WAIT_S)
        return self.errors[0]


@pytest.fixture
def played():
    """played(engine, ...) -> a pool, which is closed at the end."""
    pools = []

    def make(*arguments, **options):
        pools.append(PlayedPool(*arguments, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.driver.close()
        assert all(worker.killed for worker in pool.engines + pool.verifiers)


def requests(count, step=1):
    return [
        GroupRequest(step, i, Prompt(f"p{i}", (5, 6, 7 + i), str(i)), tiny.sampling(n=2, step=step))
        for i in range(count)
    ]


def sampled(work):
    return [tiny.completion(work.prompt.id, sample, (2 + sample, tiny.EOS)) for sample in range(work.params.n)]


def engine(worker, method, arguments):
    """One that works."""
    if method == "publish":
        return None
    return [(name, sampled(work)) for name, work in arguments[0]]


def rewards_of(done):
    return [r.reward for r in done.judged.groups[0].rollouts]


def test_groups_go_through_and_weights_come_first(played):
    seen = []

    def play(worker, method, arguments):
        seen.append((method, arguments[0] if method == "publish" else sorted(w.number for _, w in arguments[0])))
        return engine(worker, method, arguments)

    pool = played(play)
    assert all(rewards_of(done) == [1.0, 1.0] for done in pool.run(3))
    pool.driver.publish(Revision(1, "b"), "others")
    pool.driver.submit(requests(1, step=2), pool._done)
    with pool.came:
        assert pool.came.wait_for(lambda: len(pool.done) == 4, WAIT_S)
    published = [what for method, what in seen if method == "publish"]
    assert published == [REVISION, Revision(1, "b")]
    assert seen[0] == ("publish", REVISION) and seen.index(("publish", Revision(1, "b"))) < len(seen) - 1
    traces = [done.trace for done in pool.done]
    assert [t.revision for t in traces] == [0, 0, 0, 1] and {t.engine for t in traces} == {"engine 1"}


def test_a_deadline_without_end_is_kept_waiting_for(played):
    """Seconds that no clock of the system can wait for at once."""
    played(engine, deadline_s=1e300).run(2)


def test_groups_are_shared_between_engines(played):
    begun = {}

    def play(worker, method, arguments):
        if method == "work":
            begun.setdefault(worker.number, []).extend(work.number for _, work in arguments[0])
        return engine(worker, method, arguments)

    played(play, engines=2).run(8)
    assert sorted(begun[0] + begun[1]) == list(range(8)) and begun[0] and begun[1]


def test_a_dead_engine_is_replaced_and_nothing_is_lost_or_doubled(played):
    def play(worker, method, arguments):
        if worker.number == 0 and method == "work":
            return WorkerDied("its process ended")
        return engine(worker, method, arguments)

    pool = played(play)
    done = pool.run(4)
    assert len(pool.engines) == 2 and pool.engines[0].killed
    assert [d.trace.faults for d in done] == [1] * 4 and all(rewards_of(d) == [1.0, 1.0] for d in done)


@pytest.mark.slow
def test_a_hung_worker_is_replaced_and_its_late_answer_dropped(played):
    def play(worker, method, arguments):
        if worker.number == 0 and method == "work":
            return NEVER
        return engine(worker, method, arguments)

    pool = played(play, deadline_s=5.0, attempts=20)
    pool.run(3)
    first = pool.engines[0]
    assert first.killed and len(first.open) == 1
    first.open[0].set_result([(0, sampled(requests(1)[0])), (1, sampled(requests(2)[1]))])
    pool.driver.submit(requests(1, step=2), pool._done)
    with pool.came:
        assert pool.came.wait_for(lambda: len(pool.done) == 4, WAIT_S)
    assert [done.request.step for done in pool.done].count(1) == 3


def test_a_group_that_kills_its_workers_ends_with_the_reason_and_takes_no_other_with_it(played):
    def play(worker, method, arguments):
        if method == "work" and any(work.number == 2 for _, work in arguments[0]):
            return WorkerDied("its process ended (out of memory)")
        return engine(worker, method, arguments)

    done = played(play).run(4)
    assert [rewards_of(d) == [1.0, 1.0] for d in done] == [True, True, False, True]
    rollouts = done[2].judged.groups[0].rollouts
    assert {r.completion.error for r in rollouts} == {"its process ended (out of memory)"}
    assert {(r.completion.finish_reason, r.verdict.value) for r in rollouts} == {("error", None)}
    assert done[2].trace.faults == 3 and [r.completion.seed_key for r in rollouts] != [0, 0]


def test_a_group_that_nobody_can_verify_is_unscored_with_the_reason(played):
    def verifier(worker, method, arguments):
        ((_, (work, _)),) = arguments[0]
        if work.number == 1:
            return WorkerDied("its process ended")
        return JudgeWorker(lambda prompts, completions, step: [Verdict(0.5)] * len(completions)).work(*arguments)

    done = played(engine, verifier, verifiers=2, attempts=2).run(3)
    assert [rewards_of(d) for d in (done[0], done[2])] == [[0.5, 0.5]] * 2
    lost = done[1].judged.groups[0].rollouts
    assert [r.verdict.reason for r in lost] == ["its process ended"] * 2 and all(r.completion.token_ids for r in lost)
    assert done[1].trace.faults == 2


def test_answers_for_groups_that_were_not_asked_are_dropped(played):
    def play(worker, method, arguments):
        answer = engine(worker, method, arguments)
        return answer and [*answer, *answer, (10_000, sampled(requests(1)[0]))]

    played(play).run(3)


def test_an_error_of_a_worker_stops_the_run(played):
    def play(worker, method, arguments):
        return EngineError("the model's logits are not finite") if method == "work" else None

    pool = played(play)
    pool.driver.submit(requests(1), pool._done)
    assert "not finite" in str(pool.error())


def test_a_worker_that_dies_again_and_again_stops_the_run(played):
    def play(worker, method, arguments):
        return WorkerDied("its process ended") if method == "publish" else engine(worker, method, arguments)

    assert "had to be replaced 10 times in a row" in str(played(play).error())


# Verifying in this process


def test_a_thread_judges_a_group():
    def judge(prompts, completions, step=0):
        extras = {"who": [c.prompt_id for c in completions]}
        return Judged((Verdict(float(step)),) * len(completions), Logged(extras=extras))

    worker = ThreadWorker(JudgeWorker(judge))
    worker.call("start").result(WAIT_S)
    work = requests(1, step=4)[0]
    ((name, judged),) = worker.call("work", [(7, (work, sampled(work)))], 0.1).result(WAIT_S)
    (group,) = judged.groups
    assert name == 7 and [r.reward for r in group.rollouts] == [4.0, 4.0]
    assert judged.logged.extras == {"who": ["p0", "p0"]}


def test_what_a_verifier_raises_is_the_reason_of_its_group():
    def judge(prompts, completions, step):
        raise ValueError("no such row")

    ((_, judged),) = JudgeWorker(judge).work([(0, (requests(1)[0], sampled(requests(1)[0])))], 0.1)
    assert {r.verdict.reason for r in judged.groups[0].rollouts} == {"verifier raised ValueError: no such row"}


# What is refused


def test_an_empty_world_size_is_no_rank(home, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "")
    pool = {"engines": 1, "ray_address": "nowhere"}
    config = tiny.config(
        home / "model", home / "rows.jsonl", tmp_path / "run", pool=pool, train={"prompts_per_step": 99}
    )
    with pytest.raises(DataError, match="fewer than one batch"):
        runs.train(config, reward=tiny.many_digits)


def test_engines_that_do_not_fit_into_memory_are_refused(home, tmp_path):
    config = tiny.config(home / "model", home / "rows.jsonl", tmp_path / "run", pool={"engines": 10_000_000})
    with pytest.raises(ModelError, match=r"engines of the pool .* GiB.*sampling.max_batch, pool.engines"):
        runs.train(config, reward=tiny.many_digits)
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--pool.max-lag 1", "pool.max_lag = 1: nothing samples beside the trainer; set pool.engines to 1 or more"),
        ("--pool.verifiers 2", "pool.verifiers = 2: nothing samples beside the trainer; set pool.engines to 1 or more"),
        ("--pool.engines -1", "pool.engines = -1: must be at least 0"),
        ("--pool.engines 1 --engine.urls http://127.0.0.1:1", "servers are engines too; give one of them"),
        ("--pool.engine 1", "unknown option 'pool.engine'; did you mean 'pool.engines'?"),
    ],
)
def test_bad_configurations_are_one_line(capsys, tmp_path, words, said):
    assert cli.main(["grpo", *words.split(), "--run.dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and not (tmp_path / "run").exists()


def test_without_ray_the_remedy_is_named(home, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = tiny.config(home / "model", home / "rows.jsonl", tmp_path / "run", pool={"engines": 1})
    with pytest.raises(MissingExtra, match=r"needs ray; pip install 'tinyllm\[cluster\]'"):
        runs.train(config, reward=tiny.many_digits)


def test_a_pool_under_several_ranks_is_refused(home, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tiny.config(home / "model", home / "rows.jsonl", tmp_path / "run", pool={"engines": 1})
    with pytest.raises(ConfigError, match="WORLD_SIZE is more than 1"):
        runs.train(config, reward=tiny.many_digits)
