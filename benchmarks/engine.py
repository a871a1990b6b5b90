"""Tokens per second of engines on the same prompts: tinyllm in process and served, transformers, vLLM.

Every side samples the same prompts at temperature 1, --group completions of each as GRPO does, of exactly --tokens
tokens, --batch of them together. Servers get one request for each completion. The sides run in turn, round after round,
each in processes of its own; a server that is not measured is stopped meanwhile (SIGSTOP). vLLM needs an environment of
its own: sh scripts/vllm.sh. Targets: in process at least 1.8 times vLLM compiled, served 1.5 times.

    python benchmarks/engine.py --out results.json --sides engine,served,transformers,vllm,vllm-eager
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Deadline, Spread, against, command, finish, parser, start, table
from serve import Jobs, make_tiny, run_engine, run_server, serving
from vllm_server import ServerError, serve

from tinyllm.engine.build import make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.errors import ConfigError, EngineError
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory

Side = Callable[[Jobs], tuple[list[list[int]], float]]
"""Jobs -> (token ids of each, seconds)."""

NAMES = ("engine", "served", "transformers", "vllm", "vllm-eager")
TARGETS = {"engine": 1.8, "served": 1.5}
"""Times vLLM compiled."""
PAGE = 32
"""Tokens of a page of transformers' paged cache."""


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", default="smollm2-135m-instruct", help="(default: %(default)s)")
    options.add_argument("--tiny", action="store_true", help="a tiny random model instead, to try the benchmark")
    options.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="(default: auto)")
    options.add_argument(
        "--sides", default="engine,served,transformers", metavar="LIST", help=f"of {','.join(NAMES)} (default: no vLLM)"
    )
    options.add_argument("--batch", type=int, default=64, help="completions at once (default: %(default)s)")
    options.add_argument("--group", type=int, default=8, help="completions of a prompt (default: %(default)s)")
    options.add_argument("--prompt-tokens", type=int, default=46, help="(default: %(default)s)")
    options.add_argument("--tokens", type=int, default=32, help="tokens of a completion (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="rounds of the comparison (default: %(default)s)")
    options.add_argument("--time-limit", type=float, default=10.0, metavar="MIN", help="no round after (default: 10)")
    arguments = options.parse_args()
    chosen = arguments.sides.split(",")
    if unknown := [name for name in chosen if name not in NAMES]:
        raise ConfigError(f"--sides: there is no {unknown[0]!r}; choose from {','.join(NAMES)}")
    if arguments.group < 1 or arguments.batch % arguments.group:
        raise ConfigError(f"--group {arguments.group}: --batch {arguments.batch} must be a multiple of it")
    result = start(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name = str(make_tiny(Path(folder))) if arguments.tiny else arguments.model
        policy = Policy(models.load_model(name, arguments.dtype, "cpu").requires_grad_(False))
        sides = {side: stack.enter_context(_side(side, name, policy, arguments, Path(folder))) for side in chosen}
        compare(sides, policy.vocab_size, arguments, result)
    finish(arguments, result)


def compare(sides: dict[str, Side], vocabulary: int, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """All sides in turn, after one warm-up each; every round has prompts of its own, which no cache holds."""
    deadline = Deadline(arguments.time_limit)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    sizes = (arguments.batch, arguments.prompt_tokens, arguments.tokens, vocabulary)
    for number in range(arguments.rounds + 1):
        if number > 1 and deadline.passed(2 * sum(values[-1] for values in seconds.values())):
            print(f"{number - 1} of {arguments.rounds} rounds; the time is over")
            break
        jobs = Jobs.make(*sizes, first=number * arguments.batch, group=arguments.group)
        expected: list[list[int]] = []
        for name, run in sides.items():
            ids, took = run(jobs)
            if wrong := [len(x) for x in ids if len(x) != jobs.tokens]:
                raise EngineError(f"{name}: a completion has {wrong[0]} tokens instead of {jobs.tokens}")
            if name in TARGETS:  # both are tinyllm: the same tokens, bit for bit
                expected = expected or ids
                assert ids == expected, "served and in process differ"
            if number:
                seconds[name].append(took)
    total = arguments.batch * arguments.tokens
    rates = {name: Spread.of([total / value for value in values]) for name, values in seconds.items()}
    base = rates.get("vllm")
    rows = [(name, str(rate), rate.median / base.median if base else "-") for name, rate in rates.items()]
    title = (
        f"{arguments.batch} completions at once, {arguments.group} of each prompt, prompts of "
        f"{arguments.prompt_tokens} tokens, {arguments.tokens} new ones"
    )
    table(title, ("side", "tokens/s", "of vLLM compiled"), rows)
    for name, target in TARGETS.items():
        if base and name in rates:
            print(against(f"{name} / vLLM compiled", rates[name].median / base.median, target, least=True))
    result["tokens_per_s"] = rates


# The sides


@contextmanager
def _side(side: str, model: str, policy: Policy, arguments: argparse.Namespace, folder: Path) -> Iterator[Side]:
    if side in _IN_PROCESS:
        with _apart(side, model, arguments) as run:
            yield run
    elif side == "served":
        with serving(model, arguments) as (port, pid):
            yield partial(_run_served, port, pid, Jobs.bodies)
    else:
        where = Path(model)
        if not where.is_dir():
            where = folder / "model"
            policy.causal.save_pretrained(where)
            models.load_tokenizer(model).save_pretrained(where)
        dtype = str(policy.head_weight.dtype).removeprefix("torch.")
        flags = ("--enforce-eager",) if side == "vllm-eager" else ()
        try:
            with serve(where, folder / f"{side}.log", flags, dtype=dtype, threads=arguments.threads) as server:
                bodies = partial(_vllm_bodies, str(where))
                yield partial(_run_served, int(server.url.rpartition(":")[2]), server.process.pid, bodies)
        except ServerError as error:
            raise EngineError(str(error)) from None


@contextmanager
def _apart(side: str, model: str, arguments: argparse.Namespace) -> Iterator[Side]:
    """A side of this language in a process of its own: two engines in one count each other's OpenMP workers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (theirs, side, model, arguments.dtype, arguments.batch, torch.get_num_threads())
    process = context.Process(target=_work, args=given, daemon=True)
    process.start()
    theirs.close()

    def run(jobs: Jobs) -> tuple[list[list[int]], float]:
        try:
            ours.send(jobs)
            return ours.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            raise EngineError(f"{side} failed; its error stands above") from None

    try:
        yield run
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(20)
        process.kill()
        process.join()


def _work(connection: Any, side: str, model: str, dtype: str, batch: int, threads: int) -> None:
    """Does the jobs that come."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    run = _IN_PROCESS[side](model, dtype, batch)
    while jobs := connection.recv():
        connection.send(run(jobs))


def _ours(model: str, dtype: str, batch: int) -> Side:
    policy = Policy(models.load_model(model, dtype, "cpu").requires_grad_(False))
    return partial(run_engine, make_scheduler(policy, models.load_tokenizer(model), max_batch=batch))


def _run_served(port: int, pid: int, bodies: Callable[..., list[Any]], jobs: Jobs) -> tuple[list[list[int]], float]:
    """A server and its children, which rest before and after."""
    os.killpg(pid, signal.SIGCONT)
    served = run_server(port, jobs, False, len(jobs.keys), bodies)
    os.killpg(pid, signal.SIGSTOP)
    return served.ids, served.seconds


def _vllm_bodies(model: str, jobs: Jobs, stream: bool) -> list[dict[str, Any]]:
    """No seed: vLLM's CPU engine dies of one."""
    given = {"model": model, "max_tokens": jobs.tokens, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    given |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stream": stream}
    return [{"prompt": prompt, **given} for prompt in jobs.prompts]


def _transformers(name: str, dtype: str, batch: int) -> Side:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    ours = models.load_model(name, dtype, "cpu")
    with tempfile.TemporaryDirectory() as folder:  # with attention of its own
        ours.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype, attn_implementation="sdpa")
    return partial(_run_transformers, model.eval().requires_grad_(False))


def _run_transformers(model: Any, jobs: Jobs) -> tuple[list[list[int]], float]:
    """Its continuous batching, over a paged cache that holds all sequences."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    count, length = len(jobs.prompts), len(jobs.prompts[0])
    settings = GenerationConfig(
        max_new_tokens=jobs.tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    pages = -(-(length + jobs.tokens) // PAGE) + 1
    cache = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=count * pages, max_batch_tokens=max(count, min(4096, count * length))
    )
    begin = time.perf_counter()
    with torch.no_grad():
        found = model.generate_batch(
            [list(prompt) for prompt in jobs.prompts],
            generation_config=settings,
            continuous_batching_config=cache,
            warmup=False,
        )
    seconds = time.perf_counter() - begin
    return [list(answer.generated_tokens) for answer in found.values()], seconds


_IN_PROCESS = {"engine": _ours, "transformers": _transformers}


if __name__ == "__main__":
    command(main)
