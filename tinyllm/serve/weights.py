"""New weights from safetensors on disk, written into the policy's own tensors.

Everything is read and checked before anything is written: an update that fails leaves every bit as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyllm.engine.policy import Policy
from tinyllm.errors import ModelError, closest
from tinyllm.record.hashing import hash_tensors
from tinyllm.records import Revision

INDEX = "model.safetensors.index.json"
_LABEL = re.compile(r"(\d{1,18})(:[0-9a-f]+)?")


def read_update(path: str, policy: Policy) -> dict[str, Tensor]:
    """The tensors of a folder or file, complete, in the shapes and types of the policy's own: name -> tensor.

    Tied weights may be given under one of their names or under all. Raises ModelError, naming the first fault.
    """
    if policy.model is not policy.causal:
        raise ModelError("this server's model has adapters beside its weights; serve a merged model to update it")
    wanted = policy.causal.state_dict()
    new: dict[str, Tensor] = {}
    for file in _files(Path(path).expanduser()):
        for name, tensor in _read_file(file).items():
            if name in new:
                raise ModelError(f"{file}: {name} stands in two files; write the folder again")
            new[name] = _checked(file, name, tensor, wanted)
    _complete(path, new, wanted)
    return new


def write_update(policy: Policy, new: Mapping[str, Tensor]) -> str:
    """Copy the tensors of read_update into the weights, in place; returns their content hash."""
    with torch.no_grad():
        for name, tensor in policy.causal.state_dict().items():
            tensor.copy_(new[name])
    return hash_tensors(policy.model.state_dict())


def revision_of(label: str | None, content: str, before: Revision) -> tuple[Revision, str]:
    """The revision of an update, and its name: the label, or step:hash where the update has none.

    A label such as 12 or 12:abcdef gives the step; with any other the step stays; without one it counts on by one.
    """
    if label is None:
        revision = Revision(before.step + 1, content)
        return revision, str(revision)
    found = _LABEL.fullmatch(label)
    return Revision(int(found[1]) if found else before.step, content), label


def _files(path: Path) -> list[Path]:
    """The safetensors files that make the model. Raises ModelError."""
    try:
        if path.is_file() and path.suffix == ".safetensors":
            return [path]
        if not path.is_dir():
            raise ModelError(f"{path}: no such folder or .safetensors file (on the server's disk)")
        names = {entry.name for entry in path.iterdir()}
        if "config.json" not in names and "adapter_config.json" in names:
            raise ModelError(f"{path} holds a LoRA adapter; merge it into its base and publish the whole model")
        if INDEX in names:
            listed = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            found = {str(name) for name in listed}
            if missing := sorted(found - names):
                raise ModelError(f"{path}: {missing[0]}, which {INDEX} names, is missing; write the folder again")
        else:
            found = {name for name in names if name.endswith(".safetensors")}
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{path / INDEX} is damaged; write the folder again") from None
    if not found:
        raise ModelError(f"{path} has no weights (*.safetensors)")
    return [path / name for name in sorted(found)]


def _read_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, copied: a mapped file that another process truncates would crash the server."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{file} is not whole safetensors ({error}); write it again") from None


def _checked(file: Path, name: str, tensor: Tensor, wanted: Mapping[str, Tensor]) -> Tensor:
    """The tensor as the policy has it. Raises ModelError: unknown name, other shape or kind, not finite."""
    own = wanted.get(name)
    if own is None:
        if ".lora_" in name:
            raise ModelError(f"{file} holds LoRA adapters ({name}); merge them and publish the whole model")
        close = closest(name, wanted)
        hint = f" (the nearest is {close})" if close else ""
        raise ModelError(f"{file}: the model has no weight {name}{hint}; is it another model?")
    if tensor.shape != own.shape:
        raise ModelError(
            f"{file}: {name} is {list(tensor.shape)}, the model's is {list(own.shape)}; is it another model?"
        )
    if tensor.is_floating_point() != own.is_floating_point() or tensor.element_size() < 2 <= own.element_size():
        raise ModelError(f"{file}: {name} is {tensor.dtype}, the model's is {own.dtype}; publish unquantized weights")
    tensor = tensor.to(own.dtype)
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ModelError(f"{file}: {name} has values that are not finite (NaN or infinity), so it is not used")
    return tensor


def _complete(path: str, new: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Add the other names of tied weights. Raises ModelError for a missing weight, and for tied weights that differ."""
    tied: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in wanted.items():
        tied.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.numel() or name), []).append(name)
    for names in tied.values():
        given = [name for name in names if name in new]
        if not given:
            raise ModelError(f"{path} lacks the weight {names[0]}; it is incomplete, or of another model")
        for name in names:
            if name in new and not torch.equal(new[name], new[given[0]]):
                raise ModelError(f"{path}: {name} and {given[0]} are one tensor in this model, and differ here")
            new[name] = new[given[0]]
