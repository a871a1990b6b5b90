"""grpo.py keeps the contract in grpo.pyi and stands on nothing but the standard library, torch and the records."""

import ast
import subprocess
import sys
from pathlib import Path

import tinyllm.post.grpo as grpo

SOURCE = Path(grpo.__file__)


def test_stubtest_finds_no_difference_between_source_and_contract(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", str(config), "tinyllm.post.grpo"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=SOURCE.parents[2], check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_public_function_of_the_contract_says_what_it_means():
    for node in ast.walk(ast.parse(SOURCE.with_suffix(".pyi").read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_imports_are_the_standard_library_torch_records_and_errors():
    names = set()
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    ours = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"torch", "tinyllm.records", "tinyllm.errors"}
