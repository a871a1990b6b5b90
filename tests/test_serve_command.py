"""The command `tinyllm serve`: one line for every mistake, a real process from its first line to its drain."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import serving

from tinyllm.commands.cli import main
from tinyllm.serve import access


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return serving.save(tmp_path_factory.mktemp("served") / "model")


def fails(capsys, *words) -> str:
    """The one line of a mistake."""
    code = main(["serve", *map(str, words)])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1, (code, out, err)
    return err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_a_public_address_needs_a_key(capsys, monkeypatch, host):
    monkeypatch.delenv("TINYLLM_API_KEY", raising=False)
    assert "can be reached from elsewhere and there is no API key" in fails(capsys, "m", "--host", host)
    monkeypatch.setenv("TINYLLM_API_KEY", "")
    assert "there is no API key" in fails(capsys, "m", "--host", host), "an empty variable is no key"


def test_loopback_needs_none():
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        access.require_key(host, None)
    access.require_key("0.0.0.0", "key")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", 70000], "--port 70000: must be at most 65535"),
        (["--max-batch", 0], "--max-batch 0: must be at least 1"),
        (["--drain-s", "nan"], "--drain-s nan: must be a finite number"),
        (["--max-body-mb", 0], "--max-body-mb 0.0: must be at least 0.001"),
        (["--api-key", "two words"], "--api-key must be visible ASCII characters"),
        (["--api-key", ""], "--api-key must be visible ASCII characters"),
        (["--prot", 1], "unknown option '--prot'; did you mean '--port'?"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, words, message):
    assert message in fails(capsys, "m", *words)


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert "model folder" in fails(capsys, tmp_path / "none", "--port", 0)
    assert "is a server already" in fails(capsys, "http://localhost:1/v1")


def test_a_port_in_use(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in fails(capsys, folder, "--port", port)


def test_a_host_that_cannot_be_one(capsys, folder):
    assert "cannot listen on a..b:0: " in fails(capsys, folder, "--port", 0, "--host", "a..b", "--api-key", "k")


def test_more_tokens_than_positions(capsys, folder):
    assert "has 512 positions" in fails(capsys, folder, "--port", 0, "--max-length", 600)


def test_without_the_extra(capsys, monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "tinyllm serve needs uvicorn; pip install 'tinyllm[serve]'" in fails(capsys, folder, "--port", 0)


def test_keys_are_compared_whole():
    keys = access.Access("abc", "xyz")
    for good in (b"Bearer abc", b"bearer abc", b"Bearer xyz"):
        keys.check(good, admin=False, path="/")
    for wrong in (b"", b"Bearer ", b"Bearer ab", b"Bearer abcd", b"Basic abc", b"abc", b"Bearer \xff"):
        with pytest.raises(access.APIError):
            keys.check(wrong, admin=False, path="/")
    with pytest.raises(access.APIError):
        keys.check(b"Bearer abc", admin=True, path="/")


def start(folder, *words) -> tuple[subprocess.Popen, int]:
    line = [sys.executable, "-m", "tinyllm", "serve", str(folder), "--port", "0", "--threads", "1", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    said = process.stdout.readline()
    assert said.startswith(f"serving {words[-1] if '--model-name' in words else folder} at http://127.0.0.1:"), said
    return process, int(said.rpartition(":")[2].removesuffix("/v1\n"))


def ask(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    try:
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_a_process_from_start_to_drain(folder):
    process, port = start(folder, "--drain-s", "300", "--model-name", "mine")
    with process:
        results = []
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "n": 8, "model": "mine", "stream": False}
        thread = threading.Thread(target=lambda: results.append(ask(port, body)))
        assert ask(port, {"prompt": "a", "model": "mine"})[0] == 200
        thread.start()
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
            if "tinyllm_running 8.0" in text:
                break
            assert thread.is_alive(), "it ended before it could be seen running"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        thread.join(10)
        (status, answer), err = results[0], process.stderr.read()
    assert status == 200 and answer["usage"]["completion_tokens"] == 8 * 300
    assert err.startswith("stopping: 8 completions under way") and "Traceback" not in err


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(folder):
    process, port = start(folder, "--drain-s", "60", "--max-batch", "2")
    with process:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 64, "stream": True}
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            assert connection.recv(10)
            process.send_signal(signal.SIGTERM)
            assert process.stderr.readline().startswith("stopping: 64 completions")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 130
            assert "a second signal" in process.stderr.read()
