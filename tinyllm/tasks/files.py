"""Own data: rows from .jsonl, .parquet or a `datasets` name, with a column map. Rows are numbered from 1, as in an
editor.

Nothing is guessed: a row is used as it stands or refused with its number (or skipped and counted, on_bad_row = "skip").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tinyllm.errors import DataError, nearest, require_extra

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".parquet")


COLUMNS = "the columns are"


def read_file(path: str) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row of a .jsonl or .parquet file; place is "row N of NAME".

    Raises DataError: missing or unreadable file, unknown suffix, a line that is not a JSON object.
    """
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise DataError(f"data file {path}: suffix {file.suffix or 'missing'}; give a .jsonl or .parquet file")
    if not file.is_file():
        raise DataError(f"data file {path} {'is a folder' if file.is_dir() else 'does not exist'}; check the path")
    return _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)


def _read_jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"row {number} of {file.name}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                    raise DataError(f"{place} is not JSON ({what}); write one object per line") from None
                if not isinstance(row, dict):
                    raise DataError(f"{place} is {type(row).__name__}, not an object; write one object per line")
                yield place, row
    except UnicodeDecodeError as error:
        raise DataError(f"data file {file} is not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error.strerror}") from None


def _read_parquet(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number} of {file.name}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {file} is not readable as Parquet: {str(error).splitlines()[0]}") from None


def read_dataset(spec: str) -> Iterator[tuple[str, Row]]:
    """(place, row) of a `datasets` data set: "name", "name:config" or "name:config:split" (split "train" if not given).

    Code of the data set's authors is never run. Raises DataError when it cannot be loaded.
    """
    require_extra("data", f"data.dataset = {spec!r}")
    import datasets

    name, _, rest = spec.partition(":")
    config, _, split = rest.partition(":")
    try:
        data = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # `datasets` raises whatever its readers and the network raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data.dataset = {spec!r} cannot be loaded: {first}") from error
    for number, row in enumerate(data, 1):
        yield f"row {number} of {spec}", dict(row)


def rename(row: Row, columns: Mapping[str, str], place: str) -> Row:
    """The row with its columns under our names; every other column is kept. columns maps ours to theirs.

    Raises DataError naming the nearest column when one is missing.
    """
    for ours, theirs in columns.items():
        if theirs not in row:
            raise DataError(f"{place} has no column {theirs!r} (mapped to {ours!r}); {nearest(theirs, row, COLUMNS)}")
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    return renamed | {ours: row[theirs] for ours, theirs in columns.items()}


def check_prompt(row: Row, place: str) -> None:
    """Raises DataError unless row["prompt"] is a non-empty text or a list of chat messages."""
    if "prompt" not in row:
        raise DataError(
            f"{place} has no column 'prompt'; {nearest('prompt', row, COLUMNS)}; "
            "map one with --data.columns prompt=NAME"
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{place} has an empty prompt; remove the row or give --data.on_bad_row skip")
        check_text(prompt, place)
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place} has no prompt (found {type(prompt).__name__}); give a text or a list of messages")
    for index, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: message {index} has no role; write {{'role': 'user', 'content': '...'}}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"{place}: message {index} has no text content; only text messages can be trained on")
        check_text(message["content"], f"{place}: message {index}")


def check_text(text: str, place: str, part: str = "its prompt") -> None:
    """Raises DataError for half a surrogate pair, which JSON can hold: no tokenizer and no file takes such a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} has half a surrogate pair ({text[error.start]!a}) in {part}; write whole characters"
        ) from None
