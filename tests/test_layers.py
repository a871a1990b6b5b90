"""The order of the parts: a module imports only from rows above its own, so that each can be read and tested alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = """
    records errors
    seams axes
    stats record.hashing
    record.files config
    callbacks record
    model
    distributed.ranks
    engine
    engine.remote model.refs distributed
    rewards
    tasks
    episodes
    health
    post
    pool
    post.build
    post.run post.replay
    view
    evals
    serve plan
    capstone
    rundir htmlreport
    commands
    __main__
"""
"""Modules and packages of tinyllm, one row per layer; those of one row do not know each other. A module named on its
own stands in its own row, the rest of its package where the package is named."""

ROWS = {name: number for number, row in enumerate(LAYERS.split("\n")) for name in row.split()}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "tinyllm").rglob("*.py"))
}


def imports(module: str, tree: ast.AST) -> set[str]:
    """Every module imported anywhere in the tree (in functions and for types too), submodules by their full name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write absolute imports"
            assert node.module
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return found


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def part(module: str) -> str:
    """The row's word for a module: tinyllm.post.batch belongs to post, tinyllm.post.build has a row of its own."""
    name = module.removeprefix("tinyllm").removeprefix(".")
    while name and name not in ROWS and "." in name:
        name = name.rpartition(".")[0]
    return name


def test_every_module_has_a_place():
    assert {part(module) for module in MODULES if part(module)} <= set(ROWS), "add the new module to LAYERS"


@pytest.mark.parametrize("module", [module for module in MODULES if part(module)])
def test_imports_point_up(module):
    for imported in sorted(imports(module, parse(module))):
        if imported == "tinyllm" or imported.split(".")[0] not in ("tinyllm", "ol", "course"):
            continue
        assert imported.startswith("tinyllm."), f"{module} imports {imported}, which stands above the library"
        mine, theirs = part(module), part(imported)
        assert mine == theirs or ROWS[theirs] < ROWS[mine], f"{module} imports {imported}, which is below or beside it"


def when_loaded(module: str) -> set[str]:
    """What is imported when the module is: not in functions, not for types alone."""
    tree = parse(module)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return imports(module, tree) - {module}


def test_the_package_itself_loads_nothing():
    """So that every module can import it (for the version, say), and `import tinyllm` is instant."""
    assert {name.split(".")[0] for name in when_loaded("tinyllm")} <= set(sys.stdlib_module_names)


def test_no_circles_inside_a_package():
    """A circle of what is imported at loading works or fails by who comes first."""
    edges = {module: {name for name in when_loaded(module) if name in MODULES} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in sorted(edges[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("tinyllm.records", set()),
        ("tinyllm.errors", set()),
        ("tinyllm.axes", {"tinyllm.errors"}),
        ("tinyllm.post.grpo", {"torch", "tinyllm.axes", "tinyllm.records", "tinyllm.errors"}),
    ],
)
def test_what_the_core_stands_on(module, allowed):
    used = imports(module, parse(module))
    outside = {name for name in used if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name if name.startswith("tinyllm") else name.split(".")[0] for name in outside} <= allowed


def test_no_file_names_a_machine():
    """Paths of one machine and hosts of registries belong to a user's settings, not into the repository."""
    hosts = [
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "npmjs" + ".org",
        "deb.debian" + ".org",
        "download.pytorch" + ".org",
    ]
    places = r"(?<![\w.~$}/-])/(?:work|root|home|Users)/|/opt/(?:wheels|pypi)|/etc/xdg"
    pattern = re.compile("|".join([*map(re.escape, hosts), places]))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    faults = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if found := pattern.search(line):
                    faults.append(f"{name}:{number}: {found.group()}")
    assert not faults, "\n".join(faults)


def test_a_public_class_name_stands_for_one_thing():
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in parse(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_the_root_is_small():
    """What everything speaks stands in the root; everything else has a room."""
    assert len(list((ROOT / "tinyllm").glob("*.py"))) <= 8


@pytest.mark.parametrize(
    "line",
    [
        "from tinyllm import grpo, sft, dpo, evaluate, resume",
        "from tinyllm.post.grpo import clipped_objective, collect_groups, group_advantages",
        "from tinyllm.records import Completion, Group, Prompt, Verdict",
        "from tinyllm.config import GRPOConfig",
        "from tinyllm.rundir import RunDir",
        "from tinyllm.htmlreport import Section, write_html",
        "from tinyllm.htmlreport.sections import table, text",
    ],
)
def test_names_that_docs_have_shown_are_found_there(line):
    exec(line, {})
