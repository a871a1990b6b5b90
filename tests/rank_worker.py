"""What test_ranks.py runs on several ranks, and in one process to compare: updates, and whole commands.

torchrun --nproc-per-node 2 tests/rank_worker.py updates OUT
torchrun --nproc-per-node 2 tests/rank_worker.py commands FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import EOS, gpt2, group, llama

from tinyllm.axes import PRESETS
from tinyllm.config.io import make_config
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.distributed.fsdp import local, shard
from tinyllm.distributed.ranks import Ranks, current_ranks
from tinyllm.engine.head import pack_targets, score
from tinyllm.engine.policy import Policy
from tinyllm.errors import TinyLLMError
from tinyllm.model.models import add_lora
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Updater, model_scorer
from tinyllm.record.files import read_shards, write_shards

LENGTHS = [[(2, 3, EOS), (2, EOS), (4, 5, 6, 7, EOS), (2, 3, EOS)], [(8, 9), (EOS,), (2, EOS), (7, 7, 7)]]
GROUPS = [
    group("a", [1, 0, 0, 1], ids=LENGTHS[0]),
    group("b", [0.2, 0.9, None, 0.4], ids=LENGTHS[1], prompt_ids=(9,)),
    group("c", [1, 1, 1, 1], prompt_ids=(5, 6, 8)),
    group("d", [0, 0, 1, 0], ids=[(9,) * n for n in (1, 8, 3, 5)], prompt_ids=(5, 6, 8, 4, 3)),
]
PAIRS = [group(f"p{i}", [1, 0], ids=[(3,) * (i + 1), (4 + i, EOS)], prompt_ids=(5 + i, 6)) for i in range(5)]
SGD = {"name": "sgd", "lr": 1.0, "clip_norm": 0.0}


def cases() -> Iterator[tuple[str, Any, Any, list[Any], float]]:
    """(name, model, configuration, groups, learning rate)"""

    def grpo(model: Any = None, lr: float = 1.0, **more: Any) -> tuple[Any, Any, list[Any], float]:
        plain: dict[str, dict[str, Any]] = {"sampling": {"max_new_tokens": 8}, "optimizer": SGD}
        plain["train"] = {"dynamic_sampling": False, "overlong": 0.0, "tokens_per_microbatch": 11}
        for name, value in more.items():
            plain[name] = {**plain.get(name, {}), **value}
        return llama() if model is None else model, make_config(**plain), GROUPS, lr

    def given(config: Any, groups: list[Any]) -> tuple[Any, Any, list[Any], float]:
        options = {"optimizer": SGD, "train": {"steps": 1, "tokens_per_microbatch": 12}}
        return llama(tie_word_embeddings=True), make_config(config, **options), groups, 1.0

    for preset in PRESETS:
        yield preset, *grpo(objective={"preset": preset})
    yield "kl", *grpo(objective={"beta": 0.3})
    yield "updates", *grpo(train={"updates_per_batch": 3}, objective={"clip_low": 0.05, "clip_high": 0.05}, lr=0.05)
    yield "clipped", *grpo(optimizer={"clip_norm": 0.05})
    yield "one pass", *grpo(train={"tokens_per_microbatch": 4096})
    yield "gpt2", *grpo(model=gpt2(vocab_size=45))
    yield "checkpointing", *grpo(model=_checkpointed(llama()))
    yield "lora", *grpo(model=add_lora(llama(), 2))
    yield "sft", *given(SFTConfig(), GROUPS[:2])
    yield "dpo", *given(DPOConfig(), PAIRS)
    yield "adamw", *grpo(optimizer={"name": "adamw", "clip_norm": 1.0}, lr=0.01)
    yield "bf16", *grpo(model=llama(dtype=torch.bfloat16), optimizer={"name": "adamw"}, lr=0.01)


def _checkpointed(model: Any) -> Any:
    from tinyllm.post.learner import checkpoint_layers

    checkpoint_layers(Policy(model))
    return model


def one_update(ranks: Ranks, model: Any, config: Any, groups: list[Any], lr: float) -> dict[str, Any]:
    policy = Policy(model)
    reference = model_scorer(Policy(llama(1)), 1.0, 4096)
    sharded = shard(policy, score, ranks) if ranks.count > 1 else None
    trained = model if sharded is None else sharded.model
    optimizer = Optimizer(trained.named_parameters(), config.optimizer, ranks)
    updater = Updater(policy, optimizer, config, reference, sharded, ranks)
    batch = updater.objective.batch(groups)
    result = updater(batch, lr)
    if sharded is not None:
        sharded.copy_to(model)
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "entropy": result.entropy,
        "updates": result.updates,
        "logprobs": result.hashes["logprobs"],
        "stats": {name: getattr(result.stats, name) for name in result.stats.__dataclass_fields__},
        "weights": {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad},
        "passes": len(batch.microbatches),
    }


def updates(ranks: Ranks) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: one_update(ranks, *rest) for name, *rest in cases()}


def records_pass(ranks: Ranks) -> None:
    """gather, lead and share, with failures that all ranks learn of."""
    assert ranks.gather(ranks.rank * 10) == [10 * r for r in range(ranks.count)]
    assert ranks.on_main(lambda: ranks.rank + 7) == 7
    seen: list[int] = []

    def square(items: Any) -> list[int]:
        seen.extend(items)
        return [x * x for x in items]

    assert ranks.share(range(5), square) == [0, 1, 4, 9, 16] and seen == list(range(5))[ranks.rank :: ranks.count]
    assert ranks.share([3], square) == [9] and ranks.share([], square) == []

    def fails(items: Any) -> list[int]:
        if 1 in items:
            raise TinyLLMError(f"item 1 on rank {ranks.rank}")
        return list(items)

    for work in (lambda: ranks.share(range(4), fails), lambda: ranks.on_main(lambda: fails([1, ranks.rank]))):
        try:
            work()
        except TinyLLMError as error:
            assert str(error) in ("item 1 on rank 1", "item 1 on rank 0"), error
        else:
            raise AssertionError(f"rank {ranks.rank} did not learn of the failure")


def gradients_are_summed(ranks: Ranks) -> None:
    """Rank r has the loss (r + 1) sum logp: the gradient is 1 + 2 + ... times that of one, not their mean."""
    policy = Policy(llama())
    targets = pack_targets([((5, 6, 7), (2, 3, 4, EOS))], "cpu")
    score(policy, targets)[0].sum().backward()
    sharded = shard(policy, score, ranks)
    (sharded(targets, 1.0)[0].sum() * (ranks.rank + 1)).backward()
    times = ranks.count * (ranks.count + 1) / 2
    for name, p in sharded.model.named_parameters():
        one = policy.model.get_parameter(name).grad
        torch.testing.assert_close(p.grad.full_tensor(), times * one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


def shards_are_saved(ranks: Ranks, folder: Path) -> None:
    """What is written from shards is read as whole tensors, one of them smaller than the number of ranks."""
    policy = Policy(gpt2(vocab_size=45))
    policy.model.register_parameter("lone", torch.nn.Parameter(torch.tensor([3.5])))
    sharded = shard(policy, score, ranks)
    optimizer = Optimizer(sharded.model.named_parameters(), make_config().optimizer, ranks)
    for p in optimizer.parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step(0.1, optimizer.gradient_norm())
    ranks.on_main(lambda: folder.mkdir())
    write_shards(folder, optimizer.tensors())
    ranks.gather(None)
    saved = read_shards(folder)
    assert saved.keys() == {"weights", "optimizer"} and saved["weights"].keys() == optimizer.parameters.keys()
    for name, tensors in optimizer.tensors().items():
        for key, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(saved[name][key].reshape(whole.shape), whole), key
    before = [local(p).clone() for p in optimizer.parameters.values()]
    optimizer.step(0.1, optimizer.gradient_norm())
    assert not all(torch.equal(local(p), was) for p, was in zip(optimizer.parameters.values(), before, strict=True))
    optimizer.load(saved)
    assert all(torch.equal(local(p), was) for p, was in zip(optimizer.parameters.values(), before, strict=True))


def commands(ranks: Ranks, file: Path) -> None:
    """Each command line of a file, one after the other; the exit codes of this rank go beside it."""
    from tinyllm.commands.cli import main

    codes = [main(words) for words in json.loads(file.read_text())]
    file.with_suffix(f".{ranks.rank}").write_text(json.dumps(codes))


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "commands":
        commands(current_ranks(), path)
    else:
        records_pass(current_ranks())
        gradients_are_summed(current_ranks())
        shards_are_saved(current_ranks(), path.with_suffix(".shards"))
        found = updates(current_ranks())
        if current_ranks().is_main:
            torch.save(found, path)
