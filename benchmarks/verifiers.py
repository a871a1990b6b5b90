"""Verdicts per second: text families in one process, mathematics and JSON Schema in the pool, code in fresh sandboxes.

    python benchmarks/verifiers.py [--seconds 3]

Prints the machine, then one line per family with the best of three rounds. Aims: 20,000 a second for arithmetic and
format in one process; 40 small submissions a second for functions on two cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tinyllm.records import Completion, Prompt, Revision
from tinyllm.rewards import RewardJudge, build, verify
from tinyllm.rewards.code import sandbox
from tinyllm.rewards.combine import RewardPart

ROUNDS = 3
ARITHMETIC = {"prompt": "What is 12 + 17?", "answer": "29"}
TEXTS = [
    "The sum of 12 and 17 is 29, since 12 + 17 = 29.",
    "12 + 17 = 28",
    "<think>12 + 17 is 29</think><answer>29</answer>",
    "<answer>30</answer>",
    "I do not know.",
]
MATH = [
    ("\\frac{1}{2}", "\\boxed{0.5}"),
    ("x^2+2x+1", "\\boxed{(x+1)^2}"),
    ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}"),
    ("27, 64", "\\boxed{64}"),
]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CODE = {"prompt": "Write add(a, b).", "calls": [[[2, 3], 5], [[-4, 1], -3], [[0, 0], 0]]}
SUBMISSION = "```python\ndef add(a, b):\n    return a + b\n```"


def rate(work: Callable[[], int], seconds: float) -> float:
    """Verdicts per second, the best round: work() does some and returns how many."""
    best = 0.0
    for _ in range(ROUNDS):
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds / ROUNDS:
            count += work()
        best = max(best, count / spent)
    return best


def in_process(spec: str) -> Callable[[], int]:
    """Verdicts of a text verifier, in this process."""
    verifier = build(spec)
    assert verifier.in_process

    def work() -> int:
        for text in TEXTS * 20:
            assert verify(verifier, ARITHMETIC, text).value is not None
        return 20 * len(TEXTS)

    return work


def in_workers(spec: str, workers: int, rows: Sequence[dict], texts: Sequence[str], seconds: float) -> float:
    """Verdicts per second of a verifier that runs in worker processes."""
    judge = RewardJudge([RewardPart("correct", 1.0, build(spec))], timeout_s=60.0, workers=workers)
    prompts = [Prompt(str(number), (), "", row) for number, row in enumerate(rows)]
    completions = [
        Completion(prompt.id, 0, 0, (), (), "stop", 0, Revision(0, ""), text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]

    def work() -> int:
        verdicts = judge(prompts, completions).verdicts
        assert all(verdict.value is not None for verdict in verdicts), verdicts
        return len(verdicts)

    try:
        work()  # the workers import what they need
        return rate(work, seconds)
    finally:
        judge.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per family (default 3)")
    seconds = parser.parse_args().seconds
    workers = os.cpu_count() or 1
    print(f"{platform.machine()}, {workers} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print(f"sandbox: {sandbox.describe()}")
    for spec in ("arithmetic:rule=last_number", "arithmetic:rule=tag", "format:rule=exact_format", "format:rule=tag"):
        print(f"{spec:32} {rate(in_process(spec), seconds):10,.0f} verdicts/s, one process")
    math_rows = [{"prompt": "", "answer": gold} for gold, _ in MATH] * 10
    math = in_workers("math", workers, math_rows, [text for _, text in MATH] * 10, seconds)
    print(f"{'math':32} {math:10,.0f} verdicts/s, {workers} workers")
    json = in_workers("json", workers, [{"prompt": "", "schema": SCHEMA}] * 40, ['{"x": 1}'] * 40, seconds)
    print(f"{'json':32} {json:10,.0f} verdicts/s, {workers} workers")
    code = in_workers("code", workers, [CODE] * 10, [SUBMISSION] * 10, seconds)
    print(f"{'code, functions':32} {code:10.1f} submissions/s, {workers} workers, a fresh sandbox each")
    request = {"kind": "calls", "source": "def add(a, b): return a + b", "entry": "add", "calls": [[2, 3]]}
    for level in ("bubblewrap", "landlock", "unsafe-no-sandbox"):
        with ThreadPoolExecutor(workers) as threads:

            def runs(level: str = level, threads: ThreadPoolExecutor = threads) -> int:
                return len(list(threads.map(lambda _: sandbox.run(request, level=level), range(2 * workers))))  # type: ignore[arg-type]

            print(f"{'sandbox: ' + level:32} {rate(runs, seconds):10.1f} runs/s, {workers} at a time")


if __name__ == "__main__":
    main()
