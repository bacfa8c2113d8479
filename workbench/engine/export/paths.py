"""Paths: how code gets at the parts of a model, and what of it a stage keeps under which name."""

from __future__ import annotations

import keyword
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LISTS = (nn.Sequential, nn.ModuleList)
ITEMS, KEYS = (*LISTS, nn.ParameterList), (nn.ModuleDict, nn.ParameterDict)


def path(root: str, bones: nn.Module, name: str) -> str:
    """The expression for a submodule, parameter or buffer: `net.blocks[0].qkv`."""
    module: nn.Module | None = bones
    text = root
    for key in name.split(".") if name else ():
        if isinstance(module, ITEMS) and key.isdigit():
            text += f"[{key}]"
        elif isinstance(module, KEYS):
            text += f'["{key}"]'
        elif key.isidentifier() and not keyword.iskeyword(key):
            text += f".{key}"
        else:
            return f'{root}.get_{_kind(bones, name)}("{name}")'
        module = module._modules.get(key) if module is not None else None
    return text


def _kind(bones: nn.Module, name: str) -> str:
    if name in dict(bones.named_parameters(remove_duplicate=False)):
        return "parameter"
    return "buffer" if name in dict(bones.named_buffers(remove_duplicate=False)) else "submodule"


def span(root: str, bones: nn.Module, names: Sequence[str]) -> str:
    """The expression for neighbours in a list of layers: `net.blocks`, or `net.blocks[2:4]`."""
    parent = names[0].rpartition(".")[0]
    first, last = (int(name.rpartition(".")[2]) for name in (names[0], names[-1]))
    whole = path(root, bones, parent)
    size = len(bones.get_submodule(parent)._modules)
    begin, end = "" if first == 0 else str(first), "" if last + 1 == size else str(last + 1)
    return f"{whole}[{begin}:{end}]" if begin or end else whole


def item_of(names: Sequence[str]) -> str:
    """What one of a list of layers is called: one of `blocks` is a block."""
    own = names[0].split(".")[-2:-1]
    return own[0][:-1] if own and own[0].endswith("s") and len(own[0]) > 2 else "layer"


class Parts:
    """What a stage keeps of the whole model, by attribute."""

    def __init__(self, bones: nn.Module) -> None:
        self.bones = bones
        self._given: dict[str, tuple[str, str]] = {}  # attribute -> (first name, expression)
        self._units: dict[str, str] = {}  # name of a unit -> expression in the stage
        self._runs: dict[tuple[str, ...], str] = {}
        self._tensors: dict[str, str] = {}

    def lines(self) -> list[str]:
        """The assignments of __init__."""
        order = [name for name, _ in self.bones.named_modules()]
        order += [name for name, _ in self.bones.named_parameters(remove_duplicate=False)]
        places = {name: place for place, name in enumerate(order)}
        given = sorted(self._given.items(), key=lambda one: places.get(one[1][0], len(order)))
        return [f"self.{key} = {text}" for key, (_, text) in given]

    def add(self, names: Sequence[str]) -> None:
        """A layer that is called, or several one after another."""
        if len(names) == 1:
            if names[0] not in self._units:
                self._units[names[0]] = f"self.{self._keep(names[0])}"
            return
        if tuple(names) not in self._runs:
            parent = names[0].rpartition(".")[0]
            attribute = self._new(parent.rpartition(".")[2] if parent else "layers")
            self._given[attribute] = names[0], span("whole", self.bones, names)
            self._runs[tuple(names)] = f"self.{attribute}"
            for place, name in enumerate(names):
                self._units.setdefault(name, f"self.{attribute}[{place}]")

    def run(self, names: Sequence[str]) -> tuple[str, str]:
        """A list of layers, and what one of them is called; "" for a list that is called itself."""
        parent = self.bones.get_submodule(names[0].rpartition(".")[0])
        return self._runs[tuple(names)], "" if type(parent) is nn.Sequential else item_of(names)

    def unit(self, name: str) -> str:
        """A layer."""
        return self._units[name]

    def tensor(self, name: str) -> str:
        """A parameter or buffer."""
        for unit in sorted(self._units, key=len, reverse=True):
            if name.startswith(f"{unit}."):
                inner = self.bones.get_submodule(unit)
                return path(self._units[unit], inner, name.removeprefix(f"{unit}."))
        if name not in self._tensors:
            self._tensors[name] = f"self.{self._keep(name)}"
        return self._tensors[name]

    def inside(self, name: str) -> str:
        """The name that a parameter has in the stage, "" if it is not there."""
        for unit, text in self._units.items():
            if name.startswith(f"{unit}."):
                owner = text.removeprefix("self.").replace("[", ".").replace("]", "")
                return f"{owner}.{name.removeprefix(f'{unit}.')}"
        return self._tensors.get(name, "").removeprefix("self.")

    def constant(self, value: Tensor) -> str | None:
        """A tensor that is a plain attribute of a module; None if there is no such."""
        for name, module in self.bones.named_modules():
            for key, other in vars(module).items():
                if isinstance(other, Tensor) and _same(value, other):
                    return self.tensor(f"{name}.{key}".lstrip("."))
        return None

    def _keep(self, name: str) -> str:
        attribute = self._new(f"layer_{name}" if name[0].isdigit() else name)
        self._given[attribute] = name, path("whole", self.bones, name)
        return attribute

    def _new(self, wanted: str) -> str:
        wanted = "".join(char if char.isalnum() else "_" for char in wanted)
        if hasattr(nn.Module, wanted) or keyword.iskeyword(wanted):
            wanted += "_"
        name, number = wanted, 2
        while name in self._given:
            name, number = f"{wanted}_{number}", number + 1
        return name


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)
