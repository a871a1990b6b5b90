"""What `ol tests` and `ol check` do: the contract, the tests, the mutants."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ol.chapter import Chapter, Mutant
from tinyllm.errors import UserError

CPU_LIMIT_S = 60
"""Processor seconds that tests and mutants may take together; they need about 7. Waiting on a busy machine is free."""
WALL_LIMIT_S = 1800.0
"""Seconds after which a child is ended even if it computes nothing."""

MYPY_SETTINGS = """[mypy]
ignore_missing_imports = True
[mypy-torch.*,tinyllm.*]
follow_imports = skip
"""


@dataclass
class TestResult:
    """One test function; parametrized cases are counted together."""

    name: str
    why: str
    passed: bool
    message: str = ""
    asserted: bool = False
    """Whether it failed at an assertion, not by an exception on the way to one."""


def require_tools() -> None:
    """Raise UserError when what the course runs on is not installed."""
    missing = [name for name in ("pytest", "mypy") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not found: install the development extra, pip install -e '.[dev]'")


def check_contract(chapter: Chapter, file: Path, extra_names: bool) -> list[str]:
    """Differences between a file and the chapter's contract, one line each (stubtest's words).

    extra_names: whether the file may have public names that the contract lacks.
    """
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        name = chapter.contract.stem
        shutil.copy(file, Path(folder, f"{name}.py"))
        shutil.copy(chapter.contract, Path(folder, f"{name}.pyi"))
        settings = Path(folder, "mypy.ini")
        settings.write_text(MYPY_SETTINGS, encoding="utf-8")
        command = [sys.executable, "-m", "mypy.stubtest", name, "--concise", "--mypy-config-file", str(settings)]
        command += ["--ignore-missing-stub"] if extra_names else []
        result = _run(command, folder)
    lines = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    return [] if result.returncode == 0 else lines or [f"stubtest left with code {result.returncode}"]


def run_tests(chapter: Chapter, file: Path) -> list[TestResult]:
    """All tests of the chapter on one file, in order. Raises UserError when they cannot be run at all."""
    return _run_jobs(chapter, [(file, None)])[0]


def run_tests_then_mutants(chapter: Chapter, file: Path) -> tuple[list[TestResult], list[tuple[Mutant, bool]] | None]:
    """All tests on one file and, if they pass, each mutant of the reference with whether its test caught it.

    Caught means that the test failed at an assertion: a mutant that merely crashes shows nothing.
    """
    text = chapter.source.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        jobs: list[tuple[Path, str | None]] = [(file, None)]
        for mutant in chapter.mutants:
            mutated = Path(folder, f"{mutant.id}.py")
            mutated.write_text(mutant.applied(text), encoding="utf-8")
            jobs.append((mutated, mutant.caught_by))
        results, *found = _run_jobs(chapter, jobs)
    if not found:
        return results, None
    return results, [(m, any(r.asserted for r in rs)) for m, rs in zip(chapter.mutants, found, strict=True)]


def _run_jobs(chapter: Chapter, jobs: list[tuple[Path, str | None]]) -> list[list[TestResult]]:
    """Results per job, from one runner process; only those of the first job when one of its tests fails."""
    with tempfile.TemporaryDirectory(prefix="ol-") as folder:
        events = Path(folder, "events.jsonl")
        command = [sys.executable, "-m", "ol.runner", str(chapter.tests), str(events), str(CPU_LIMIT_S)]
        given = json.dumps([{"file": str(file), "only": only} for file, only in jobs])
        process = _run(command, folder, given)
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    found = [json.loads(line) for line in lines]
    done = sum("exit" in event for event in found)
    if process.returncode == -signal.SIGXCPU:
        started = [event["start"] for event in found if "start" in event] or ["loading the file"]
        raise UserError(f"{started[-1]} did not end within {CPU_LIMIT_S} s of computing: look for an endless loop")
    results = [_by_test([e for e in found if e["job"] == n and "test" in e]) for n in range(done)]
    if process.returncode != 0 or done != len(jobs) and (done != 1 or all(r.passed for r in results[0])):
        last = (process.stderr.strip() or process.stdout.strip() or "no output").splitlines()[-1]
        raise UserError(f"the tests of {chapter.id} could not be run: {last}")
    return results


def _by_test(events: list[dict[str, Any]]) -> list[TestResult]:
    results: dict[str, TestResult] = {}
    for event in events:
        result = results.setdefault(event["test"], TestResult(event["test"], event["why"], True))
        if result.passed and not event["passed"]:
            result.passed, result.message, result.asserted = False, event["message"], event["asserted"]
    return list(results.values())


def _run(command: list[str], folder: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """A child of this Python that finds what this one finds, one thread, in its own folder."""
    paths = [folder, *(path for path in sys.path if path)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        return subprocess.run(
            command, input=given, capture_output=True, text=True, cwd=folder, env=env, timeout=WALL_LIMIT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[2]} did not end within {WALL_LIMIT_S:g} s: look for something that waits") from None
