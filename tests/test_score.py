"""`tinyllm score` and `tinyllm probe`, from the shell as a user runs them and through their functions."""

from __future__ import annotations

import json
import sys

import pytest
from test_rewards import data, prompt
from test_tasks import jsonl

from tinyllm.commands import score as commands
from tinyllm.commands.arguments import ProbeArguments, ScoreArguments
from tinyllm.config.sections import RewardConfig
from tinyllm.config.words import parse_words
from tinyllm.errors import DataError, RewardError, UserError
from tinyllm.rewards import RewardJudge
from tinyllm.rewards.combine import make_parts
from tinyllm.rewards.probe import probe, probe_before_training
from tinyllm.tasks.arithmetic import ArithmeticConfig, generate


def main(words):
    return commands.main(*parse_words(words, ScoreArguments))


def probe_main(words):
    return commands.probe_main(*parse_words(words, ProbeArguments))


ROWS = [
    {"prompt": "3 + 4?", "answer": "7", "completion": "<answer>7</answer>"},
    {"prompt": "3 + 4?", "answer": "7", "completion": "<answer>8</answer>"},
    {"prompt": "3 + 4?", "answer": "7", "completion": "seven"},
    {"prompt": "3 + 4?", "answer": "?", "completion": "<answer>8</answer>"},
]


def test_score_counts_values_and_unscored_rows(tmp_path, capsys):
    out = tmp_path / "verdicts.jsonl"
    code = main([jsonl(tmp_path, ROWS), "--verifier", "arithmetic", "--explain", "--out", str(out)])
    text = capsys.readouterr().out
    assert code == 1  # a row stayed unscored
    assert "4 rows: 1 score 1, 2 score 0, 1 unscored" in text and "mean 0.3333 (95% interval" in text
    assert "row 1 of rows.jsonl: 1 answer '7'" in text and "row 3 of rows.jsonl: 0 (no <answer> block)" in text
    assert "row 4 of rows.jsonl: unscored (bad task: gold '?'" in text
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [verdict["value"] for verdict in verdicts] == [1.0, 0.0, 0.0, None]


def test_score_with_functions_weights_columns_and_chat_completions(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_score.py").write_text(
        "def length(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [{"prompt": "3 + 4?", "gold": "7", "out": [{"role": "assistant", "content": "7"}]}]
    command = [jsonl(tmp_path, rows), "--verifier", "arithmetic:rule=whole", "--verifier", "my_score:length"]
    assert main([*command, "--weights", "1,0.5", "--columns", "answer=gold,completion=out", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "1.5" in text and "[correct=1 length=1]" in text


def test_score_warns_when_nothing_differs(tmp_path, capsys):
    main([jsonl(tmp_path, ROWS[:1] * 6), "--verifier", "arithmetic"])
    assert "a reward that never differs teaches nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl", "--verifier", "arithmetic"], "does not exist"),
        (["FILE", "--verifier", "arithmetik:rule=tag"], "did you mean 'arithmetic'"),
        (["FILE", "--verifier", "arithmetic", "--weights", "x"], "--weights x: expected number"),
        (["FILE", "--verifier", "arithmetic", "--columns", "x"], "ours=theirs"),
        (["FILE", "--verifier", "arithmetic", "--columns", "completion=x"], "no column 'x'"),
        (["FILE", "--verifier", "arithmetic", "--timeout-s", "0"], "--timeout-s 0.0: must be more than 0"),
        (["FILE"], "--verifier"),
    ],
)
def test_score_mistakes_are_one_line(tmp_path, arguments, words):
    file = jsonl(tmp_path, ROWS)
    with pytest.raises(UserError, match=words):
        main([file if argument == "FILE" else argument for argument in arguments])


def test_score_names_a_missing_completion_column(tmp_path):
    with pytest.raises(DataError, match="has no column 'completion'; did you mean 'completions'"):
        main([jsonl(tmp_path, [{"completions": "x", "answer": "1"}]), "--verifier", "arithmetic"])


# probe


@pytest.mark.parametrize("rule", ["last_number", "tag", "boxed", "hash", "marker", "final", "exact_format", "whole"])
@pytest.mark.parametrize("family", ["arithmetic", "format"])
def test_no_attack_pays_on_our_verifiers(family, rule, capsys):
    assert probe_main(["--verifier", f"{family}:rule={rule}", "--rows", "4"]) == 0
    assert "0 of" in capsys.readouterr().out


def findings(function, *rows):
    verify = RewardJudge(make_parts(RewardConfig(functions=(function,)), None))
    return {
        finding.name for finding in probe(verify, [prompt(str(n), **row) for n, row in enumerate(rows)]) if finding.pays
    }


def test_weak_rewards_are_found_out():
    rows = [{"prompt": f"Add {n} and 1000.", "answer": str(n + 1000)} for n in range(10)]

    def contains(completions, answer, **_):
        return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]

    def ends(completions, answer, **_):
        return [float(text.endswith(gold)) for text, gold in zip(completions, answer, strict=True)]

    def always(completions, **_):
        return [1.0 for _ in completions]

    def short(completions, **_):
        return [float(len(text) < 50) for text in completions]

    def digits(completions, answer, **_):
        return [
            float(text.isdigit() and int(text) == int(gold)) for text, gold in zip(completions, answer, strict=True)
        ]

    assert {"gold or another", "gold, continued", "gold, then another answer"} <= findings(contains, *rows)
    assert "gold after the end of turn" in findings(ends, *rows)
    assert {"empty", "refusal", "the prompt"} <= findings(always, *rows)
    assert "empty" in findings(short, *rows)
    assert findings(digits, *rows) == {"gold in other digits"}


def test_training_is_stopped_by_a_paying_attack_unless_it_is_allowed_by_name():
    rows = data(
        *(prompt(str(n), prompt="Say anything.", answer=str(n)) for n in range(10)), verifier="format:rule=tag,gold="
    )
    with pytest.raises(RewardError, match="the verifier pays for .*'any'"):
        probe_before_training(RewardConfig(), rows)
    with pytest.raises(RewardError) as caught:
        probe_before_training(RewardConfig(), rows, allowed=("any",))
    assert "'any'" not in str(caught.value)
    found = probe_before_training(RewardConfig(), data(prompt()))
    assert found and not [finding for finding in found if finding.pays]


def test_functions_of_the_user_are_not_called_before_training():
    calls = []
    assert probe_before_training(RewardConfig(functions=(lambda **_: calls.append(1),)), data(prompt())) == []
    assert calls == []


def test_code_attacks_do_not_pay(tmp_path, capsys):
    rows = [
        {"prompt": "Write add(a, b).", "calls": [[[2, 3], 5], [[1, 1], 2]], "solution": "def add(a, b): return a + b"}
    ]
    assert probe_main(["--verifier", "code", "--data", jsonl(tmp_path, rows)]) == 0
    assert "always-equal object" in capsys.readouterr().out


def test_probe_reports_rows_that_cannot_be_used(tmp_path, capsys):
    rows = [{"prompt": "a", "answer": "12"}, {"prompt": "b", "answer": "x"}]
    assert probe_main(["--verifier", "arithmetic", "--data", jsonl(tmp_path, rows)]) == 0
    assert "1 of 2 rows fail their self-test" in capsys.readouterr().out
    with pytest.raises(DataError, match="no row can be used"):
        probe_main(["--verifier", "arithmetic", "--data", jsonl(tmp_path, rows[1:])])


@pytest.mark.slow
def test_no_attack_pays_on_any_row_of_the_main_job():
    rows = data(*(prompt(str(n), **row) for n, row in enumerate(generate(ArithmeticConfig())[0])))
    found = probe_before_training(RewardConfig(), rows, rows=519)
    assert found[0].rows == 519 and not [finding for finding in found if finding.informed and finding.paid]
