"""What training on several ranks changes in the numbers: the same steps in one process and on two (torchrun, FSDP2).

Each setting (SGD in fp32, AdamW in fp32, AdamW in bf16) does the same GRPO steps twice, on completions drawn at random
beforehand, of uneven lengths: once alone, once on the ranks. Printed are the largest differences: of loss and gradient
norm over all steps, relative to the largest loss and norm, and of the weights after the last, relative to the largest
of their tensor. Sums over ranks are taken in another order, so last bits differ; AdamW divides by them and bf16 rounds.

    python benchmarks/ranks.py --out results.json
    python benchmarks/ranks.py --model smollm2-135m-instruct --steps 5
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import command, finish, parser, start, table
from transformers import LlamaConfig, LlamaForCausalLM

from tinyllm.config.io import make_config
from tinyllm.distributed.fsdp import shard
from tinyllm.distributed.ranks import SOLO, Ranks, current_ranks
from tinyllm.engine.head import score
from tinyllm.engine.policy import Policy
from tinyllm.errors import ConfigError
from tinyllm.model import models
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Updater
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, Verdict

SETTINGS = (("sgd", "float32", 1.0), ("adamw", "float32", 1e-5), ("adamw", "bfloat16", 1e-5))


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", help="bundled model, folder or hub id (default: a random Llama of 2 layers)")
    options.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    options.add_argument("--steps", type=int, default=10, help="(default: %(default)s)")
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        runs = [train(current_ranks(), arguments, *setting) for setting in SETTINGS]
        if current_ranks().is_main:
            torch.save(runs, arguments.child)
        return
    if arguments.ranks < 2 or arguments.steps < 1:
        raise ConfigError(f"--ranks {arguments.ranks} --steps {arguments.steps}: give at least 2 ranks and 1 step")
    result = start(arguments)
    alone = [train(SOLO, arguments, *setting) for setting in SETTINGS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ranks.pt"
        words = ["--child", str(file), "--steps", str(arguments.steps)]
        words += ["--model", arguments.model] if arguments.model else []
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
        subprocess.run([*line, __file__, *words], check=True)
        several = torch.load(file, weights_only=True)
    found = [differences(*pair) for pair in zip(alone, several, strict=True)]
    rows = [
        (f"{name} {dtype}", *(f"{x:.1e}" for x in difference.values()))
        for (name, dtype, _), difference in zip(SETTINGS, found, strict=True)
    ]
    title = f"{arguments.steps} steps on {arguments.ranks} ranks against one process, largest differences"
    table(title, ("", *found[0]), rows)
    finish(arguments, result | {"settings": SETTINGS, "differences": found})


def train(ranks: Ranks, arguments: argparse.Namespace, name: str, dtype: str, lr: float) -> dict[str, Any]:
    """Some steps of GRPO; losses, gradient norms and the final weights."""
    model = load(arguments.model, dtype)
    config = make_config(
        optimizer={"name": name, "lr": lr, "clip_norm": 0.0 if name == "sgd" else 1.0},
        objective={"preset": "dr_grpo"},
        train={"tokens_per_microbatch": 256},
    )
    policy = Policy(model)
    sharded = shard(policy, score, ranks) if ranks.count > 1 else None
    trained = model if sharded is None else sharded.model
    optimizer = Optimizer(trained.named_parameters(), config.optimizer, ranks)
    updater = Updater(policy, optimizer, config, None, sharded, ranks)
    results = [
        updater(updater.objective.batch(drawn(step, policy.vocab_size)), lr) for step in range(1, arguments.steps + 1)
    ]
    if sharded is not None:
        sharded.copy_to(model)
    return {
        "loss": [r.loss for r in results],
        "gradient norm": [r.grad_norm for r in results],
        "weights": {n: p.detach().float().cpu() for n, p in model.named_parameters()},
    }


def load(name: str | None, dtype: str) -> Any:
    if name:
        return models.load_model(name, dtype, "cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(models.pick_dtype(dtype)).eval()


def drawn(step: int, vocabulary: int) -> list[Group]:
    """Eight groups of four completions of 1 to 24 tokens, the same in every process."""
    dice = random.Random(step)
    groups = []
    for number in range(8):
        prompt = Prompt(f"p{number}", tuple(dice.randrange(vocabulary) for _ in range(dice.randint(4, 30))), "")
        rollouts = []
        for sample in range(4):
            ids = tuple(dice.randrange(vocabulary) for _ in range(dice.randint(1, 24)))
            completion = Completion(
                prompt.id, 0, sample, ids, (-1.0,) * len(ids), "stop", sample, Revision(step - 1, ""), ""
            )
            rollouts.append(Rollout(completion, Verdict(float(dice.random() < 0.4))))
        groups.append(Group(prompt, tuple(rollouts)))
    return groups


def differences(alone: dict[str, Any], several: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of each number."""
    found = {
        key: max(abs(a - b) for a, b in zip(alone[key], several[key], strict=True)) / max(map(abs, alone[key]))
        for key in ("loss", "gradient norm")
    }
    pairs = [(weight, several["weights"][name]) for name, weight in alone["weights"].items()]
    return found | {"weights": max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)}


if __name__ == "__main__":
    command(main)
