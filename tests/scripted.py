"""Small scripted servers over real HTTP that speak the dialects of tinyllm, vLLM and SGLang, with faults injected.

A script decides what happens to one sampling request: script(number from 1, body, server) returns None for the ordinary
answer, or what to do instead: a `Reply`, or a function that edits the ordinary answer in place. Tokens are drawn from
the request's own key, so that a test can say what is right: `expected(prompt ids, key, params)`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinyllm.engine.seeds import uniform

VOCABULARY = 44
STOP = 0


@dataclass
class Reply:
    """Something other than the ordinary answer."""

    status: int = 200
    body: Any = None
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hang_up: bool = False
    """Close the connection without an answer."""


def draw(
    prompt: Sequence[int], key: int, limit: int, stops: Sequence[int], shift: float
) -> tuple[list[int], list[float], str]:
    """Ids from the key alone (greedy: from the prompt), log-probabilities from ids, prompt and the weights' shift."""
    ids: list[int] = []
    while len(ids) < limit:
        ids.append(int(uniform(key, len(ids)) * VOCABULARY))
        if ids[-1] in stops:
            return ids, logprobs(prompt, ids, shift), "stop"
    return ids, logprobs(prompt, ids, shift), "length"


def logprobs(prompt: Sequence[int], ids: Sequence[int], shift: float) -> list[float]:
    """What the scripted weights give these ids; the trainer's callable in tests is this function too."""
    return [-1.0 - (sum(prompt) % 7) / 10 - token / 100 - shift for token in ids]


class Scripted(ThreadingHTTPServer):
    """One scripted server. `shift` stands for its weights."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, kind: str, script: Any = None, **options: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.script = kind, script or (lambda number, body, server: None)
        self.lock = threading.RLock()
        self.sampled: list[dict[str, Any]] = []
        self.admin: list[tuple[str, Any]] = []
        self.keys: set[str] = set()
        self.running = self.peak = 0
        self.shift, self.version = options.pop("shift", 0.0), options.pop("version", "default")
        self.takes = options.pop("takes", True)
        """False: says ok to an update and changes nothing."""
        self.says: dict[str, Reply] = options.pop("says", {})
        """Route -> what to answer instead."""
        self.weights: Callable[[str], float] = options.pop(
            "weights", lambda path: float((Path(path) / "shift").read_text())
        )
        self.convention = options.pop("convention", "after temperature")
        self.seeds = options.pop("seeds", True)
        """True, False (ignored) or "dies"."""
        self.cpu = options.pop("cpu", False)
        self.mode = options.pop("mode", None)
        """vLLM's logprobs_mode as /server_info shows it; None: the page does not exist."""
        self.names = options.pop("names", ("m",))
        self.max_length = options.pop("max_length", 512)
        self.echo = options.pop("echo", True)
        self.spans = options.pop("spans", kind != "vllm")
        self.adapters: dict[str, float] = {}
        self.paused = self.dead = False
        assert not options, options

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault here."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.serve(json.loads(data) if data else None)

    def serve(self, body: Any) -> None:
        server, path = self.server, urlsplit(self.path).path
        with server.lock:
            server.keys.add(self.headers.get("Authorization") or "")
        if server.dead:
            return self.reply(Reply(500, {"error": "EngineDeadError"}))
        if path in server.says:
            with server.lock:
                server.admin.append((self.path, body))
            return self.reply(server.says[path])
        if path in ("/v1/completions", "/generate") and self.command == "POST":
            return self.sample(body)
        with server.lock:
            answer = _PAGES.get((server.kind, path), _PAGES.get(("", path), _missing))(server, body, self.path)
            if self.command == "POST":
                server.admin.append((self.path, body))
        self.reply(answer if isinstance(answer, Reply) else Reply(200, answer))

    def sample(self, body: Any) -> None:
        server = self.server
        with server.lock:
            server.sampled.append(body)
            number = len(server.sampled)
            server.running += 1
            server.peak = max(server.peak, server.running)
        try:
            act = server.script(number, body, server)
            if isinstance(act, Reply):
                return self.reply(act)
            with server.lock:
                answer = _ANSWERS[server.kind](server, body)
            if isinstance(answer, Reply):
                return self.reply(answer)
            if act is not None:
                act(answer)
            self.reply(Reply(200, answer))
        finally:
            with server.lock:
                server.running -= 1

    def reply(self, reply: Reply) -> None:
        if reply.delay_s:
            time.sleep(reply.delay_s)
        if reply.hang_up:
            self.close_connection = True
            self.connection.close()
            return
        data = reply.raw if reply.raw is not None else b"" if reply.body is None else json.dumps(reply.body).encode()
        try:
            self.send_response(reply.status)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **reply.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True
        if "Content-Length" in reply.headers:  # a lie about the body
            self.close_connection = True


# Answers


def _numbers(
    server: Scripted, prompt: list[int], limit: int, stops: list[int], temperature: float, key: int | None, shift: float
) -> Any:
    seeded = key is not None and server.seeds is True
    number = key if seeded and temperature else sum(prompt) if not temperature else len(server.sampled) * 7919
    return draw(prompt, number, limit, stops, shift)


def _tops(server: Scripted, temperature: float) -> list[float]:
    """Two likeliest tokens of logits 1 and 0 (the others far below)."""
    scale = 1.0 if server.convention == "raw" or not temperature else temperature
    return [-0.3, -0.3 - 1.0 / scale]


def _completions(server: Scripted, body: dict[str, Any]) -> Any:
    keys = body.get("seed_keys")
    key = keys[0] if keys else body.get("seed")
    if "seed" in body and server.seeds == "dies":
        server.dead = True
        return Reply(500, {"error": "EngineDeadError"})
    model, shift = body["model"], server.shift
    if model in server.adapters:
        shift = server.adapters[model]
    elif model not in server.names:
        return Reply(404, {"error": {"message": f"no model {model}"}})
    prompt, temperature = body["prompt"], body["temperature"]
    ids, logps, reason = _numbers(server, prompt, body["max_tokens"], body["stop_token_ids"], temperature, key, shift)
    choice: dict[str, Any] = {
        "index": 0,
        "text": "".join(map(chr, (48 + i for i in ids))),
        "token_ids": ids,
        "logprobs": {"token_logprobs": logps, "tokens": [str(i) for i in ids]},
        "finish_reason": reason,
    }
    if body["logprobs"]:
        choice["logprobs"]["top_logprobs"] = [{f"token_id:{i}": x for i, x in enumerate(_tops(server, temperature))}]
    if server.spans:
        choice["weight_versions"] = [{"version": server.version, "start": 0, "end": len(ids)}]
    ident = ("cmpl-" if server.kind == "vllm" else "") + body["request_id"] if server.echo else f"x{time.time_ns()}"
    return {"id": ident, "model": model, "choices": [choice]}


def _generate(server: Scripted, body: dict[str, Any]) -> Any:
    p = body["sampling_params"]
    prompt, temperature = body["input_ids"], p["temperature"]
    ids, logps, reason = _numbers(
        server, prompt, p["max_new_tokens"], p["stop_token_ids"], temperature, p.get("sampling_seed"), server.shift
    )
    meta: dict[str, Any] = {
        "id": body["rid"],
        "output_token_logprobs": [[x, i, None] for x, i in zip(logps, ids, strict=True)],
        "finish_reason": {"type": reason},
        "weight_version": server.version,
    }
    if server.spans:
        meta["weight_versions"] = [{"version": server.version, "start": 0, "end": len(ids)}]
    if body["top_logprobs_num"]:
        meta["output_top_logprobs"] = [[[x, i, None] for i, x in enumerate(_tops(server, temperature))]]
    return {"text": "".join(map(chr, (48 + i for i in ids))), "output_ids": ids, "meta_info": meta}


_ANSWERS: dict[str, Callable[[Scripted, dict[str, Any]], Any]] = {
    "tinyllm": _completions,
    "vllm": _completions,
    "sglang": _generate,
}


# Pages


def _missing(server: Scripted, body: Any, path: str) -> Any:
    return Reply(404, {"detail": "Not Found"})


def _models(server: Scripted, body: Any, path: str) -> Any:
    data = [{"id": name, "owned_by": server.kind, "max_model_len": server.max_length} for name in server.names]
    return {
        "data": data + [{"id": name, "owned_by": server.kind, "parent": server.names[0]} for name in server.adapters]
    }


def _update(server: Scripted, body: Any, path: str) -> Any:
    try:
        shift = server.weights(body["model_path"])
    except (OSError, ValueError) as error:
        return Reply(400, {"error": {"message": f"{type(error).__name__}: cannot read {body['model_path']}"}})
    server.version = body["weight_version"]
    if server.takes:
        server.shift = shift
    return {"success": True, "message": "ok", "weight_version": server.version}


def _load_adapter(server: Scripted, body: Any, path: str) -> Any:
    if body["lora_name"] in server.adapters:
        return Reply(400, {"error": f"The lora adapter '{body['lora_name']}' has already been loaded."})
    shift = server.weights(body["lora_path"])
    server.adapters[body["lora_name"]] = shift if server.takes else server.shift
    return Reply(200, raw=b"Success: LoRA adapter added successfully.")


def _unload_adapter(server: Scripted, body: Any, path: str) -> Any:
    if server.adapters.pop(body["lora_name"], None) is None:
        return Reply(404, {"error": "not loaded"})
    return Reply(200, raw=b"Success")


def _pause(server: Scripted, body: Any, path: str) -> Any:
    server.paused = True
    return {"status": "paused"}


def _resume(server: Scripted, body: Any, path: str) -> Any:
    server.paused = False
    return {"status": "resumed"}


def _server_info(server: Scripted, body: Any, path: str) -> Any:
    if server.mode is None:
        return _missing(server, body, path)
    device = "cpu" if server.cpu else "cuda"
    return {"vllm_config": {"model_config": {"logprobs_mode": server.mode}, "device_config": {"device": device}}}


_PAGES: dict[tuple[str, str], Callable[[Scripted, Any, str], Any]] = {
    ("", "/v1/models"): _models,
    ("", "/health"): lambda server, body, path: Reply(200, raw=b""),
    ("tinyllm", "/version"): lambda server, body, path: {
        "version": "0.1.0",
        "logprobs": "after temperature, top-k, top-p, min-p",
        "seeds": True,
        "dtype": "float32",
        "limits": {"max_length": server.max_length},
    },
    ("tinyllm", "/weight_info"): lambda server, body, path: {"weight_version": server.version, "paused": server.paused},
    ("tinyllm", "/update_weights_from_disk"): _update,
    ("vllm", "/version"): lambda server, body, path: {"version": "0.32.0+cpu" if server.cpu else "0.32.0"},
    ("vllm", "/server_info"): _server_info,
    ("vllm", "/v1/load_lora_adapter"): _load_adapter,
    ("vllm", "/v1/unload_lora_adapter"): _unload_adapter,
    ("sglang", "/server_info"): lambda server, body, path: {"version": "0.5.23"},
    ("sglang", "/model_info"): lambda server, body, path: {"weight_version": server.version},
    ("sglang", "/update_weights_from_disk"): _update,
    ("sglang", "/pause_generation"): _pause,
    ("sglang", "/continue_generation"): _resume,
}


@contextmanager
def scripted(kind: str = "tinyllm", script: Any = None, **options: Any) -> Iterator[Scripted]:
    """A server in a thread, on a port that the system chooses."""
    server = Scripted(kind, script, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
