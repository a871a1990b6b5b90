"""The course command: `ol check` on the reference, and a chapter as a student goes through it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ol import chapter as chapters

CHAPTER = chapters.load("L12.3")


def ol(*args, cwd):
    """Exit code, standard output, standard error."""
    command = [sys.executable, "-m", "ol.cli", *args]
    environment = os.environ | {"PYTHONPATH": str(chapters.ROOT)}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


def refilled(exercise: str, reference: str) -> str:
    """The exercise with each blanked body replaced by the reference's."""
    for name in CHAPTER.blank:
        blank, full = chapters.functions(exercise)[name], chapters.functions(reference)[name]
        lines, source = exercise.splitlines(keepends=True), reference.splitlines(keepends=True)
        body = source[chapters.body_start(full) - 1 : full.end_lineno]
        lines[chapters.body_start(blank) - 1 : blank.end_lineno] = body
        exercise = "".join(lines)
    return exercise


@pytest.mark.slow
def test_check_passes_on_the_reference_and_catches_every_mutant(tmp_path):
    code, out, err = ol("check", "L12.3", "--reference", cwd=tmp_path)
    assert (code, err) == (0, ""), out + err
    for mutant in CHAPTER.mutants:
        assert re.search(rf"caught +{mutant.id} .*\n +by {mutant.caught_by}\n", out)
    assert "MISSED" not in out and "FAIL" not in out
    assert f"{len(CHAPTER.mutants)} mutants are caught" in out


@pytest.mark.slow
def test_a_student_starts_fails_and_finishes(tmp_path):
    code, out, _ = ol("start", "L12.3", cwd=tmp_path)
    file = tmp_path / "workspace" / "L12.3" / "grpo.py"
    assert code == 0 and "workspace/L12.3/grpo.py: 13 bodies" in out
    assert file.with_suffix(".pyi").read_text() == CHAPTER.contract.read_text()

    code, out, _ = ol("tests", "L12.3", cwd=tmp_path)
    assert code == 1 and "0 of 18 tests pass" in out
    assert "NotImplementedError: L12.3: write group_advantages (line" in out
    assert "still to write: group_advantages, clipped_objective," in out
    for name, why in reasons().items():
        assert f"FAIL  {name}\n" in out and " ".join(why.split())[:60] in " ".join(out.split())

    exercise = file.read_text()
    assert exercise != CHAPTER.source.read_text()
    code, _, err = ol("start", "L12.3", cwd=tmp_path)
    assert code == 2 and "exists and stays as it is" in err and file.read_text() == exercise

    solved = refilled(exercise, CHAPTER.source.read_text())
    assert solved == CHAPTER.source.read_text()
    # An own solution may have public helpers that the contract does not know
    file.write_text(solved + "\n\ndef my_helper(x: float) -> float:\n    return 2 * x\n")
    code, out, err = ol("check", "L12.3", cwd=tmp_path)
    assert (code, err) == (0, ""), out + err
    assert "checking workspace/L12.3/grpo.py\n" in out and "L12.3 complete" in out


@pytest.mark.slow
def test_check_names_what_is_wrong_with_a_workspace(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    text = CHAPTER.source.read_text()
    wrong = text.replace("clip_high: float = 0.2,\n    dual_clip", "clip_high: float = 0.3,\n    dual_clip")
    wrong = wrong.replace("(beta * _aggregated", "(_aggregated").replace("torch.minimum(q * A", "torch.minimum(q / A")
    assert wrong != text
    (folder / "grpo.py").write_text(wrong)
    code, out, _ = ol("check", "L12.3", "--workspace", "mine", cwd=tmp_path)
    assert code == 1
    assert re.search(r"contract  FAIL", out) and "clip_high" in out
    assert re.search(r"FAIL    test_hand_grpo_objective\n +-> AssertionError", out)
    assert "mutants   not run" in out and "not yet:" in out


def test_mistakes_are_one_line_with_exit_code_2(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "grpo.py").write_text("def group_advantages(:\n")
    (tmp_path / "a file").write_text("")
    for args, message in [
        (("start", "L99"), "there is no chapter 'L99'; chapters: L12.3"),
        (("check", "../L12.3"), "there is no chapter '../L12.3'"),
        (("tests", "L12.3", "--workspace", "nowhere"), "there is no nowhere/grpo.py: make it with"),
        (("check", "L12.3", "--workspace", "broken"), "broken/grpo.py line 1: invalid syntax"),
        (("start", "L12.3", "--workspace", "a file"), "choose --workspace FOLDER"),
        ((), "the following arguments are required: COMMAND"),
        (("build", "L12.3"), "invalid choice: 'build'"),
    ]:
        code, out, err = ol(*args, cwd=tmp_path)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
        assert message in err


@pytest.mark.slow
def test_a_hanging_or_unimportable_workspace_is_reported(tmp_path, monkeypatch):
    from ol import check
    from tinyllm.errors import UserError

    monkeypatch.setattr(check, "CPU_LIMIT_S", 8)
    file = tmp_path / "grpo.py"
    file.write_text("def group_advantages(*a, **k):\n    while True:\n        pass\n")
    with pytest.raises(UserError, match="test_grouped_rewards_are_centered did not end within 8 s"):
        check.run_tests(CHAPTER, file)
    monkeypatch.undo()
    file.write_text("import a_module_that_is_not_there\n")
    results = check.run_tests(CHAPTER, file)
    assert len(results) == 18
    assert all("ModuleNotFoundError" in r.message and r.message.endswith("(line 1)") for r in results)


def reasons() -> dict[str, str]:
    """Test functions of the chapter and their docstrings."""
    found = {}
    for path in CHAPTER.tests.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.get_docstring(node)
    return found


def test_every_test_says_why_it_exists_and_the_chapter_lists_it():
    text = CHAPTER.text.read_text()
    for name, why in reasons().items():
        assert why and why.startswith("Why: "), name
        assert f"| `{name}` |" in text
    required = {"hand_grpo_objective", "grouped_rewards_are_centered", "zero_advantage_has_zero_policy_gradient"}
    assert {f"test_{name}" for name in required} <= set(reasons())


def test_mutants_are_distinct_and_name_a_test_of_the_chapter():
    ids = [m.id for m in CHAPTER.mutants]
    assert ids == [f"s{i:02}" for i in range(1, len(ids) + 1)] and len(ids) >= 12
    assert {m.caught_by for m in CHAPTER.mutants} == set(reasons())
    text = CHAPTER.source.read_text()
    assert len({m.applied(text) for m in CHAPTER.mutants}) == len(ids)
    by_id = {m.id: m for m in CHAPTER.mutants}
    assert by_id["s01"].caught_by == "test_grouped_rewards_are_centered" and "unrelated prompts" in by_id["s01"].fault
    assert by_id["s02"].caught_by == "test_hand_grpo_objective" and by_id["s02"].fault == "omits clipping"


def test_the_chapter_has_all_its_parts():
    text = CHAPTER.text.read_text()
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings == [
        "Key takeaways", "Why now", "Principles", "Worked example", "Interface", "Pitfalls", "What comes next",
        "Going further",
    ]  # fmt: skip
    for word in ("optional build", "3 to 4 hours", "M11.1", "M07.4", "L8.1", "L10.5", "capstone C2", CHAPTER.title):
        assert word in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert Path(CHAPTER.text.parent, link).exists()
