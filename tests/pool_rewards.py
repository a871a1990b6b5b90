"""Reward functions for the tests of pools, importable where Ray's workers run: they log, hang once, take their time."""

from __future__ import annotations

import os
import time
from pathlib import Path


def share(completions, **_):
    """The share of digits in a completion, so that most groups have members that differ."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def logging_share(completions, log_extra, log_metric, **_):
    log_extra("letters", [len(text) for text in completions])
    log_metric("ones", 1.0)
    return share(completions)


def odd_share(prompts, completions, **_):
    """The same for about half of the prompts; the others have nothing to learn from."""
    return [v if p[0] in "13579" else 0.0 for p, v in zip(prompts, share(completions), strict=True)]


class HangsOnce:
    """Sleeps for ever the first time that a process beside the trainer's calls it: the one that makes the file."""

    def __init__(self, mark):
        self.mark, self.trainer = str(mark), os.getpid()
        self.__name__ = "hangs_once"

    def __call__(self, completions, **_):
        if os.getpid() == self.trainer:
            return share(completions)
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return share(completions)
        while True:
            time.sleep(60)


class SleepsForLong:
    """Hangs on groups with a completion of at least so many characters, in a process beside the trainer's."""

    def __init__(self, length):
        self.length, self.trainer = length, os.getpid()
        self.__name__ = "sleeps_for_long"

    def __call__(self, completions, **_):
        while os.getpid() != self.trainer and max(map(len, completions)) >= self.length:
            time.sleep(60)
        return share(completions)


def wait_for(path, seconds=300.0):
    """Until a file is there."""
    end = time.monotonic() + seconds
    while not Path(path).exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)
