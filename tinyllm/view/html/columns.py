"""The record of a run as columns: read from Parquet, packed for the page.

Legend: R rollouts, G groups, T tokens of all completions after one another.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tinyllm.errors import RunError
from tinyllm.record.rundir import RunDir

MAX_TOKENS = 4_000_000
"""Of all completions in one page; a run with more is shown by steps at even distances."""
FINISH = ("stop", "length", "error")
READ = (
    "step group_id prompt_id sample policy_step policy_hash prompt completion reward reason answer parts "
    "finish_reason error seed_key completion_token_ids logprobs messages row extra"
).split()


@dataclass(frozen=True)
class Rollouts:
    """Columns of the rollouts of a run, in recorded order; numbers [R] unless said otherwise."""

    step: np.ndarray
    group: np.ndarray
    """Index into the groups."""
    sample: np.ndarray
    reward: np.ndarray
    """NaN: unscored."""
    advantage: np.ndarray
    """NaN: not in derived/."""
    trained: np.ndarray
    """Whether derived/ has the trainer's log-probabilities of the rollout, as 1 or 0."""
    finish: np.ndarray
    """Index into FINISH."""
    seed_key: np.ndarray
    length: np.ndarray
    """Tokens of the completion."""
    lag: np.ndarray
    """Optimizer steps between the weights that sampled it and those that were trained."""
    token_ids: np.ndarray
    """[T]"""
    logprobs: np.ndarray
    """[T] of the sampler, in fp64."""
    trainer: np.ndarray
    """[T] of the trainer's first pass, in fp64; NaN where not trained."""
    group_step: np.ndarray
    """[G]"""
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    """Reward parts by name; NaN where a verdict has no such part."""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """Per rollout: completion, reason, answer, error, revision, extra; per group: group, prompt_id, prompt, row."""
    questions: list[str] = field(default_factory=list)
    """[G] The last message of each chat, the prompt where it is raw text."""
    omitted_steps: int = 0
    """Recorded steps that are not in these columns."""

    def __len__(self) -> int:
        return len(self.step)


def read_rollouts(run: RunDir, max_tokens: int = MAX_TOKENS) -> Rollouts | None:
    """The record of a run, with what derived/ adds; None when nothing is recorded. Raises RunError for a damaged file.

    When a run has more than max_tokens, whole steps at even distances are left out, never the last.
    """
    recorded = recorded_steps(run)
    if not recorded:
        return None
    probed = recorded if len(recorded) <= 40 else [recorded[i * (len(recorded) - 1) // 39] for i in range(40)]
    lengths = [_read(run.rollout_path(step), ["completion_token_ids"]).column(0).combine_chunks() for step in probed]
    expected = sum(len(ids.flatten()) for ids in lengths) / len(probed) * len(recorded)
    kept = max(1, min(len(recorded), int(len(recorded) * max_tokens / max(expected, 1))))
    steps = [recorded[(i + 1) * len(recorded) // kept - 1] for i in range(kept)]
    table = pa.concat_tables([_read(run.rollout_path(step), READ) for step in steps]).combine_chunks()
    return _columns(run, table, steps, len(recorded) - kept) if len(table) else None


def recorded_steps(run: RunDir) -> list[int]:
    """Steps that have rollouts; none for a run of a kind that samples nothing."""
    return run.steps() if (run.path / "rollouts").is_dir() else []


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read(columns=list(columns), use_threads=False)
        return table.select(list(columns)).replace_schema_metadata(None)
    except (OSError, pa.ArrowException, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path}: damaged, or not written by tinyllm ({reason})") from None


def _columns(run: RunDir, table: pa.Table, steps: Sequence[int], omitted: int) -> Rollouts:
    def numbers(name: str, dtype: Any) -> np.ndarray:
        column = table[name].combine_chunks()
        return column.to_numpy(zero_copy_only=False).astype(dtype)

    step, sample = numbers("step", np.uint32), numbers("sample", np.uint32)
    names = table["group_id"].to_pylist()
    keys = list(zip(step.tolist(), names, strict=True))
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([index[key] for key in keys], np.uint32)
    first = np.unique(group, return_index=True)[1]
    ids = table["completion_token_ids"].combine_chunks()
    length = np.diff(ids.offsets.to_numpy()).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])
    advantage, trainer, trained = _derived(run, steps, list(zip(keys, sample.tolist(), strict=True)), offsets)
    policy = numbers("policy_step", np.int64)
    texts: dict[str, list[str | None]] = {
        name: table[name].to_pylist() for name in ("completion", "reason", "answer", "error", "extra")
    }
    hashes = (str(value)[:12] for value in table["policy_hash"].to_pylist())
    texts["revision"] = [f"{at}:{name}" for at, name in zip(policy.tolist(), hashes, strict=True)]
    shared = table.select(["group_id", "prompt_id", "prompt", "row", "messages"]).take(first)
    texts |= {name: shared[name].to_pylist() for name in shared.column_names}
    chats = [json.loads(chat) if chat else None for chat in texts.pop("messages")]
    questions = [str(chat[-1]["content"] if chat else text) for chat, text in zip(chats, texts["prompt"], strict=True)]
    return Rollouts(
        step=step,
        group=group,
        sample=sample,
        reward=numbers("reward", np.float64),
        advantage=advantage,
        trained=trained,
        finish=np.array([FINISH.index(name) for name in table["finish_reason"].to_pylist()], np.uint8),
        seed_key=numbers("seed_key", np.uint64),
        length=length,
        lag=np.maximum(step.astype(np.int64) - 1 - policy, 0).astype(np.uint32),
        token_ids=ids.flatten().to_numpy(),
        logprobs=_sampled(table["logprobs"].combine_chunks(), offsets, trainer),
        trainer=trainer,
        group_step=step[first],
        parts=_parts(table["parts"].combine_chunks()),
        texts=texts,
        questions=questions,
        omitted_steps=omitted,
    )


def _sampled(column: Any, offsets: np.ndarray, trainer: np.ndarray) -> np.ndarray:
    """Log-probabilities the tokens were drawn with [T]; the trainer's for completions that were given, not sampled."""
    bounds, values = column.offsets.to_numpy(), column.values.to_numpy().astype(np.float64)
    found = trainer.copy()
    for row in np.flatnonzero(np.diff(bounds) == np.diff(offsets)):
        found[offsets[row] : offsets[row + 1]] = values[bounds[row] : bounds[row + 1]]
    return found


def _parts(column: Any) -> dict[str, np.ndarray]:
    rows = np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))
    flat = column.flatten()
    names, values = flat.field("name").to_numpy(zero_copy_only=False), flat.field("value").to_numpy()
    found: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(names.tolist()):
        mine = names == name
        found[name] = np.full(len(column), np.nan)
        found[name][rows[mine]] = values[mine]
    return found


def _derived(
    run: RunDir, steps: Sequence[int], keys: Sequence[tuple[Any, int]], offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(advantage [R], trainer log-probabilities [T], whether there are any [R]) from derived/, matched by name."""
    place = {key: row for row, key in enumerate(keys)}
    advantage, trained = np.full(len(keys), np.nan), np.zeros(len(keys), np.uint8)
    trainer = np.full(int(offsets[-1]), np.nan)
    for path in filter(Path.exists, map(run.derived_path, steps)):
        table = _read(path, ["step", "group_id", "sample", "advantage", "trainer_logprobs"])
        names = [table[name].to_pylist() for name in ("step", "group_id", "sample", "advantage")]
        logprobs = table["trainer_logprobs"].combine_chunks()
        bounds, values = logprobs.offsets.to_numpy(), logprobs.values.to_numpy()
        valid = logprobs.is_valid().to_numpy(zero_copy_only=False)
        for number, (step, name, sample, value) in enumerate(zip(*names, strict=True)):
            row = place.get(((step, name), sample))
            if row is None:
                continue
            advantage[row] = value
            begin, end = bounds[number], bounds[number + 1]
            if valid[number] and end - begin == offsets[row + 1] - offsets[row]:
                trainer[offsets[row] : offsets[row + 1]] = values[begin:end]
                trained[row] = 1
    return advantage, trainer, trained


# Packing


def packed(data: bytes, level: int = 6) -> str:
    """Bytes compressed and in base64, as a block stores them."""
    return base64.b64encode(zlib.compress(data, level)).decode()


class Blocks:
    """Columns of a page: each is compressed and written as one block of base64; the page's data names it by number."""

    def __init__(self) -> None:
        self.html: list[str] = []

    def add(self, data: bytes, level: int = 6) -> int:
        """Keep bytes and return the number of their block."""
        return self.add_packed(packed(data, level))

    def add_packed(self, text: str) -> int:
        """Keep a text that `packed` returned."""
        self.html.append(f'<script type="text/plain" id="block-{len(self.html)}">{text}</script>')
        return len(self.html) - 1

    def add_json(self, value: Any) -> int:
        """Keep a JSON value."""
        return self.add(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode())

    def add_numbers(self, values: np.ndarray) -> dict[str, Any]:
        """Keep an array of numbers, the bytes of equal weight together, which compresses better."""
        kind = values.dtype
        planes = np.ascontiguousarray(values.astype(kind.newbyteorder("<"))).view(np.uint8)
        planes = planes.reshape(len(values), kind.itemsize).T
        block = self.add(np.ascontiguousarray(planes).tobytes(), level=2)  # more effort finds little in such bytes
        return {"block": block, "type": kind.name, "length": len(values)}

    def add_texts(self, values: Sequence[str | None]) -> dict[str, Any]:
        """Keep texts: each different one once, and its number per row."""
        table = list(dict.fromkeys(values))
        number = {value: i for i, value in enumerate(table)}
        return {"texts": self.add_json(table), "rows": self.add_numbers(_smallest([number[v] for v in values]))}


def _smallest(values: Iterable[int]) -> np.ndarray:
    array = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, np.int64)
    return array.astype(np.uint16 if array.max(initial=0) < 1 << 16 else np.uint32)


def pack(rollouts: Rollouts, blocks: Blocks, tokens: Mapping[int, str], axes: Mapping[str, Any]) -> dict[str, Any]:
    """The page's description of a run's rollouts, the columns themselves in blocks.

    tokens: text by token id, as far as it is known; axes: the objective's ratio and bounds, see post.grpo. Floats are
    kept in fp32 where that is exact, else in fp64, the trainer's as the bits that differ from the sampler's.
    """
    used, numbers = np.unique(rollouts.token_ids, return_inverse=True)
    exact = _is_fp32(rollouts.logprobs) and _is_fp32(rollouts.trainer)
    dtype, bits = (np.float32, np.uint32) if exact else (np.float64, np.uint64)
    sampler, trainer = rollouts.logprobs.astype(dtype), rollouts.trainer.astype(dtype)
    trainer = np.where(np.isnan(trainer), sampler, trainer)
    named = ("group", "sample", "reward", "advantage", "trained", "finish", "seed_key", "length", "lag")
    columns = {name: blocks.add_numbers(getattr(rollouts, name)) for name in named}
    columns |= {"group_step": blocks.add_numbers(rollouts.group_step)}
    columns |= {f"part {i}": blocks.add_numbers(values) for i, values in enumerate(rollouts.parts.values())}
    return {
        "count": len(rollouts),
        "omitted_steps": rollouts.omitted_steps,
        "columns": columns,
        "parts": list(rollouts.parts),
        "texts": {name: blocks.add_texts(values) for name, values in rollouts.texts.items()},
        "vocabulary": blocks.add_json([[i, tokens.get(i)] for i in used.tolist()]),
        "tokens": blocks.add_numbers(_smallest(numbers)),
        "logprobs": blocks.add_numbers(sampler),
        "difference": blocks.add_numbers(sampler.view(bits) ^ trainer.view(bits)),
        "axes": dict(axes),
    }


def _is_fp32(values: np.ndarray) -> bool:
    narrow = values.astype(np.float32).astype(np.float64)
    return bool(((narrow == values) | np.isnan(values)).all())


def replay_command(run: RunDir) -> str:
    """The command that computes a step of the run again; the step's number follows."""
    return f"tinyllm replay {shlex.quote(str(run.path))} --sample --steps"


# Token texts


def token_texts(run: RunDir, ids: np.ndarray) -> dict[int, str]:
    """Token id -> its text, by the tokenizer of the run's model or of its start model; empty without a tokenizer."""
    path = _tokenizer_file(run)
    if path is None:
        return {}
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises plain Exception; the page shows numbers instead of texts
        return {}
    found = {}
    for token in np.unique(ids).tolist():
        name, text = tokenizer.id_to_token(token), tokenizer.decode([token], skip_special_tokens=False)
        if name is None:
            continue
        if name.startswith("▁") and not text.startswith(" "):  # a first word loses its space in decoding
            text = " " + text
        found[token] = name if "\ufffd" in text or not text else text  # part of a character has a name only
    return found


def _tokenizer_file(run: RunDir) -> Path | None:
    from tinyllm.model.bundled import BUNDLED, cached

    name = run.config.model.name
    folders = [run.path / "model", Path(name).expanduser()]
    if name in BUNDLED and (folder := cached(BUNDLED[name])):
        folders.append(folder)
    files = [folder / "tokenizer.json" for folder in folders]
    if "/" in name and not folders[1].exists():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(name, "tokenizer.json")
        except ValueError:  # not a name that a hub could have
            found = None
        files += [Path(found)] if isinstance(found, str) else []
    return next((file for file in files if file.is_file()), None)
