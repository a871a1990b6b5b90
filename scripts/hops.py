"""Count the functions that a completion passes on its way from the engine to the gradient.

    OMP_NUM_THREADS=1 python scripts/hops.py [--all]

Runs one step of a tiny model under sys.setprofile. A function counts when one of its arguments, or what it returns or
yields, is a completion or holds one (a rollout, a group, a step, a batch, a list of them), until the loss of the first
micro-batch is known. Lambdas, comprehensions and properties do not count.
A function is a pass-through when its whole body is one statement that hands the completion to one other function.
--all also lists helpers: functions that only derive a number or a table from a completion and give none back.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tinyllm"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
CARRIERS = {"Completion", "Rollout", "Group", "Step", "Batch", "Recorded", "JudgedGroups"}


def carries(value: Any, depth: int = 3) -> bool:
    """Whether a value is a completion or holds one."""
    if type(value).__name__ in CARRIERS:
        return True
    if depth == 0:
        return False
    if isinstance(value, (list, tuple)):
        return any(carries(x, depth - 1) for x in value[:2])
    if isinstance(value, dict):
        return any(carries(x, depth - 1) for x in list(value.values())[:2])
    if is_dataclass(value) and type(value).__module__.startswith("tinyllm.post"):
        return any(carries(getattr(value, field.name), depth - 1) for field in fields(value))
    return False


def trace(run: Callable[[], None]) -> tuple[dict[CodeType, str], set[CodeType]]:
    """(functions by the order of the completion's first visit, those that hand a completion on or back)."""
    seen: dict[CodeType, str] = {}
    giving: set[CodeType] = set()

    def watch(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if f"{PACKAGE}/" not in code.co_filename or code.co_name.startswith("<"):
            return
        name = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(carries(frame.f_locals.get(n)) for n in names if n != "self"):
                seen.setdefault(code, name)
        elif event == "return":
            if carries(value) or (seen and code.co_name == "clipped_objective"):
                seen.setdefault(code, name)
                giving.add(code)
            if code.co_name == "clipped_objective":
                sys.setprofile(None)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen, giving


def is_pass_through(code: CodeType) -> bool:
    """Whether the body of a function is one statement: a call, or the return or yield of one."""
    lines, _ = inspect.getsourcelines(code)
    (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    body = [
        s for s in getattr(function, "body", []) if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
    ]
    if len(body) != 1:
        return False
    value = getattr(body[0], "value", None)
    value = getattr(value, "value", value) if isinstance(value, (ast.Yield, ast.YieldFrom)) else value
    return isinstance(value, ast.Call)


def one_step() -> None:
    """A run of one step of a tiny model, in process."""
    import tiny

    from tinyllm.post.run import train

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = tiny.save(tiny.llama(), home / "model")
        rows = tiny.write_rows(home / "rows.jsonl")
        config = tiny.config(model, rows, home / "run", train={"steps": 1}, data={"held_out": 0.0})
        train(config, reward=tiny.many_digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="list helpers too")
    arguments = parser.parse_args()
    seen, giving = trace(one_step)
    way = {code: name for code, name in seen.items() if arguments.all or code in giving}
    through = [name for code, name in way.items() if is_pass_through(code)]
    for code, name in way.items():
        print(f"{name}{'   (pass-through)' if name in through else ''}{'' if code in giving else '   (helper)'}")
    print(f"{len(way)} functions in {len({name.partition(':')[0] for name in way.values()})} files, ", end="")
    print(f"{len(through)} of them pass-through")


if __name__ == "__main__":
    main()
