"""tests/data/verifiers.jsonl as verifiers and rows: each case's task text, in English, as settings.

A phrase of the text stands for a setting, so further cases of the same kinds can be put into the file as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LINES = (Path(__file__).parent / "data/verifiers.jsonl").read_text(encoding="utf-8").split("\n")
CASES = [json.loads(line) for line in LINES if line]


def case_ids(*families: str) -> list[Any]:
    """The cases of these families as pytest parameters, named by id."""
    import pytest

    return [pytest.param(case, id=case["id"]) for case in CASES if case["family"] in families]


def spec_of(case: dict[str, Any]) -> dict[str, Any]:
    """The verifier of a case as a spec."""
    kinds = {"format": _text, "arithmetic": _text, "math": _text, "json": _json, "if": _instructions}
    kinds |= {"code": lambda case: {"family": "code"}, "gym": lambda case: {"family": "gym"}}
    return kinds[case["family"]](case)


def row_of(case: dict[str, Any]) -> dict[str, Any]:
    """The task row of a case."""
    if isinstance(case["gold"], dict):
        return {"prompt": case["task"], **case["gold"]}
    return {"prompt": case["task"], "answer": case["gold"]}


def _json(case: dict[str, Any]) -> dict[str, Any]:
    return {"family": "json", "fence": "fence" in case["task"]}


def _instructions(case: dict[str, Any]) -> dict[str, Any]:
    return {"family": "instructions"}


def _text(case: dict[str, Any]) -> dict[str, Any]:
    task: str = case["task"]
    spec: dict[str, Any] = {"family": case["family"], **_region(task)}
    if spec["rule"] == "boxed" and spec["family"] == "format":
        spec["family"] = "math"  # what a box holds is mathematics
    if spec["family"] == "arithmetic":
        spec |= {"units": ["$"]} if "dollars" in task else {}
        spec |= {"percent": "asked"} if "percentage" in task else {}
        tolerance = re.search(r"error (1e-[0-9]+) is allowed", task)
        spec |= {"abs_tol": tolerance[1], "rel_tol": tolerance[1]} if tolerance else {}
    if spec["family"] == "math":
        places = re.search(r"[Dd]ecimal answers to ([0-9]+) places", task)
        spec |= {"places": int(places[1])} if places else {}
        kind = re.search(r"is an (interval|angle)|(Equation)|(?:Find all )(solutions|functions)", task)
        if kind:
            spec["kind"] = next(word for word in kind.groups() if word).lower()
    return spec


def _region(task: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if re.search(
        r"prefilled|(prompt|template)[^.]{0,60}<think>|<think>[^.]{0,60}\b(in|of|by) the (prompt|template)", task
    ):
        found["think_prefilled"] = True
    stop = re.search(r"stops at the first (\S+?)[;,.\s]", task)
    if stop:
        found["stop"] = stop[1]
    marker = re.search(r"'([A-Za-z ]+:) X'", task)
    pair = re.search(r"last <(\w+)>", task)
    if task.startswith("The whole output must be"):
        found |= {"rule": "exact_format", "tags": re.findall(r"one <(\w+)>", task)}
    elif "boxed{}" in task and not marker:
        found |= {"rule": "boxed", "boxes": ["boxed", "fbox"] if "fbox" in task else ["boxed"]}
        found["agree"] = "agree" in task
    elif pair:
        found |= {"rule": "tag", "tag": pair[1], "which": "last"}
    elif "<answer>" in task or stop:
        found |= {"rule": "tag"}
    elif "####" in task:
        found |= {"rule": "hash"}
    elif marker:
        found |= {"rule": "marker", "marker": marker[1]}
    elif "Free text" in task:
        found |= {"rule": "final"}
    else:
        found |= {"rule": "last_number"} if "last number" in task else {"rule": "whole"}
    letters = re.search(r"one of ([A-Z])-([A-Z])", task)
    if letters:
        found["choices"] = [chr(code) for code in range(ord(letters[1]), ord(letters[2]) + 1)]
    return found
