"""`tinyllm serve`: start a server. Mistakes in options are told before torch is imported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from tinyllm.commands.arguments import ServeArguments
from tinyllm.errors import ConfigError, ModelError, require_extra
from tinyllm.serve.access import ADMIN_KEY, API_KEY, key_of, require_key

_MAX_LENGTH = 1024
"""Default bound on prompt and completion; the model's own may be far more than a key-value cache has room for."""


def main(given: ServeArguments, options: Mapping[str, Any]) -> int:
    """Run the command and return its exit code. Raises the errors of errors.py."""
    api_key = key_of("--api-key", given.api_key, API_KEY)
    admin_key = key_of("--admin-key", given.admin_key, ADMIN_KEY)
    if given.model.startswith(("http://", "https://")):
        raise ConfigError(f"{given.model} is a server already; name a model, a folder or a run")
    require_key(given.host, api_key)
    require_extra("serve", "tinyllm serve")
    return _serve(given, api_key, admin_key)


def _serve(given: ServeArguments, api_key: str | None, admin_key: str | None) -> int:
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


def _max_length(given: ServeArguments, positions: int | None) -> int:
    """Tokens of prompt and completion together. Raises ModelError for more than the model has positions."""
    if given.max_length is None:
        return min(positions or _MAX_LENGTH, _MAX_LENGTH)
    if positions is not None and given.max_length > positions:
        raise ModelError(f"--max-length {given.max_length}: model {given.model} has {positions} positions; lower it")
    return given.max_length
