"""Tiny random models and tokenizers, made on the fly, and records by hand: what the tests of batch, trainer and resume share.

The vocabulary is 40 single characters after three special tokens; pad and end of text are the same token on purpose.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from light_rewards import many_digits
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tinyllm.callbacks import RunResult
from tinyllm.config.io import make_config
from tinyllm.config.sections import GRPOConfig
from tinyllm.engine.policy import Policy
from tinyllm.record.rundir import RunDir
from tinyllm.records import Completion, Group, Prompt, Revision, Rollout, SamplingParams, Verdict

EOS = 0
STOPS = (16, 17, 18, 19)
CHARACTERS = "0123456789+-=x ?.Wabcdefghijklmnoprstuy"
VOCABULARY = 44


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; pad token = end-of-text token; no chat template."""
    words = ["<eos>", "<unk>", *CHARACTERS]
    base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    base.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")


def llama(
    seed: int = 0, *, spread: float = 0.25, dtype: torch.dtype = torch.float32, **changes: Any
) -> LlamaForCausalLM:
    """2 layers, hidden 32, grouped heads. `spread` scales the weights: at 0.25 the distribution is far from uniform."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    special = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": EOS, "tie_word_embeddings": False}
    config = LlamaConfig(**{**sizes, **heads, **special, "initializer_range": spread, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()


def gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """Biases, learned positions, tied head; dropout 0.3 in its configuration, which training must not switch on."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    dropout = {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    special = {"bos_token_id": None, "eos_token_id": EOS, "initializer_range": 0.25}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropout, **special, **changes})).eval()


def save(model: PreTrainedModel, path: Path) -> Path:
    """The model with its tokenizer as a folder; a few more tokens end a completion, so that lengths differ."""
    model.generation_config.eos_token_id = [EOS, *STOPS]
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def write_rows(path: Path, count: int = 12) -> Path:
    """Raw-text sums, one row each; no two prompts are equal."""
    rows = [{"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def digits_in_odd_steps(completions: Sequence[str], trainer_state: Any, **_: Any) -> list[float]:
    """many_digits in every other step; the others have nothing to learn from."""
    return many_digits(completions) if trainer_state.global_step % 2 else [0.0] * len(completions)


def only_in_steps(*steps: int) -> Callable[..., list[float]]:
    """many_digits in the given steps; the others have nothing to learn from."""

    def reward(completions: Sequence[str], trainer_state: Any, **_: Any) -> list[float]:
        return many_digits(completions) if trainer_state.global_step in steps else [0.0] * len(completions)

    return reward


def digits_after_odd_numbers(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """many_digits for about half of the prompts; the others have nothing to learn from."""
    return [v if p[0] in "13579" else 0.0 for p, v in zip(prompts, many_digits(completions), strict=True)]


def config(model: Path, rows: Path, out: Path, /, **options: Any) -> GRPOConfig:
    """A run of a tiny model on `rows`: plain SGD without clipping, 4 prompts a step, 4 completions of up to 6 tokens."""
    plain = {
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"file": str(rows), "prompt_rule": "raw", "held_out": 0.25},
        "sampling": {"group_size": 4, "max_new_tokens": 6},
        "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0.0, "schedule": "constant"},
        "train": {"steps": 3, "prompts_per_step": 4},
        "eval": {"every": 0},
        "run": {"dir": str(out), "threads": 1},
    }
    for name, value in options.items():
        plain[name] = {**plain.get(name, {}), **value} if isinstance(value, dict) else value
    return make_config(**plain)


# Records by hand


def completion(prompt_id: str, sample: int, ids: Sequence[int], reason: str = "stop", draw: int = 0) -> Completion:
    logprobs = tuple(-1.5 - 0.1 * i for i in range(len(ids)))
    text = tokenizer().decode(list(ids), skip_special_tokens=True)
    return Completion(prompt_id, draw, sample, tuple(ids), logprobs, reason, sample, Revision(0, "0"), text)  # type: ignore[arg-type]


def group(
    name: str,
    rewards: Sequence[float | None],
    ids: Sequence[Sequence[int]] | None = None,
    reasons: Sequence[str] | None = None,
    prompt_ids: Sequence[int] = (5, 6, 7),
) -> Group:
    """One prompt's rollouts; a reward of None is unscored. Completions are (sample + 2, end) unless given."""
    ids = [(2 + i, EOS) for i in range(len(rewards))] if ids is None else ids
    reasons = ["stop"] * len(rewards) if reasons is None else reasons
    prompt = Prompt(name, tuple(prompt_ids), "".join(map(str, prompt_ids)))
    rollouts = [
        Rollout(
            completion(name, i, ids[i], reasons[i]), Verdict(None, "unscored on purpose") if r is None else Verdict(r)
        )
        for i, r in enumerate(rewards)
    ]
    return Group(prompt, tuple(rollouts))


# Numbers by hand


def dense_logprobs(policy: Policy, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """A teacher-forced pass with transformers' own eager attention: log p of each completion token. Differentiable."""
    causal = policy.causal
    causal.set_attn_implementation("eager")
    try:
        whole = torch.tensor([[*prompt, *ids]])
        logits = causal(input_ids=whole, use_cache=False).logits[0].float() / temperature
    finally:
        causal.set_attn_implementation("tinyllm")
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows[torch.arange(len(ids)), torch.tensor(list(ids))]


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 6, "n": 4, "stop_token_ids": (EOS,), **changes})


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved model folder."""
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """The same names, the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of one kind; NaN and infinity, which JSON does not have, are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {run}/metrics.jsonl")

    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    return [row for row in rows if row.get("kind", "train") == kind]


def rollouts(run: Path) -> dict[str, bytes]:
    """The files of the record."""
    return {path.name: path.read_bytes() for path in sorted((run / "rollouts").iterdir())}


def groups_of(result: RunResult, step: int) -> list[Group]:
    return RunDir.read(result.run_dir).read_groups(step)


class ScriptedEngine:
    """An engine that returns given token ids: what_ids(prompt, sample, params) -> ids. It logs what it was asked for."""

    def __init__(self, what_ids: Any) -> None:
        self.what_ids = what_ids
        self.asked: list[list[Prompt]] = []
        self.revisions: list[Revision] = []

    def publish(self, revision: Revision) -> None:
        self.revisions.append(revision)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        self.asked.append(list(prompts))
        return [completion(p.id, s, self.what_ids(p, s, params), draw=p.draw) for p in prompts for s in range(params.n)]
