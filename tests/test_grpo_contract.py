"""grpo.py keeps the contract in grpo.pyi and stands on nothing but the standard library, torch and the records."""

import ast
import sys
from pathlib import Path

import tinyllm.post.grpo as grpo
from ol.chapter import load
from ol.check import check_contract

SOURCE = Path(grpo.__file__)


def test_stubtest_finds_no_difference_between_source_and_contract():
    chapter = load("L12.3")
    assert chapter.source == SOURCE and check_contract(chapter, SOURCE, extra_names=False) == []


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
