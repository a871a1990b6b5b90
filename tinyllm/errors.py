"""The errors a user can meet. Each message says in one line what was wrong, where, and the remedy.

The command line prints `error: <message>` and exits with the class's exit code; in Python they are exceptions.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable


class TinyLLMError(Exception):
    """Base class: an expected failure, with a message for the user."""

    exit_code = 1


class UserError(TinyLLMError):
    """The user's input is wrong; no work was started or lost."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration field is unknown, of the wrong type, out of range, or in conflict with another."""


class DataError(UserError):
    """A data file, row or column is missing or unusable."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded, does not fit into memory, or needs a kind of attention not supported."""


class RewardError(UserError):
    """A reward function or verifier cannot be built, or breaks its contract (such as a wrong number of rewards)."""


class MissingExtra(UserError):
    """An optional package is needed and not installed."""


class EngineError(TinyLLMError):
    """An engine cannot sample as requested: not enough memory, or token ids or log-probabilities are missing."""


class RunError(UserError):
    """A run directory is missing, locked by another process, or damaged."""


class TrainingStopped(TinyLLMError):
    """Training cannot continue, as after three non-finite steps or without any signal; all finished steps are saved."""


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
"""Extra (optional dependency group) of this package -> the modules that it installs."""


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Raises MissingExtra when a module of an extra is not installed; modules: check only these modules of the extra.

    what: the feature that needs the modules, as in "verifier 'math'"; the message begins with it.
    """
    assert set(modules) <= set(EXTRAS[extra])
    missing = [name for name in modules or EXTRAS[extra] if not is_installed(name)]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise MissingExtra(f"{what} needs {names}; pip install 'tinyllm[{extra}]'")


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`; None when none has a similarity of at least `cutoff` (0 to 1)."""
    found = difflib.get_close_matches(name[:100], list(known), 1, cutoff)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str], there: str = "there is") -> str:
    """The end of a message about an unknown name: "did you mean ...?", or else the list of known names.

    there: the words before that list.
    """
    names = list(known)
    close = closest(name, names, cutoff=0.5)
    return f"did you mean {close!r}?" if close else f"{there}: {', '.join(names) or 'nothing'}"
