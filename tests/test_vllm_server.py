"""The helper that starts a real vLLM, tried on a command that only pretends to be one; and what scripts/vllm.sh refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from vllm_server import ServerError, serve  # noqa: E402

FAKE = """#!{python}
import http.server, json, os, subprocess, sys
if "--dies" in sys.argv:
    sys.exit("no such model")
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        silent = "--silent" in sys.argv and self.path == "/health"
        facts = {{"child": child.pid, "argv": sys.argv[1:], "dev": os.environ.get("VLLM_SERVER_DEV_MODE")}}
        body = json.dumps(facts).encode()
        self.send_response(503 if silent else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    command = tmp_path / "venv" / "bin" / "vllm"
    command.write_text(FAKE.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("TINYLLM_VLLM", str(tmp_path / "venv"))


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits for its parent counts as gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_ends_with_its_children(fake, tmp_path):
    with serve(tmp_path / "model", tmp_path / "log", ["--enforce-eager"], dtype="float32", start_s=60) as server:
        status, facts = server.json("GET", "/facts")
        assert status == 200 and facts["dev"] == "1" and alive(facts["child"])
        assert facts["argv"][:4] == ["serve", str(tmp_path / "model"), "--dtype", "float32"]
        assert facts["argv"][-1] == "--enforce-eager"
    end = time.monotonic() + 30
    while alive(facts["child"]):  # killed; its end is the system's to finish
        assert time.monotonic() < end
        time.sleep(0.02)
    assert server.process.poll() is not None


def test_what_does_not_start_is_said_with_its_log(fake, tmp_path):
    with pytest.raises(ServerError, match=r"exit code 1 before it answered.*\nno such model$"):
        with serve(tmp_path, tmp_path / "log", ["--dies"], start_s=60):
            pass
    with pytest.raises(ServerError, match="did not answer within 1 s"):
        with serve(tmp_path, tmp_path / "log", ["--silent"], start_s=1):
            pass


def test_a_missing_environment_names_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYLLM_VLLM", str(tmp_path / "none"))
    with pytest.raises(ServerError, match=r"make it with: sh scripts/vllm\.sh"), serve(tmp_path, tmp_path / "log"):
        pass


def test_the_script_touches_no_folder_of_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    script = ["sh", str(ROOT / "scripts" / "vllm.sh"), str(tmp_path)]
    result = subprocess.run(script, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert (result.returncode, (tmp_path / "thesis.tex").read_text()) == (2, "years of work")
    assert result.stderr.startswith(f"error: {tmp_path} has files in it") and result.stderr.count("\n") == 1
