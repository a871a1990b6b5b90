"""Self-tests of task rows at load: a verifier that cannot tell the gold from nothing at all must not train anyone.

Per row: its gold can be read; the gold, written as an answer, scores 1; the empty text, the prompt itself and a
different
value of the same kind score 0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm.errors import DataError
from tinyllm.model.bundled import cache_folder
from tinyllm.record.hashing import hash_bytes, hash_json
from tinyllm.rewards.base import Row, SelfTest, Verifier, verify


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
    prompt = row.get("prompt", "")
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    echo = [SelfTest("the prompt itself", str(prompt), 0)] if verifier.prompt_fails else []
    return [SelfTest("empty text", "", 0), *echo, *verifier.probes(row)]


class Passed:
    """Rows that passed under a verifier before, by hash, in the user's cache folder. A changed verifier starts anew."""

    def __init__(self, verifier: Verifier) -> None:
        self._file = cache_folder() / "selftest" / hash_json([verifier.hash, _code_hash()])
        try:
            self._hashes = set(self._file.read_text().split())
        except OSError:
            self._hashes = set()

    def __contains__(self, row: Row) -> bool:
        return hash_json(row) in self._hashes

    def add(self, rows: Sequence[Row]) -> None:
        """Remember rows; a cache that cannot be written is only slower."""
        lines = "".join(f"{hash_json(row)}\n" for row in rows)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, lines.encode())
            finally:
                os.close(descriptor)
        except OSError:
            return


@functools.cache
def _code_hash() -> str:
    """Hash of the verifiers' own source."""
    return hash_bytes(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
