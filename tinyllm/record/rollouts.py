"""Groups as a Parquet table, one row per rollout, and back, exactly: every float keeps its bits.

The columns are ours alone. What the task brought along is JSON in `row`, what a reward function logged is JSON in
`extra`, so no name of a user's can ever replace one of ours.
Each row carries the hash of its content, the file the hash of all of them: a change is noticed, and its row named.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tinyllm.errors import RewardError, RunError
from tinyllm.record.hashing import hash_bytes, hash_json
from tinyllm.records import Completion, Group, Logged, Prompt, Revision, RevisionSpan, Rollout, Step, Verdict

# policy_step and policy_hash are null where the environment gave the tokens
SPANS = pa.list_(
    pa.struct([("policy_step", pa.int64()), ("policy_hash", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("attempt", pa.int32()),  # always 0
        ("group_id", pa.string()),  # prompt_id#draw
        ("prompt_id", pa.string()),
        ("draw", pa.int32()),
        ("sample", pa.int32()),
        ("policy_step", pa.int64()),  # the optimizer step of the weights that sampled it
        ("policy_hash", pa.string()),  # the hash of their content
        ("spans", SPANS),  # null: all tokens are of these weights; else what gave tokens [start, end), see SPANS
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),  # null: unscored, for the reason beside it
        ("reason", pa.string()),
        ("answer", pa.string()),
        ("parts", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("seed_key", pa.uint64()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),  # null within: a token that the environment gave
        ("messages", pa.string()),  # JSON; null: the prompt is raw text
        ("row", pa.string()),  # JSON: the task row
        ("extra", pa.string()),  # JSON: what the reward function logged
        ("row_hash", pa.string()),
    ]
)


@dataclass(frozen=True)
class Recorded:
    """One file of rollouts."""

    step: int
    groups: list[Group]
    logged: Logged
    """What reward functions logged; extras have one value per rollout."""
    changed: list[str]
    """Rows that are not what was written, as "row 3 (group 17#0, sample 2)"; empty when all is well."""


def write_table(step: Step) -> memoryview:
    """A step as a Parquet file, as bytes: one row per rollout, in the order of its groups.

    Raises RewardError for a logged column that has a name of ours or another number of values than rollouts.
    """
    extras = step.logged.extras
    if taken := sorted(set(SCHEMA.names) & set(extras)):
        raise RewardError(f"log_extra column {taken[0]!r}: the name is taken by the run's record; choose another")
    count = sum(len(group.rollouts) for group in step.groups)
    for name, values in extras.items():
        if len(values) != count:
            raise RewardError(f"log_extra column {name!r} has {len(values)} values for {count} completions")
    rows: list[dict[str, Any]] = []
    for group in step.groups:
        assert group.rollouts, f"group {group.id} has no rollouts"
        shared = _prompt_columns(group.prompt) | {"step": step.number, "attempt": 0, "group_id": group.id}
        for rollout in group.rollouts:
            beside = {name: values[len(rows)] for name, values in extras.items()}
            assert (rollout.completion.prompt_id, rollout.completion.draw) == (group.prompt.id, group.prompt.draw)
            row = shared | _rollout_columns(rollout) | {"extra": _json(beside, "log_extra") if beside else None}
            rows.append(row | {"row_hash": _row_hash(row)})
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    # attempt and complete are of a format that had several files a step; a step is one file
    facts: dict[str, Any] = {"step": step.number, "attempt": 0, "complete": True, "rows": _rows_hash(rows)}
    facts["logged"] = dict(step.logged.metrics)
    return _parquet(table.replace_schema_metadata({"tinyllm": json.dumps(facts)}))


def _parquet(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return memoryview(sink.getvalue())


def derived_table(
    step: int, rows: Sequence[tuple[str, int]], advantages: Sequence[float], logprobs: Mapping[int, Sequence[float]]
) -> memoryview:
    """What training computed for each rollout as a Parquet file, as bytes; the floats of training, to the bit.

    rows: (group id, sample); logprobs: by row number, null in the file for a row that was not trained on.
    """
    table = pa.table(
        {
            "step": pa.array([step] * len(rows), pa.int64()),
            "group_id": [group for group, _ in rows],
            "sample": pa.array([sample for _, sample in rows], pa.int32()),
            "advantage": pa.array(advantages, pa.float64()),
            "trainer_logprobs": pa.array([logprobs.get(i) for i in range(len(rows))], pa.list_(pa.float64())),
        }
    )
    return _parquet(table)


def read_table(path: str | Path) -> Recorded:
    """Read what write_table wrote. Raises RunError when it cannot be read; changed rows are listed, not refused."""
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False)
        facts = json.loads((table.schema.metadata or {})[b"tinyllm"])
        rows = table.to_pylist()
        groups = [_group(list(part)) for _, part in groupby(rows, key=lambda row: row["group_id"])]
        extra = [json.loads(row["extra"] or "{}") for row in rows]
    except FileNotFoundError:
        raise RunError(f"{path}: missing") from None
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path}: damaged, or not written by tinyllm ({reason})") from None
    changed = [
        f"row {number} (group {row['group_id']}, sample {row['sample']})"
        for number, row in enumerate(rows)
        if _row_hash(row) != row["row_hash"]
    ]
    if not changed and _rows_hash(rows) != facts["rows"]:
        changed = ["rows were added, left out or put in another order"]
    columns = {name: [row.get(name) for row in extra] for name in dict.fromkeys(name for row in extra for name in row)}
    return Recorded(facts["step"], groups, Logged(facts["logged"], columns), changed)


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "draw": prompt.draw,
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "messages": None if prompt.messages is None else _json([dict(m) for m in prompt.messages], "messages"),
        "row": _json(dict(prompt.row), f"the row of prompt {prompt.id}"),
    }


def _rollout_columns(rollout: Rollout) -> dict[str, Any]:
    completion, verdict = rollout.completion, rollout.verdict
    return {
        "sample": completion.sample,
        "policy_step": completion.revision.step,
        "policy_hash": completion.revision.hash,
        "spans": [_span_columns(span) for span in completion.spans] or None,
        "completion": completion.text,
        "reward": verdict.value,
        "reason": verdict.reason,
        "answer": verdict.answer,
        "parts": [{"name": name, "value": value} for name, value in verdict.parts],
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "seed_key": completion.seed_key,
        "completion_token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }


def _span_columns(span: RevisionSpan) -> dict[str, Any]:
    step, weights = (None, None) if span.revision is None else (span.revision.step, span.revision.hash)
    return {"policy_step": step, "policy_hash": weights, "start": span.start, "end": span.end}


def _span(row: Mapping[str, Any]) -> RevisionSpan:
    step, weights = row["policy_step"], row["policy_hash"]
    return RevisionSpan(None if step is None else Revision(step, weights), row["start"], row["end"])


def _group(rows: list[dict[str, Any]]) -> Group:
    first = rows[0]
    messages = first["messages"]
    prompt = Prompt(
        id=first["prompt_id"],
        token_ids=tuple(first["prompt_token_ids"]),
        text=first["prompt"],
        row=json.loads(first["row"]),
        messages=None if messages is None else tuple(json.loads(messages)),
        draw=first["draw"],
    )
    return Group(prompt, tuple(_rollout(row) for row in rows))


def _rollout(row: dict[str, Any]) -> Rollout:
    completion = Completion(
        prompt_id=row["prompt_id"],
        draw=row["draw"],
        sample=row["sample"],
        token_ids=tuple(row["completion_token_ids"]),
        logprobs=tuple(row["logprobs"]),
        finish_reason=row["finish_reason"],
        seed_key=row["seed_key"],
        revision=Revision(row["policy_step"], row["policy_hash"]),
        text=row["completion"],
        error=row["error"],
        spans=tuple(_span(span) for span in row.get("spans") or ()),
    )
    parts = tuple((part["name"], part["value"]) for part in row["parts"])
    return Rollout(completion, Verdict(row["reward"], row["reason"], row["answer"], parts))


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=True, sort_keys=False)
    except (TypeError, ValueError) as error:
        raise RunError(f"{what} cannot be recorded: {error}; use text, numbers, lists and mappings") from None


def _row_hash(row: Mapping[str, Any]) -> str:
    """Hash of everything in a row but its hash; lists of numbers by their bytes, so that it is quick."""
    digest = xxhash.xxh3_128()
    for name, code in (("prompt_token_ids", "i"), ("completion_token_ids", "i"), ("logprobs", "d")):
        numbers = array(code, [math.nan if x is None else x for x in row[name]])  # what is recorded is never NaN
        digest.update(len(numbers).to_bytes(8, "little"))
        digest.update(numbers.tobytes())
    rest = {name: value for name, value in row.items() if not isinstance(value, tuple | list) and name != "row_hash"}
    if row.get("spans"):  # left out where there are none, so that records from before they were kept hold
        rest["spans"] = [list(span.values()) for span in row["spans"]]
    else:
        rest.pop("spans", None)
    rest["parts"] = [[part["name"], part["value"]] for part in row["parts"]]
    digest.update(hash_json(rest).encode())
    return digest.hexdigest()


def _rows_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    return hash_bytes("".join(row["row_hash"] for row in rows).encode())
