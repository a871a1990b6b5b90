"""Coverage-guided fuzzing of our own readers: `make fuzz`, or python tests/fuzz_readers.py [RUNS], 200,000 unless said.

Every input goes through every reader, and through every text family under one rule. A crash, a verdict outside its contract or an input that takes
over LIMIT_S ends the run, with the input in a file crash-*. Starts from the completions of tests/data/verifiers.jsonl.
Needs atheris.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tinyllm"]):
    from tinyllm.rewards import build, verify
    from tinyllm.rewards.code.condition import Condition, ConditionError
    from tinyllm.rewards.code.verifier import fenced_blocks, find_code, same_output
    from tinyllm.rewards.gym.checks import CHECKS
    from tinyllm.rewards.gym.readers import arithmetic
    from tinyllm.rewards.json.formats import FORMATS
    from tinyllm.rewards.json.reader import NotJson, read_json
    from tinyllm.rewards.math.reader import read
    from tinyllm.rewards.math.tokens import Unreadable
    from tinyllm.rewards.text.extract import RULES, math_spans, unwrap
    from tinyllm.rewards.text.languages import language_of
    from tinyllm.rewards.text.numbers import last_number, read_number, stated_number

LIMIT_S = 2.0
"""CPU seconds for one input through everything (some thirty readers and verifiers)."""
MAX_CHARS = 600
ROW = {"prompt": "f(x)", "answer": "12", "schema": {"type": "integer"}, "constraints": [{"id": "punctuation:no_comma"}]}
GOLDS = {
    "countdown": ("6*2", {"numbers": [6, 2], "target": 12}),
    "simple_integration": ("x**2 + C", {"integrand": "2*x", "variable": "x"}),
    "propositional_logic": ("P", {"variables": ["P", "Q"], "premises": ["P"]}),
    "prime_factorization": ("2 \u00d7 2 \u00d7 3", {}),
}
FAMILIES = ("format", "arithmetic", "math")
VERIFIERS = [[build(f"{family}:rule={rule}") for family in FAMILIES] for rule in RULES]
OTHERS = [build("json:fence=true"), build("instructions")]
GYM = [CHECKS[name](gold, metadata) for name, (gold, metadata) in GOLDS.items()]
GYM += [CHECKS[name]("12", {}) for name in ("gcd", "spiral_matrix", "sudoku", "caesar_cipher")]


def read_everything(text: str) -> None:
    """Every reader once; only the errors they declare may leave them."""
    for reader in (read_number, last_number, stated_number, unwrap, math_spans, language_of, arithmetic, fenced_blocks):
        reader(text)
    find_code(text, "f")
    find_code(text, "")
    same_output(text, text[::-1], 1e-6)
    for check in (*FORMATS.values(), *GYM):
        check(text)
    for reader, declared in ((read_json, NotJson), (read, Unreadable)):
        try:
            reader(text)
        except declared:
            pass
    try:
        Condition(text, ("y",)).holds([2.0], 1.0)
    except ConditionError:
        pass


def one_input(data: bytes) -> None:
    """The entry of the fuzzer."""
    text = data.decode("utf-8", "surrogateescape")
    start = time.process_time()
    read_everything(text)
    for verifier in (*VERIFIERS[len(data) % len(RULES)], *OTHERS):  # one rule per input
        verdict = verify(verifier, ROW, text)
        assert verdict.value in (0.0, 1.0), (verifier, verdict)
    assert time.process_time() - start < LIMIT_S, "too slow"


def write_corpus(folder: Path) -> None:
    """The completions of the cases, one file each."""
    cases = Path(__file__).parent / "data/verifiers.jsonl"
    for line in filter(None, cases.read_text(encoding="utf-8").split("\n")):
        case = json.loads(line)
        (folder / case["id"]).write_text(case["completion"][:MAX_CHARS], encoding="utf-8")


if __name__ == "__main__":
    runs = sys.argv[1] if len(sys.argv) > 1 else "200000"
    with tempfile.TemporaryDirectory() as corpus:
        write_corpus(Path(corpus))
        options = [
            f"-atheris_runs={runs}",
            f"-max_len={MAX_CHARS}",
            "-len_control=0",
            "-timeout=60",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *options, corpus], one_input)
        atheris.Fuzz()
