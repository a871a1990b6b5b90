"""Load on `tinyllm serve`: many streams at once, their tokens against the engine's, throughput, latency.

The same jobs (a random prompt each, completions of exactly --tokens tokens, one random key each) are done by the engine
in this process and by a server in its own, not streamed and streamed, in turn; the client is a third, light process.
Every token of every answer is compared with the engine's. Targets: not streamed 85% of the engine's tokens per second
at the same batch, streamed 70%. Latency: from request to first token, and from token to token.

    python benchmarks/serve.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers_server
from common import Deadline, Spread, against, command, finish, parser, start, table
from vllm_server import free_port

from tinyllm.engine.build import make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import SampleRequest, Scheduler
from tinyllm.engine.seeds import seed_key
from tinyllm.errors import ConfigError, EngineError
from tinyllm.model import models
from tinyllm.model.memory import keep_freed_memory
from tinyllm.records import Completion, Prompt, SamplingParams

ENGINE, WHOLE, STREAMED, OTHER = "engine", "served, not streamed", "served, streamed", "transformers serve"
TARGETS = {WHOLE: 0.85, STREAMED: 0.70}
CLIENT = Path(__file__).parent / "serve_client.py"
_READY_S = 300


@dataclass(frozen=True)
class Jobs:
    """What is asked for, and what the answers must be."""

    prompts: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]
    tokens: int

    @classmethod
    def make(
        cls, count: int, prompt_tokens: int, tokens: int, vocabulary: int, *, first: int = 0, group: int = 1
    ) -> Jobs:
        """Random prompts, each `group` times."""
        numbers = random.Random(first)
        own = [tuple(numbers.randrange(3, vocabulary) for _ in range(prompt_tokens)) for _ in range(count // group)]
        prompts = tuple(prompt for prompt in own for _ in range(group))
        return cls(prompts, tuple(seed_key(0, 0, "", first + i, 0) for i in range(count)), tokens)

    def bodies(self, stream: bool) -> list[dict[str, Any]]:
        shared = {"max_tokens": self.tokens, "ignore_eos": True, "return_token_ids": True, "stream": stream}
        pairs = zip(self.prompts, self.keys, strict=True)
        return [{"prompt": prompt, "seed_keys": [key], **shared} for prompt, key in pairs]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", default="smollm2-135m-instruct", help="(default: %(default)s)")
    options.add_argument("--tiny", action="store_true", help="a tiny random model instead, to try the benchmark")
    options.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="(default: auto)")
    options.add_argument("--streams", type=int, default=256, help="requests at once (default: %(default)s)")
    options.add_argument("--batch", type=int, default=64, help="completions decoded together (default: %(default)s)")
    options.add_argument("--prompt-tokens", type=int, default=46, help="(default: %(default)s)")
    options.add_argument("--tokens", type=int, default=32, help="tokens of a completion (default: %(default)s)")
    options.add_argument(
        "--concurrency", default="1,8,64,256", metavar="LIST", help="for latency (default: %(default)s)"
    )
    options.add_argument("--transformers", action="store_true", help="also `transformers serve` (needs fastapi)")
    options.add_argument("--rounds", type=int, default=3, help="rounds of the comparison (default: %(default)s)")
    options.add_argument("--time-limit", type=float, default=10.0, metavar="MIN", help="no round after (default: 10)")
    arguments = options.parse_args()
    levels = _levels(arguments)
    result = start(arguments)
    deadline = Deadline(arguments.time_limit)
    with tempfile.TemporaryDirectory() as folder:
        name = str(make_tiny(Path(folder))) if arguments.tiny else arguments.model
        tokenizer = models.load_tokenizer(name)
        policy = Policy(models.load_model(name, arguments.dtype, "cpu").requires_grad_(False))
        keep_freed_memory()
        with ExitStack() as stack:
            port, pid = stack.enter_context(serving(name, arguments))
            engine = partial(run_engine, make_scheduler(policy, tokenizer, max_batch=arguments.batch))
            sides: dict[str, Any] = {
                ENGINE: lambda jobs: Served(*engine(jobs), 0.0, [], []),
                WHOLE: lambda jobs: run_server(port, jobs, False, arguments.streams),
                STREAMED: lambda jobs: run_server(port, jobs, True, arguments.streams),
            }
            if arguments.transformers:
                sides[OTHER] = stack.enter_context(transformers_side(policy, tokenizer, arguments, Path(folder)))
            compare(sides, policy.vocab_size, arguments, result)
            latency(engine, port, levels, policy.vocab_size, arguments, deadline, result)
    finish(arguments, result)


def _levels(arguments: argparse.Namespace) -> list[int]:
    words = arguments.concurrency.split(",")
    if not all(word.isdigit() and 0 < int(word) <= 1024 for word in words):
        raise ConfigError(f"--concurrency {arguments.concurrency!r}: write numbers from 1 to 1024 with commas, as 1,8")
    for name in ("streams", "batch", "prompt_tokens", "tokens", "rounds"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: give at least 1")
    return [int(word) for word in words]


# The sides


def run_engine(scheduler: Scheduler, jobs: Jobs) -> tuple[list[list[int]], float]:
    """The engine in this process."""
    found: dict[int, Completion] = {}
    begin = time.perf_counter()
    for i, (prompt, key) in enumerate(zip(jobs.prompts, jobs.keys, strict=True)):
        params = SamplingParams(max_new_tokens=jobs.tokens)
        scheduler.submit(
            SampleRequest(str(i), Prompt(str(i), prompt, ""), params, {0: key}, partial(found.__setitem__, i))
        )
    while scheduler.step():
        pass
    seconds = time.perf_counter() - begin
    return [list(found[i].token_ids) for i in range(len(found))], seconds


@dataclass(frozen=True)
class Served:
    """What a server answered."""

    ids: list[list[int]]
    seconds: float
    client_share: float
    """Of one core, what the client took."""
    first_s: list[float]
    between_s: list[float]
    """From token to token, where it is streamed."""


def run_server(
    port: int, jobs: Jobs, stream: bool, concurrency: int, bodies: Any = Jobs.bodies, read: Any = None
) -> Served:
    """A server, through the client process. Raises EngineError when an answer is not whole."""
    read = read or (_read_stream if stream else _read_whole)
    given = {"port": port, "concurrency": concurrency, "path": "/v1/completions", "jobs": bodies(jobs, stream)}
    done = subprocess.run(
        [sys.executable, str(CLIENT)], input=json.dumps(given), capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise EngineError(f"the client failed: {done.stderr.strip()[-300:]}")
    result = json.loads(done.stdout)
    ids, first_s, between_s = [], [], []
    for number, answer in enumerate(result["answers"]):
        if answer["status"] != 200:
            raise EngineError(f"request {number} was answered with {answer['status']}: {answer['parts']}"[:300])
        tokens, times = read(answer["parts"])
        ids.append(tokens)
        first_s.append(times[0] - answer["begin"])
        between_s += [b - a for a, b in zip(times, times[1:], strict=False)]
    return Served(ids, result["wall_s"], result["cpu_s"] / result["wall_s"], first_s, between_s)


def _read_whole(parts: Sequence[tuple[float, str]]) -> tuple[list[int], list[float]]:
    (choice,) = json.loads("".join(text for _, text in parts))["choices"]
    return choice["token_ids"], [parts[-1][0]]


def _read_count(parts: Sequence[tuple[float, str]]) -> tuple[list[int], list[float]]:
    """From a server that names no ids: as many zeros as it counts."""
    return [0] * json.loads("".join(text for _, text in parts))["usage"]["completion_tokens"], [parts[-1][0]]


def _read_stream(parts: Sequence[tuple[float, str]]) -> tuple[list[int], list[float]]:
    """The ids, and when each arrived. A part is whole events, as the server sends them."""
    ids: list[int] = []
    times: list[float] = []
    ended = False
    for at, text in parts:
        for event in text.split("\n\n")[:-1]:
            ended = event == "data: [DONE]"
            for choice in () if ended else json.loads(event.removeprefix("data: "))["choices"]:
                ids += choice["token_ids"]
                times += [at] * len(choice["token_ids"])
    if not ended:
        raise EngineError("a stream ended without [DONE]")
    return ids, times


@contextmanager
def transformers_side(policy: Policy, tokenizer: Any, arguments: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """`transformers serve` on the same weights; it rests (SIGSTOP) while others are measured."""
    policy.causal.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    dtype = str(policy.head_weight.dtype).removeprefix("torch.")
    length = arguments.prompt_tokens + arguments.tokens + 16  # a prompt's text may come to more tokens
    with transformers_server.serving(
        folder / "model", free_port(), dtype, torch.get_num_threads(), arguments.streams, length
    ) as (port, pid):

        def bodies(jobs: Jobs, stream: bool) -> list[dict[str, Any]]:
            return transformers_server.bodies(tokenizer, folder / "model", jobs.prompts, jobs.tokens)

        def run(jobs: Jobs) -> Served:
            os.killpg(pid, signal.SIGCONT)
            done = run_server(port, jobs, False, arguments.streams, bodies, _read_count)
            os.killpg(pid, signal.SIGSTOP)
            if short := [len(ids) for ids in done.ids if len(ids) != jobs.tokens]:
                raise EngineError(f"transformers serve gave {short[0]} tokens instead of {jobs.tokens}")
            return done

        yield run


# What is measured


def compare(sides: dict[str, Any], vocabulary: int, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Throughput of all sides in turn, after a warm-up; every token of the server against the engine's.

    Each side of each round has prompts that it has not seen.
    """
    deadline = Deadline(arguments.time_limit)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shares: dict[str, list[float]] = {name: [] for name in sides}
    wrong = 0
    for number in range(arguments.rounds + 1):
        first = 10_000_000 + number * arguments.streams
        jobs = Jobs.make(arguments.streams, arguments.prompt_tokens, arguments.tokens, vocabulary, first=first)
        expected: list[list[int]] = []
        if number > 1 and deadline.passed(2 * sum(values[-1] for values in seconds.values())):
            print(f"{number - 1} of {arguments.rounds} rounds; the time is over")
            break
        for name, run in sides.items():
            done = run(jobs)
            if name == ENGINE:
                expected = done.ids
            elif name in TARGETS:
                wrong += sum(a != b for a, b in zip(done.ids, expected, strict=True))
            if number:
                seconds[name].append(done.seconds)
                shares[name].append(done.client_share)
    total = arguments.streams * arguments.tokens
    rates = {name: Spread.of([total / value for value in values]) for name, values in seconds.items()}
    base = rates[ENGINE].median
    rows = [(name, str(x), x.median / base, Spread.of(shares[name]).median) for name, x in rates.items()]
    title = f"{arguments.streams} requests at once, {arguments.tokens} tokens each, batch {arguments.batch}"
    table(title, ("side", "tokens/s", "of engine", "client's CPU, of a core"), rows)
    print(f"answers that are not the engine's, token for token: {wrong}")
    for name, target in TARGETS.items():
        print(against(name, rates[name].median / base, target, least=True))
    result["throughput"] = {
        "tokens_per_s": rates,
        "client_cpu": shares,
        "wrong_answers": wrong,
        "requests": arguments.streams,
    }


def latency(
    engine: Any,
    port: int,
    levels: Sequence[int],
    vocabulary: int,
    arguments: argparse.Namespace,
    deadline: Deadline,
    result: dict[str, Any],
) -> None:
    """Of streams, against how many are under way."""
    rows, found = [], []
    for number, level in enumerate(levels, 1):
        if deadline.passed():
            print(f"no latency from concurrency {level} on; the time is over")
            break
        count = max(level, 8)
        first = number * 10_000
        jobs = Jobs.make(count, arguments.prompt_tokens, arguments.tokens, vocabulary, first=first)
        served = run_server(port, jobs, True, level)
        if served.ids != engine(jobs)[0]:
            raise EngineError(f"at concurrency {level} an answer is not the engine's")
        first_s, between_s = (
            [float(x) for x in numpy.percentile(values or [0.0], (50, 99))]
            for values in (served.first_s, served.between_s)
        )
        found.append({"concurrency": level, "first_s": first_s, "between_s": between_s, "requests": count})
        rows.append((str(level), *(1000 * x for x in (*first_s, *between_s))))
    header = ("concurrency", "first token p50", "p99", "token to token p50", "p99")
    table("Latency of streams in ms", header, rows)
    result["latency"] = found


# The server


@contextmanager
def serving(model: str, arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """`tinyllm serve` in a session of its own; its port and process."""
    words = ["--port", "0", "--max-batch", arguments.batch, "--max-queue", 4096, "--dtype", arguments.dtype]
    words += ["--max-length", arguments.prompt_tokens + arguments.tokens, "--device", "cpu"]
    words += ["--threads", torch.get_num_threads()]
    line = [sys.executable, "-m", "tinyllm", "serve", model, *map(str, words)]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        if not select.select([server.stdout], [], [], _READY_S)[0]:
            raise EngineError(f"the server did not start within {_READY_S} s")
        said = server.stdout.readline()
        if "serving " not in said:
            raise EngineError("the server did not start; its error stands above")
        yield int(said.rpartition(":")[2].partition("/")[0]), server.pid
    finally:
        server.send_signal(signal.SIGCONT)  # it may be stopped
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def make_tiny(folder: Path) -> Path:
    """A random Llama with a tokenizer of single characters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", *map(chr, range(33, 96))]
    base = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<end>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=512, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    command(main)
