"""Runs chapter tests in a process of its own: jobs come as JSON on standard input, events go out as JSON lines.

    python -m ol.runner TESTS_FOLDER EVENTS_FILE CPU_LIMIT_S < jobs.json
    jobs    [{"file": path of the file under test, "only": name of one test, or null}, ...]; those after the first run
            only if all its tests pass
    events  {"job": 0, "start": test} when a test starts; {"job": 0, "exit": code} when the job is done;
            {"job": 0, "test": name, "why", "passed", "message", "asserted": did an assertion fail} when a test ends

One process runs all jobs, so that importing torch is paid once. An endless loop ends at the limit of processor time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins that happen to be installed are not part of the course

import pytest


class Reporter:
    """A pytest plugin that writes what happens to a file, one event a line."""

    def __init__(self, job: int, only: str | None, out: TextIO):
        self.job, self.only, self.out = job, only, out
        self.why: dict[str, str] = {}

    def write(self, **event: Any) -> None:
        print(json.dumps({"job": self.job, **event}), file=self.out, flush=True)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the one test that is asked for, and remember why each exists."""
        items[:] = [item for item in items if self.only in (None, name_of(item.nodeid))]
        for item in items:
            doc = " ".join((item.function.__doc__ or "").split())  # type: ignore[attr-defined]
            self.why[name_of(item.nodeid)] = doc

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(start=name_of(nodeid))

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Report the call, and set-up or tear-down only when they fail (the file under test cannot be imported)."""
        if call.when != "call" and call.excinfo is None:
            return
        name, error = name_of(item.nodeid), call.excinfo
        asserted = error is not None and error.errisinstance((AssertionError, pytest.fail.Exception))
        message = "" if error is None else error.exconly() if asserted else f"{error.exconly()}{where(error)}"
        self.write(test=name, why=self.why[name], passed=error is None, message=message, asserted=asserted)


def name_of(nodeid: str) -> str:
    """test_a for folder/test_x.py::test_a[parameters]."""
    return nodeid.split("::")[-1].split("[")[0]


def where(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The last line of the file under test that the exception passed through."""
    lines = [entry.lineno + 1 for entry in error.traceback if str(entry.path) == os.environ["OL_FILE"]]
    return f" (line {lines[-1]})" if lines else ""


def main(tests: str, events: str, cpu_limit_s: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_limit_s), int(cpu_limit_s) + 5))
    with Path(events).open("w", encoding="utf-8") as out:
        for number, job in enumerate(json.load(sys.stdin)):
            os.environ["OL_FILE"] = job["file"]
            reporter = Reporter(number, job["only"], out)
            options = ["-q", "--import-mode=importlib"]
            options += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]  # the latter collects garbage, slowly
            code = pytest.main([*options, tests], plugins=[reporter])
            reporter.write(exit=int(code))
            if number == 0 and code != pytest.ExitCode.OK:
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
