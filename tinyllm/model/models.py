"""Causal language models and their tokenizers: found, checked, loaded, prompted, saved.

Models are transformers' own classes. Before weights are read, a model is refused, with the reason, for pickled weights,
for code in its folder and for quantized weights; after, for missing weights, which would be random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from tinyllm.errors import ConfigError, DataError, ModelError, closest, require_extra
from tinyllm.model.bundled import BUNDLED, bundled_model, quiet_transformers
from tinyllm.model.memory import memory_estimate, native_bf16, require_memory
from tinyllm.record.files import new_folder
from tinyllm.record.hashing import hash_bytes, hash_json, hash_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Message = Mapping[str, Any]
LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, AttributeError)
"""What transformers raises for damaged or unsuitable folders."""


# Where a model is and what it runs on


def resolve(name: str) -> Path | str:
    """Where a model is: a bundled one (fetched if need be), an existing folder, else a hub id. Raises ModelError."""
    if name in BUNDLED:
        return bundled_model(BUNDLED[name])
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder
    if folder.exists():
        raise ModelError(f"model {name!r} is a file; name the folder that holds config.json and *.safetensors")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ModelError(f"model folder {name!r} does not exist; check the path, or see `tinyllm models`")
    near = closest(name.lower(), BUNDLED)
    if near and "/" not in name:
        raise ModelError(f"unknown model {name!r}; did you mean {near!r}?")
    return name


def _check_folder(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise ModelError(f"{folder} holds an adapter, not a model; merge it into its base model first")
        raise ModelError(f"{folder} has no config.json; a model folder is what save_pretrained writes")
    if not any(name.endswith(".safetensors") for name in names):
        pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        if pickled:
            raise ModelError(
                f"{folder} has its weights only as pickle ({pickled[0]}), which can run code and is never loaded; "
                "convert them to safetensors with a tool you trust"
            )
        raise ModelError(f"{folder} has no weights (*.safetensors)")


def pick_device(device: str = "auto") -> str:
    """The device to run on; auto is cuda, else mps, else cpu. Raises ConfigError for one this machine lacks."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(kind for kind, found in there.items() if found)
    kind = device.partition(":")[0]
    if not there.get(kind):
        usable = ", ".join(kind for kind, found in there.items() if found)
        raise ConfigError(f"model.device = {device!r} is not available here; choose auto or one of: {usable}")
    return device


def pick_dtype(dtype: str = "auto", device: str = "cpu") -> torch.dtype:
    """The compute type; auto is bfloat16 where the device multiplies it natively, else float32."""
    if dtype == "auto":
        if device == "cpu":
            native = native_bf16()
        else:
            native = not device.startswith("cuda") or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    try:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    except KeyError:
        raise ConfigError(f"model.dtype = {dtype!r} is unknown; choose auto, bfloat16 or float32") from None


# Loading


def load_config(name: str, source: Path | str | None = None) -> PretrainedConfig:
    """The model's configuration, checked to be one we can train. Raises ModelError, naming the model and the reason."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        arch = AutoConfig.from_pretrained(source or resolve(name), trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise _load_error(name, error) from error
    if type(arch) not in MODEL_FOR_CAUSAL_LM_MAPPING or arch.is_encoder_decoder:
        raise ModelError(f"model {name} ({arch.model_type}) is not a causal language model; choose one that is")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(arch)]
    wanted = {cls.__name__ for cls in (found if isinstance(found, (tuple, list)) else [found])}
    if arch.architectures and not wanted & set(arch.architectures):
        raise ModelError(
            f"model {name} is a {arch.architectures[0]}, not a causal language model ({', '.join(sorted(wanted))})"
        )
    if quantization := getattr(arch, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise ModelError(f"model {name} has quantized weights ({method}), which cannot be trained; use the original")
    return arch


def load_model(name: str, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Load a causal LM from a bundled name, folder or hub id: safetensors only, no remote code, in eval mode.

    Raises ModelError for a model that is missing, damaged, larger than the memory, or not a causal language model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = resolve(name)
    arch = load_config(name, source)
    device = pick_device(device)
    weights = pick_dtype(dtype, device)
    require_memory(name, memory_estimate(arch, weights), device)
    options = {"dtype": weights, "use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    try:
        with quiet_transformers() if isinstance(source, Path) else nullcontext():  # a download shows its progress
            model, report = AutoModelForCausalLM.from_pretrained(source, **options)
    except LOAD_ERRORS as error:
        raise _load_error(name, error) from error
    except SafetensorError as error:
        raise ModelError(f"the weights of model {name} are damaged ({error}); fetch or copy them again") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model {name} lacks {len(missing)} weights, such as {missing[0]}, and would start with random ones; "
            "its files are incomplete or belong to another architecture"
        )
    return model.to(device).eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises ModelError for none, or for one with more tokens than the model has."""
    from transformers import AutoTokenizer

    source = resolve(name)
    arch = load_config(name, source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise _load_error(name, error, "tokenizer of model") from error
    vocabulary = arch.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer of model {name} has {len(tokenizer)} tokens, the model {vocabulary}; "
            "resize the model's embeddings and save it again"
        )
    return tokenizer


def _load_error(name: str, error: Exception, what: str = "model") -> ModelError:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return ModelError(
            f"model {name} needs code from its own repository (trust_remote_code), which is never run; "
            "choose a model whose class is part of transformers"
        )
    first = text.splitlines()[0] if text else type(error).__name__
    remedy = "check its files"
    if not Path(name).expanduser().exists():
        remedy = "check the name (see `tinyllm models`) and the connection, or name a folder"
    return ModelError(f"cannot load {what} {name}: {first[:300]}; {remedy}")


# Prompts


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    rule: str = "auto",
    system_prompt: str | None = None,
) -> tuple[str, tuple[int, ...]]:
    """A prompt as the model reads it: (text, token ids), where the text is what the ids decode to.

    rule "chat" applies the tokenizer's chat template, exactly once; a plain text is the user's message, and a last
    message of the assistant is continued. rule "raw" is the text as it is, after system_prompt and an empty line, with
    the beginning-of-text token where the tokenizer adds one. "auto" is chat where there is a template.
    Raises DataError for prompts that do not fit the rule, ConfigError for a rule that does not fit the tokenizer.
    """
    if rule == "auto":
        rule = "chat" if tokenizer.chat_template else "raw"
    if rule == "chat":
        ids = _chat_ids(tokenizer, prompt, system_prompt)
    elif rule == "raw":
        if not isinstance(prompt, str):
            raise DataError("the prompt is a list of chat messages, which needs prompt_rule = chat and a chat template")
        text = f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
        ids = tokenizer(text, add_special_tokens=True).input_ids
        eos = tokenizer.eos_token
        if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(eos):
            ids = ids[:-1]  # some tokenizers close every text, but a prompt goes on
    else:
        raise ConfigError(f"prompt_rule = {rule!r} is unknown; choose auto, chat or raw")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # the text began with it, and the tokenizer added another
    if not ids:
        raise DataError("the prompt is empty")
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False), tuple(ids)


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], system_prompt: str | None
) -> list[int]:
    if not tokenizer.chat_template:
        raise ConfigError("prompt_rule = chat needs a chat template, and this model's tokenizer has none; use raw")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if not messages:
        raise DataError("the prompt is an empty list of messages")
    for number, message in enumerate(messages, 1):
        if "role" not in message or "content" not in message:
            raise DataError(f"message {number} of the prompt lacks a role or a content: {message!r:.80}")
    if system_prompt:
        if any(message["role"] == "system" for message in messages):
            raise DataError("the prompt has a system message of its own and system_prompt is set; unset one")
        messages = [{"role": "system", "content": system_prompt}, *messages]
    text = apply_template(tokenizer, messages, "open" if messages[-1]["role"] == "assistant" else "asked")
    return tokenizer(text, add_special_tokens=False).input_ids


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], ending: Literal["asked", "open", "closed"]
) -> str:
    """A chat as text, by the model's chat template.

    ending: "asked" adds the head of the answer to come, "open" leaves the last message unfinished, "closed" adds
    nothing. Raises DataError when the template refuses the chat.
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ending == "asked", continue_final_message=ending == "open"
        )
    except Exception as error:  # a template is the model author's program, which may raise anything
        raise DataError(f"the model's chat template refuses the prompt: {error}") from error


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PretrainedConfig) -> tuple[int, ...]:
    """The tokens that end a completion, sorted.

    They are the end-of-text tokens that tokenizer, model configuration and generation configuration name, and the token
    with which the chat template closes an assistant's turn (a base model's template often closes with another).
    """
    config = getattr(model, "config", model)
    sources = [tokenizer, config, config.get_text_config(), getattr(model, "generation_config", None)]
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
    if tokenizer.chat_template:
        mark = "the answer"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": mark}]
        try:
            after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(mark)[2]
        except Exception:  # noqa: BLE001 - a template is the model author's program; one that fails adds no token
            after = ""
        first = tokenizer(after, add_special_tokens=False).input_ids[:1]
        found.update(set(first) & {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})
    return tuple(sorted(found))


# Adapters, saving, identity


def add_lora(model: PreTrainedModel, rank: int, alpha: float = 16.0, targets: Sequence[str] = (), seed: int = 0) -> Any:
    """Put trainable low-rank adapters (W + alpha / rank x B A, B = 0 at the start) on a model and freeze the rest.

    targets: names of linear layers; empty = all but the head. Returns a peft.PeftModel in eval mode; the base with the
    adapters off is the start policy. Raises ModelError for names the model does not have, and for tied embeddings.
    """
    require_extra("lora", f"lora.rank = {rank}")
    from peft import LoraConfig, get_peft_model

    tied = {"lm_head", "embed_tokens", "wte"} & set(targets)
    if tied and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        raise ModelError(f"lora.targets = {min(tied)!r}: embedding and head are one tensor in this model; leave it out")
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            there = {n.split(".")[-2] for n, p in model.named_parameters() if n.endswith(".weight") and p.ndim == 2}
            raise ModelError(
                f"lora.targets = {tuple(targets)}: the model has no such layers; there are: {', '.join(sorted(there))}"
            ) from error
    return adapted.eval()


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase | None, path: Path | str) -> None:
    """Write a model as a folder that AutoModelForCausalLM.from_pretrained loads, whole or not at all.

    A model with adapters is written merged (from a copy: its own weights keep their bits), the adapters beside it in
    adapter/. Raises RunError when the folder cannot be written.
    """
    with new_folder(Path(path)) as folder:
        if hasattr(model, "merge_and_unload"):
            import copy

            model.save_pretrained(folder / "adapter", save_embedding_layers=False)
            model = copy.deepcopy(model).merge_and_unload()
        with quiet_transformers():
            model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer without its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return hash_bytes(backend.to_str().encode()) if backend else hash_json(tokenizer.get_vocab())


def content_hash(model: torch.nn.Module) -> str:
    """Hash of every weight and buffer a model saves (adapters too), by name: the same exactly when all are equal."""
    return hash_tensors(model.state_dict())


def weights_hash(model: Any, start_hash: str) -> str:
    """Hash of the weights that a model computes with: of all, or of start_hash and the adapters if there are any."""
    if hasattr(model, "peft_config"):
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return hash_json([start_hash, hash_tensors(trained)])
    return content_hash(model)
