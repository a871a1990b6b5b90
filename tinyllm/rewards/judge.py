"""The judge of a run: prompts and completions in, one verdict per completion and what was logged out.

for each part of the reward: its verdicts of all completions      (here, or in worker processes)
per completion: the verdicts of its parts -> one verdict          (combine.py)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tinyllm.config.sections import RewardConfig
from tinyllm.errors import RewardError
from tinyllm.records import Completion, Judged, Logged, Prompt, Unscored, Verdict
from tinyllm.rewards import functions
from tinyllm.rewards.base import Verifier, verify
from tinyllm.rewards.combine import RewardPart, combined, make_parts
from tinyllm.rewards.pool import START_S, VerifierPool, VerifyTask
from tinyllm.rewards.worker import from_json

Pair = tuple[Prompt, Completion]


class RewardJudge:
    """Implements `tinyllm.seams.Judge` for verifiers and reward functions: each judges a completion exactly once.

    Verifiers of bounded time and functions given as objects run in this process. Verifiers and functions without a
    bound of their own (math, code, JSON Schema, "module:function") run in worker processes under timeout_s: a timeout
    or a crash leaves one completion unscored. A function whose batch ran out of time is called again completion by
    completion, to find the completion that hangs.
    """

    def __init__(
        self, parts: Sequence[RewardPart], timeout_s: float = 10.0, workers: int = 2, combine: str = "sum"
    ) -> None:
        self.parts = tuple(parts)
        self.timeout_s = timeout_s
        self.combine = combine
        self.pool = VerifierPool(workers) if any(part.in_worker for part in self.parts) else None
        self._one_call = threading.Lock()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int = 0) -> Judged:
        """One verdict per completion, in order. Raises RewardError when a reward function breaks its contract."""
        by_key = {(prompt.id, prompt.draw): prompt for prompt in prompts}
        places = [place for place, completion in enumerate(completions) if completion.finish_reason != "error"]
        pairs = [
            (by_key[completions[place].prompt_id, completions[place].draw], completions[place]) for place in places
        ]
        far = [part for part in self.parts if part.in_worker]
        with self._one_call:
            remote = iter(self._remote(far, pairs, step) if far else [])
            columns = [next(remote) if part.in_worker else self._local(part, pairs, step) for part in self.parts]
        rows = zip(*(column.verdicts for column in columns), strict=True)
        verdicts = {place: combined(self.parts, row, self.combine) for place, row in zip(places, rows, strict=True)}
        return Judged(
            tuple(verdicts[place] if place in verdicts else _not_sampled(c) for place, c in enumerate(completions)),
            _joined([column.logged for column in columns], places, len(completions)),
        )

    def describe(self) -> dict[str, Any]:
        """For the manifest of a run: each part's name, weight and settings, and the sandbox that code runs in."""
        parts = [{"name": part.name, "weight": part.weight, **_described(part.judge)} for part in self.parts]
        code = [part.judge for part in self.parts if isinstance(part.judge, Verifier) and part.judge.family == "code"]
        return {"parts": parts, "combine": self.combine, **({"sandbox": code[0].describe()} if code else {})}

    def close(self) -> None:
        """End the worker processes, if there are any. A call that another thread has under way fails."""
        if self.pool:
            self.pool.close()

    def prepare(self, columns: Sequence[str]) -> None:
        """Load every reward function and check its arguments against the data's columns. Raises RewardError."""
        for number, part in enumerate(self.parts):
            if isinstance(part.judge, str):
                assert self.pool
                empty = {"kind": "call", "name": part.name, "batch": _batch([], 0).__dict__}
                self.pool.run([VerifyTask(part.judge, empty, START_S, tuple(columns), pin=number)])
            elif not isinstance(part.judge, Verifier):
                functions.check_columns(part.judge, part.name, columns)

    def _local(self, part: RewardPart, pairs: Sequence[Pair], step: int) -> Judged:
        """The verdicts of a part of this process on all completions, and what the part logged."""
        judge = part.judge
        if isinstance(judge, Verifier):
            return Judged(tuple(_cut(judge, done) or verify(judge, prompt.row, done.text) for prompt, done in pairs))
        assert callable(judge)
        return functions.call(judge, part.name, _batch(pairs, step))

    def _remote(self, parts: Sequence[RewardPart], pairs: Sequence[Pair], step: int) -> list[Judged]:
        """The same for the parts in worker processes, all at once."""
        if not pairs:
            return [Judged(()) for _ in parts]
        assert self.pool
        jobs: list[VerifyTask] = []
        for number, part in enumerate(parts):
            if isinstance(part.judge, Verifier):
                whole = [(prompt, done) for prompt, done in pairs if not _cut(part.judge, done)]
                jobs += [_verify_task(part.judge, prompt.row, done.text, self.timeout_s) for prompt, done in whole]
            else:
                jobs.append(self._function_task(part, pairs, step, number))
        results = iter(self.pool.run(jobs))
        columns = []
        for number, part in enumerate(parts):
            if isinstance(part.judge, Verifier):
                columns.append(Judged(tuple(_cut(part.judge, done) or _verdict(next(results)) for _, done in pairs)))
                continue
            result = next(results)
            singles = [self._function_task(part, [pair], step, number, pinned=False) for pair in pairs]
            columns.append(self._function_judged(result, singles))
        return columns

    def _function_task(
        self, part: RewardPart, pairs: Sequence[Pair], step: int, number: int, pinned: bool = True
    ) -> VerifyTask:
        batch = _batch(pairs, step)
        message = {
            "kind": "call",
            "name": part.name,
            "batch": {**batch.__dict__, "rows": [dict(row) for row in batch.rows]},
        }
        columns = tuple(dict.fromkeys(name for row in batch.rows for name in row if name != "prompt"))
        return VerifyTask(part.judge, message, self.timeout_s, columns, retry=False, pin=number if pinned else None)

    def _function_judged(self, result: dict[str, Any], singles: Sequence[VerifyTask]) -> Judged:
        """The result of a batch; after a timeout or a dead worker, each completion is judged by a call of its own."""
        assert self.pool
        if "failed" in result:
            return Judged(tuple(map(_verdict, self.pool.run(singles) if len(singles) > 1 else [result])))
        logged = Logged(result["metrics"], result["extras"])
        return Judged(tuple(from_json(fields) for fields in result["verdicts"]), logged)


class TaskRows(Protocol):
    """The part of a task's data that make_judge reads."""

    @property
    def train(self) -> Sequence[Prompt]:
        """Prompts to train on; reward functions are given the columns of the first one."""
        ...

    @property
    def verifier(self) -> str | None:
        """Spec of the task's own verifier."""
        ...


def make_judge(reward: RewardConfig, data: TaskRows) -> RewardJudge:
    """The judge of completions of `data`, by the reward's functions or the task's own verifier.

    Raises RewardError for a function or verifier that cannot be built, or that needs a column the data does not have.
    """
    columns = [column for prompt in data.train[:1] for column in prompt.row if column != "prompt"]
    judge = RewardJudge(make_parts(reward, data.verifier), reward.timeout_s, reward.workers, reward.combine)
    try:
        judge.prepare(columns)
    except RewardError:
        judge.close()
        raise
    return judge


def _described(judge: Verifier | Callable[..., Any] | str) -> dict[str, Any]:
    if isinstance(judge, Verifier):
        return {"verifier": judge.spec, "hash": judge.hash}
    return {"function": judge if isinstance(judge, str) else functions.importable_name(judge)}


def _not_sampled(completion: Completion) -> Verdict:
    why = f"sampling failed: {completion.error or 'no reason given'}"
    return Verdict(None, why, cause=Unscored.SAMPLING_FAILED)


def _cut(verifier: Verifier, completion: Completion) -> Verdict | None:
    """The verdict 0 of a completion that the length limit cut, under a rule that reads the end of the text."""
    reads_end = verifier.region is not None and verifier.region.reads_end
    return Verdict(0.0) if reads_end and completion.finish_reason == "length" else None


def _verify_task(verifier: Verifier, row: Mapping[str, Any], text: str, timeout_s: float) -> VerifyTask:
    message = {"kind": "verify", "row": dict(row), "text": text}
    return VerifyTask(verifier.spec, message, max(timeout_s, verifier.time_limit(row)))


def _verdict(result: dict[str, Any]) -> Verdict:
    if "failed" in result:
        return Verdict(None, result["failed"], cause=result["cause"])
    return from_json(result["verdicts"][0])


def _joined(columns: Sequence[Logged], places: Sequence[int], count: int) -> Logged:
    """What all parts logged; `places` of `count` completions were judged, and the others have None."""
    metrics: dict[str, float] = {}
    extras: dict[str, list[Any]] = {}
    for logged in columns:
        metrics |= logged.metrics
        for name, values in logged.extras.items():
            by_place = dict(zip(places, values, strict=True))
            extras[name] = [by_place.get(place) for place in range(count)]
    return Logged(metrics, extras)


def _batch(pairs: Sequence[Pair], step: int) -> functions.RewardBatch:
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
