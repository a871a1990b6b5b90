"""Made-up runs with everything that a report shows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny
from browser import chromium
from run_samples import RunDir, manifest

from tinyllm.config.io import to_dict
from tinyllm.config.sections import CONFIGS, GRPOConfig, ModelConfig, SamplingConfig
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Step, Verdict
from tinyllm.view.html import write_html

ATTACK = "</script><img src=x onerror=document.title='owned'><!--<script>"
STEPS, PROMPTS, SIZE = 12, 4, 4


def sampler_logprob(step: int, group: int, sample: int, t: int) -> float:
    """Some fp32 number, another for each token."""
    return float(np.float32(-0.01 - 0.37 * t - 0.05 * sample - 0.003 * group - step / 77))


def trainer_logprob(step: int, group: int, sample: int, t: int) -> float:
    """The trainer's: equal to the sampler's but for the second token, whose ratio is 1.5 or 1 / 1.5."""
    shift = math.log(1.5) * (-1 if sample else 1) if t == 1 else 0.0
    return float(np.float32(sampler_logprob(step, group, sample, t) + shift))


def make_group(step: int, number: int, shift: float = 0.0) -> Group:
    prompt = Prompt(f"row-{number}", (5, 6), f"{number}+{number}= {ATTACK if number == 0 else ''}", {"answer": "2"})
    rollouts = []
    for sample in range(SIZE):
        ids = tuple([2 + sample, 3, 4, 5 + step % 3, 0][: 3 + sample % 3])
        text = ATTACK if (step, number, sample) == (1, 0, 0) else f"answer {sample} of step {step}"
        completion = Completion(
            prompt.id, 0, sample, ids, tuple(sampler_logprob(step, number, sample, t) for t in range(len(ids))),
            "length" if sample == 2 else "stop", 2**63 + sample, Revision(step - 1, "ab" * 16), text,
        )  # fmt: skip
        verdict = Verdict(None, "timed out") if (step, number, sample) == (3, 1, 1) else Verdict(
            min(1.0, shift + float(sample == 0 and number != 3)), None, str(sample), (("correct", 1.0), ("format", 0.5))
        )  # fmt: skip
        rollouts.append(Rollout(completion, verdict))
    return Group(prompt, tuple(rollouts))


def manifest_of(kind: str) -> dict:
    """The manifest of a run of this kind, with its own options."""
    return manifest() | {"kind": kind, "config": to_dict(CONFIGS[kind]())}


def make_run(
    path: Path, *, shift: float = 0.0, model: str = "nowhere", kind: str = "grpo", steps: int = STEPS
) -> RunDir:
    """A finished run of a few prompts, with all that training would write."""
    about = manifest(GRPOConfig(model=ModelConfig(name=model), sampling=SamplingConfig(group_size=SIZE))) | {
        "kind": kind
    }
    with RunDir.create(path, about) as run:
        run.log({"step": 0, "kind": "eval", "correct": 23, "prompts": 162, "kl": 0.0, "reward_mean": 0.14})
        for step in range(1, steps + 1):
            groups = [make_group(step, number, shift) for number in range(PROMPTS)]
            run.record(Step(step, groups))
            rows = [(g, r) for g in groups for r in g.rollouts]
            names = [(g.id, r.completion.sample) for g, r in rows]
            advantages = [0.0 if g.id == "row-3#0" else 1.5 if r.completion.sample == 0 else -0.5 for g, r in rows]
            logprobs = {
                i: [trainer_logprob(step, i // SIZE, r.completion.sample, t) for t in range(len(r.completion.token_ids))]
                for i, (g, r) in enumerate(rows) if advantages[i]
            }  # fmt: skip
            run.write_derived(step, names, advantages, logprobs)
            rewards = [r.verdict.value for _, r in rows if r.verdict.value is not None]
            run.log({
                "step": step, "loss": 0.1 / step, "reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards)),
                "reward_parts": {"correct": 1.0, "format": 0.5}, "accuracy": 0.25, "kl": None, "clip_fraction_high": 0.1,
                "clip_fraction_low": 0.05, "ratio_max": 1.5 if step != 7 else 42.0, "ratio_mean": 1.0, "entropy": 1.5,
                "completion_length": 4.0, "groups_drawn": PROMPTS, "truncated": 0.25, "zero_advantage": 0.25 if step < 8 else 0.95,
                "unscored": int(step == 3), "unscored_reasons": {"timed out": 1} if step == 3 else {},
                "grad_norm": 0.5, "lr": 1e-5, "tokens": 45, "sampler_equal": 0.8, "sampler_gap": 0.05, "sampler_gap_max": 0.4,
                "non_finite": None, "surprise": step**2, "hashes": {"weights": "00"}, "revision": f"{step}:ab",
            })  # fmt: skip
            run.log_timing({"step": step, "step_s": 2.0, "sample_s": 1.2, "update_s": 0.7, "sampled_tokens": 60})
        run.log({"step": steps, "kind": "eval", "correct": 130, "prompts": 162, "kl": 0.2, "reward_mean": 0.8})
    return RunDir.read(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    """A run whose folder has the tokenizer of tiny.py."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    tiny.tokenizer().save_pretrained(run.path / "model")
    return run


@pytest.fixture(scope="module")
def page_file(run) -> Path:
    return write_html(run.path / "report.html", [run])


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running
