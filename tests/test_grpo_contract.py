"""grpo.py keeps the contract in course/L12.3/grpo.pyi and stands on nothing but the standard library, torch and the records."""

import ast
import sys
from pathlib import Path

import tinyllm.post.grpo as grpo
from ol.chapter import load

SOURCE = Path(grpo.__file__)
CONTRACT = load("L12.3").contract


def outline(path: Path) -> dict[str, str]:
    """Public names: functions and methods with arguments and defaults, classes with decorators, fields with defaults."""
    found: dict[str, str] = {}

    def read(body: list[ast.stmt], of: str = "") -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                for argument in ast.walk(node.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                found[of + node.name] = ast.unparse([*node.decorator_list, node.args])
            elif isinstance(node, ast.ClassDef):
                found[of + node.name] = ast.unparse([*node.decorator_list, *node.bases])
                read(node.body, f"{of}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                name = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                found[of + ast.unparse(name)] = ast.unparse(node.value) if of and node.value else ""

    read(ast.parse(path.read_text()).body)
    return {name: what for name, what in found.items() if not any(part[0] == "_" for part in name.split("."))}


def test_source_and_contract_have_the_same_names_arguments_and_defaults():
    """The slow tests have stubtest look at both, in `ol check L12.3 --reference`."""
    assert load("L12.3").source == SOURCE
    assert outline(SOURCE) == outline(CONTRACT) and len(outline(SOURCE)) > 40


def test_every_public_function_of_the_contract_says_what_it_means():
    for node in ast.walk(ast.parse(CONTRACT.read_text())):
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
