"""Options of earlier versions: where each went, and the configurations of runs that were recorded with them.

An old option that a user writes is refused, and the error says what to write now. An old manifest is translated:
`upgrade` makes its configuration one of this version that means the same, so that old runs replay, resume and compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm.errors import ConfigError


@dataclass(frozen=True)
class Moved:
    """Where an option of an earlier version went."""

    option: str | None
    """The option of today; None when there is none."""
    how: str
    """What to write, or why there is nothing to."""

    def __str__(self) -> str:
        return f"is now {self.option!r}: {self.how}" if self.option else f"is gone: {self.how}"


_TASK = "a setting of the task, as in arithmetic:operators=+|-,operands=1|20,factors=2|10,held_out=162,seed=0"
_WHOLE = "training needs the whole distribution; use sampling.temperature"
_CACHE = "the cache has room for max_batch completions; lower max_batch"

MOVED: Mapping[str, Moved] = {
    "data.arithmetic": Moved("data.task", _TASK),
    "data.arithmetic.operators": Moved("data.task", _TASK),
    "data.arithmetic.operands": Moved("data.task", _TASK),
    "data.arithmetic.factors": Moved("data.task", _TASK),
    "data.arithmetic.held_out": Moved("data.task", _TASK),
    "data.arithmetic.seed": Moved("data.task", _TASK),
    "data.held_out_fraction": Moved("data.held_out", "a share (0.1) or a file of rows"),
    "reward.rule": Moved("reward.functions", "a setting of the verifier, as in arithmetic:rule=exact_format"),
    "reward.format_weight": Moved(
        "reward.functions", "a term of its own, as in arithmetic,format:rule=exact_format,gold= with --weights 1,0.5"
    ),
    "sampling.top_k": Moved(None, _WHOLE),
    "sampling.top_p": Moved(None, _WHOLE),
    "sampling.min_p": Moved(None, _WHOLE),
    "sampling.cache_tokens": Moved(None, _CACHE),
    "machine.cache_tokens": Moved(None, _CACHE),
    "engine.model": Moved("engine.urls", "behind the address, as in http://127.0.0.1:8000#NAME"),
    "engine.publish": Moved(None, "the kind of server decides: adapters for vLLM, files for the others"),
    "engine.attempts": Moved(None, "a request is tried 4 times within engine.deadline_s"),
    "engine.seeds": Moved(None, "servers are asked whether they take seeds"),
    "engine.canary_tolerance": Moved(None, "the kind of server and the compute type decide"),
    "pool.engine_threads": Moved(None, "an engine of a pool has one thread; raise pool.engines"),
    "pool.group_deadline_s": Moved("engine.deadline_s", "for a group too"),
    "pool.group_attempts": Moved(None, "a group is tried 3 times"),
    "optimizer.eps": Moved(None, "it is 1e-8"),
    "train.max_refills": Moved("stop.refills", "the same number"),
    "train.mask_truncated": Moved("train.overlong", "mask"),
    "train.overlong_buffer": Moved("train.overlong", "the same number"),
    "train.early_stop_evals": Moved("stop.evals_without_best", "the same number"),
    "train.max_bad_steps": Moved("stop.bad_steps", "the same number"),
    "run.samples_shown": Moved(None, "two completions are shown at each step"),
}
"""Options of earlier versions. For any other unknown name the error suggests the nearest option."""


# Recorded configurations

_RENAMED = {
    "train.max_refills": "stop.refills",
    "train.early_stop_evals": "stop.evals_without_best",
    "train.max_bad_steps": "stop.bad_steps",
}
_ARITHMETIC: Mapping[str, Any] = {
    "operators": ["+", "-", "*"],
    "operands": [1, 20],
    "factors": [2, 10],
    "held_out": 162,
    "seed": 0,
}
"""The defaults of the arithmetic task's settings, which an old record has in full."""
_VERIFIERS = {"gsm8k": "arithmetic:rule=hash,units=$", "math": "math:rule=boxed,units=waive"}
"""The verifiers of the recipes at that time; every other task had arithmetic, or its environment's own."""
_EPS = 1e-8


def upgrade(config: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration, of this version or an earlier one, as one of this version that means the same.

    Raises ConfigError for one that no longer has an equal.
    """
    sections = {name: part for name, part in config.items() if isinstance(part, Mapping)}
    flat = {f"{name}.{leaf}": value for name, part in sections.items() for leaf, value in part.items()}
    if (eps := flat.get("optimizer.eps", _EPS)) != _EPS:
        raise ConfigError(f"optimizer.eps = {eps}: it is {_EPS} now, and the numbers would be others")
    _upgrade_reward(flat)  # reads data.task, which the next line changes
    _upgrade_data(flat)
    _upgrade_engine(flat)
    if "train.mask_truncated" in flat:
        mask, buffer = flat["train.mask_truncated"], flat["train.overlong_buffer"]
        flat["train.overlong"] = buffer if not mask else "mask" if buffer is None else f"mask,{buffer}"
    flat |= {_RENAMED[name]: value for name, value in flat.items() if name in _RENAMED}
    new = {name: value for name, value in config.items() if name not in sections}
    for name, value in flat.items():
        section, _, leaf = name.partition(".")
        if name not in MOVED:  # those that are gone had no part in the numbers
            new.setdefault(section, {})[leaf] = value
    return new


def _upgrade_data(flat: dict[str, Any]) -> None:
    settings = flat.get("data.arithmetic", {})
    given = {name: value for name, value in settings.items() if value != _ARITHMETIC[name]}
    if given and flat["data.task"] == "arithmetic" and not _has_rows(flat):
        flat["data.task"] += ":" + ",".join(f"{name}={_spec_text(value)}" for name, value in given.items())
    share = flat.get("data.held_out_fraction")
    if share is not None and flat.get("data.held_out") is None:
        flat["data.held_out"] = share


def _spec_text(value: Any) -> str:
    return "|".join(map(str, value)) if isinstance(value, list) else str(value)


def _has_rows(flat: Mapping[str, Any]) -> bool:
    """Whether the run read rows of the user's, and data.task had no effect."""
    return bool(flat["data.file"] or flat["data.dataset"])


def _upgrade_reward(flat: dict[str, Any]) -> None:
    """A rule became a setting of the verifier, and the format's term one of the functions (its share was logged)."""
    rule, weight = flat.get("reward.rule"), flat.get("reward.format_weight", 0.0)
    if not (rule or weight):
        return
    functions, weights = list(flat["reward.functions"]), list(flat["reward.weights"])
    own = not functions
    if own:
        functions = [_ruled(_own_verifier(flat), rule)]
    if weight or own:
        tags = functions[0].partition("tags=")[2].partition(",")[0] or "answer"
        weights = [*(weights or [1.0] * len(functions)), weight]
        functions.append(f"format:rule=exact_format,tags={tags},gold=")
    flat |= {"reward.functions": functions, "reward.weights": weights}


def _own_verifier(flat: Mapping[str, Any]) -> str:
    if flat["data.task"].startswith("gym:") and not _has_rows(flat):
        return "gym"
    return _VERIFIERS.get(flat["data.task"], "arithmetic:rule=last_number")


def _ruled(verifier: str, rule: str | None) -> str:
    """The verifier with another rule, whose one tag was then the answer's."""
    if rule is None:
        return verifier
    family, _, settings = verifier.partition(":")
    kept = [item for item in settings.split(",") if not item.startswith("rule=")]
    return f"{family}:" + ",".join([f"rule={rule}", "tags=answer", *kept])


def _upgrade_engine(flat: dict[str, Any]) -> None:
    if model := flat.get("engine.model"):
        flat["engine.urls"] = [f"{url}#{model}" for url in flat["engine.urls"]]
    deadline_s = flat.get("pool.group_deadline_s")
    if deadline_s is not None and flat["pool.engines"]:
        flat["engine.deadline_s"] = deadline_s
