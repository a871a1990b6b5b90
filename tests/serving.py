"""A server in this process, on a port of the system's choice, with a tiny model of bytes; and ways to talk to it."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tinyllm.engine.build import make_scheduler
from tinyllm.engine.policy import Policy
from tinyllm.engine.scheduler import SampleRequest
from tinyllm.engine.seeds import seed_key
from tinyllm.model.models import content_hash
from tinyllm.records import Completion, Prompt, Revision, SamplingParams
from tinyllm.serve.app import Service, Settings
from tinyllm.serve.server import address, bind, serve

END, BOS, TURN = 0, 1, 2
VOCABULARY = 259
MAX_LENGTH = 128
ADMIN = {"Authorization": "Bearer admin-key"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}"
    "{% if not loop.last or m.role != 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that most random completions are broken UTF-8; it adds <bos>, and so does its template."""
    special = ["<end>", "<bos>", "<turn>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate([*special, *letters])}, merges=[]))
    base.add_special_tokens([AddedToken(word, special=True) for word in special])
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    base.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<bos>", eos_token="<end>", pad_token="<end>")
    made.chat_template = TEMPLATE
    return made


def model(seed: int = 0, **changes: Any) -> Any:
    return tiny.llama(seed, **{"vocab_size": VOCABULARY, "bos_token_id": BOS, "spread": 0.15, **changes})


def save(folder: Path, seed: int = 0, **changes: Any) -> Path:
    model(seed, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@dataclass
class Served:
    """A running server."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON); a body of bytes is sent as it is."""
        status, data, _ = self.exchange(method, path, body, headers)
        return status, json.loads(data)

    def exchange(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read(), response.headers
        finally:
            connection.close()

    def complete(self, **body: Any) -> Any:
        """The answer of POST /v1/completions, which must succeed."""
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def events(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """The objects of a stream, which must end with [DONE]."""
        status, data, _ = self.exchange("POST", path, {**body, "stream": True})
        assert status == 200, data
        parts = data.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    def metric(self, line: str) -> float:
        """The value after the name and labels of a metric; 0 when it is not there yet."""
        _, data, _ = self.exchange("GET", "/metrics")
        found = [row for row in data.decode().splitlines() if row.startswith(line + " ")]
        return float(found[0].split()[-1]) if found else 0.0


@contextmanager
def serving(made: Any = None, **settings: Any) -> Iterator[Served]:
    """A server of a model (its weights belong to the server), until the block ends."""
    made = model() if made is None else made
    revision = Revision(0, content_hash(made))
    given = Settings(**{"model_name": "tiny", "max_length": MAX_LENGTH, "max_batch": 8, "threads": 1, **settings})
    service = Service(Policy(made.requires_grad_(False)), tokenizer(), revision, given)
    bound = bind("127.0.0.1", 0)
    ready, found, faults = threading.Event(), {}, []

    async def run() -> None:
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        await serve(service, bound, ready.set, found["stop"])

    def target() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - raised again below
            faults.append(error)
            ready.set()

    thread = threading.Thread(target=target)
    thread.start()
    assert ready.wait(30) and not faults, faults
    try:
        yield Served(address(bound), service, found["loop"], found["stop"])
    finally:
        with suppress(RuntimeError):  # a test that stopped the server itself may have closed the loop
            found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(30)
    assert not faults and not thread.is_alive(), faults


def sample_alone(made: Any, ids: Any, params: SamplingParams, keys: Any) -> list[Completion]:
    """What the scheduler gives a job that runs alone in it."""
    scheduler = make_scheduler(Policy(made.requires_grad_(False)), tokenizer(), max_batch=8)
    done: list[Completion] = []
    scheduler.submit(SampleRequest("only", Prompt("", tuple(ids), ""), params, dict(enumerate(keys)), done.append))
    while scheduler.step():
        pass
    return sorted(done, key=lambda completion: completion.sample)


def key_of(seed: int, prompt: int = 0, sample: int = 0) -> int:
    """The random key of a choice, as the server derives it."""
    return seed_key(seed, 0, "", prompt, sample)
