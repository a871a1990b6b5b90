"""What a verifier is, and how one is built from settings.

A verifier maps (task row, completion text) to a Verdict. Three outcomes stay apart:
- wrong: value 0;
- a bad task or gold: `check` raises DataError when the rows are loaded (and `verify` gives an unscored verdict);
- a failed scorer: an unscored verdict with a named reason. Never an exception, NaN, None or a silent 0.

Settings are the fields of a frozen dataclass, checked when it is made. A spec is their text form:
"family", "family:key=value,key=value" (elements of a list are separated by `|`), or a JSON object with "family".
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tinyllm.config.options import Option, read_setting
from tinyllm.errors import ConfigError, DataError, RewardError, nearest
from tinyllm.record.hashing import hash_json
from tinyllm.records import Unscored, Verdict
from tinyllm.rewards.text.extract import Region

Row = Mapping[str, Any]

FAMILIES = {
    "format": ("tinyllm.rewards.text.format", "FormatVerifier"),
    "arithmetic": ("tinyllm.rewards.text.arithmetic", "ArithmeticVerifier"),
    "math": ("tinyllm.rewards.math.verifier", "MathVerifier"),
    "json": ("tinyllm.rewards.json.verifier", "JsonVerifier"),
    "code": ("tinyllm.rewards.code.verifier", "CodeVerifier"),
    "gym": ("tinyllm.rewards.gym.verifier", "GymVerifier"),
    "instructions": ("tinyllm.rewards.text.instructions", "InstructionVerifier"),
}
"""Family -> where its class is; imported when first used, since some need an extra."""
MAX_TEXT_CHARS = 1_000_000
"""A longer completion is not read: it scores 0."""


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """A text whose verdict is known beforehand: a self-test of a row, or an attack."""

    name: str
    text: str
    expected: int
    """1 for the gold written as an answer, else 0."""


@dataclasses.dataclass(frozen=True)
class Verifier(ABC):
    """Base of the families; the fields of a subclass are its settings."""

    family: ClassVar[str]
    in_process: ClassVar[bool] = True
    """Whether one verdict is bounded by construction (linear time, no foreign code), so that the verifier needs no
    worker process."""
    prompt_fails: ClassVar[bool] = True
    """Whether the prompt itself, as a completion, must score 0 (a self-test)."""
    region: Region | None = None
    """Where the answer stands in the text; None in families that read the whole text. A spec has the settings of the
    region beside the family's own."""

    @abstractmethod
    def check(self, row: Row) -> object:
        """The row's gold or task as the family reads it. Raises DataError when it cannot be used."""

    @abstractmethod
    def judge(self, row: Row, text: str) -> Verdict:
        """The verdict; may raise DataError for a row that `check` would refuse."""

    def score(self, completion: str | Sequence[Mapping[str, Any]], row: Row) -> float | None:
        """The reward of a completion (a text, or chat messages of which the last one is judged); None: unscored.

        For other trainers' reward functions. It runs in the calling process, without a time limit of its own.
        """
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        return verify(self, row, text).value

    def explain(self, row: Row, text: str) -> str:
        """Why the text has no answer that can be judged, in words; "" when it has one."""
        return ""

    def probes(self, row: Row) -> list[SelfTest]:
        """Self-tests of the row beyond those every family has (empty text, the prompt): gold as an answer, wrong
        gold."""
        return []

    def describe(self) -> dict[str, Any]:
        """Facts of this machine that decide verdicts beside the settings (the sandbox of code)."""
        return {}

    def warm_up(self) -> None:  # noqa: B027  most families have nothing to warm up
        """Import and build what the first verdict needs, so that its time limit is for judging alone."""

    def time_limit(self, row: Row) -> float:
        """Seconds one verdict may take by the row's own limits; the pool waits at least this long."""
        return 0.0

    @property
    def spec(self) -> dict[str, Any]:
        """The settings as build() takes them."""
        own = dataclasses.asdict(self)
        return {"family": self.family, **(own.pop("region") or {}), **own}

    @functools.cached_property
    def hash(self) -> str:
        """Identity of family and settings, for caches and manifests."""
        return hash_json(self.spec)


def verify(verifier: Verifier, row: Row, text: str) -> Verdict:
    """verifier.judge, made total: whatever goes wrong becomes an unscored verdict with a reason."""
    if not isinstance(text, str):
        return Verdict(None, f"completion is {type(text).__name__}, not text", cause=Unscored.SAMPLING_FAILED)
    if len(text) > MAX_TEXT_CHARS:
        return correct(False, None)
    try:
        verdict = verifier.judge(row, text)
    except DataError as error:
        return Verdict(None, f"bad task: {error}", cause=Unscored.BAD_TASK)
    except (MemoryError, RecursionError) as error:
        why = type(error).__name__
    except Exception as error:  # noqa: BLE001  a fault of ours or of a library is data about one sample
        why = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        return verdict
    return Verdict(None, f"{verifier.family} verifier failed: {why}", cause=Unscored.RAISED)


_RIGHT, _WRONG = (("correct", 1.0),), (("correct", 0.0),)


def correct(right: bool, answer: str | None) -> Verdict:
    """Value 1 or 0, with the answer that was judged (cut to 200 characters; None when there was none)."""
    answer = answer if answer is None else answer[:200]
    return Verdict(1.0, None, answer, _RIGHT) if right else Verdict(0.0, None, answer, _WRONG)


def gold_text(row: Row, column: str) -> str:
    """The row's gold as text. Raises DataError when it is missing or empty: an absent gold never equals an absent
    answer."""
    if column not in row:
        raise DataError(
            f"the row has no column {column!r} with the gold answer; columns are {', '.join(row) or 'none'}"
        )
    gold = row[column]
    if isinstance(gold, bool) or not isinstance(gold, (str, int, float)):
        raise DataError(f"gold in column {column!r} is {type(gold).__name__}, not a text or number")
    text = str(gold).strip()
    if not text:
        raise DataError(f"gold in column {column!r} is empty")
    return text


def prompt_text(row: Row) -> str:
    """The row's prompt as one text; the messages of a chat on lines of their own."""
    prompt = row.get("prompt", "")
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content", "")) for message in prompt)
    return str(prompt)


# Self-tests of a row


def row_fault(verifier: Verifier, row: Row) -> str | None:
    """Why the verifier cannot judge this row, or None.

    A verifier that cannot tell the gold answer from an empty text must not train a model: the gold can be read; the
    gold, written as an answer, scores 1; the empty text, the prompt itself and a wrong gold of the same kind score 0.
    """
    try:
        verifier.check(row)
    except DataError as error:
        return str(error)
    for probe in self_tests(verifier, row):
        verdict = verify(verifier, row, probe.text)
        if verdict.value is None:
            return f"self-test {probe.name!r} could not be scored: {verdict.reason}"
        if (verdict.value == 1.0) != bool(probe.expected) or (not probe.expected and verdict.value > 0):
            return (
                f"self-test {probe.name!r} scores {verdict.value:g} instead of {probe.expected}: {probe.text[-80:]!r}"
            )
    return None


def self_tests(verifier: Verifier, row: Row) -> list[SelfTest]:
    """All self-tests of a row."""
    echo = [SelfTest("the prompt itself", prompt_text(row), 0)] if verifier.prompt_fails else []
    return [SelfTest("empty text", "", 0), *echo, *verifier.probes(row)]


# Building from a spec


def is_family(spec: str) -> bool:
    """Whether a spec is one of a verifier (else it is a reward function, module:function)."""
    family, colon, settings = spec.partition(":")
    return not colon or "=" in settings or spec.lstrip().startswith("{") or family.strip() in FAMILIES


def build(spec: str | Mapping[str, Any] | Verifier) -> Verifier:
    """The verifier of a spec. Raises RewardError naming the setting, the value and the remedy."""
    if isinstance(spec, Verifier):
        return spec
    family, settings = _parse(spec)
    if family not in FAMILIES:
        hint = nearest(family, list(FAMILIES))
        raise RewardError(f"verifier {family!r} is unknown; {hint}; a function of yours is module:function")
    module, name = FAMILIES[family]
    kind: type[Verifier] = getattr(importlib.import_module(module), name)
    region = {} if kind.region is None else _settings(Region)
    own = _settings(kind)
    del own["region"]
    values = {}
    for key, value in settings.items():
        if key not in own and key not in region:
            raise RewardError(f"verifier {family!r} has no setting {key!r}; {nearest(key, sorted({*own, *region}))}")
        values[key] = _convert(value, own[key] if key in own else region[key], f"{family}.{key}")
    if kind.region is not None:
        of_region = {key: values.pop(key) for key in region if key in values}
        values["region"] = dataclasses.replace(kind.region, **of_region)
    return kind(**values)


def _settings(kind: type[Any]) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _parse(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        try:
            found = json.loads(spec)
        except ValueError as error:
            raise RewardError(f"verifier spec {spec[:80]!r} is not JSON: {error}") from None
        spec = found if isinstance(found, dict) else {}
    if isinstance(spec, Mapping):
        settings = dict(spec)
        return str(settings.pop("family", "")), settings
    family, _, rest = str(spec).partition(":")
    settings = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise RewardError(f"verifier spec {spec!r}: {item!r} is not key=value; write {family}:key=value,key=value")
        settings[key.strip()] = value
    return family.strip(), settings


def _convert(value: Any, hint: Any, name: str) -> Any:
    try:
        return read_setting(Option(name, hint, None), value)
    except ConfigError as error:
        raise RewardError(str(error)) from None
