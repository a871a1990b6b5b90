"""From a configuration to the `verify` that the loop calls: parts, weights, one verdict per completion.

    value = sum of weight x part      (combine = "sum")
          | product of the parts      ("product")
          | first part x sum of the others      ("gate": for example the format gates correctness)

Each part is logged by name in Verdict.parts; accuracy is counted from the part "correct".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.config.sections import RewardConfig
from tinyllm.errors import RewardError
from tinyllm.records import Completion, Prompt, Verdict
from tinyllm.rewards import functions
from tinyllm.rewards.base import Verifier, build, is_family, verify
from tinyllm.rewards.pool import START_S, VerifierPool, VerifyTask
from tinyllm.rewards.selftest import Passed, row_fault
from tinyllm.rewards.text.extract import Region
from tinyllm.rewards.text.format import FormatVerifier
from tinyllm.rewards.worker import from_json

FINISHED_RULES = ("last_number", "final")
"""Rules that read the end of the text: a completion cut by the length limit has no answer under them, so it scores
0."""
PROBES = 6
"""Self-tests of a row, at most: its time limit is this many verdicts."""


@dataclass(frozen=True)
class RewardPart:
    """One term of the reward."""

    name: str
    weight: float
    judge: Verifier | Callable[..., Any] | str
    """A verifier; a function of this process; or "module:function", which runs in the pool."""


def make_parts(reward: RewardConfig, task_verifier: str | None) -> list[RewardPart]:
    """The terms of the reward, in order. Raises RewardError naming the field, the value and the remedy."""
    specs: list[Any] = list(reward.functions)
    weights = list(reward.weights) or [1.0] * max(1, len(specs))
    if not specs:
        specs = [_own(task_verifier)]
    if reward.combine == "gate" and len(specs) < 2:
        raise RewardError("reward.combine = 'gate' needs two functions or more: the first opens the gate")
    if len(weights) != len(specs):
        raise RewardError(f"reward.weights has {len(weights)} numbers for {len(specs)} functions; give one each")
    if not all(map(math.isfinite, weights)):
        raise RewardError(f"reward.weights = {weights}; give finite numbers")
    parts: list[RewardPart] = []
    for spec, weight in zip(specs, weights, strict=True):
        judge = _judge(spec)
        name = judge.rpartition(":")[2] if isinstance(judge, str) else getattr(judge, "__name__", type(judge).__name__)
        if isinstance(judge, Verifier):
            name = "correct" if not any(part.name == "correct" for part in parts) else judge.family
        taken = [part.name for part in parts]
        parts.append(RewardPart(next(unique for unique in _names(name) if unique not in taken), weight, judge))
    main = parts[0].judge
    if isinstance(main, Region) and not reward.functions:  # logged beside correctness
        tags = main.tags if main.rule == "exact_format" else ("answer",)
        parts.append(RewardPart("format", 0.0, FormatVerifier(rule="exact_format", tags=tags, gold=None)))
    return parts


def _own(task_verifier: str | None) -> Verifier:
    if task_verifier is None:
        raise RewardError(
            "these rows have no verifier of their own; give --reward module:function, or a verifier such as "
            "--reward math:rule=boxed, or arithmetic:rule=last_number for numeric answers"
        )
    return build(task_verifier)


def _judge(spec: Any) -> Verifier | Callable[..., Any] | str:
    if isinstance(spec, Verifier) or (callable(spec) and not isinstance(spec, str)):
        return spec
    return build(spec) if is_family(spec) else functions.check_spec(spec)


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1


class Verify:
    """verify(prompts, completions, step) -> one verdict per completion, in order; each is judged exactly once per part.

    Our text verifiers run here. What has no bound of its own (math, code, JSON Schema, "module:function") runs in a
    pool of
    worker processes with a time limit; functions given as Python objects run here, without one.
    """

    def __init__(
        self, parts: Sequence[RewardPart], timeout_s: float = 10.0, workers: int = 2, combine: str = "sum"
    ) -> None:
        self.parts = tuple(parts)
        self.timeout_s = timeout_s
        self.combine = combine
        self.pool = VerifierPool(workers) if any(_in_pool(part) for part in self.parts) else None
        self.logged = functions.Logged()
        """What reward functions logged in the last call: metrics by "function/name", extras by column."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> list[Verdict]:
        self.logged = functions.Logged()
        by_key = {(prompt.id, prompt.draw): prompt for prompt in prompts}
        pairs = [(by_key[completion.prompt_id, completion.draw], completion) for completion in completions]
        sampled = [pair for pair in pairs if pair[1].finish_reason != "error"]
        remote = iter(self._remote([part for part in self.parts if _in_pool(part)], sampled, step))
        columns = [next(remote) if _in_pool(part) else self._local(part, sampled, step) for part in self.parts]
        rows = iter(list(zip(*columns, strict=True)))
        return [
            Verdict(None, f"sampling failed: {completion.error or 'no reason given'}")
            if completion.finish_reason == "error"
            else self._combined(next(rows))
            for _, completion in pairs
        ]

    def describe(self) -> dict[str, Any]:
        """For the manifest of a run: each part's name, weight and settings, and the sandbox that code runs in."""
        parts = [{"name": part.name, "weight": part.weight, **_described(part.judge)} for part in self.parts]
        code = [part.judge for part in self.parts if isinstance(part.judge, Verifier) and part.judge.family == "code"]
        return {"parts": parts, "combine": self.combine, **({"sandbox": code[0].describe()} if code else {})}

    def close(self) -> None:
        """End worker processes, if there are any."""
        if self.pool:
            self.pool.close()

    def prepare(self, columns: Sequence[str]) -> None:
        """Load every reward function and check its arguments against the data's columns. Raises RewardError."""
        for number, part in enumerate(self.parts):
            if isinstance(part.judge, str):
                assert self.pool
                empty = {
                    "kind": "call",
                    "name": part.name,
                    "batch": functions.RewardBatch([], [], [], [], [], 0).__dict__,
                }
                self.pool.run([VerifyTask(part.judge, empty, START_S, tuple(columns), pin=number)])
            elif not isinstance(part.judge, Verifier):
                functions.check_columns(part.judge, part.name, columns)

    def _local(self, part: RewardPart, pairs: Sequence[tuple[Prompt, Completion]], step: int) -> list[Verdict]:
        judge = part.judge
        if isinstance(judge, Verifier):
            return [_unfinished(judge, done) or verify(judge, prompt.row, done.text) for prompt, done in pairs]
        assert callable(judge)
        return functions.call(judge, part.name, _batch(pairs, step), self.logged)

    def _remote(
        self, parts: Sequence[RewardPart], pairs: Sequence[tuple[Prompt, Completion]], step: int
    ) -> list[list[Verdict]]:
        """The verdicts of the parts that run in the pool, all parts at once."""
        if not parts or not pairs:
            return [[] for _ in parts]
        assert self.pool
        jobs: list[VerifyTask] = []
        for number, part in enumerate(parts):
            if isinstance(part.judge, Verifier):
                finished = [(prompt, done) for prompt, done in pairs if not _unfinished(part.judge, done)]
                jobs += [_verify_job(part.judge, prompt.row, done.text, self.timeout_s) for prompt, done in finished]
            else:
                jobs.append(self._function_job(part, pairs, step, number))
        results = iter(self.pool.run(jobs))
        columns = []
        for number, part in enumerate(parts):
            if isinstance(part.judge, Verifier):
                columns.append([_unfinished(part.judge, done) or _verdict(next(results)) for _, done in pairs])
                continue
            result = next(results)
            singles = [self._function_job(part, [pair], step, number, pinned=False) for pair in pairs]
            columns.append(self._function_verdicts(result, singles))
        return columns

    def _function_job(
        self, part: RewardPart, pairs: Sequence[tuple[Prompt, Completion]], step: int, number: int, pinned: bool = True
    ) -> VerifyTask:
        batch = _batch(pairs, step)
        message = {
            "kind": "call",
            "name": part.name,
            "batch": {**batch.__dict__, "rows": [dict(row) for row in batch.rows]},
        }
        columns = tuple(dict.fromkeys(name for row in batch.rows for name in row if name != "prompt"))
        return VerifyTask(part.judge, message, self.timeout_s, columns, retry=False, pin=number if pinned else None)

    def _function_verdicts(self, result: dict[str, Any], singles: Sequence[VerifyTask]) -> list[Verdict]:
        """A batch that ran out of time (or killed its worker) is called again completion by completion, to find
        which."""
        assert self.pool
        if "failed" in result and len(singles) > 1:
            return [_verdict(single) for single in self.pool.run(singles)]
        self.logged.metrics |= result.get("metrics", {})
        self.logged.extras |= result.get("extras", {})
        if "failed" in result:
            return [_verdict(result)]
        return [from_json(fields) for fields in result["verdicts"]]

    def _combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        """One verdict from the parts' own. A part that is None for this row (a function for other tasks) leaves the
        sum."""
        answer = next((verdict.answer for verdict in verdicts if verdict.answer is not None), None)
        named = list(zip(self.parts, verdicts, strict=True))
        failed = [verdict.reason for _, verdict in named if verdict.value is None]
        left_out = [reason for reason in failed if reason and reason.endswith("returned None")]
        scored = [(part, verdict.value) for part, verdict in named if verdict.value is not None]
        parts = tuple((part.name, value) for part, value in scored)
        main = [part for part, _ in scored if part.name != "format"]
        if len(failed) > len(left_out) or not main or (failed and self.combine != "sum"):
            others = [reason for reason in failed if reason not in left_out]
            return Verdict(None, (others or left_out)[0], answer, parts)
        if self.combine == "product":
            value = math.prod(value for part, value in scored if part.weight)
        elif self.combine == "gate":
            value = scored[0][1] * sum(part.weight * value for part, value in scored[1:])
        else:
            value = sum(part.weight * value for part, value in scored)
        if not math.isfinite(value):
            return Verdict(None, f"the combined reward is {value}", answer)
        return Verdict(value, None, answer, parts)


def _described(judge: Verifier | Callable[..., Any] | str) -> dict[str, Any]:
    if isinstance(judge, Verifier):
        return {"verifier": judge.spec, "hash": judge.hash}
    return {
        "function": judge if isinstance(judge, str) else f"{judge.__module__}:{getattr(judge, '__qualname__', '?')}"
    }


def verdict_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Shares of all verdicts: right (part "correct" is 1), unreadable (no answer found), unscored, timed out."""
    count = max(1, len(verdicts))
    unscored = [verdict.reason or "" for verdict in verdicts if verdict.value is None]
    judged = [verdict for verdict in verdicts if verdict.value is not None and "correct" in dict(verdict.parts)]
    return {
        "verdicts/right": sum(dict(verdict.parts)["correct"] == 1.0 for verdict in judged) / count,
        "verdicts/unreadable": sum(verdict.answer is None for verdict in judged) / count,
        "verdicts/unscored": len(unscored) / count,
        "verdicts/timed_out": sum("timed out" in reason for reason in unscored) / count,
    }


def _in_pool(part: RewardPart) -> bool:
    return isinstance(part.judge, str) or (isinstance(part.judge, Verifier) and not part.judge.in_process)


def _unfinished(verifier: Verifier, completion: Completion) -> Verdict | None:
    cut = completion.finish_reason == "length" and getattr(verifier, "rule", None) in FINISHED_RULES
    return Verdict(0.0) if cut else None


def _verify_job(verifier: Verifier, row: Mapping[str, Any], text: str, timeout_s: float) -> VerifyTask:
    message = {"kind": "verify", "row": dict(row), "text": text}
    return VerifyTask(verifier.spec, message, max(timeout_s, verifier.time_limit(row)))


def _verdict(result: dict[str, Any]) -> Verdict:
    return Verdict(None, result["failed"]) if "failed" in result else from_json(result["verdicts"][0])


def _batch(pairs: Sequence[tuple[Prompt, Completion]], step: int) -> functions.RewardBatch:
    chats = [isinstance(prompt.row.get("prompt"), (list, tuple)) for prompt, _ in pairs]
    return functions.RewardBatch(
        ids=[prompt.id for prompt, _ in pairs],
        prompts=[prompt.row.get("prompt", prompt.text) for prompt, _ in pairs],
        completions=[
            [{"role": "assistant", "content": completion.text}] if chat else completion.text
            for chat, (_, completion) in zip(chats, pairs, strict=True)
        ],
        completion_ids=[list(completion.token_ids) for _, completion in pairs],
        rows=[prompt.row for prompt, _ in pairs],
        step=step,
    )


def make_verify(reward: RewardConfig, data: Any, tokenizer: Any = None) -> Verify:
    """What the loop calls to judge completions of `data` (a TaskData: its verifier spec and its rows are read).

    Raises RewardError for a function or verifier that cannot be built, or that needs a column the data does not have.
    """
    rows = [prompt.row for prompt in data.train[:1]]
    verify_all = Verify(make_parts(reward, data.verifier), reward.timeout_s, reward.workers, reward.combine)
    try:
        verify_all.prepare([column for row in rows for column in row if column != "prompt"])
    except RewardError:
        verify_all.close()
        raise
    return verify_all


def self_test(
    reward: RewardConfig, task_verifier: str | None, rows: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str | None]:
    """For each (place, row) why it cannot be used, or None (see selftest.py). Reward functions have none: they are the
    user's."""
    faults: list[str | None] = [None] * len(rows)
    for part in make_parts(reward, task_verifier):
        if not isinstance(part.judge, Verifier):
            continue
        for index, fault in enumerate(_row_faults(part.judge, [row for _, row in rows], reward)):
            if fault and not faults[index]:
                faults[index] = f"{rows[index][0]}: {fault}"
    return faults


def _row_faults(verifier: Verifier, rows: Sequence[Mapping[str, Any]], reward: RewardConfig) -> list[str | None]:
    if verifier.in_process:
        return [row_fault(verifier, row) for row in rows]
    passed = Passed(verifier)
    faults: list[str | None] = [None] * len(rows)
    new = [index for index, row in enumerate(rows) if row not in passed]
    if not new:
        return faults
    pool = VerifierPool(reward.workers)
    try:
        limits = [PROBES * max(reward.timeout_s, verifier.time_limit(rows[index])) for index in new]
        messages = [{"kind": "fault", "row": dict(rows[index])} for index in new]
        jobs = [VerifyTask(verifier.spec, message, limit) for message, limit in zip(messages, limits, strict=True)]
        results = pool.run(jobs)
    finally:
        pool.close()
    for index, result in zip(new, results, strict=True):
        faults[index] = f"the self-test {result['failed']}" if "failed" in result else result["fault"]
    passed.add([rows[index] for index in new if faults[index] is None])
    return faults


def pool_verdicts(
    pool: VerifierPool,
    verifier: Verifier,
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    timeout_s: float = 10.0,
) -> list[Verdict]:
    """One verdict per (row, text), in order, from the pool's workers."""
    jobs = [_verify_job(verifier, row, text, timeout_s) for row, text in zip(rows, texts, strict=True)]
    return [_verdict(result) for result in pool.run(jobs)]
