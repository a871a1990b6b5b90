"""Rewards: how parts become one verdict, TRL-style reward functions and everything they may return."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tinyllm.config.sections import RewardConfig
from tinyllm.errors import RewardError
from tinyllm.records import Completion, Prompt, Revision, Unscored, Verdict
from tinyllm.rewards import RewardJudge, build, make_judge, verifier_hash
from tinyllm.rewards.combine import make_parts

ROW = {"prompt": "What is 3 + 4?", "answer": "7"}


def prompt(name="p", **row):
    return Prompt(name, (1, 2), "rendered", {**ROW, **row})


def completion(text, name="p", sample=0, finish="stop", error=None):
    return Completion(name, 0, sample, (5, 6), (-1.0, -1.0), finish, 1, Revision(0, "h"), text, error)


def data(*prompts, verifier="arithmetic:rule=last_number"):
    return SimpleNamespace(train=prompts, held_out=(), verifier=verifier)


def judge(texts, functions=(), finish="stop", prompts=None, **config):
    prompts = prompts or [prompt()]
    verify = make_judge(RewardConfig(functions=functions, **config), data(*prompts))
    found = verify(prompts, [completion(text, prompts[0].id, i, finish) for i, text in enumerate(texts)], 3)
    verify.close()
    return found.verdicts, found.logged


# the main job


def test_last_number_of_a_finished_completion():
    verdicts, _ = judge(["3 + 4 = 7.", "It is 7, not 8", "seven", ""])
    assert [v.value for v in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert verdicts[0].answer == "7" and dict(verdicts[0].parts) == {"correct": 1.0, "format": 0.0}
    cut, _ = judge(["3 + 4 = 7"], finish="length")
    assert cut[0].value == 0.0 and dict(cut[0].parts)["correct"] == 0.0


def test_correctness_and_format_are_separate_terms():
    texts = ["<answer>7</answer>", "7", "<answer>8</answer>"]
    strict, _ = judge(texts, ("arithmetic:rule=exact_format,tags=answer",))
    assert [v.value for v in strict] == [1.0, 0.0, 0.0]
    terms = ("arithmetic:rule=last_number", "format:rule=exact_format,tags=answer,gold=")
    weighted, _ = judge(texts, terms, weights=(1.0, 0.5))
    assert [v.value for v in weighted] == [1.5, 1.0, 0.5]
    assert [dict(v.parts)["format"] for v in weighted] == [1.0, 0.0, 1.0]


def test_failed_samples_are_unscored_and_not_judged():
    calls = []
    verify = make_judge(
        RewardConfig(functions=(lambda completions: calls.append(len(completions)) or [1.0],)), data(prompt())
    )
    given = [completion("", finish="error", error="cache full"), completion("7", sample=1)]
    verdicts = verify([prompt()], given).verdicts
    assert verdicts[0].value is None and verdicts[0].reason == "sampling failed: cache full"
    assert verdicts[0].cause is Unscored.SAMPLING_FAILED and verdicts[1].cause is None
    assert verdicts[1].value == 1.0 and calls == [1]


# functions


def test_a_function_gets_the_arguments_trl_users_have():
    seen = {}

    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level, **rest):
        seen.update(locals())
        log_extra("length", [len(text) for text in completions])
        log_metric("mean", 2)
        return [0.25] * len(completions)

    verdicts, logged = judge(["7", "eight"], (reward,), prompts=[prompt(level=3)])
    assert seen["prompts"] == ["What is 3 + 4?"] * 2 and seen["completions"] == ["7", "eight"]
    assert seen["completion_ids"] == [[5, 6]] * 2 and seen["trainer_state"].global_step == 3
    assert (seen["answer"], seen["level"], seen["rest"]) == (["7", "7"], [3, 3], {})
    assert logged.extras == {"length": [1, 5]} and logged.metrics == {"reward/mean": 2.0}
    assert [dict(v.parts) for v in verdicts] == [{"reward": 0.25}] * 2


def test_chat_prompts_get_chat_completions():
    chat = [{"role": "user", "content": "hi"}]
    got = []
    judge(
        ["yo"], (lambda prompts, completions: got.append((prompts, completions)) or [1],), prompts=[prompt(prompt=chat)]
    )
    assert got == [([chat], [[{"role": "assistant", "content": "yo"}]])]


def test_async_functions_also_inside_a_running_loop():
    async def reward(completions):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    assert [v.value for v in judge(["a", "bb"], (reward,))[0]] == [1.0, 2.0]

    async def inside():
        return judge(["a", "bb"], (reward,))[0]

    assert [v.value for v in asyncio.run(inside())] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.25), 0.25),
        (Decimal("1.5"), 1.5),
        (np.int64(2), 2.0),
        (-3, -3.0),
    ],
)
def test_numbers_of_any_kind_count(value, expected):
    verdict = judge(["x"], (lambda completions: [value],))[0][0]
    assert verdict.value == expected and type(verdict.value) is float


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), 10**400, np.nan])
def test_what_is_no_finite_number_is_unscored_with_its_reason_and_neighbours_count(value):
    def reward(completions):
        return [1.0, value, 0.0]

    verdicts, _ = judge(["a", "b", "c"], (reward,))
    assert [v.value for v in verdicts] == [1.0, None, 0.0] and verdicts[1].reason.startswith("reward returned")


@pytest.mark.parametrize("value", ["1", b"1", [1.0], 1j, {"a": 1}])
def test_what_is_no_number_at_all_is_refused_with_the_row(value):
    def reward(completions):
        return [value]

    with pytest.raises(RewardError, match="reward returned .* for prompt p; return a number"):
        judge(["x"], (reward,))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_wrong_count_names_the_function_and_both_counts(count):
    def reward(completions):
        return [1.0] * count

    with pytest.raises(RewardError, match=f"reward function reward returned {count} rewards for 4 completions"):
        judge(["a", "b", "c", "d"], (reward,))


@pytest.mark.parametrize("value", [None, 1.0, "1111", {"a": 1}])
def test_what_is_no_list_is_refused(value):
    with pytest.raises(RewardError, match="return a list of 4 numbers"):
        judge(["a", "b", "c", "d"], (lambda completions: value,))


def test_a_function_that_raises_leaves_its_completions_unscored():
    def reward(completions):
        raise KeyError("gold")

    verdicts, _ = judge(["a", "b"], (reward,))
    assert [v.value for v in verdicts] == [None, None]
    assert re.match(r"reward raised KeyError: 'gold' \(test_rewards.py:\d+\)", verdicts[0].reason)


def test_each_completion_is_judged_exactly_once_in_order():
    counted = []

    def reward(completions):
        counted.extend(completions)
        return [float(text) for text in completions]

    prompts = [prompt("a"), prompt("b")]
    verify = make_judge(RewardConfig(functions=(reward,)), data(*prompts))
    texts = [completion(str(n), "ab"[n % 2], n) for n in range(6)]
    assert [v.value for v in verify(prompts, texts).verdicts] == [0, 1, 2, 3, 4, 5]
    assert counted == [str(n) for n in range(6)]


def test_rows_without_a_column_give_none_to_the_function():
    got = []
    prompts = [prompt("a", level=1), prompt("b")]
    verify = make_judge(
        RewardConfig(functions=(lambda completions, level: got.append(level) or [0, 0],)), data(*prompts)
    )
    verify(prompts, [completion("x", "a"), completion("y", "b")])
    assert got == [[1, None]]


def test_reserved_names_are_refused():
    def reward(completions, log_extra):
        log_extra("prompt", ["x"])
        return [1.0]

    with pytest.raises(RewardError, match=r"log_extra\('prompt'\) is a column of the record"):
        judge(["x"], (reward,))
    with pytest.raises(RewardError, match="data column 'completions' has the name of an argument"):
        judge(["x"], (lambda completions: [1],), prompts=[prompt(completions="y")])

    def short(completions, log_extra):
        log_extra("note", [])
        return [1.0]

    with pytest.raises(RewardError, match="0 values for 1 completions"):
        judge(["x"], (short,))


def test_an_argument_that_is_no_column_is_found_before_training():
    with pytest.raises(RewardError, match="needs 'anwser', which is no column of the data; did you mean 'answer'"):
        make_judge(RewardConfig(functions=(lambda completions, anwser: [1],)), data(prompt()))


# combinations


def test_weighted_sum_and_names():
    def length(completions):
        return [len(text) for text in completions]

    verdicts, _ = judge(["7", "it is 7"], ("arithmetic:rule=last_number", length, length), weights=(1.0, 0.1, 0.0))
    assert [v.value for v in verdicts] == pytest.approx([1.1, 1.7])
    assert dict(verdicts[1].parts) == {"correct": 1.0, "length": 7.0, "length2": 7.0}


def test_a_function_for_other_tasks_returns_none_and_leaves_the_sum():
    verdicts, _ = judge(["7"], (lambda completions: [None], lambda completions: [0.5]))
    assert verdicts[0].value == 0.5
    verdicts, _ = judge(["7"], (lambda completions: [None], lambda completions: [None]))
    assert verdicts[0].value is None
    verdicts, _ = judge(["7"], (lambda completions: [float("nan")], lambda completions: [0.5]))
    assert verdicts[0].value is None and "nan" in verdicts[0].reason


@pytest.mark.parametrize(
    ("combine", "values"), [("sum", [2.0, 1.0, 1.0]), ("product", [1.0, 0.0, 0.0]), ("gate", [1.0, 0.0, 0.0])]
)
def test_product_and_gate(combine, values):
    specs = ("format:rule=tag,gold=", "arithmetic:rule=last_number")
    verdicts, _ = judge(["<answer>7</answer>", "7", "<answer>8</answer>"], specs, combine=combine)
    assert [v.value for v in verdicts] == values
    assert [name for name, _ in verdicts[0].parts] == ["correct", "arithmetic"]


def test_a_gate_needs_something_behind_it():
    with pytest.raises(RewardError, match="needs two functions or more"):
        judge(["7"], combine="gate")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"functions": ("nowhere_module:f",)}, "no module 'nowhere_module'"),
        ({"functions": ("arithmetc",)}, "verifier 'arithmetc' is unknown; did you mean 'arithmetic'"),
        ({"functions": ("json:nothing=1",)}, "json"),
        ({"functions": ("arithmetic:rul=tag",)}, "has no setting 'rul'; did you mean 'rule'"),
        ({"functions": ("arithmetic:rule=tags",)}, 'arithmetic.rule = "tags": expected tag|boxed'),
        ({"functions": ("arithmetic:abs_tol=-1",)}, "abs_tol = '-1'"),
        ({"functions": ("os.path:joinn",)}, "did you mean 'join'"),
        ({"functions": ("os.path:sep",)}, "cannot be called"),
        ({"functions": ("os.path:join",), "weights": (1.0, 2.0)}, "2 numbers for 1 functions"),
        ({"functions": ("math:places=x",)}, 'math.places = "x": expected whole number'),
        ({"functions": ('{"family": "arithmetik"}',)}, "did you mean 'arithmetic'"),
    ],
)
def test_wrong_specs_are_refused_with_the_remedy(config, words):
    with pytest.raises(RewardError, match=re.escape(words)):
        make_judge(RewardConfig(**config), data(prompt()))


def test_a_module_that_fails_to_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RewardError, match="importing it raised ZeroDivisionError"):
        make_judge(RewardConfig(functions=("broken_reward:f",)), data(prompt()))


def test_a_function_can_be_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [0.5 for _ in completions]\n")
    verdicts, _ = judge(["x"], (f"{tmp_path}/mine.py:score",))
    assert verdicts[0].value == 0.5
    with pytest.raises(RewardError, match="does not exist"):
        judge(["x"], (f"{tmp_path}/other.py:score",))


def test_what_the_manifest_says():
    about = make_judge(RewardConfig(), data(prompt())).describe()
    assert [part["name"] for part in about["parts"]] == ["correct", "format"]
    assert about["parts"][0]["verifier"]["rule"] == "last_number" and len(about["parts"][0]["hash"]) == 32
    code = RewardJudge(make_parts(RewardConfig(functions=("code",)), None)).describe()
    assert code["sandbox"]["level"] in ("bubblewrap", "landlock")


# what was logged, and causes


def log_length(completions, log_extra, log_metric):
    log_extra("length", [len(text) for text in completions])
    log_metric("calls", 1)
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [log_length, "reward_functions:log_length"])
def test_columns_have_one_value_per_completion_that_was_given(function, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    verify = make_judge(RewardConfig(functions=(function,)), data(prompt()))
    failed = completion("", sample=1, finish="error", error="cache full")
    try:
        judged = verify([prompt()], [completion("abc"), failed, completion("a", sample=2)])
        nothing = verify([prompt()], [failed])
    finally:
        verify.close()
    assert judged.logged.extras == {"length": [3, None, 1]} and judged.logged.metrics == {"log_length/calls": 1.0}
    assert [v.value for v in judged.verdicts] == [1.0, None, 1.0]
    assert nothing.logged.extras == {} and nothing.verdicts[0].reason == "sampling failed: cache full"


def test_words_of_a_message_decide_nothing():
    """An exception whose text ends as the reason of None does: it failed, and is not a function for other rows."""

    def raises(completions):
        raise ValueError("the server returned None")

    verdicts, _ = judge(["7"], (raises, lambda completions: [0.5]))
    assert verdicts[0].value is None and verdicts[0].cause is Unscored.RAISED
    verdicts, _ = judge(["7"], (lambda completions: [None], lambda completions: [None]))
    assert verdicts[0].cause is Unscored.NOT_APPLICABLE
    verdicts, _ = judge(["7"], (lambda completions: [float("nan")], lambda completions: [None]))
    assert verdicts[0].cause is Unscored.NOT_FINITE


def test_a_cause_is_no_part_of_what_replay_compares():
    assert Verdict(None, "why", cause=Unscored.RAISED) == Verdict(None, "why")
    assert hash(Verdict(None, "why", cause=Unscored.RAISED)) == hash(Verdict(None, "why"))


def test_threads_call_a_judge_one_at_a_time():
    inside, most = [], []

    def reward(completions):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return [float(text) for text in completions]

    verify, found = make_judge(RewardConfig(functions=(reward,)), data(prompt())), {}

    def call(number):
        found[number] = verify([prompt()], [completion(str(number))]).verdicts[0].value

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8 and found == {number: float(number) for number in range(8)}


# specs and identity

HASHES = {
    "format": "d1f7e327ba4dceb58c2be384b39c065d",
    "arithmetic": "a3c29202fd983d399bc45b051d2798a7",
    "math": "f87dea06ff8daffc776d5efccb9e4539",
    "json": "10edbfe874af7622dd3b07b5720891b6",
    "code": "d214ab9d2e8996e9787425a766f69cb5",
    "gym": "d6037bfe7b2f689de7f00d91bcba5dd1",
    "instructions": "e93dde8c5fea67c48016e1288efad908",
    "arithmetic:rule=hash,units=$|dollars,abs_tol=1e-6": "a9622a9cbae49a5945647d2ef4a0e8b3",
    "math:rule=final,places=6": "9fb54a053d9185cd7f256746eb608df8",
    "gym:rule=boxed,boxes=boxed|fbox": "31aa4e4e583ff1f196e9f75c263da06a",
}


@pytest.mark.parametrize("spec", HASHES)
def test_specs_are_flat_and_their_hashes_stay(spec):
    """They stand in manifests: another hash would make every recorded run look as if its verifier had changed."""
    verifier = build(spec)
    assert verifier.hash == HASHES[spec]
    assert build(verifier.spec) == verifier and build(json.dumps(verifier.spec)) == verifier
    assert "region" not in verifier.spec


@pytest.mark.parametrize("spec", ["json:rule=tag", "code:tag=x", "arithmetic:region=x", "math:reads_end=1"])
def test_settings_of_a_region_are_for_families_that_have_one(spec):
    with pytest.raises(RewardError, match="has no setting"):
        build(spec)


def test_a_reward_is_identified_by_its_settings_weights_and_sources(tmp_path):
    def parts(*functions, **config):
        return make_parts(RewardConfig(functions=functions, **config), None)

    file = tmp_path / "mine.py"
    file.write_text("def score(completions):\n    return [1.0]\n")
    both = [parts("arithmetic"), parts("arithmetic:rule=boxed"), parts("math"), parts(f"{file}:score")]
    both += [parts("arithmetic", weights=(2.0,)), parts(log_length)]
    hashes = [verifier_hash(each) for each in both]
    assert len(set(hashes)) == len(both) and hashes == [verifier_hash(each) for each in both]
    file.write_text("def score(completions):\n    return [0.5]\n")
    assert verifier_hash(both[3]) != hashes[3]


def test_every_family_is_built_and_judges_without_torch():
    code = (
        "import sys, tinyllm.rewards as r\n"
        "from tinyllm.rewards.base import FAMILIES\n"
        "assert all(r.build(name).family == name for name in FAMILIES)\n"
        "assert r.build('arithmetic').score('<answer>7</answer>', {'answer': '7'}) == 1.0\n"
        "assert r.build('math').score('$\\\\boxed{0.5}$', {'answer': '1/2'}) == 1.0\n"
        "found = {'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
