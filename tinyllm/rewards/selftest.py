"""Self-tests of a task row: a verifier that cannot tell the gold answer from an empty text must not train a model.

Its gold can be read; the gold, written as an answer, scores 1; the empty text, the prompt itself and a different value
of the same kind score 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinyllm.errors import DataError
from tinyllm.rewards.base import Row, SelfTest, Verifier, prompt_text, verify


def row_fault(verifier: Verifier, row: Row) -> str | None:
    """Why the verifier cannot judge this row, or None."""
    try:
        verifier.check(row)
    except DataError as error:
        return str(error)
    for probe in probes(verifier, row):
        verdict = verify(verifier, row, probe.text)
        if verdict.value is None:
            return f"self-test {probe.name!r} could not be scored: {verdict.reason}"
        if (verdict.value == 1.0) != bool(probe.expected) or (not probe.expected and verdict.value > 0):
            return (
                f"self-test {probe.name!r} scores {verdict.value:g} instead of {probe.expected}: {probe.text[-80:]!r}"
            )
    return None


def probes(verifier: Verifier, row: Mapping[str, Any]) -> list[SelfTest]:
    """All self-tests of a row."""
    echo = [SelfTest("the prompt itself", prompt_text(row), 0)] if verifier.prompt_fails else []
    return [SelfTest("empty text", "", 0), *echo, *verifier.probes(row)]
