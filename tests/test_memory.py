"""Threads that compute for a moment leave no OpenMP workers behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm.model.memory import in_brief_thread

PROGRAM = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from tinyllm.model.memory import in_brief_thread

torch.set_num_threads(3)
x = torch.ones(1_000_000)

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
assert in_brief_thread(lambda: (x + x)[7].item()) == 2.0
for _ in range(200):  # a thread that was waited for may be listed a moment longer
    if (brief := threads() - before) == 0:
        break
    time.sleep(0.05)
lasting = ThreadPoolExecutor(1)
lasting.submit(lambda: x + x).result()
print(brief, threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_its_workers_end_with_a_brief_thread():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    brief, lasting = map(int, done.stdout.split())
    assert lasting == 3, "a thread that lives on keeps its two workers: what the function is there for"
    assert brief == 0


def test_what_the_function_raises_is_raised():
    with pytest.raises(ValueError, match="of the function"):
        in_brief_thread(lambda: int("of the function"))
