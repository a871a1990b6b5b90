"""grpo.py keeps the contract in course/L12.3/grpo.pyi, and stands on torch, the records and the table of axes alone."""

import ast
import sys
from pathlib import Path

import tinyllm.post.grpo as grpo
from ol.chapter import load

SOURCE = Path(grpo.__file__)
CONTRACT = load("L12.3").contract


def outline(path: Path) -> dict[str, str]:
    """Public names: functions and methods with arguments, annotations and defaults; classes with decorators and bases;
    fields and aliases with annotations and values."""
    found: dict[str, str] = {}

    def read(body: list[ast.stmt], of: str = "") -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                returned = ast.unparse(node.returns) if node.returns else ""
                found[of + node.name] = ast.unparse([*node.decorator_list, node.args]) + returned
            elif isinstance(node, ast.ClassDef):
                found[of + node.name] = ast.unparse([*node.decorator_list, *node.bases])
                read(node.body, f"{of}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                name = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                found[of + ast.unparse(name)] = ast.unparse(node)

    read(ast.parse(path.read_text()).body)
    return {name: what for name, what in found.items() if not any(part[0] == "_" for part in name.split("."))}


def docstrings(path: Path) -> dict[str, str | None]:
    """Docstrings of public functions, classes and their public methods, by name."""
    found: dict[str, str | None] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found[node.name] = ast.get_docstring(node)
            found |= {f"{node.name}.{m.name}": ast.get_docstring(m) for m in inner if isinstance(m, ast.FunctionDef)}
    return {name: text for name, text in found.items() if not name.startswith("_")}


def test_source_and_contract_have_the_same_names_arguments_annotations_and_defaults():
    """The slow tests have stubtest look at both, in `ol check L12.3 --reference`."""
    assert load("L12.3").source == SOURCE
    assert outline(SOURCE) == outline(CONTRACT) and len(outline(SOURCE)) > 30


def test_the_mathematics_says_of_itself_what_the_contract_says():
    """Sections 1 and 2 carry the contract's own words; those of the rollout client may be shorter in the source."""
    source, contract = docstrings(SOURCE), docstrings(CONTRACT)
    client = {"RolloutClient", "RolloutClient.sample", "collect_groups"}
    assert {n: source[n] for n in contract.keys() - client} == {n: contract[n] for n in contract.keys() - client}


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
    assert ours == {"torch", "tinyllm.axes", "tinyllm.records", "tinyllm.errors"}
