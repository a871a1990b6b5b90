"""The losses of SFT and DPO against TRL's, on the same token ids of the same model: equal to 1e-5.

tinyllm's value is that of its updater on packed rows; TRL's is its trainer's compute_loss on a padded batch, in fp32.
The policy of DPO is moved away from its reference first, so that no log-ratio is 0.

    python benchmarks/losses.py --out results.json
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from common import command, finish, parser, start, table
from trl_side import require_trl

from tinyllm.config.io import make_config
from tinyllm.config.sections import DPOConfig, SFTConfig
from tinyllm.engine.policy import Policy
from tinyllm.errors import TinyLLMError
from tinyllm.model import models
from tinyllm.post.optimizer import Optimizer
from tinyllm.post.update import Updater, model_scorer
from tinyllm.records import Group
from tinyllm.tasks.examples import load_examples

TOLERANCE = 1e-5
ROWS = [
    ("What is 12 + 7?", "12 + 7 = 19.", "It is 20, I think, or perhaps 18."),
    ("Name a colour.", "Blue.", "A colour is what the eye sees of light, and there are many of them."),
    ("Say hello in French.", "Bonjour!", "Hello."),
    ("What is the capital of Italy?", "Rome is the capital of Italy.", "Paris."),
]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", default="smollm2-135m-instruct", help="default: the bundled one")
    arguments = options.parse_args()
    result = start(arguments) | {"trl": require_trl(), "rows": []}
    warnings.filterwarnings("ignore")
    tokenizer = models.load_tokenizer(arguments.model)
    start_model = models.load_model(arguments.model, "float32", "cpu")
    moved = moved_copy(start_model)
    with tempfile.TemporaryDirectory() as folder:
        groups = {kind: rows_of(kind, arguments.model, tokenizer, Path(folder)) for kind in ("sft", "dpo")}
        sft, dpo = groups["sft"], groups["dpo"]
        theirs = trl_sft(start_model, tokenizer, sft, folder)
        pairs = [("sft, mean over tokens", our_sft(start_model, sft), theirs)]
        for name, loss_type in (("sigmoid", "sigmoid"), ("length-normalised", "sigmoid_norm")):
            ours = our_dpo(moved, start_model, dpo, name == "length-normalised")
            theirs = trl_dpo(moved, start_model, tokenizer, dpo, loss_type, folder)
            pairs.append((f"dpo, {name}, beta 0.1", ours, theirs))
    for name, ours, theirs in pairs:
        result["rows"].append({"loss": name, "tinyllm": ours, "trl": theirs, "difference": abs(ours - theirs)})
    rows = [(r["loss"], f"{r['tinyllm']:.7f}", f"{r['trl']:.7f}", f"{r['difference']:.1e}") for r in result["rows"]]
    table("losses", ("loss", "tinyllm", "TRL", "difference"), rows)
    finish(arguments, result)
    if wrong := [r["loss"] for r in result["rows"] if r["difference"] > TOLERANCE]:
        raise TinyLLMError(f"more than {TOLERANCE} apart: {', '.join(wrong)}")


def rows_of(kind: str, model: str, tokenizer: Any, folder: Path) -> list[Group]:
    """ROWS as groups of token ids."""
    names = ("prompt", "completion") if kind == "sft" else ("prompt", "chosen", "rejected")
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=False))) + "\n" for row in ROWS))
    base = SFTConfig() if kind == "sft" else DPOConfig()
    data = load_examples(make_config(base, model=model, data={"file": str(file), "held_out": 0.0}), tokenizer)
    return data.of(data.train)


def moved_copy(model: Any) -> Any:
    """The model with every weight a little elsewhere."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * p.std() * 0.02)
    return other


def our_sft(model: Any, groups: list[Group]) -> float:
    return our_loss(model, make_config(SFTConfig(), train={"tokens_per_microbatch": 64}), groups, None)


def our_dpo(model: Any, reference: Any, groups: list[Group], normalized: bool) -> float:
    objective = {"beta": 0.1, "length_normalized": normalized}
    config = make_config(DPOConfig(), objective=objective, train={"tokens_per_microbatch": 128})
    return our_loss(model, config, groups, model_scorer(Policy(copy.deepcopy(reference)), 1.0, 256))


def our_loss(model: Any, config: Any, groups: list[Group], reference: Any) -> float:
    policy = Policy(copy.deepcopy(model))
    updater = Updater(policy, Optimizer(policy.model.named_parameters(), config.optimizer), config, reference)
    loss = updater(updater.objective.batch(groups), 0.0).loss
    assert loss is not None
    return loss


def trl_sft(model: Any, tokenizer: Any, groups: list[Group], folder: str) -> float:
    from datasets import Dataset
    from trl import SFTConfig as TRLConfig
    from trl import SFTTrainer

    rows = []
    for group in groups:
        prompt, completion = group.prompt.token_ids, group.rollouts[0].completion.token_ids
        mask = [0] * len(prompt) + [1] * len(completion)
        rows.append({"input_ids": [*prompt, *completion], "completion_mask": mask})
    arguments = TRLConfig(
        output_dir=folder, completion_only_loss=True, per_device_train_batch_size=len(rows), **plain()
    )
    trainer = SFTTrainer(
        model=copy.deepcopy(model), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    return value(trainer, list(trainer.train_dataset))


def trl_dpo(model: Any, reference: Any, tokenizer: Any, groups: list[Group], loss_type: str, folder: str) -> float:
    from datasets import Dataset
    from trl import DPOConfig as TRLConfig
    from trl import DPOTrainer

    text = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ROWS]
    rows = [
        {
            "prompt_ids": list(g.prompt.token_ids),
            "chosen_ids": list(g.rollouts[0].completion.token_ids),
            "rejected_ids": list(g.rollouts[1].completion.token_ids),
        }
        for g in groups
    ]
    arguments = TRLConfig(
        output_dir=folder, beta=0.1, loss_type=loss_type, per_device_train_batch_size=len(rows), **plain()
    )
    trainer = DPOTrainer(
        model=copy.deepcopy(model),
        ref_model=copy.deepcopy(reference),
        args=arguments,
        train_dataset=Dataset.from_list(text),
        processing_class=tokenizer,
    )
    return value(trainer, rows)


def plain() -> dict[str, Any]:
    """What both trainers need for fp32 on the CPU."""
    return {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False, "disable_tqdm": True}


def value(trainer: Any, rows: list[dict[str, Any]]) -> float:
    """The trainer's loss on these rows, in evaluation mode (no dropout)."""
    batch = trainer.data_collator(rows)
    for module in (trainer.model, getattr(trainer, "ref_model", None)):
        if module is not None:
            module.set_attn_implementation("eager")
            module.eval()
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, batch))


if __name__ == "__main__":
    command(main)
