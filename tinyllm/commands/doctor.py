"""`tinyllm doctor`: what this machine can do and what is missing, each with its remedy."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.commands.text import table, width
from tinyllm.config.words import NoArguments
from tinyllm.errors import EXTRAS, is_installed


@dataclass(frozen=True)
class MachineCheck:
    """One line of the doctor's report."""

    mark: str
    """ok; note: works, with a limit; FAIL: training will not work."""
    name: str
    detail: str
    remedy: str = ""


def main(given: NoArguments, options: Mapping[str, Any]) -> int:
    """Print every check, and return 1 when one failed."""
    checks = examine()
    for check in checks:
        print(table([(check.mark, check.name, check.detail)], widths=(4, 16)))
        if check.remedy:
            print(textwrap.fill(f"→ {check.remedy}", width(), initial_indent=" " * 24, subsequent_indent=" " * 26))
    broken = sum(check.mark == "FAIL" for check in checks)
    print(f"\n{broken} of {len(checks)} checks failed" if broken else "\nready: start with `tinyllm grpo`")
    return 1 if broken else 0


NEED_GIB = 4.0
"""Memory of the default run: weights, optimizer and activations of the bundled model in float32."""
NEED_DISK_GIB = 5.0
"""A default run: two checkpoints, one being written, and the model."""


def examine() -> list[MachineCheck]:
    """Every check, most important first."""
    return [*_processor(), *_numeric(), _memory(), _disk(), _model(), *_extras()]


def _processor() -> list[MachineCheck]:
    import torch

    from tinyllm.model.memory import native_bf16
    from tinyllm.record.manifest import processor

    name, _ = processor()
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    found = [MachineCheck("ok", "processor", f"{name}, {threads}")]
    if torch.cuda.is_available():
        found.append(MachineCheck("ok", "accelerator", torch.cuda.get_device_name()))
    elif torch.backends.mps.is_available():
        found.append(MachineCheck("ok", "accelerator", "Apple GPU"))
    if native_bf16():
        found.append(MachineCheck("ok", "bfloat16", "multiplied natively by this processor"))
    else:
        found.append(MachineCheck("note", "bfloat16", "not multiplied natively by this processor: float32 is used"))
    return found


def _numeric() -> list[MachineCheck]:
    """Whether a row's numbers depend on what is computed beside it; if not, sampler and trainer agree bit for bit."""
    from tinyllm.engine.probe import probe

    found = []
    for name, (same, what, remedy) in probe().items():
        told = f"{'same' if same else 'other'} bits: {what}"
        found.append(MachineCheck("ok" if same else "note", name.replace("_", " "), told, remedy))
    return found


def _memory() -> MachineCheck:
    from tinyllm.model.memory import available_memory, gib

    free, total = available_memory("cpu")
    detail = f"{gib(free)} free of {gib(total)}; the default run takes about {NEED_GIB:g} GiB"
    if free >= NEED_GIB * 2**30:
        return MachineCheck("ok", "memory", detail)
    return MachineCheck(
        "FAIL", "memory", detail, "close other programs, or lower --max-batch and --tokens-per-microbatch"
    )


def _disk() -> MachineCheck:
    folder = Path("runs") if Path("runs").is_dir() else Path(".")
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{free:.0f} GiB free here; the default run takes up to {NEED_DISK_GIB:g} GiB while it runs"
    if free >= NEED_DISK_GIB:
        return MachineCheck("ok", "disk", detail)
    return MachineCheck("FAIL", "disk", detail, "free some room, or write elsewhere with --run.dir")


def _model() -> MachineCheck:
    from tinyllm.model.bundled import SMOLLM2, cached

    if (folder := cached(SMOLLM2)) is not None:
        return MachineCheck("ok", "bundled model", str(folder))
    size = f"{SMOLLM2.download_bytes / 1e6:.0f} MB"
    return MachineCheck(
        "note", "bundled model", f"not fetched yet ({size})", "fetched when first used; needs pip and a network"
    )


def _extras() -> list[MachineCheck]:
    lacking = {extra: [name for name in EXTRAS[extra] if not is_installed(name)] for extra in EXTRAS}
    found = [MachineCheck("ok", "extras", ", ".join(extra for extra in EXTRAS if not lacking[extra]) or "none")]
    for extra, names in lacking.items():
        if names:
            told = f"not installed: {', '.join(names)}"
            found.append(MachineCheck("note", f"extra {extra}", told, f"pip install 'tinyllm[{extra}]'"))
    return found
