"""What `make` stands on: the pinned versions fit the package's ranges, and what is missing is said in one line."""

from __future__ import annotations

import os
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def test_pinned_versions_fit_the_ranges():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {pin.name.lower().replace("_", "-"): next(iter(pin.specifier)) for pin in pins}
    assert all(str(version.operator) == "==" for version in versions.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [text for name in ("dev", "gym", "json", "math", "serve") for text in extras[name]]
    for text in [*project["dependencies"], *used]:
        needed = Requirement(text)
        if needed.name != "tinyllm":
            assert versions[needed.name].version in needed.specifier, f"{needed} against {versions[needed.name]}"


def make_venv(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", str(ROOT / "scripts" / "setup.sh"), "venv", str(folder)],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )


def test_a_python_that_does_not_work_is_named(tmp_path):
    result = make_venv(tmp_path / "venv", PYTHON="/bin/false")
    assert result.returncode == 2
    assert result.stderr == "error: PYTHON=/bin/false is not Python 3.11 or newer, or does not run\n"
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_an_environment_that_works_is_kept_and_a_broken_one_made_anew(tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    (library,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (library / "pip").mkdir()  # stands for the real one, which takes long to unpack
    assert make_venv(tmp_path / "venv").stdout == "" and (library / "pip").exists()
    interpreter = tmp_path / "venv" / "bin" / "python"
    interpreter.unlink()
    interpreter.symlink_to(tmp_path / "gone")
    result = make_venv(tmp_path / "venv")
    assert result.returncode == 0 and "with Python 3" in result.stdout, result.stderr
    assert (library / "pip" / "__main__.py").exists()
