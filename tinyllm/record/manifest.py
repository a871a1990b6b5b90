"""The manifest of a run: the configuration and every other condition, besides the rollouts, that its numbers depend on.

Identical runs differ in `instance` alone (time, host, process); everything else is compared.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import tinyllm

FORMAT = 1
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "peft",
    "numpy",
    "scipy",
    "pyarrow",
    "datasets",
    "xxhash",
)
NUMERIC_VARIABLES = ("ATEN_CPU_CAPABILITY", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "OPENBLAS_", "CUBLAS_")
FEATURES = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512", "amx", "avx_vnni", "asimd", "sve", "bf16", "i8mm")


def build_manifest(
    config: Mapping[str, Any],
    *,
    hashes: Mapping[str, Any],
    probe: Mapping[str, Any],
    kind: str = "grpo",
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest for RunDir.create.

    config: the resolved configuration (to_dict); hashes: content hashes of weights, tokenizer, chat template,
    data, verifier; probe: the result of the start-up probe; facts: what else the trainer knows (counts, compute type).
    """
    return {
        "format": FORMAT,
        "kind": kind,
        "config": dict(config),
        "hashes": dict(hashes),
        "probe": dict(probe),
        "facts": dict(facts or {}),
        "versions": versions(),
        "machine": machine(),
        "instance": {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "pid": os.getpid(),
            "command": sys.argv,
            "folder": str(Path.cwd()),
        },
    }


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that has a part in the numbers; None when it is not installed."""
    own = {"tinyllm": tinyllm.__version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in PACKAGES}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """What of this machine can change a bit: processor, its features, threads, accelerator, numeric variables."""
    import torch

    model, flags = processor()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": model,
        "features": flags,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(NUMERIC_VARIABLES)},
    }


def processor() -> tuple[str, list[str]]:
    """Name of the processor and those of its features that matter to arithmetic, sorted."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return facts.get("model name") or platform.machine(), sorted(f for f in flags if f.startswith(FEATURES))


def compare_manifests(
    first: Mapping[str, Any], second: Mapping[str, Any], *, ignore: tuple[str, ...] = ("instance", "checksum")
) -> list[tuple[str, Any, Any]]:
    """Every recorded condition in which two manifests differ: (dotted name, value, value); missing counts as None."""
    differences: list[tuple[str, Any, Any]] = []

    def walk(prefix: str, a: Any, b: Any) -> None:
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in [*a, *(key for key in b if key not in a)]:
                if prefix or key not in ignore:
                    walk(f"{prefix}.{key}" if prefix else str(key), a.get(key), b.get(key))
        elif a != b:
            differences.append((prefix, a, b))

    walk("", first, second)
    return differences
