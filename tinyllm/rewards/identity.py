"""Hashes of what judges: settings and weights, tinyllm's own verifier code, and the source of reward functions."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinyllm.record.hashing import hash_bytes, hash_file, hash_json
from tinyllm.rewards.base import Verifier
from tinyllm.rewards.combine import RewardPart
from tinyllm.rewards.functions import importable_name


def verifier_hash(parts: Sequence[RewardPart]) -> str:
    """Identity of a reward, for the manifest: it changes with whatever may change a verdict."""
    described: list[list[Any]] = []
    for part in parts:
        judge = part.judge
        if isinstance(judge, Verifier):
            described.append([part.name, part.weight, judge.spec])
        elif isinstance(judge, str):
            described.append([part.name, part.weight, judge, _module_hash(judge)])
        else:
            spec = importable_name(judge)
            described.append([part.name, part.weight, spec, _module_hash(spec) or _source_hash(judge)])
    return hash_json([code_hash(), described])


@functools.cache
def code_hash() -> str:
    """Hash of all modules and tables of this package, by their paths."""
    folder = Path(__file__).parent
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")])
    return hash_json({path.relative_to(folder).as_posix(): hash_file(path) for path in files})


def _module_hash(spec: str) -> str | None:
    """Hash of the source file of a function's module, where "module:function" has one."""
    module = spec.partition(":")[0]
    if module.endswith(".py"):
        return hash_file(module) if Path(module).is_file() else None
    sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.pop(0)
    return hash_file(found.origin) if found and found.origin and Path(found.origin).exists() else None


def _source_hash(function: Callable[..., Any]) -> str | None:
    """Hash of the source of a function that no module can be imported for (in a notebook, from `exec`)."""
    try:
        return hash_bytes(inspect.getsource(function).encode())
    except (OSError, TypeError):
        return None
