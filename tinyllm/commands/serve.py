"""`tinyllm serve`: words to a server. Help and mistakes in options answer at once, without torch."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tinyllm.errors import ConfigError, ModelError, require_extra
from tinyllm.serve.access import ADMIN_KEY, API_KEY, key_of, require_key

_MAX_LENGTH = 1024
"""Default bound on prompt and completion; the model's own may be far more than a key-value cache has room for."""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises the errors of errors.py."""
    _add_options(parser)
    given = parser.parse_args(words)
    api_key = key_of("--api-key", given.api_key, API_KEY)
    admin_key = key_of("--admin-key", given.admin_key, ADMIN_KEY)
    _check(given)
    require_key(given.host, api_key)
    require_extra("serve", "tinyllm serve")
    return _serve(given, api_key, admin_key)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="bundled name, folder, hub id, RUN, RUN@best, or RUN@20 (a checkpoint)")
    add("--host", default="127.0.0.1", help="address to listen on; others than loopback need an API key (%(default)s)")
    add("--port", type=int, default=8000, help="port; 0 = a free one, which is printed (%(default)s)")
    add("--model-name", metavar="NAME", help="what clients call the model (default: MODEL)")
    add("--max-batch", type=int, default=64, metavar="N", help="completions decoded together (%(default)s)")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of prompt and completion (the model's, at most {_MAX_LENGTH})",
    )
    add("--max-queue", type=int, default=1024, metavar="N", help="completions that may wait (%(default)s)")
    add("--max-body-mb", type=float, default=4.0, metavar="MB", help="largest request (%(default)s)")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="compute type (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, mps (%(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"clients must send it as a bearer token (or {API_KEY}, which ps does not show)",
    )
    add("--admin-key", metavar="KEY", help=f"opens the routes that pause and change weights (or {ADMIN_KEY})")
    add(
        "--drain-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to finish what runs after SIGTERM (%(default)s)",
    )


def _check(given: argparse.Namespace) -> None:
    least = {"max_batch": 1, "max_length": 2, "max_queue": 0, "threads": 1, "drain_s": 0, "port": 0}
    for name, bound in least.items():
        value = getattr(given, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {bound}")
    if given.port > 65535:
        raise ConfigError(f"--port {given.port}: must be at most 65535")
    if not 0.001 <= given.max_body_mb <= 1024:
        raise ConfigError(f"--max-body-mb {given.max_body_mb:g}: must be from 0.001 to 1024")
    if given.model.startswith(("http://", "https://")):
        raise ConfigError(f"{given.model} is a server already; name a model, a folder or a run")


def _serve(given: argparse.Namespace, api_key: str | None, admin_key: str | None) -> int:
    import torch

    from tinyllm.model import models
    from tinyllm.model.memory import in_brief_thread
    from tinyllm.model.refs import find_subject, load_policy
    from tinyllm.serve.app import Service, Settings
    from tinyllm.serve.server import address, bind, serve_until_signal

    subject = find_subject(given.model)
    with bind(given.host, given.port) as bound:
        if given.threads:
            torch.set_num_threads(given.threads)
        length = _max_length(given, getattr(models.load_config(subject.source), "max_position_embeddings", None))
        tokenizer = models.load_tokenizer(subject.source)
        # The engine's thread is to be the only one with OpenMP workers.
        cached = given.max_batch * length
        policy, revision = in_brief_thread(
            lambda: load_policy(subject, given.dtype, given.device, samples=given.max_batch, cached=cached)
        )
        settings = Settings(
            model_name=given.model_name or given.model,
            max_length=length,
            max_batch=given.max_batch,
            max_queue=given.max_queue,
            max_body_bytes=int(given.max_body_mb * 1e6),
            drain_s=given.drain_s,
            api_key=api_key,
            admin_key=admin_key,
            threads=given.threads,
        )
        service = Service(policy, tokenizer, revision, settings)

        def on_ready() -> None:
            print(f"serving {settings.model_name} at {address(bound)}/v1", flush=True)

        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        cut = serve_until_signal(service, bound, on_ready)
    if cut:
        print(f"warning: {cut} requests were cut off after {given.drain_s:g} s; raise --drain-s", file=sys.stderr)
    return 0


def _max_length(given: argparse.Namespace, positions: int | None) -> int:
    """Tokens of prompt and completion together. Raises ModelError for more than the model has positions."""
    if given.max_length is None:
        return min(positions or _MAX_LENGTH, _MAX_LENGTH)
    if positions is not None and given.max_length > positions:
        raise ModelError(f"--max-length {given.max_length}: model {given.model} has {positions} positions; lower it")
    return given.max_length
