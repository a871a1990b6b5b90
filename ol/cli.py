"""The command line of the course.

    ol list              the chapters
    ol start L12.3       a workspace: the real file with the bodies you write left blank, and its contract
    ol tests L12.3       run the tests of the chapter on your file, each with the reason why it exists
    ol check L12.3       contract, tests, and faults that the tests must catch
    ol check C2 RUN      a capstone run: its stages, its report's quantities and their intervals

Exit codes: 0 all is well, 1 not yet, 2 a mistake in what was asked.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

from ol import chapter as chapters
from ol import check
from ol.chapter import Chapter
from tinyllm.errors import TinyLLMError, UserError

WIDTH = min(shutil.get_terminal_size((110, 24)).columns, 120)


class Parser(argparse.ArgumentParser):
    """One line for a mistake, like every other error of this project."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see: {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except TinyLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def parser() -> Parser:
    top = Parser(prog="ol", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("list", help="list the chapters").set_defaults(run=list_chapters)
    for name, run, text in (
        ("start", start, "write a workspace for a chapter"),
        ("tests", tests, "run the chapter's tests, with their reasons"),
        ("check", checked, "contract, tests and mutants"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("chapter", help="for example L12.3")
        if name == "check":
            command.add_argument("run_folder", nargs="?", type=Path, metavar="RUN", help="with C2: the folder of a run")
        command.add_argument("--workspace", type=Path, default=None, help="default: workspace/<chapter>, here")
        if name != "start":
            command.add_argument(
                "--reference", action="store_true", help="the project's own file, even beside a workspace"
            )
        command.set_defaults(run=run)
    return top


def list_chapters(args: argparse.Namespace) -> int:
    for chapter_id in chapters.chapter_ids():
        print(f"{chapter_id}  {chapters.load(chapter_id).title}")
    return 0


def start(args: argparse.Namespace) -> int:
    chapter = chapters.load(args.chapter)
    folder = args.workspace or Path("workspace", chapter.id)
    file = folder / chapter.source.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as out:
            out.write(chapter.exercise())
        shutil.copy(chapter.contract, folder / chapter.contract.name)
    except FileExistsError:
        raise UserError(f"{file} exists and stays as it is: move it away, or choose --workspace FOLDER") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; choose --workspace FOLDER") from None
    print(f"{chapter.id} {chapter.title}\n")
    print(f"  read    {_short(chapter.text)}")
    print(f"  write   {file}: {len(chapter.blank)} bodies, marked by NotImplementedError")
    print(f"  keep    {folder / chapter.contract.name}: what each of them must do")
    print(f"  run     ol tests {chapter.id}, then ol check {chapter.id}")
    return 0


def tests(args: argparse.Namespace) -> int:
    chapter = chapters.load(args.chapter)
    file, _ = _file_under_test(chapter, args)
    print(f"{chapter.id} {chapter.title}\ntesting {_short(file)}\n")
    results = check.run_tests(chapter, file)
    for result in results:
        print(f"{'ok  ' if result.passed else 'FAIL'}  {result.name}")
        _print_wrapped(result.why, 6)
        if not result.passed:
            _print_wrapped(f"-> {_brief(result.message)}", 6)
    passed = sum(r.passed for r in results)
    print(f"\n{passed} of {len(results)} tests pass")
    _print_blank(chapter, file)
    return 0 if passed == len(results) else 1


def checked(args: argparse.Namespace) -> int:
    if args.chapter == "C2":
        return check_capstone(args.run_folder)
    if args.run_folder is not None:
        raise UserError(f"{args.run_folder}: only C2 is checked on a run")
    chapter = chapters.load(args.chapter)
    file, is_reference = _file_under_test(chapter, args)
    print(f"{chapter.id} {chapter.title}\nchecking {_short(file)}{' (the reference)' if is_reference else ''}\n")

    differences = check.check_contract(chapter, file, extra_names=not is_reference)
    print(f"contract  {'ok' if not differences else 'FAIL'}: names, arguments and defaults of {chapter.contract.name}")
    for line in differences:
        _print_wrapped(f"-> {line}", 10)

    results, mutants = check.run_tests_then_mutants(chapter, file)
    failed = [r for r in results if not r.passed]
    print(f"\ntests     {'ok' if not failed else 'FAIL'}: {len(results) - len(failed)} of {len(results)} pass")
    for result in results:
        print(f"  {'ok  ' if result.passed else 'FAIL'}    {result.name}")
        if not result.passed:
            _print_wrapped(f"-> {_brief(result.message)}", 12)
    if mutants is None:
        print("\nmutants   not run: first the tests must pass")
        _print_blank(chapter, file)
        print(f"\nnot yet: {len(failed)} of {len(results)} tests fail. `ol tests {chapter.id}` says why each exists.")
        return 1

    missed = [m for m, caught in mutants if not caught]
    print(f"\nmutants   {'ok' if not missed else 'FAIL'}: {len(mutants) - len(missed)} of {len(mutants)} caught")
    print("          (the reference with one fault each, all of a kind that real trainers had; a test must fail)")
    for mutant, caught in mutants:
        print(
            f"  {'caught' if caught else 'MISSED'}  {mutant.id}  {mutant.fault}\n               by {mutant.caught_by}"
        )
    if differences or missed:
        print(f"\nnot yet: {'the contract differs' if differences else f'{len(missed)} mutants are not caught'}.")
        return 1
    print(
        f"\n{chapter.id} complete: the contract is kept, {len(results)} tests pass, {len(mutants)} mutants are caught."
    )
    return 0


def check_capstone(folder: Path | None) -> int:
    if folder is None:
        raise UserError("name the capstone's folder, as in: ol check C2 capstones/20260101-120000")
    from ol import capstone

    print(f"C2 From base model to evaluated policy\nchecking {folder}\n")
    findings = capstone.check_capstone(folder)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.what:{width}}  {finding.detail}")
    failed = sum(not finding.holds for finding in findings)
    print(f"\n{f'not yet: {failed} of {len(findings)} checks fail' if failed else 'C2 complete'}")
    return 1 if failed else 0


def _file_under_test(chapter: Chapter, args: argparse.Namespace) -> tuple[Path, bool]:
    """The workspace's file if there is one (or one is named), else the reference; and whether it is the reference."""
    check.require_tools()
    file = (args.workspace or Path("workspace", chapter.id)) / chapter.source.name
    if args.reference or (args.workspace is None and not file.exists()):
        return chapter.source, True
    if not file.exists():
        raise UserError(f"there is no {file}: make it with `ol start {chapter.id} --workspace {args.workspace}`")
    try:
        compile(file.read_text(encoding="utf-8"), file.name, "exec")
    except (SyntaxError, UnicodeDecodeError) as error:
        where = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else "it is not UTF-8 text"
        raise UserError(f"{file}{where}: {what}") from None
    return file.resolve(), False


def _print_blank(chapter: Chapter, file: Path) -> None:
    blank = chapters.still_blank(file.read_text(encoding="utf-8"), chapter.blank)
    if blank:
        print()
        _print_wrapped(f"still to write: {', '.join(blank)}", 0)


def _brief(message: str) -> str:
    """What a failed test said, without pytest's details below it."""
    return textwrap.shorten(message.strip().splitlines()[0], 300) if message.strip() else "no message"


def _print_wrapped(text: str, indent: int) -> None:
    print(textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent))


def _short(path: Path) -> str:
    """Relative to here where that is shorter to read."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
