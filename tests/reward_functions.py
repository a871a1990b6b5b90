"""Reward functions for the pool tests: they hang, die, fill memory, count."""

from __future__ import annotations

import os
import time

CALLS = []


def hang_on_text(completions, **_):
    for text in completions:
        if text == "loop":
            while True:
                pass
        if text == "sleep":
            time.sleep(600)
        if text == "quit":
            os._exit(3)
    return [float(len(text)) for text in completions]


def fill_memory(completions, **_):
    return [float(len(bytearray(1 << 40))) for _ in completions]


def count_calls(completions, log_metric, log_extra, **_):
    CALLS.append(len(completions))
    log_metric("calls", len(CALLS))
    log_extra("pid", [os.getpid()] * len(completions))
    print("printed text is not a result")
    return [0.1] * len(completions)


def wrong_count(completions, **_):
    return [1.0]


def child(completions, **_):
    import subprocess

    subprocess.Popen(["sleep", "600"])
    while True:
        pass


def log_length(completions, log_extra, log_metric):
    log_extra("length", [len(text) for text in completions])
    log_metric("calls", 1)
    return [1.0] * len(completions)
