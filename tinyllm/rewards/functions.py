"""Reward functions with the signature of TRL's: `module:function`, called once per batch with lists.

    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list

- prompts, completions: texts; where a row's prompt is a chat, lists of messages ([{"role": ..., "content": ...}]).
- completion_ids: token ids. trainer_state.global_step: the step. columns: every column of the data, as lists.
- log_extra(column, values): one value per completion, kept beside it. log_metric(name, value): a number of this step.
- A function may be async, and need not take arguments that it does not use.
- A function returns one number or None per completion. None, NaN, infinity or an exception: unscored with a reason,
  never 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tinyllm.errors import RewardError, closest, nearest
from tinyllm.records import Judged, Logged, Unscored, Verdict

FIXED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments every function may take; a data column cannot have such a name."""
RESERVED = ("prompt", "prompt_id", "draw", "sample", "step", "text", "completion", "reward", "advantage", "verdict")
"""Names log_extra refuses: columns of the run's own record."""


@dataclass(frozen=True)
class RewardBatch:
    """What reward functions are called with. All lists have one element per completion."""

    ids: list[str]
    """Prompt ids, for messages."""
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    rows: list[Mapping[str, Any]]
    step: int


def importable_name(function: Callable[..., Any]) -> str:
    """The "module:function" under which a function given as an object is recorded."""
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}:{name}"


def check_spec(spec: str) -> str:
    """The spec of a function as it was given. Raises RewardError where it is not module:function."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise RewardError(f"reward function {spec!r}: write module:function, or a verifier (see docs/verifiers.md)")
    return spec


def load_function(spec: str) -> Callable[..., Any]:
    """The function of "module:function" (found from the current folder too) or "folder/file.py:function".

    Raises RewardError with the remedy.
    """
    module_name, _, name = check_spec(spec).partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = _load_file(spec, Path(module_name)) if module_name.endswith(".py") else import_module(module_name)
    except RewardError:
        raise
    except ModuleNotFoundError as error:
        raise RewardError(f"reward function {spec!r}: no module {error.name!r} here; check name and folder") from None
    except Exception as error:  # whatever the user's module raises while it is imported
        raise RewardError(f"reward function {spec!r}: importing it raised {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            close = closest(part, dir(found))
            hint = f"; did you mean {close!r}?" if close else ""
            raise RewardError(f"reward function {spec!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise RewardError(f"reward function {spec!r} is {type(found).__name__}, which cannot be called")
    return found


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward function {spec!r}: {path} does not exist; check the path")
    found = spec_from_file_location(path.stem, path)
    assert found and found.loader
    module = module_from_spec(found)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    sys.path.insert(0, str(path.parent.absolute()))
    found.loader.exec_module(module)
    return module


def check_columns(function: Callable[..., Any], name: str, columns: Sequence[str]) -> None:
    """Raises RewardError when the function needs an argument that the data does not have, or a column name is taken."""
    for column in columns:
        if column in FIXED:
            raise RewardError(f"data column {column!r} has the name of an argument of reward functions; rename it")
    for parameter in inspect.signature(function).parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and parameter.name not in (*FIXED, *columns):
            hint = nearest(parameter.name, columns, "the columns are")
            raise RewardError(
                f"reward function {name} needs {parameter.name!r}, which is no column of the data; {hint}"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"reward function {name}: argument {parameter.name!r} is positional-only; name it plainly"
            )


def call(function: Callable[..., Any], name: str, batch: RewardBatch) -> Judged:
    """One verdict per completion of the batch, in order, and what was logged; the function is called once.

    Raises RewardError when it breaks its contract: not a list, a wrong count, a text instead of a number.
    """
    count = len(batch.completions)
    if not count:
        return Judged(())
    log = _Log(name, count)
    try:
        result = _run(function, _arguments(function, batch, log))
    except RewardError:
        raise
    except Exception as error:  # noqa: BLE001  whatever the user's function raises is data about its completions
        why = f"{name} raised {type(error).__name__}: {str(error)[:200]}{_line(error)}"
        return Judged((Verdict(None, why, cause=Unscored.RAISED),) * count, log.logged())
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise RewardError(f"reward function {name} returned {type(result).__name__}; return a list of {count} numbers")
    if len(result) != count:
        raise RewardError(
            f"reward function {name} returned {len(result)} rewards for {count} completions; return one each"
        )
    verdicts = tuple(_verdict(value, name, prompt_id) for value, prompt_id in zip(result, batch.ids, strict=True))
    return Judged(verdicts, log.logged())


def _verdict(value: Any, name: str, prompt_id: str) -> Verdict:
    """A returned value as a verdict: numbers of any kind (bool, numpy, 0-d tensor, Decimal), None, NaN, infinity.

    Raises RewardError for anything else, such as a text.
    """
    if value is None:
        return Verdict(None, f"{name} returned None", cause=Unscored.NOT_APPLICABLE)
    scalar = not isinstance(value, numbers.Number) and getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if scalar else value
    if not isinstance(number, numbers.Number) or isinstance(number, complex):
        raise RewardError(
            f"reward function {name} returned {type(value).__name__} {str(value)[:40]!r} for prompt "
            f"{prompt_id}; return a number"
        )
    try:
        result = float(number)  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        why = f"{name} returned a number no float can hold for prompt {prompt_id}"
        return Verdict(None, why, cause=Unscored.NOT_FINITE)
    if math.isfinite(result):
        return Verdict(result)
    return Verdict(None, f"{name} returned {result} for prompt {prompt_id}", cause=Unscored.NOT_FINITE)


class _Log:
    """What a function logs during one call."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._metrics: dict[str, float] = {}
        self._extras: dict[str, list[Any]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if column in RESERVED:
            raise RewardError(
                f"reward function {self._name}: log_extra({column!r}) is a column of the record; take another name"
            )
        if len(values) != self._count:
            raise RewardError(
                f"reward function {self._name}: log_extra({column!r}) has {len(values)} values for "
                f"{self._count} completions"
            )
        self._extras[column] = list(values)

    def log_metric(self, metric: str, value: float) -> None:
        self._metrics[f"{self._name}/{metric}"] = float(value)

    def logged(self) -> Logged:
        return Logged(dict(self._metrics), dict(self._extras))


def _arguments(function: Callable[..., Any], batch: RewardBatch, log: _Log) -> dict[str, Any]:
    columns = {column: None for row in batch.rows for column in row if column != "prompt"}
    known: dict[str, Any] = {
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }
    known |= {column: [row.get(column) for row in batch.rows] for column in columns}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known
    return {parameter.name: known[parameter.name] for parameter in parameters if parameter.name in known}


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as thread:  # a running event loop (a notebook) allows no second one in its thread
        return thread.submit(asyncio.run, wait()).result()


def _line(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})" if trace else ""
