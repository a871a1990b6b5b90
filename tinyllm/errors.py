"""One family of errors. Each message says what was wrong, where, and the remedy, in one line.

The command line prints `error: <message>` and leaves with the class's exit code; in Python they are exceptions.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable


class TinyLLMError(Exception):
    """Base of the family: an expected failure with a message fit for a user."""

    exit_code = 1


class UserError(TinyLLMError):
    """The user's input is at fault and nothing was started or lost."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration field: unknown, of the wrong type, out of range, or in conflict with another."""


class DataError(UserError):
    """A data file, row or column."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded, does not fit, or needs attention we do not honour."""


class RewardError(UserError):
    """A reward function or verifier that cannot be built or breaks its contract (as by a wrong count)."""


class MissingExtra(UserError):
    """A package that only some users need, and that is not installed."""


class EngineError(TinyLLMError):
    """The sampler cannot do what was asked (memory bound, missing ids or log-probabilities)."""


class RunError(UserError):
    """A run directory that is missing, locked by another process, or damaged."""


class TrainingStopped(TinyLLMError):
    """Training cannot go on (three non-finite steps in a row, no group with signal); what was done is saved."""


EXTRAS = {
    "cluster": ("ray",),
    "data": ("datasets",),
    "gym": ("reasoning_gym", "magiccube"),
    "instructions": ("py3langid",),
    "json": ("re2", "jsonschema"),
    "lora": ("peft",),
    "math": ("math_verify",),
    "remote": ("httpx2",),
    "report": ("matplotlib", "plotly"),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
    "track": ("tensorboard", "trackio", "wandb"),
}
"""Extra of the package -> the modules that it installs and that are imported only where it is needed."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Raises MissingExtra when a module of an extra (or of `modules`, some of them) is missing.

    what: who needs it, as in "verifier 'math'".
    """
    assert set(modules) <= set(EXTRAS[extra])
    missing = [name for name in modules or EXTRAS[extra] if not is_installed(name)]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise MissingExtra(f"{what} needs {names}; pip install 'tinyllm[{extra}]'")


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like this one, where one is."""
    found = difflib.get_close_matches(name[:100], list(known), 1, cutoff)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str], there: str = "there is") -> str:
    """The end of a message about an unknown name: the one that may be meant, or all of them."""
    names = list(known)
    close = closest(name, names, cutoff=0.5)
    return f"did you mean {close!r}?" if close else f"{there}: {', '.join(names) or 'nothing'}"
