"""The worker pool: hung and dead workers, limits, neighbours, threads and event loops, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from test_rewards import completion, data, prompt

from tinyllm.config.sections import RewardConfig
from tinyllm.errors import RewardError
from tinyllm.records import Unscored
from tinyllm.rewards import make_judge
from tinyllm.rewards.pool import VerifierPool, VerifyTask


@pytest.fixture
def make(monkeypatch):
    """The judge of one function of reward_functions.py, closed after the test."""
    monkeypatch.chdir(os.path.dirname(__file__))
    made = []

    def build(name, **config):
        made.append(make_judge(RewardConfig(functions=(f"reward_functions:{name}",), **config), data(prompt())))
        return made[-1]

    yield build
    for verify in made:
        verify.close()


def judge(verify, texts):
    return judged(verify, texts).verdicts


def judged(verify, texts):
    return verify([prompt()], [completion(text, sample=n) for n, text in enumerate(texts)], 1)


def test_hung_calls_are_marked_their_neighbours_count_and_no_worker_is_lost(make):
    verify = make("hang_on_text", timeout_s=1.0)
    start = time.monotonic()
    verdicts = judge(verify, ["a", "bb", "loop", "ccc", "sleep", "d", "e", "f"])
    assert time.monotonic() - start < 15  # 2 limits of 1 s and the starts of new workers, with room for a slow machine
    assert [v.value for v in verdicts] == [1.0, 2.0, None, 3.0, None, 1.0, 1.0, 1.0]
    assert {verdicts[2].reason, verdicts[4].reason} == {"timed out after 1 s"}
    assert {verdicts[2].cause, verdicts[4].cause} == {Unscored.TIMED_OUT}
    for _ in range(20):
        assert [v.value for v in judge(verify, ["a", "bb"])] == [1.0, 2.0]
    pids = [worker.process.pid for worker in verify.pool._workers if worker]
    verify.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_worker_that_dies_marks_only_its_sample(make):
    verdicts = judge(make("hang_on_text"), ["a", "quit", "b"])
    assert [v.value for v in verdicts] == [1.0, None, 1.0]
    assert verdicts[1].reason == "its worker died (exit code 3)" and verdicts[1].cause is Unscored.DIED


def test_memory_is_bounded(make):
    verdicts = judge(make("fill_memory"), ["a"])
    assert verdicts[0].value is None and "MemoryError" in verdicts[0].reason
    assert verdicts[0].cause is Unscored.RAISED


def test_children_of_a_killed_worker_are_killed(make):
    def sleeping():
        found = [process for process in psutil.process_iter() if process.name() == "sleep"]
        return {process.pid for process in found if process.status() != psutil.STATUS_ZOMBIE}

    before = sleeping()
    assert judge(make("child", timeout_s=1.0), ["a"])[0].reason == "timed out after 1 s"
    time.sleep(0.2)
    assert sleeping() <= before


def test_closing_ends_a_call_that_another_thread_has_under_way(make):
    """As at the second Ctrl-C, while a pool verifies in a thread: nobody waits for its limit of an hour."""
    verify, ended = make("hang_on_text", timeout_s=3600.0), []

    def call():
        try:
            ended.append(judge(verify, ["sleep", "sleep"])[0].reason)
        except RewardError as error:
            ended.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not any(worker and worker.task is not None and not worker.preparing for worker in verify.pool._workers):
        assert thread.is_alive()
        time.sleep(0.02)
    closing = threading.Thread(target=verify.close, daemon=True)
    closing.start()
    for each in (closing, thread):
        each.join(60.0)
        assert not each.is_alive()
    assert ended == ["verifying was ended"] and not any(verify.pool._workers)


def test_a_worker_whose_parent_is_killed_ends_in_the_middle_of_a_call(tmp_path):
    """SIGKILL of a verifier's process, or of the trainer: a call that sleeps or loops for ever is not left behind."""
    code = (
        "from test_rewards import data, prompt, completion\nfrom tinyllm.config.sections import RewardConfig\n"
        "from tinyllm.rewards import make_judge\n"
        "config = RewardConfig(functions=('reward_functions:child',), timeout_s=3600.0)\n"
        "make_judge(config, data(prompt()))([prompt()], [completion('a')], 1)"
    )
    folder = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(folder), folder])}
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment) as parent:
        process, left, end = psutil.Process(parent.pid), [], time.monotonic() + 300
        while not any(child.name() == "sleep" for child in left):
            assert parent.poll() is None and time.monotonic() < end
            time.sleep(0.1)
            left = process.children(recursive=True)
        parent.kill()
    gone, alive = psutil.wait_procs(left, timeout=60)
    for child in alive:
        child.kill()
    assert len(gone) >= 2 and not alive


def test_each_call_is_made_once_and_state_and_logs_come_back(make):
    verify = make("count_calls")
    assert [v.value for v in judge(verify, ["a", "b"])] == [0.1, 0.1]
    logged = judged(verify, ["a", "b", "c"]).logged
    assert logged.metrics == {"count_calls/calls": 2.0}
    assert logged.extras["pid"][0] != os.getpid() and len(logged.extras["pid"]) == 3


def test_a_broken_contract_stops_with_its_message(make):
    with pytest.raises(RewardError, match="wrong_count returned 1 rewards for 3 completions"):
        judge(make("wrong_count"), ["a", "b", "c"])
    with pytest.raises(RewardError, match="has no 'nothing'"):
        make("nothing")


def test_from_threads_and_inside_an_event_loop(make):
    verify = make("hang_on_text")
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: [v.value for v in judge(verify, ["a" * n])]}))
        for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [float(n)] for n in range(1, 5)}

    async def serve():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        verdicts = await asyncio.to_thread(judge, verify, ["abc"])
        ticking.cancel()
        return verdicts[0].value, ticks

    value, ticks = asyncio.run(serve())
    assert value == 3.0 and ticks > 0


def test_nothing_grows_over_many_calls(make):
    verify = make("hang_on_text", timeout_s=0.3, workers=1)
    judge(verify, ["a"])
    process = psutil.Process()
    before = process.num_fds(), threading.active_count(), len(process.children(recursive=True))
    for _ in range(3):
        judge(verify, ["loop"])
        judge(verify, ["a"])
    assert (process.num_fds(), threading.active_count(), len(process.children(recursive=True))) == before


def test_verifiers_run_in_the_pool_and_keep_their_order():
    schema = {"type": "integer"}
    rows = SimpleNamespace(train=(prompt(schema=schema),), held_out=(), verifier="json")
    verify = make_judge(RewardConfig(), rows)
    try:
        texts = ["1", "x", "2", "{}", "3"] * 4
        assert [v.value for v in judge_rows(verify, rows.train, texts)] == [1.0, 0.0, 1.0, 0.0, 1.0] * 4
    finally:
        verify.close()


def test_completions_that_were_cut_leave_the_others_in_place():
    rows = SimpleNamespace(train=(prompt(answer="1/2"),), held_out=(), verifier="math:rule=final")
    verify = make_judge(RewardConfig(timeout_s=60.0), rows)
    texts = [("$\\frac{1}{2}$", "length"), ("$0.5$", "stop"), ("$0.5$", "length"), ("$2$", "stop"), ("$1/2$", "stop")]
    try:
        cut = [completion(text, sample=n, finish=finish) for n, (text, finish) in enumerate(texts)]
        assert [v.value for v in verify(rows.train, cut, 1).verdicts] == [0.0, 1.0, 0.0, 0.0, 1.0]
    finally:
        verify.close()


def judge_rows(verify, prompts, texts):
    return verify(prompts, [completion(text, sample=n) for n, text in enumerate(texts)], 1).verdicts


def test_time_waiting_for_a_worker_does_not_count():
    pool = VerifierPool(workers=1)
    try:
        spec = {"family": "json"}
        message = {"kind": "verify", "row": {"schema": {"type": "integer"}}, "text": "1"}
        results = pool.run([VerifyTask(spec, message, 0.5) for _ in range(400)])
        assert all(result["verdicts"][0][0] == 1.0 for result in results)
    finally:
        pool.close()
