"""A chapter on disk: course/<id>/ (text, chapter.toml, mutants.toml) and course/tests/<id>/ (its tests).

The exercise is the real source file with some bodies blanked, made when a chapter is started: no second copy exists.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tinyllm.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """One fault, as a replacement in the reference source; the test caught_by must fail with it."""

    id: str
    fault: str
    caught_by: str
    old: str
    new: str
    source: str = ""

    def applied(self, text: str) -> str:
        """The source with the fault. Raises UserError when the place is not found exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise UserError(f"mutant {self.id}: its place occurs {found} times in the source: update mutants.toml")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Chapter:
    """What `ol` needs to know of a chapter."""

    id: str
    title: str
    source: Path
    blank: tuple[str, ...]
    mutants: tuple[Mutant, ...]

    @property
    def text(self) -> Path:
        return ROOT / "course" / self.id / "chapter.md"

    @property
    def tests(self) -> Path:
        return ROOT / "course" / "tests" / self.id

    @property
    def contract(self) -> Path:
        return ROOT / "course" / self.id / f"{self.source.stem}.pyi"

    def exercise(self) -> str:
        """The source with the bodies of `blank` replaced."""
        return blanked(self.source.read_text(encoding="utf-8"), self.blank, self.id)


def chapter_ids() -> list[str]:
    """Ids of all chapters, sorted."""
    return sorted(path.parent.name for path in (ROOT / "course").glob("*/chapter.toml"))


def load(chapter_id: str) -> Chapter:
    """The chapter. Raises UserError when there is none of that name."""
    if chapter_id not in chapter_ids():
        have = ", ".join(chapter_ids()) or "none here: run ol from a checkout of the repository"
        raise UserError(f"there is no chapter {chapter_id!r}; chapters: {have}")
    folder = ROOT / "course" / chapter_id
    spec = tomllib.loads((folder / "chapter.toml").read_text(encoding="utf-8"))
    mutants = tomllib.loads((folder / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    made = tuple(Mutant(**m) for m in mutants)
    return Chapter(chapter_id, spec["title"], ROOT / spec["source"], tuple(spec["blank"]), made)


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """The functions at the top level of a source, by name."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def body_start(function: ast.FunctionDef) -> int:
    """Line of the first statement after signature and docstring (1-based)."""
    rest = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return rest[0].lineno


def blanked(text: str, names: tuple[str, ...], chapter_id: str) -> str:
    """The source with each named body replaced by a line that says what to write; signature and docstring stay."""
    lines = text.splitlines(keepends=True)
    found = functions(text)
    for name in sorted(
        names, key=lambda n: found[n].lineno, reverse=True
    ):  # from the end, so that lines keep their number
        start, end = body_start(found[name]), found[name].end_lineno
        lines[start - 1 : end] = [f'    raise NotImplementedError("{chapter_id}: write {name}")\n']
    return "".join(lines)


def still_blank(text: str, names: tuple[str, ...]) -> list[str]:
    """Which of the named functions still only say what to write."""
    found = functions(text)

    def is_blank(function: ast.FunctionDef) -> bool:
        last = function.body[-1]
        return isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last)

    return [name for name in names if name in found and is_blank(found[name])]
