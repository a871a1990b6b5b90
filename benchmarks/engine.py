"""Tokens per second of engines on the same prompts: tinyllm in process and served, transformers, vLLM.

Every side samples the same prompts at temperature 1, completions of exactly --tokens tokens, --batch of them together.
The sides run in turn, round after round; a server that is not measured is stopped meanwhile (SIGSTOP). vLLM needs an
environment of its own: sh scripts/vllm.sh. Targets: in process at least 1.8 times vLLM compiled, served 1.5 times.

    python benchmarks/engine.py --out results.json --sides engine,served,transformers,vllm,vllm-eager
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Deadline, Spread, against, command, finish, parser, start, table
from serve import Jobs, make_tiny, run_engine, run_server, serving
from vllm_server import ServerError, serve

from tinyllm import models
from tinyllm.engine.head import Policy
from tinyllm.errors import ConfigError, EngineError
from tinyllm.memory import keep_freed_memory

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
    options.add_argument("--prompt-tokens", type=int, default=46, help="(default: %(default)s)")
    options.add_argument("--tokens", type=int, default=32, help="tokens of a completion (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="rounds of the comparison (default: %(default)s)")
    options.add_argument("--time-limit", type=float, default=10.0, metavar="MIN", help="no round after (default: 10)")
    arguments = options.parse_args()
    chosen = arguments.sides.split(",")
    if unknown := [name for name in chosen if name not in NAMES]:
        raise ConfigError(f"--sides: there is no {unknown[0]!r}; choose from {','.join(NAMES)}")
    result = start(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name = str(make_tiny(Path(folder))) if arguments.tiny else arguments.model
        policy = Policy(models.load_model(name, arguments.dtype, "cpu").requires_grad_(False))
        keep_freed_memory()
        jobs = Jobs.make(arguments.batch, arguments.prompt_tokens, arguments.tokens, policy.vocab_size)
        sides = {side: stack.enter_context(_side(side, name, policy, arguments, Path(folder))) for side in chosen}
        compare(sides, jobs, arguments, result)
    finish(arguments, result)


def compare(sides: dict[str, Side], jobs: Jobs, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """All sides in turn, after one warm-up each."""
    deadline = Deadline(arguments.time_limit)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    expected: list[list[int]] | None = None
    for number in range(arguments.rounds + 1):
        if number > 1 and deadline.passed(2 * sum(values[-1] for values in seconds.values())):
            print(f"{number - 1} of {arguments.rounds} rounds; the time is over")
            break
        for name, run in sides.items():
            ids, took = run(jobs)
            if wrong := [len(x) for x in ids if len(x) != jobs.tokens]:
                raise EngineError(f"{name}: a completion has {wrong[0]} tokens instead of {jobs.tokens}")
            if name in TARGETS:  # both are tinyllm: the same tokens, bit for bit
                expected = expected or ids
                assert ids == expected, "served and in process differ"
            if number:
                seconds[name].append(took)
    total = len(jobs.keys) * jobs.tokens
    rates = {name: Spread.of([total / value for value in values]) for name, values in seconds.items()}
    base = rates.get("vllm")
    rows = [(name, str(rate), rate.median / base.median if base else "-") for name, rate in rates.items()]
    title = f"{len(jobs.keys)} completions at once, prompts of {arguments.prompt_tokens} tokens, {jobs.tokens} new ones"
    table(title, ("side", "tokens/s", "of vLLM compiled"), rows)
    for name, target in TARGETS.items():
        if base and name in rates:
            print(against(f"{name} / vLLM compiled", rates[name].median / base.median, target, least=True))
    result["tokens_per_s"] = rates


# The sides


@contextmanager
def _side(side: str, model: str, policy: Policy, arguments: argparse.Namespace, folder: Path) -> Iterator[Side]:
    tokenizer = models.load_tokenizer(model)
    if side == "engine":
        yield partial(run_engine, policy, tokenizer, arguments.batch)
    elif side == "transformers":
        yield partial(_run_transformers, _for_transformers(model, arguments.dtype))
    elif side == "served":
        with serving(model, arguments) as (port, pid):
            yield partial(_run_served, port, pid, Jobs.bodies)
    else:
        where = Path(model)
        if not where.is_dir():
            where = folder / "model"
            policy.causal.save_pretrained(where)
            tokenizer.save_pretrained(where)
        dtype = str(policy.head_weight.dtype).removeprefix("torch.")
        flags = ("--enforce-eager",) if side == "vllm-eager" else ()
        try:
            with serve(where, folder / f"{side}.log", flags, dtype=dtype, threads=arguments.threads) as server:
                bodies = partial(_vllm_bodies, str(where))
                yield partial(_run_served, int(server.url.rpartition(":")[2]), server.process.pid, bodies)
        except ServerError as error:
            raise EngineError(str(error)) from None


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


def _for_transformers(name: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    ours = models.load_model(name, dtype, "cpu")
    with tempfile.TemporaryDirectory() as folder:  # with attention of its own
        ours.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


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


if __name__ == "__main__":
    command(main)
