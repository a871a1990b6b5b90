"""Configurations of SFT and DPO on tiny models."""

from __future__ import annotations

from pathlib import Path

from tinyllm.config.io import make_config
from tinyllm.config.sections import DPOConfig, SFTConfig


def sft_config(model: Path, rows: Path, out: Path | None = None, base=None, **options):
    plain = {
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"file": str(rows), "prompt_rule": "raw", "held_out": 0.25},
        "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0.0, "schedule": "constant"},
        "train": {"steps": 3, "batch_size": 4},
        "eval": {"every": 0},
        "run": {"dir": None if out is None else str(out), "threads": 1},
    }
    for name, value in options.items():
        plain[name] = {**plain.get(name, {}), **value} if isinstance(value, dict) else value
    return make_config(base or SFTConfig(), **plain)


def dpo_config(model: Path, rows: Path, out: Path | None = None, **options):
    return sft_config(model, rows, out, DPOConfig(), **options)
