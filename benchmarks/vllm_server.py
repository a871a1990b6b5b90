"""A real vLLM on this machine's processor: start `vllm serve FOLDER`, wait until it answers, end it with its children.

Standard library only. The environment is made by scripts/vllm.sh; TINYLLM_VLLM names it where it is not .venv-vllm.
By hand: `python benchmarks/vllm_server.py MODEL_FOLDER [vllm options]` serves until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_S = 900
"""How long a start may take: imports and a compilation on a busy machine of two cores."""
LORA = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "16")

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it leaves one core to others
    "VLLM_SERVER_DEV_MODE": "1",  # /weight_info, /pause, /resume, /server_info
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # its own bound, 300, ends the engine when a busy machine compiles
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerError(RuntimeError):
    """The server did not start, or ended by itself; the message carries the end of its log."""


def environment() -> Path:
    """The folder of vLLM's own environment. Raises ServerError with the remedy where there is none."""
    folder = Path(os.environ.get("TINYLLM_VLLM") or ROOT / ".venv-vllm")
    if not (folder / "bin" / "vllm").exists():
        raise ServerError(f"no vLLM in {folder}; make it with: sh scripts/vllm.sh {folder}")
    return folder


def processor_dtype() -> str:
    """bfloat16 where the processor calculates with it, else float32."""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text().split()
        return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"
    return "float32"


@dataclass
class VLLMServer:
    """A running server; `url` has no path. Ended by `stop`, which is safe to call twice."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = 120) -> tuple[int, str]:
        """Status and body of one request, whatever the status. Raises OSError where no answer comes."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with OPENER.open(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def json(self, method: str, path: str, body: Any = None, *, timeout_s: float = 120) -> tuple[int, Any]:
        """Like `request`, with the body read as JSON."""
        status, text = self.request(method, path, body, timeout_s=timeout_s)
        return status, json.loads(text)

    def wait(self, start_s: float = START_S) -> None:
        """Returns when /health answers 200. Raises ServerError when the process ends before, or time is up."""
        end = time.monotonic() + start_s
        while time.monotonic() < end:
            if (code := self.process.poll()) is not None:
                raise ServerError(
                    f"vllm ended with exit code {code} before it answered; {self.log} ends:\n{self.tail()}"
                )
            with contextlib.suppress(OSError):
                if self.request("GET", "/health", timeout_s=10)[0] == 200:
                    return
            time.sleep(0.5)
        raise ServerError(f"vllm did not answer within {start_s:.0f} s; {self.log} ends:\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The end of what the server wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, patience_s: float = 20) -> None:
        """SIGTERM to the server and SIGKILL to what is left of its session (the engine is a process of its own)."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and its children at once: a machine that lost its power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the session is its own
        self.process.wait()


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes through a proxy


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now (vllm takes a number and does not print one that it chose)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def command(venv: Path, model: Path, port: int, dtype: str, options: Sequence[str]) -> list[str]:
    """The command line; `options` stand last, so that they win."""
    sizes = ["--dtype", dtype, "--max-model-len", "512", "--max-num-seqs", "64"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--logprobs-mode", "processed_logprobs"]
    return [str(venv / "bin" / "vllm"), "serve", str(model), *sizes, *place, *options]


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    options: Sequence[str] = ("--enforce-eager",),
    *,
    dtype: str | None = None,
    threads: int | None = None,
    start_s: float = START_S,
) -> Iterator[VLLMServer]:
    """A server of `model` that answers; it and all its children are gone when the block is left, also by an error.

    `log` receives what it writes. `threads`: of each engine process (default: vLLM's choice, every core).
    Raises ServerError when there is no environment or the server does not answer within `start_s`.
    """
    venv, port = environment(), free_port()
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    settings |= SETTINGS | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    if "--enforce-eager" in options:  # else its sampler is compiled all the same, by g++ at the first request
        settings["TORCH_COMPILE_DISABLE"] = "1"
    settings["PATH"] = f"{venv / 'bin'}:{settings.get('PATH', '')}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(venv, model, port, dtype or processor_dtype(), options),
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = VLLMServer(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait(start_s)
        yield server
    finally:
        server.stop()


def main(arguments: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; the log goes to vllm.log in the current folder."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python benchmarks/vllm_server.py MODEL_FOLDER [vllm options]", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with serve(Path(arguments[0]), Path("vllm.log"), arguments[1:] or ("--enforce-eager",)) as server:
            print(f"vllm serves {arguments[0]} at {server.url}/v1", flush=True)
            server.process.wait()
            raise ServerError(f"vllm ended by itself:\n{server.tail()}")
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
