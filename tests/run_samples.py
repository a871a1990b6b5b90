"""Made-up runs for the tests of the run directory and what reads it."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import torch

from tinyllm.config.io import to_dict
from tinyllm.config.sections import GRPOConfig, RunConfig, TrainConfig
from tinyllm.errors import RunError
from tinyllm.record.manifest import build_manifest
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Verdict

__all__ = [
    "CONFIG",
    "GRPOConfig",
    "RunConfig",
    "RunDir",
    "RunError",
    "assert_tensors_equal",
    "child",
    "make_groups",
    "make_tensors",
    "manifest",
    "os",
    "signal",
    "sys",
]

CONFIG = GRPOConfig(train=TrainConfig(steps=40), run=RunConfig(keep_checkpoints=2))


def manifest(config: GRPOConfig = CONFIG) -> dict:
    return build_manifest(to_dict(config), hashes={"weights": "ab" * 16}, probe={"rows": True})


def make_groups(step: int = 1, prompts: int = 2, size: int = 3) -> list[Group]:
    groups = []
    for p in range(prompts):
        prompt = Prompt(f"row-{p}", (1, 2, 3 + p), f"<s>{p} + 1", {"answer": str(p + 1), "n": [1, 2.5, None]}, draw=p)
        rollouts = []
        for s in range(size):
            logprobs = tuple(-math.exp(k - 3 * s + step / 7) for k in range(4))
            completion = Completion(
                prompt.id,
                prompt.draw,
                s,
                (5, 6, 7, s),
                logprobs,
                ("stop", "length", "error")[s % 3],
                2**64 - 1 - s,
                Revision(step - 1, "cd" * 16),
                f"it is {s}\n",
                "out of memory" if s % 3 == 2 else None,
            )
            verdict = Verdict(None, "timed out") if s == 1 else Verdict(0.1 * s, None, str(s), (("correct", 0.1 * s),))
            rollouts.append(Rollout(completion, verdict))
        groups.append(Group(prompt, tuple(rollouts)))
    return groups


def make_tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(30, 40, generator=generator)
    return {
        "weights": {"embed": weight.bfloat16(), "scale": torch.tensor(1.5), "empty": torch.zeros(0, 4)},
        "optimizer": {"m": weight, "t": torch.tensor(step), "view": weight.t(), "state": torch.arange(7).byte()},
    }


def assert_tensors_equal(found, expected):
    assert found.keys() == expected.keys()
    for group in expected:
        assert found[group].keys() == expected[group].keys()
        for name, tensor in expected[group].items():
            assert found[group][name].dtype == tensor.dtype
            assert torch.equal(found[group][name], tensor), (group, name)


def child(script: str, *args: object) -> subprocess.Popen:
    """A Python process that runs a script with this file's helpers in reach; its output is line-buffered text."""
    head = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom run_samples import *\nfrom tinyllm.records import Step\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def output(process: subprocess.Popen) -> str:
    """What a process printed, once it ended well."""
    with process:
        out, _ = process.communicate()
    assert process.returncode == 0
    return out
