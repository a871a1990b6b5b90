"""What keeping freed memory saves (tinyllm.model.memory.keep_freed_memory): the same step with it and without.

A step samples 16 prompts x 8 completions of 12 tokens of the bundled model and computes the gradient of their
log-probabilities in four micro-batches. Each measurement is a process of its own, the two sides in turn.

    python benchmarks/allocator.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from common import Spread, command, finish, parser, start, table

from tinyllm.engine.engine import EmbeddedEngine
from tinyllm.engine.head import pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory
from tinyllm.records import Prompt, SamplingParams

SIDES = ("kept", "returned")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pairs", type=int, default=3, metavar="N", help="(default: %(default)s)")
    options.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        child(arguments.child == "kept")
        return
    result = start(arguments)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(arguments.pairs):
        for side in SIDES:
            done = subprocess.run([sys.executable, __file__, "--child", side], stdout=subprocess.PIPE, check=True)
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    spreads = {side: {key: Spread.of([run[key] for run in runs[side]]) for key in runs[side][0]} for side in SIDES}
    rows = [(side, *map(str, spreads[side].values())) for side in SIDES]
    table("Freed memory: kept by the process, or returned", ("", *spreads["kept"]), rows)
    ratio = Spread.of([b["seconds"] / a["seconds"] for a, b in zip(runs["kept"], runs["returned"], strict=True)])
    print(f"  returned / kept: {ratio}")
    finish(arguments, result | {"sides": spreads, "ratio": ratio})


def child(kept: bool) -> None:
    if kept:
        keep_freed_memory()
    policy = Policy(models.load_model("smollm2-135m-instruct", "float32", "cpu"))
    tokenizer = models.load_tokenizer("smollm2-135m-instruct")
    engine = EmbeddedEngine(policy, tokenizer)
    prompts = []
    for number in range(16):
        text = f"What is {number} + 7?"
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(Prompt(str(number), tuple(ids), text))
    params = SamplingParams(max_new_tokens=12, n=8, seed=1)

    def step() -> None:
        done = engine.sample(prompts, params)
        pairs = [(prompts[i // 8].token_ids, c.token_ids) for i, c in enumerate(done)]
        for first in range(0, len(pairs), 32):
            logp, _ = score(policy, pack_targets(pairs[first : first + 32], "cpu"))
            logp.mean().backward()
        policy.model.zero_grad()

    step()
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(2):
        step()
    seconds, after = (time.perf_counter() - begin) / 2, resource.getrusage(resource.RUSAGE_SELF)
    told = {"seconds": seconds, "in the kernel": (after.ru_stime - before.ru_stime) / 2}
    print(json.dumps(told | {"peak GiB": after.ru_maxrss / 2**20}))


if __name__ == "__main__":
    command(main)
