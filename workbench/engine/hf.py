"""A checkpoint as Hugging Face's own files: what `from_pretrained` reads, under the model's names.

Made by rank 0 from a checkpoint that is whole, beside the training; the model's own
`save_pretrained` writes it. Memory: the whole model once, without optimizer state.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from workbench.engine.shards import Box
from workbench.errors import CheckpointError
from workbench.spec import aside
from workbench.spec import manifest as manifests


def pretrained(model: nn.Module) -> tuple[str, nn.Module]:
    """The model of Hugging Face that a recipe trains, and the prefix of its names in it.

    Raises CheckpointError where there is none, or several side by side.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and _is_pretrained(module):
            found[name] = module
    if len(found) != 1:
        have = f"has {len(found)} of them ({', '.join(found)})" if found else "is none"
        raise CheckpointError(
            f"--export hf writes a model that has save_pretrained and a config, and this one {have}"
            ". Leave it out: safetensors alone reads the files of a checkpoint."
        )
    ((name, module),) = found.items()
    return f"{name}." if name else "", module


def _is_pretrained(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    return callable(getattr(module, "save_pretrained", None)) and callable(
        getattr(config, "to_json_string", None)
    )


def export(bones: nn.Module, checkpoint: Path, target: Path) -> None:
    """Write the model of a checkpoint for `from_pretrained`: whole in `target`, or not there.

    bones: the recipe's model, without values. Raises CheckpointError.
    """
    prefix, module = pretrained(bones)
    model = _filled(module, _values(checkpoint, f"model/{prefix}"))
    with aside.says_where(target.parent):
        target.parent.mkdir(mode=0o700, exist_ok=True)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} exists. Choose another name.")
        directory = aside.new(target.parent, target.name)
        lock = aside.lock(aside.lock_of(directory))
        try:
            directory.mkdir(mode=0o700)
            model.save_pretrained(directory)
            aside.sync(directory)
            os.rename(directory, target)
        finally:
            aside.discard(directory)
            os.close(lock)


def _values(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint whose keys begin so, under the rest of the key."""
    manifest = manifests.read(checkpoint)
    opened: dict[str, Any] = {}
    found = {}
    for key, entry in manifest["keys"].items():
        if not key.startswith(prefix):
            continue
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for piece in entry["pieces"]:
            name = piece["file"]
            if name not in opened:
                opened[name] = safe_open(checkpoint / name, framework="pt")
            box = Box(tuple(piece["offset"]), tuple(piece["shape"]))
            whole[box.slices()] = opened[name].get_tensor(piece["key"])
        found[key.removeprefix(prefix)] = whole
    return found


def _filled(bones: nn.Module, values: dict[str, Tensor]) -> Any:
    """The module with these values; what is tied stays so."""
    model = copy.deepcopy(bones)
    names = {param: name for name, param in model.named_parameters()}
    made = {param: nn.Parameter(values[name], False) for param, name in names.items()}
    for path, module in model.named_modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                module._parameters[leaf] = made[param]
        for leaf in module._buffers:
            name = f"{path}.{leaf}" if path else leaf
            if name in values:
                module._buffers[leaf] = values[name]
    return model
