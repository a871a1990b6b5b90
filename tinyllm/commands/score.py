"""`tinyllm score` and `tinyllm probe`: try a verifier on old outputs, and attack it, before any training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.commands.arguments import ProbeArguments, ScoreArguments, VerifierArguments
from tinyllm.config.sections import RewardConfig
from tinyllm.errors import DataError, UserError
from tinyllm.records import Completion, Prompt, Revision, Verdict
from tinyllm.rewards.base import Verifier
from tinyllm.rewards.combine import make_parts
from tinyllm.rewards.judge import RewardJudge
from tinyllm.rewards.probe import probe
from tinyllm.rewards.rowcheck import self_test
from tinyllm.stats import wilson
from tinyllm.tasks.files import nearest, read_file, rename

COMPLETION_COLUMNS = ("completion", "text", "response", "output")
"""Where the completion is looked for, in this order, unless --columns maps it."""


@dataclass(frozen=True)
class ScoredRow:
    """One row of a file with its verdict."""

    place: str
    row: Mapping[str, Any]
    text: str
    verdict: Verdict


def main(given: ScoreArguments, options: Mapping[str, Any]) -> int:
    """`tinyllm score FILE --verifier SPEC`: returns the exit code (1 when rows stayed unscored)."""
    if given.file is None:
        raise UserError("tinyllm score: FILE is missing (see: tinyllm score --help)")
    scored = score_file(given.file, _reward(given), _columns(given.columns))
    if given.explain:
        verifiers = [part.judge for part in make_parts(_reward(given), None) if isinstance(part.judge, Verifier)]
        for item in scored:
            print(explain(item, verifiers))
    if given.out:
        _write(Path(given.out), scored)
    print(summary([item.verdict for item in scored]))
    return 1 if any(item.verdict.value is None for item in scored) else 0


def probe_main(given: ProbeArguments, options: Mapping[str, Any]) -> int:
    """`tinyllm probe --verifier SPEC [--data FILE]`: returns the exit code (1 when an attack pays)."""
    rows = _task_rows(given.data, _columns(given.columns))
    reward = _reward(given)
    faults = self_test(reward, None, rows)
    usable = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    if not usable:
        raise DataError(f"no row can be used; first: {faults[0] if faults else 'the file is empty'}")
    if len(usable) < len(rows):
        print(
            f"{len(rows) - len(usable)} of {len(rows)} rows fail their self-test; first: {next(filter(None, faults))}"
        )
    with _judge(reward, list(usable[0][1])) as judge:
        found = probe(judge, [_prompt(place, row) for place, row in usable], given.rows)
    for finding in found:
        mark = "PAYS" if finding.pays else "ok"
        print(
            f"{mark:5} {finding.name:32} {finding.paid:3} of {finding.rows} rows"
            + (f"  {finding.example[:60]!r}" if finding.pays else "")
        )
    paying = [finding.name for finding in found if finding.pays]
    print(f"{len(paying)} of {len(found)} attacks pay" + (f": {', '.join(paying)}" if paying else ""))
    return 1 if paying else 0


def score_file(file: str, reward: RewardConfig, columns: Mapping[str, str] | None = None) -> list[ScoredRow]:
    """Score every row of a file; rows whose gold cannot be used come back unscored with the reason.

    Raises DataError (file, rows, missing columns) and RewardError (the verifier).
    """
    rows = [(place, rename(row, columns or {}, place)) for place, row in read_file(file)]
    if not rows:
        raise DataError(f"{file} has no rows; nothing to score")
    texts = [_text(place, row) for place, row in rows]
    prompts = [_prompt(place, row) for place, row in rows]
    completions = [
        Completion(prompt.id, 0, 0, (), (), _finish(prompt.row), 0, Revision(0, "file"), text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    with _judge(reward, [column for column in rows[0][1] if column != "prompt"]) as judge:
        verdicts = judge(prompts, completions).verdicts
    return [
        ScoredRow(place, row, text, verdict) for (place, row), text, verdict in zip(rows, texts, verdicts, strict=True)
    ]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Shares of 0, 1, other and unscored, and the mean with its 95% interval (of the share of 1, when all are 0 or
    1)."""
    values = [verdict.value for verdict in verdicts if verdict.value is not None]
    reasons = Counter((verdict.reason or "")[:100] for verdict in verdicts if verdict.value is None)
    lines = [f"{len(verdicts)} rows: {values.count(1.0)} score 1, {values.count(0.0)} score 0"]
    others = len(values) - values.count(1.0) - values.count(0.0)
    lines[0] += f", {others} score between or beyond" if others else ""
    lines[0] += f", {len(verdicts) - len(values)} unscored"
    if values:
        mean = sum(values) / len(values)
        interval = ""
        if not others:
            low, high = wilson(values.count(1.0), len(values))
            interval = f" (95% interval {low:.3f} to {high:.3f})"
        lines.append(f"mean {mean:.4f}{interval}")
        if len(values) > 5 and len(set(values)) == 1:
            lines.append(f"warning: every row scores {values[0]:g}; a reward that never differs teaches nothing")
    lines += [f"unscored: {count} x {reason}" for reason, count in reasons.most_common(10)]
    return "\n".join(lines)


def explain(item: ScoredRow, verifiers: Sequence[Verifier]) -> str:
    """One line: place, value, answer, parts, and why there is no answer."""
    verdict = item.verdict
    value = "unscored" if verdict.value is None else f"{verdict.value:g}"
    why = verdict.reason or ""
    if verdict.value is not None and verdict.value < 1:
        why = "; ".join(filter(None, (verifier.explain(item.row, item.text) for verifier in verifiers)))
    parts = " ".join(f"{name}={number:g}" for name, number in verdict.parts)
    answer = "" if verdict.answer is None else f" answer {verdict.answer.strip()[:60]!r}"
    return (
        f"{item.place}: {value}{answer}"
        + (f" [{parts}]" if len(verdict.parts) > 1 else "")
        + (f" ({why})" if why else "")
    )


@contextmanager
def _judge(reward: RewardConfig, columns: Sequence[str]) -> Iterator[RewardJudge]:
    judge = RewardJudge(make_parts(reward, None), reward.timeout_s, reward.workers)
    try:
        judge.prepare(columns)
        yield judge
    finally:
        judge.close()


def _reward(given: VerifierArguments) -> RewardConfig:
    if not given.verifier:
        raise UserError("--verifier is missing; give a verifier (math:rule=boxed) or module:function")
    specs = [_unsafe(spec) if given.unsafe_no_sandbox else spec for spec in given.verifier]
    return RewardConfig(tuple(specs), given.weights, timeout_s=given.timeout_s, workers=given.workers)


def _unsafe(spec: str) -> str:
    if spec.partition(":")[0] != "code":
        return spec
    return spec + ("," if ":" in spec else ":") + "sandbox=unsafe-no-sandbox"


def _columns(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise UserError(f"--columns {text!r}: write ours=theirs between commas")
    return {ours: theirs for ours, _, theirs in pairs}


def _text(place: str, row: Mapping[str, Any]) -> str:
    for column in COMPLETION_COLUMNS:
        if column in row:
            value = row[column]
            if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # chat messages
                value = value[-1].get("content")
            if not isinstance(value, str):
                raise DataError(f"{place}: column {column!r} is {type(value).__name__}, not a text")
            return value
    hint = nearest("completion", list(row))
    raise DataError(f"{place} has no column 'completion'; {hint}; map one with --columns completion=NAME")


def _finish(row: Mapping[str, Any]) -> Any:
    return "length" if row.get("finish_reason") == "length" else "stop"


def _prompt(place: str, row: Mapping[str, Any]) -> Prompt:
    prompt = row.get("prompt", "")
    return Prompt(place, (), prompt if isinstance(prompt, str) else json.dumps(prompt), row)


def _task_rows(file: str | None, columns: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    if file is not None:
        return [(place, rename(row, columns, place)) for place, row in read_file(file)]
    from tinyllm.tasks.arithmetic import ArithmeticConfig, generate

    return [(repr(row["prompt"]), row) for row in generate(ArithmeticConfig())[1]]


def _write(path: Path, scored: Sequence[ScoredRow]) -> None:
    rows = [
        {"place": item.place}
        | {name: getattr(item.verdict, name) for name in ("value", "reason", "answer")}
        | {"parts": dict(item.verdict.parts)}
        for item in scored
    ]
    try:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from None
