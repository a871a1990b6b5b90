"""Options of earlier versions: where each went, and the configurations of runs that were recorded with them.

What a user writes is not translated: the error says how it is written now. What a run recorded is: `upgrade` makes the
configuration of an old manifest one of today that means the same, so that old runs replay, resume and compare.
"""

from __future__ import annotations

import copy
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
"""Options of earlier versions. A name that no command ever had is not here: it gets the nearest one."""


# Recorded configurations

_ARITHMETIC: Mapping[str, Any] = {
    "operators": ["+", "-", "*"],
    "operands": [1, 20],
    "factors": [2, 10],
    "held_out": 162,
    "seed": 0,
}
"""What the settings of the arithmetic task were when nobody gave them."""
_VERIFIERS = {"gsm8k": "arithmetic:rule=hash,units=$", "math": "math:rule=boxed,units=waive"}
"""The verifiers of the recipes at that time; a task's own verifier had to be named nowhere."""
_EPS = 1e-8


def upgrade(config: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration, of this version or an earlier one, as one of this version that means the same.

    Raises ConfigError for one that no longer has an equal.
    """
    new: dict[str, Any] = copy.deepcopy(dict(config))
    _upgrade_reward(new)  # looks at data.task as it was
    _upgrade_data(new)
    _upgrade_sampling(new)
    _upgrade_train(new)
    new.get("run", {}).pop("samples_shown", None)
    if (eps := new.get("optimizer", {}).pop("eps", _EPS)) != _EPS:
        raise ConfigError(f"optimizer.eps = {eps}: it is {_EPS} now, and the numbers would be others")
    return new


def _upgrade_data(new: dict[str, Any]) -> None:
    data = new.get("data", {})
    settings = data.pop("arithmetic", {})
    given = {name: value for name, value in settings.items() if value != _ARITHMETIC[name]}
    if given and data["task"] == "arithmetic" and not (data["file"] or data["dataset"]):
        data["task"] += ":" + ",".join(f"{name}={_spec_text(value)}" for name, value in given.items())
    share = data.pop("held_out_fraction", None)
    if share is not None and data.get("held_out") is None:
        data["held_out"] = share


def _spec_text(value: Any) -> str:
    return "|".join(map(str, value)) if isinstance(value, list) else str(value)


def _upgrade_reward(new: dict[str, Any]) -> None:
    """A rule became a setting of the verifier, and the format's term one of the functions (its share was logged)."""
    reward = new.get("reward", {})
    rule, weight = reward.pop("rule", None), reward.pop("format_weight", 0.0)
    if not (rule or weight):
        return
    own = not reward["functions"]
    if own:
        reward["functions"] = [_ruled(_own_verifier(new["data"]), rule)]
    if weight or own:
        main = reward["functions"][0]
        tags = ",tags=answer" if "tags=" not in main else f",tags={main.partition('tags=')[2].partition(',')[0]}"
        reward["weights"] = [*(reward["weights"] or [1.0] * len(reward["functions"])), weight]
        reward["functions"] = [*reward["functions"], f"format:rule=exact_format{tags},gold="]


def _own_verifier(data: Mapping[str, Any]) -> str:
    if data["task"].startswith("gym:") and not (data["file"] or data["dataset"]):
        return "gym"
    return _VERIFIERS.get(data["task"], "arithmetic:rule=last_number")


def _ruled(verifier: str, rule: str | None) -> str:
    """The verifier with another rule, whose one tag was then the answer's."""
    if rule is None:
        return verifier
    family, _, settings = verifier.partition(":")
    kept = [item for item in settings.split(",") if not item.startswith("rule=")]
    return f"{family}:" + ",".join([f"rule={rule}", "tags=answer", *kept])


def _upgrade_sampling(new: dict[str, Any]) -> None:
    for name in ("top_k", "top_p", "min_p", "cache_tokens"):  # the first three were off in every run
        new.get("sampling", {}).pop(name, None)
    engine, pool = new.get("engine", {}), new.get("pool", {})
    if model := engine.pop("model", None):
        engine["urls"] = [f"{url}#{model}" for url in engine["urls"]]
    for name in ("publish", "attempts", "seeds", "canary_tolerance"):
        engine.pop(name, None)
    deadline_s = pool.pop("group_deadline_s", None)
    if deadline_s is not None and pool["engines"]:
        engine["deadline_s"] = deadline_s
    for name in ("engine_threads", "group_attempts"):
        pool.pop(name, None)


def _upgrade_train(new: dict[str, Any]) -> None:
    train = new.get("train", {})
    if "mask_truncated" in train:
        mask, buffer = train.pop("mask_truncated"), train.pop("overlong_buffer")
        train["overlong"] = buffer if not mask else "mask" if buffer is None else f"mask,{buffer}"
    moved = {"max_refills": "refills", "early_stop_evals": "evals_without_best", "max_bad_steps": "bad_steps"}
    for old, name in moved.items():
        if old in train:
            new.setdefault("stop", {})[name] = train.pop(old)
