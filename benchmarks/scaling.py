"""Step time over group size, completion length and prompt length, and how well three terms explain it.

    seconds = a (prompts x P) + b (B x C) + c B C (P + C / 2)

P prompt tokens, C completion tokens, B completions (prompts x group size): prompt tokens are charged once per group,
each completion token once, and each completion token for the keys it looks at. a, b, c >= 0 by least squares on
relative errors. A random Llama of moderate size; completions of exactly C tokens; one micro-batch, so that no group is
cut in two. Grid points with more than --max-tokens completion tokens are left out; the grid is measured in rounds, so
that drift spreads over it.

    python benchmarks/scaling.py --out results.json
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import types
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from common import Deadline, Spread, command, finish, parser, start, table
from scipy.optimize import nnls
from tinyllm_side import FOREVER, Side, random_verdicts
from transformers import LlamaConfig, LlamaForCausalLM

from tinyllm.config.sections import (
    EvalConfig,
    GRPOConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from tinyllm.errors import ConfigError
from tinyllm.records import Prompt

TARGET = 0.25
VOCABULARY = 2048


@dataclass(frozen=True)
class Point:
    """One grid point: prompts, and per prompt G completions of C tokens after P prompt tokens."""

    prompts: int
    group: int
    completion: int
    prompt: int

    @property
    def terms(self) -> tuple[float, float, float]:
        tokens = self.prompts * self.group * self.completion
        return float(self.prompts * self.prompt), float(tokens), tokens * (self.prompt + self.completion / 2)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--group-sizes", default="4,16,64", metavar="LIST", help="(default: %(default)s)")
    options.add_argument("--completion-lengths", default="32,128,512", metavar="LIST", help="(default: %(default)s)")
    options.add_argument("--prompt-lengths", default="64,256,1024", metavar="LIST", help="(default: %(default)s)")
    options.add_argument("--prompts", type=int, default=8, help="prompts per step (default: %(default)s)")
    options.add_argument(
        "--max-tokens", type=int, default=16384, help="completion tokens of a step (default: %(default)s)"
    )
    options.add_argument("--hidden", type=int, default=512, help="hidden size, a multiple of 64 (default: %(default)s)")
    options.add_argument("--layers", type=int, default=2, help="layers (default: %(default)s)")
    options.add_argument("--repetitions", type=int, default=2, metavar="N", help="rounds (default: %(default)s)")
    options.add_argument(
        "--time-limit", type=float, default=8.0, metavar="MIN", help="no further round after (default: 8)"
    )
    arguments = options.parse_args()
    points = grid(arguments)
    result = start(arguments)
    torch.manual_seed(0)
    heads = arguments.hidden // 64
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 11 // 4,
            num_hidden_layers=arguments.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=8192,
            vocab_size=VOCABULARY,
        )
    ).eval()
    print(f"random Llama, {model.num_parameters() / 1e6:.1f}M weights, float32; {len(points)} points")
    seconds = measure(model, points, arguments.repetitions, Deadline(arguments.time_limit))
    report(points, seconds, result)
    finish(arguments, result)


def grid(arguments: argparse.Namespace) -> list[Point]:
    sizes = [_numbers(arguments, name) for name in ("group_sizes", "completion_lengths", "prompt_lengths")]
    if arguments.hidden % 64 or arguments.hidden < 64:
        raise ConfigError(f"--hidden {arguments.hidden} is not a multiple of 64")
    points = [Point(arguments.prompts, *size) for size in itertools.product(*sizes)]
    points = [p for p in points if p.terms[1] <= arguments.max_tokens]
    if len(points) < 3:
        raise ConfigError(
            f"{len(points)} grid points cannot fix three coefficients; give more sizes or raise --max-tokens"
        )
    return points


def _numbers(arguments: argparse.Namespace, name: str) -> list[int]:
    words = getattr(arguments, name).split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(
            f"--{name.replace('_', '-')} {getattr(arguments, name)!r}: write numbers with commas, such as 4,16"
        )
    return [int(word) for word in words]


def measure(model: Any, points: list[Point], rounds: int, deadline: Deadline) -> list[list[float]]:
    """Seconds per step of each point, one per round."""
    seconds: list[list[float]] = [[] for _ in points]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sides = [stack.enter_context(_side(model, p, Path(folder) / str(i))) for i, p in enumerate(points)]
        sides[0].step()  # warm-up
        for number in range(rounds):
            if number and deadline.passed():
                print(f"{number} of {rounds} rounds; the time is over")
                break
            for i, side in enumerate(sides):
                seconds[i].append(side.step())
    return seconds


def _side(model: Any, point: Point, folder: Path) -> Side:
    tokens = point.prompts * (point.prompt + point.group * point.completion)
    config = GRPOConfig(
        sampling=SamplingConfig(
            group_size=point.group, max_new_tokens=point.completion, max_batch=point.prompts * point.group
        ),
        objective=ObjectiveConfig(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(steps=FOREVER, prompts_per_step=point.prompts, tokens_per_microbatch=tokens),
        eval=EvalConfig(every=0),
        run=RunConfig(checkpoint_every=FOREVER),
    )
    numbers = random.Random(0)
    prompts = []
    for i in range(point.prompts):
        ids = tuple(numbers.randrange(VOCABULARY) for _ in range(point.prompt))
        prompts.append(Prompt(f"random-{i}", ids, " ".join(map(str, ids))))
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    return Side(config, prompts, random_verdicts, (), folder, model, tokenizer)


def report(points: list[Point], seconds: list[list[float]], result: dict[str, Any]) -> None:
    medians = numpy.array([Spread.of(s).median for s in seconds])
    terms = numpy.array([p.terms for p in points])
    scale = terms.max(0)  # so that the solver sees numbers of one size
    coefficients, _ = nnls(terms / scale / medians[:, None], numpy.ones(len(points)))
    a, b, c = coefficients / scale
    fitted = terms @ (a, b, c)
    deviation = fitted / medians - 1
    rows = [
        (f"{p.group}", str(p.completion), str(p.prompt), Spread.of(s), float(f), f"{100 * d:+.1f}%")
        for p, s, f, d in zip(points, seconds, fitted, deviation, strict=True)
    ]
    table(
        "Step time", ("group size", "completion", "prompt", "seconds: median (min to max)", "fitted", "deviation"), rows
    )
    worst = float(abs(deviation).max())
    print(f"  a = {1e6 * a:.3g} us per prompt token (once per group), b = {1e6 * b:.3g} us per completion token,")
    print(f"  c = {1e9 * c:.3g} ns per completion token and key")
    met = "met" if worst <= TARGET else "missed"
    print(f"  worst deviation: {100 * worst:.1f}% (target: at most {100 * TARGET:.0f}%: {met})")
    result |= {
        "points": [
            vars(p) | {"seconds": s, "fitted": float(f), "deviation": float(d)}
            for p, s, f, d in zip(points, seconds, fitted, deviation, strict=True)
        ],
        "coefficients": {"a": a, "b": b, "c": c},
        "worst_deviation": worst,
    }


if __name__ == "__main__":
    command(main)
