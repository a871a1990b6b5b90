"""What the benchmarks share: options, tables, spreads, the machine in words, matrix product rate, seconds by part.

Times are wall-clock seconds. Comparisons alternate their sides (A B A B) after a warm-up and give medians with the
smallest and the largest value, because a machine's speed drifts by more than many a difference that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from tinyllm.errors import TinyLLMError
from tinyllm.model.memory import native_bf16
from tinyllm.record.manifest import machine, versions

GEMM_SIZE = 2048


# Command line and results


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; `doc` is the script's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the results as JSON")
    made.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    return made


def start(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sets the threads, prints on what is measured, and returns the head of the JSON result."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    about = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "machine": {
            **machine(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "native_bf16": native_bf16(),
        },
        "versions": versions(),
    }
    m = about["machine"]
    print(f"{about['command']}\n{about['date']}")
    print(
        f"{m['processor']}, {m['cores']} cores, {m['threads']} threads, {m['memory_gib']} GiB, {m['capability']}, "
        f"bf16 unit: {'yes' if m['native_bf16'] else 'no'}; torch {about['versions']['torch']}, "
        f"transformers {about['versions']['transformers']}",
        flush=True,
    )
    return about


def finish(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the results where --out says."""
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1, default=_plain) + "\n", encoding="utf-8")
        print(f"\nresults: {arguments.out}")


def command(main: Callable[[], None]) -> None:
    """Runs a benchmark's main; a user's mistake is one line and its exit code."""
    try:
        main()
    except TinyLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return {"median": value.median, "min": value.low, "max": value.high, "count": value.count}
    raise TypeError(type(value).__name__)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def number(value: float) -> str:
    """Three or four significant digits."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    cells = [[x if isinstance(x, str) else number(x) if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    print(f"\n{title}")
    for row in [list(header), *cells]:
        print(
            "  " + "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        )
    sys.stdout.flush()


def against(name: str, value: float, bound: float, *, least: bool) -> str:
    """One line: a figure beside its target."""
    met = value >= bound if least else value <= bound
    return (
        f"{name}: {number(value)} (target: at {'least' if least else 'most'} {bound:g}: {'met' if met else 'missed'})"
    )


class Deadline:
    """The time a benchmark may take; None is no limit."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.perf_counter() + 60 * minutes

    def passed(self, needed_s: float = 0.0) -> bool:
        """Whether less than needed_s are left."""
        return self.end is not None and time.perf_counter() + needed_s > self.end


# Measuring


class GemmRate:
    """The best rate of a 2048 x 2048 x 2048 product, from measurements spread over the run."""

    def __init__(self, dtype: torch.dtype, size: int = GEMM_SIZE) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
        self.flops = 2.0 * size**3
        self.best = 0.0
        """FLOP/s."""

    def measure(self, times: int = 3) -> None:
        for _ in range(times):
            begin = time.perf_counter()
            torch.mm(self.a, self.b)
            self.best = max(self.best, self.flops / (time.perf_counter() - begin))


class PartTimer:
    """Seconds by part: wrapped functions count their own time, less that of the parts they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._open.append((name, 0.0))
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            _, inner = self._open.pop()
            self.seconds[name] += elapsed - inner
            if self._open:
                outer, inside = self._open[-1]
                self._open[-1] = (outer, inside + elapsed)

    def take(self) -> dict[str, float]:
        """The seconds so far; starts again from nothing."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    @contextmanager
    def wrapping(self, *places: tuple[Any, str, str, tuple[str, ...]]) -> Iterator[None]:
        """Times functions while the block runs: (owner, attribute, part, parts it counts in; () for anywhere)."""
        before = []
        for owner, attribute, name, inside in places:
            had = attribute in vars(owner)
            raw = vars(owner).get(attribute)
            before.append((owner, attribute, had, raw))
            timed = self._timed(getattr(owner, attribute), name, inside)
            setattr(owner, attribute, staticmethod(timed) if isinstance(raw, staticmethod) else timed)
        try:
            yield
        finally:
            for owner, attribute, had, raw in reversed(before):
                if had:
                    setattr(owner, attribute, raw)
                else:
                    delattr(owner, attribute)

    def _timed(self, function: Callable[..., Any], name: str, inside: tuple[str, ...]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if inside and not (self._open and self._open[-1][0] in inside):
                return function(*args, **kwargs)
            with self.part(name):
                return function(*args, **kwargs)

        return timed
