"""x"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyllm.record.hashing import hash_bytes, hash_file, hash_json
from tinyllm.rewards.base import Verifier


def importable_name(function: Any) -> str:
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}:{name}"


def verifier_hash(parts: Sequence[Any]) -> str:
    """Hash of what judges: settings and weights, tinyllm's verifier code, and the source of reward functions."""
    code = {p.name: hash_file(p) for p in sorted(Path(__file__).parent.glob("*.py"))}
    described = []
    for part in parts:
        judge = part.judge
        if isinstance(judge, Verifier):
            described.append([part.name, part.weight, judge.spec])
        elif isinstance(judge, str):
            described.append([part.name, part.weight, judge, _module_hash(judge.partition(":")[0])])
        else:
            spec = importable_name(judge)
            described.append(
                [part.name, part.weight, spec, _module_hash(spec.partition(":")[0]) or _source_hash(judge)]
            )
    return hash_json([code, described])


def _module_hash(module: str) -> str | None:
    """Hash of the source of a module, or of a file."""
    import importlib.util
    import sys

    if module.endswith(".py"):
        return hash_file(module) if Path(module).is_file() else None
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    return hash_file(spec.origin) if spec and spec.origin and Path(spec.origin).exists() else None


def _source_hash(function: Any) -> str | None:
    try:
        return hash_bytes(inspect.getsource(function).encode())
    except (OSError, TypeError):
        return None
