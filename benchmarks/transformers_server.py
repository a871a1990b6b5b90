"""`transformers serve` with continuous batching, as the other side of a comparison (needs fastapi)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinyllm.errors import ConfigError, EngineError

PAGE = 32
"""Tokens of a page of its cache."""
_READY_S = 300
_MAIN = "from transformers.cli.transformers import main; main()"


@contextmanager
def serving(folder: Path, port: int, dtype: str, threads: int, requests: int, length: int) -> Iterator[tuple[int, int]]:
    """Port and process of a server whose cache holds so many sequences of this length, in a session of its own.

    Raises ConfigError without fastapi, EngineError when it does not start.
    """
    if importlib.util.find_spec("fastapi") is None:
        raise ConfigError("transformers serve needs fastapi; install it: pip install fastapi")
    pages = requests * (-(-length // PAGE) + 1)
    words = ["serve", folder, "--continuous-batching", "--device", "cpu", "--dtype", dtype, "--host", "127.0.0.1"]
    words += ["--port", port, "--attn-implementation", "sdpa", "--cb-block-size", PAGE, "--cb-num-blocks", pages]
    words += ["--cb-max-batch-tokens", 2048, "--log-level", "error"]
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *map(str, words)],
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        try:
            _wait(server, port, said)
            yield port, server.pid
        finally:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], port: int, said: Any) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if server.poll() is not None:
            said.seek(0)
            raise EngineError(f"transformers serve did not start: {said.read().strip()[-300:]}")
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        time.sleep(0.2)
    raise EngineError(f"transformers serve did not answer within {_READY_S} s")


def bodies(tokenizer: Any, model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """Requests; it takes text, so that a prompt may have a token more or less there."""
    settings = {"max_new_tokens": tokens, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings |= {"eos_token_id": -1, "pad_token_id": 0}
    given = {"model": str(model), "generation_config": json.dumps(settings), "max_tokens": tokens}
    return [{"prompt": tokenizer.decode(list(prompt)), **given} for prompt in prompts]
