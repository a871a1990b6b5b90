"""The capstone: its rows, that stages follow from each other, its outcome, and `ol check C2`, on tiny models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import llama, save

from ol.capstone import check_capstone
from ol.cli import main as ol
from tinyllm.capstone import outcome, stages
from tinyllm.capstone.rows import HELD_OUT, VERIFIER, shifted_rows, worked, write_rows
from tinyllm.capstone.stages import CapstonePlan
from tinyllm.commands.capstone import capstone
from tinyllm.errors import RunError, TinyLLMError
from tinyllm.record.files import read_json, write_json
from tinyllm.record.rundir import RunDir
from tinyllm.rewards.base import build, verify

# Rows


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 47 + 36?", "<think>77+6</think><answer>83</answer>"),
        ("What is 82 - 57?", "<think>32-7</think><answer>25</answer>"),
    ],
)
def test_worked_by_hand(prompt, answer):
    assert worked(prompt) == answer


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"), 3, 500, 2000, 50)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def key(prompt: str) -> tuple:
    """The numbers and the operator, in one order for sums: what makes two prompts the same question."""
    words = prompt.removesuffix("?").split()
    operator, a, b = words[3], int(words[2]), int(words[4])
    return (operator, *sorted((a, b))) if operator == "+" else (operator, a, b)


def test_every_worked_example_is_right_in_the_exact_format(rows):
    verifier = build(VERIFIER)
    examples = lines(rows.examples)
    assert len(examples) == 500
    assert all(verify(verifier, row, row["completion"]).value == 1.0 for row in examples)


def test_the_suite_is_kept_out_of_every_stage(rows):
    held_out = {key(row["prompt"]) for row in lines(rows.held_out)}
    trained = [key(row["prompt"]) for path in (rows.examples, rows.prompts) for row in lines(path)]
    assert len(lines(rows.held_out)) == HELD_OUT and not held_out & set(trained)
    assert not {row["prompt"] for row in lines(rows.examples)} & {row["prompt"] for row in lines(rows.prompts)}


def test_suites_are_the_same_for_every_seed_and_what_is_trained_is_not(rows, tmp_path):
    other = write_rows(tmp_path, 4, 500, 2000, 50)
    for name in ("held_out", "shifted"):
        assert getattr(rows, name).read_bytes() == getattr(other, name).read_bytes()
    assert rows.examples.read_bytes() != other.examples.read_bytes()


def test_the_shifted_suite_has_three_digits_and_right_answers():
    found = shifted_rows(80)
    assert len({row["prompt"] for row in found}) == 80
    for row in found:
        numbers = sorted(int(w.strip("?.")) for w in row["prompt"].split() if w.strip("?.").isdigit())
        assert all(100 <= n <= 999 for n in numbers)
        result = sum(numbers) if "plus" in row["prompt"] else numbers[1] - numbers[0]
        assert row["answer"] == str(result)


# The whole, with a reward that a tiny model can earn


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("capstone")
    save(llama(), folder / "model")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tinyllm.view.plot.write_report", lambda run: run.path / "report.png")
        patched.setattr("tinyllm.evals.view.draw", lambda report: b"a picture")
        patched.setattr("tinyllm.capstone.rows.HELD_OUT", 150)
        for module in (stages, outcome):
            patched.setattr(module, "VERIFIER", f"{Path(__file__).parent / 'light_rewards.py'}:many_digits")
        patched.setattr(stages, "SYSTEM_PROMPT", None)
        patched.setattr(outcome, "SYSTEM_PROMPT", None)
        capstone(small(folder), folder / "out")
        capstone(small(folder), folder / "out")  # nothing is done again
    return folder


def small(folder: Path) -> CapstonePlan:
    sizes = {"examples": 20, "prompts": 40, "shifted": 5, "epochs": 1, "pair_steps": 5, "grpo_steps": 2, "monitored": 5}
    return CapstonePlan(model=str(folder / "model"), threads=1, prompts_per_step=4, group_size=4, grpo_lr=0.01, **sizes)


def test_stages_start_from_each_others_weights_and_the_record_agrees(made, capsys):
    findings = check_capstone(made / "out")
    assert [f for f in findings if not f.holds] == []
    names = {f.what for f in findings}
    assert {
        "4-grpo starts from 3-dpo",
        "reward",
        "kl",
        "clip fraction",
        "rollout revision",
        "grpo against sft",
    } <= names
    assert ol(["check", "C2", str(made / "out")]) == 0
    assert "C2 complete" in capsys.readouterr().out


def test_a_run_at_learning_rate_0_samples_and_leaves_the_weights(made):
    run = RunDir.read(made / "out" / "2-pairs")
    hashes = {row["hashes"]["weights"] for row in run.metrics("train")}
    assert hashes == {run.manifest["hashes"]["weights"]} and any(row["updates"] for row in run.metrics("train"))


def test_every_stages_own_rows_are_looked_for_in_the_suite(made):
    overlap = read_json(made / "out" / "capstone.json")["suites"]["held_out"]["overlap"]
    checked = {Path(part["train"]).name: part["prompts"] for part in overlap["checked"]}
    assert checked.keys() == {"1-sft", "3-dpo", "4-grpo"} and min(checked.values()) > 0 and overlap["found"] == []


def test_the_outcome_has_every_stage_and_both_suites(made):
    result = read_json(made / "out" / "capstone.json")
    for suite in ("held_out", "shifted"):
        part = result["suites"][suite]
        assert list(part["results"]) == ["base", "sft", "dpo", "grpo"]
        assert {(c["a"], c["b"]) for c in part["comparisons"]} == {("grpo", b) for b in ("base", "sft", "dpo")}
    text = "\n".join(outcome.summary_lines(result))
    assert str(made) not in text and "grpo and sft:" in text
    page = (made / "out" / "capstone.html").read_text()
    assert "Capstone, seed 0" in page


@pytest.mark.parametrize("fault", ["score", "difference", "quantity", "stage", "weights", "page"])
def test_a_capstone_that_is_not_what_it_says_is_found(made, tmp_path, fault, capsys):
    folder = tmp_path / "out"
    shutil.copytree(made / "out", folder)
    result = read_json(folder / "capstone.json")
    if fault == "score":
        result["suites"]["held_out"]["results"]["grpo"]["score"]["value"] += 0.01
    elif fault == "difference":
        pair = next(c for c in result["suites"]["held_out"]["comparisons"] if c["b"] == "sft")
        pair["difference"]["low"] -= 0.01
    elif fault == "quantity":
        result["quantities"]["reward"]["value"] += 0.001
    elif fault == "stage":
        result["stages"].pop(0)
    elif fault == "weights":
        shutil.rmtree(folder / "3-dpo")
        shutil.copytree(folder / "1-sft", folder / "3-dpo")
    else:
        (folder / "capstone.html").unlink()
    write_json(folder / "capstone.json", {k: v for k, v in result.items() if k != "checksum"})
    assert ol(["check", "C2", str(folder)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_another_plan_or_other_files_are_refused(made, tmp_path):
    with pytest.raises(RunError, match="holds a capstone with other options"):
        capstone(replace(small(made), seed=5), made / "out")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds other files"):
        capstone(small(made), tmp_path)


@pytest.mark.parametrize(
    ("words", "says"), [(["C2"], "name the capstone's folder"), (["C2", "/nowhere"], "no capstone")]
)
def test_check_without_a_capstone_is_one_line(words, says, capsys):
    assert ol(["check", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_finished_stage_is_known(made):
    run = RunDir.read(made / "out" / "4-grpo")
    stage = stages.Stage("4-grpo", run.config, run.path)
    assert stage.finished and not stages.Stage("5", run.config, made / "nowhere").finished
    assert issubclass(RunError, TinyLLMError)
