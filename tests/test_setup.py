"""What `make` stands on: the pinned versions fit the package's ranges, and what is missing is said in one line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tinyllm.errors import EXTRAS, MissingExtra, require_extra

ROOT = Path(__file__).parent.parent


def test_pinned_versions_fit_the_ranges():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {pin.name.lower().replace("_", "-"): next(iter(pin.specifier)) for pin in pins}
    assert all(str(version.operator) == "==" for version in versions.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [text for name, texts in extras.items() if name not in ("track", "trl") for text in texts]
    for text in [*project["dependencies"], *used]:
        needed = Requirement(text)
        if needed.name != "tinyllm":
            assert versions[needed.name].version in needed.specifier, f"{needed} against {versions[needed.name]}"


DISTRIBUTIONS = {
    "google": "protobuf",
    "huggingface_hub": "huggingface-hub",
    "math_verify": "math-verify",
    "prometheus_client": "prometheus-client",
    "re2": "google-re2",
    "reasoning_gym": "reasoning-gym",
}
"""Module -> the distribution that brings it, where the names differ."""
LOADED_BY_OTHERS = {"accelerate", "gguf"}
"""What transformers imports for the bundled model."""


def declared() -> tuple[set[str], dict[str, set[str]]]:
    """(core, extra -> what it adds), names of distributions without those that only make other extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {Requirement(text).name for text in requirements} - {"tinyllm"}

    extras = {extra: names(texts) for extra, texts in project["optional-dependencies"].items()}
    return names(project["dependencies"]), extras


def imported() -> dict[Path, set[str]]:
    """File of the package -> the distributions that it imports anywhere."""
    found = {}
    for path in sorted((ROOT / "tinyllm").rglob("*.py")):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
        others = modules - set(sys.stdlib_module_names) - {"tinyllm"}
        found[path] = {DISTRIBUTIONS.get(name, name) for name in others}
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    core, extras = declared()
    optional = set().union(*(extras[extra] for extra in EXTRAS))
    used = set().union(*imported().values())
    assert used <= core | optional, "declare it, or do without"
    assert core - used == LOADED_BY_OTHERS, "nothing imports it: leave it out"
    assert optional - used == extras["track"], "trackers are imported by their names"
    assert len(core) <= 14


def test_the_extras_are_those_that_errors_name():
    _, extras = declared()
    for extra, modules in EXTRAS.items():
        assert {DISTRIBUTIONS.get(name, name) for name in modules} == extras[extra]


def test_where_a_package_of_an_extra_is_imported_its_lack_is_said_in_one_line():
    """By require_extra in the same file; of a server's files only the command that starts it is reached without."""
    _, extras = declared()
    for path, used in imported().items():
        for extra in EXTRAS:
            if extras[extra] & used and path.parent.name != "serve":
                assert f'require_extra("{extra}"' in path.read_text(encoding="utf-8"), path


def test_a_missing_package_is_one_line_with_the_extra(monkeypatch):
    monkeypatch.setitem(EXTRAS, "math", ("json", "no_such_module"))
    with pytest.raises(MissingExtra, match=r"^verifier 'math' needs no-such-module; pip install 'tinyllm\[math\]'$"):
        require_extra("math", "verifier 'math'")
    require_extra("math", "verifier 'math'", "json")


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
