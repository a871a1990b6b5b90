"""One training step of tinyllm against one of TRL's GRPOTrainer, on the same weights, prompts and objective.

Three tables: `short` (completions of exactly 32 tokens, arithmetic prompts of the main job), `long` (128 tokens,
prompts of 300), `kl` (as short, with beta 0.04). Each has 8 prompts x 8 completions, random rewards so that every group
has signal, and fp32 or bf16 as it is fastest. TRL is tried in several configurations, all listed; the best is measured
again, step by step in turn with tinyllm (A B A B). tinyllm runs its own loop with everything that a run does: equal
log-probabilities to the bit, hashes, record, metrics.

The floor: 2 FLOPs per weight and sampled or prompt token, 6 in training, the head only where a token is drawn or
scored, no attention, no recomputation, at the best rate of a 2048 x 2048 x 2048 product of the compute type measured in
the same run.

    python benchmarks/vs_trl.py --out results.json           everything (an hour or two)
    python benchmarks/vs_trl.py --tables short --configurations fp32:16 --repetitions 1     a quick look
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Deadline, GemmRate, PartTimer, Spread, against, command, finish, number, parser, start, table
from tinyllm_side import FOREVER, PARTS, Side, floor_flops, parameter_counts, random_verdicts
from trl_side import TRLSetup, TRLSide, default_setups, fits, random_reward, require_trl

from tinyllm import tasks
from tinyllm.config.sections import (
    EvalConfig,
    GRPOConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from tinyllm.engine.trie import Trie
from tinyllm.errors import ConfigError
from tinyllm.model import models
from tinyllm.model.memory import skeleton
from tinyllm.records import Prompt

PROMPTS, GROUP = 8, 8


@dataclass(frozen=True)
class Case:
    """One table."""

    name: str
    completion: int
    prompt: int
    """Tokens of a prompt; 0: as the arithmetic task has them."""
    beta: float
    batches: tuple[int, ...]
    """TRL's device batches."""


CASES = {
    "short": Case("short", 32, 0, 0.0, (8, 16, 32, 64)),
    "long": Case("long", 128, 300, 0.0, (8, 16, 32)),
    "kl": Case("kl", 32, 0, 0.04, (8, 16, 32, 64)),
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--model", default="smollm2-135m-instruct", help="bundled model or folder (default: %(default)s)"
    )
    options.add_argument("--tables", default="short,long,kl", help="which tables (default: %(default)s)")
    options.add_argument(
        "--configurations",
        metavar="LIST",
        help="TRL's, as kind:batch[:paged],... with kind fp32, autocast or bf16 (default: all in the first table, then "
        "the best of each kind)",
    )
    options.add_argument("--repetitions", type=int, default=5, metavar="N", help="A B pairs (default: %(default)s)")
    options.add_argument(
        "--tries", type=int, default=1, metavar="N", help="steps to choose a configuration by (default: 1)"
    )
    options.add_argument("--time-limit", type=float, metavar="MIN", help="start nothing new after so many minutes")
    arguments = options.parse_args()
    names = arguments.tables.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"--tables {unknown[0]!r} is unknown; there are: {', '.join(CASES)}")
    if arguments.repetitions < 1 or arguments.tries < 1:
        raise ConfigError("--repetitions and --tries are at least 1")
    given = [TRLSetup.parse(x) for x in arguments.configurations.split(",")] if arguments.configurations else None
    version = require_trl()
    result = start(arguments) | {"trl": version, "model": arguments.model, "tables": {}}
    print(f"TRL {version}, {arguments.model}")
    deadline = Deadline(arguments.time_limit)
    best_kinds: list[TRLSetup] = []
    for name in names:
        if deadline.passed():
            print(f"\n{name}: left out, the time is over")
            continue
        measured = Comparison(CASES[name], arguments, deadline).run(given, best_kinds)
        best_kinds = best_kinds or [TRLSetup.parse(x) for x in measured["best_of_kind"]]
        result["tables"][name] = measured
        finish(arguments, result)


class Comparison:
    """One table: choose TRL's configuration, then measure in turn."""

    def __init__(self, case: Case, arguments: argparse.Namespace, deadline: Deadline) -> None:
        self.case, self.arguments, self.deadline = case, arguments, deadline
        self.config = GRPOConfig(
            model=ModelConfig(name=arguments.model, device="cpu"),
            sampling=SamplingConfig(group_size=GROUP, max_new_tokens=case.completion),
            objective=ObjectiveConfig(beta=case.beta),
            optimizer=OptimizerConfig(lr=1e-6),
            train=TrainConfig(steps=FOREVER, prompts_per_step=PROMPTS),
            eval=EvalConfig(every=0),
            run=RunConfig(checkpoint_every=FOREVER),
        )
        self.prompts = make_prompts(self.config, case.prompt)
        self.rate = GemmRate(models.pick_dtype("auto", "cpu"))
        self.timer = PartTimer()
        self.parts: list[dict[str, float]] = []

    def run(self, given: list[TRLSetup] | None, best_kinds: list[TRLSetup]) -> dict[str, Any]:
        case = self.case
        lengths = sorted(len(p.token_ids) for p in self.prompts)
        print(
            f"\n=== {case.name}: {PROMPTS} prompts of {lengths[0]} to {lengths[-1]} tokens x {GROUP} completions of "
            f"{case.completion}, beta {case.beta:g}"
        )
        setups = self.setups(given, best_kinds)
        tried = self.choose(setups) if len(setups) > 1 else {}
        times = {setup: spread.median for setup, spread in tried.items() if isinstance(spread, Spread)}
        ranking = sorted(times, key=lambda setup: times[setup]) if tried else setups
        if not ranking:
            raise ConfigError("no configuration of TRL worked; see the table above")
        best, fp32 = ranking[0], next((s for s in ranking if s.kind == "fp32"), None)
        out: dict[str, Any] = {
            "case": vars(case),
            "tried": {str(s): x for s, x in tried.items()},
            "best_of_kind": [str(next(s for s in ranking if s.kind == kind)) for kind in _kinds(ranking)],
            "against": {},
        }
        for setup in dict.fromkeys(s for s in (best, fp32) if s):
            with tempfile.TemporaryDirectory() as folder, self.side(Path(folder) / "run") as side:
                out["against"][str(setup)] = self.in_turn(setup, side, is_best=setup == best)
                out |= self.floor(side)
        return out

    def setups(self, given: list[TRLSetup] | None, best_kinds: list[TRLSetup]) -> list[TRLSetup]:
        """What to try: as given; or everything; or, after the first table, the best of each kind."""
        if given or not best_kinds:
            return given or default_setups(self.case.batches)
        if self.case.prompt:
            return [TRLSetup(s.kind, batch, s.paged) for s in best_kinds for batch in self.case.batches]
        return best_kinds

    def choose(self, setups: Sequence[TRLSetup]) -> dict[TRLSetup, Spread | str]:
        """Seconds per step, or why there are none; paged generation is tried with the best of each kind."""
        tried: dict[TRLSetup, Spread | str] = {}
        for setup in setups:
            tried[setup] = self.try_one(setup)
        if not self.arguments.configurations and not any(s.paged for s in setups):
            for kind in _kinds(tried):
                worked = {s: x for s, x in tried.items() if s.kind == kind and isinstance(x, Spread)}
                if worked:
                    setup = TRLSetup(kind, min(worked, key=lambda s: worked[s].median).device_batch, paged=True)
                    tried[setup] = self.try_one(setup)
        table(
            "TRL configurations tried (seconds per step after a warm-up)",
            ("configuration", "seconds"),
            list(tried.items()),
        )
        return tried

    def try_one(self, setup: TRLSetup) -> Spread | str:
        longest = max(len(p.token_ids) for p in self.prompts)
        if self.deadline.passed():
            return "left out, the time is over"
        if not fits(skeleton(models.load_config(self.arguments.model)), setup, longest + self.case.completion):
            return "left out, does not fit into memory"
        seconds: list[float] = []

        def between(step: int, step_s: float) -> bool:
            seconds.append(step_s)
            return len(seconds) <= self.arguments.tries and not self.deadline.passed()

        try:
            self.trl(setup, between)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            ImportError,
            AttributeError,
            KeyError,
            NotImplementedError,
        ) as error:
            return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
        spread = Spread.of(seconds[1:] or seconds)
        print(f"  {setup}: {spread}", flush=True)
        return spread

    def trl(self, setup: TRLSetup, between: Callable[[int, float], bool]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            side = TRLSide(setup, self.config, self.prompts, random_reward, (), Path(folder), FOREVER)
            try:
                side.train(between)
            finally:
                side.close()

    def side(self, folder: Path) -> Side:
        return Side(self.config, self.prompts, random_verdicts, (), folder)

    def in_turn(self, setup: TRLSetup, side: Side, is_best: bool) -> dict[str, Any]:
        """A B A B: TRL's step, then ours, after one of each that does not count."""
        theirs: list[float] = []
        ours: list[float] = []
        equal: list[float] = []

        def between(step: int, step_s: float) -> bool:
            theirs.append(step_s)
            self.rate.measure()
            with side.timed(self.timer):
                ours.append(side.step())
            parts = self.timer.take()
            self.parts.append(parts | {"rest": ours[-1] - sum(parts.values())})
            equal.append(side.metrics["sampler_equal"])
            self.rate.measure()
            more = 1 + self.arguments.repetitions - len(ours)
            return more > 0 and not (len(ours) > 1 and self.deadline.passed(theirs[-1] + ours[-1]))

        self.parts = []
        self.trl(setup, between)
        theirs, ours, self.parts = (x[1:] or x for x in (theirs, ours, self.parts))
        ratios = [t / o for t, o in zip(theirs, ours, strict=True)]
        ratio = Spread.of(theirs).median / Spread.of(ours).median
        table(
            f"Step, TRL {setup}{' (its best)' if is_best else ''} and tinyllm in turn, {len(ours)} times",
            ("", "seconds: median (min to max)"),
            [
                ("TRL", Spread.of(theirs)),
                ("tinyllm", Spread.of(ours)),
                ("TRL / tinyllm, pair by pair", Spread.of(ratios)),
            ],
        )
        if self.case.name == "short":
            if is_best:
                print("  " + against("TRL's best / tinyllm", ratio, 4, least=True))
            if setup.kind == "fp32":
                print("  " + against("TRL fp32 / tinyllm", ratio, 7, least=True))
        else:
            print(f"  TRL / tinyllm: {number(ratio)}")
        print(f"  sampler and trainer log-probabilities equal to the bit: {100 * min(equal):.4g}% of tokens")
        return {
            "trl_s": theirs,
            "tinyllm_s": ours,
            "ratio": ratio,
            "ratios": Spread.of(ratios),
            "sampler_equal": min(equal),
        }

    def floor(self, side: Side) -> dict[str, Any]:
        """The budget by part beside the floor, from the steps just measured."""
        prompt_tokens = sum(len(p.token_ids) for p in self.prompts)
        floor = self.floor_seconds(side, prompt_tokens)
        spreads = {name: Spread.of([parts.get(name, 0.0) for parts in self.parts]) for name in PARTS}
        totals = Spread.of([sum(parts.values()) for parts in self.parts])
        rows = []
        for name, spread in spreads.items():
            if spread.high:
                least = floor.get(name)
                rows.append(
                    (
                        name,
                        spread,
                        f"{100 * spread.median / totals.median:.1f}%",
                        least if least else "",
                        spread.median / least if least else "",
                    )
                )
        rows.append(("step", totals, "100%", sum(floor.values()), totals.median / sum(floor.values())))
        trunk, head = parameter_counts(side.policy)
        dtype = str(side.dtype).removeprefix("torch.")
        table(
            f"Budget of tinyllm's step and floor ({trunk / 1e6:.1f}M + head {head / 1e6:.1f}M weights, {dtype} at "
            f"{self.rate.best / 1e9:.0f} GFLOP/s)",
            ("part", "seconds: median (min to max)", "share", "floor", "times floor"),
            rows,
        )
        ratio = totals.median / sum(floor.values())
        if self.case.name == "short":
            print("  " + against("step / floor", ratio, 2.5, least=False))
        distinct = Trie()
        for prompt in self.prompts:
            distinct.add(prompt.token_ids)
        least = sum(self.floor_seconds(side, len(distinct)).values())
        print(
            f"  With what prompts begin with in common counted once ({len(distinct)} of {prompt_tokens} prompt "
            f"tokens): floor {number(least)} s, step / floor {number(totals.median / least)}"
        )
        return {
            "dtype": dtype,
            "gemm_gflops": self.rate.best / 1e9,
            "budget_s": spreads,
            "step_s": totals,
            "floor_s": floor,
            "floor_total_s": sum(floor.values()),
            "times_floor": ratio,
            "floor_distinct_total_s": least,
        }

    def floor_seconds(self, side: Side, prompt_tokens: int) -> dict[str, float]:
        flops = floor_flops(side.policy, side.groups, prompt_tokens, self.case.beta > 0)
        return {name: x / self.rate.best for name, x in flops.items()}


def _kinds(setups: Any) -> list[str]:
    return list(dict.fromkeys(s.kind for s in setups))


def make_prompts(config: GRPOConfig, length: int) -> list[Prompt]:
    """The first prompts of the arithmetic task, or prompts of exactly `length` tokens that begin with solved ones."""
    tokenizer = models.load_tokenizer(config.model.name)
    rows = tasks.load(config, tokenizer).train
    if not length:
        return list(rows[:PROMPTS])
    prompts = []
    for i, row in enumerate(rows[:PROMPTS]):
        solved = [f"{_question(r)} {r.row['answer']}." for r in rows[PROMPTS + i :: PROMPTS]]
        text = " ".join([*solved, _question(row)])
        rendered, ids = models.render(tokenizer, text)
        while len(ids) > length:  # dropping n characters drops n tokens at most, but for one that was cut in two
            text = text[max(1, (len(ids) - length) // 2) :]
            rendered, ids = models.render(tokenizer, text)
        if len(ids) != length:
            raise ConfigError(f"model {config.model.name}: no prompt of {length} tokens can be made for its tokenizer")
        prompts.append(Prompt(f"long-{i}", ids, rendered, row.row))
    return prompts


def _question(prompt: Prompt) -> str:
    question = prompt.row["prompt"]
    return question if isinstance(question, str) else question[-1]["content"]


if __name__ == "__main__":
    torch.manual_seed(0)
    command(main)
