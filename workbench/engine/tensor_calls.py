"""What a forward pass does with its linear layers: their order, their inputs, what they lie in.

The pass runs on tensors without values, so it costs no memory and no arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from workbench.engine.axes.tp import is_conv1d
from workbench.engine.skeleton import fake_like, faked

# What may be asked of a parameter anywhere: none of it is its values.
HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cuda", "is_meta")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point")),
}


@dataclass(frozen=True)
class Seen:
    """A tensor that was passed to a module, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Visit:
    """One call of a module, with its arguments: tensors as Seen, or as given to the model."""

    name: str
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Call:
    """One call of a linear layer. inside: the visits that it happens in, outermost first."""

    name: str
    input: Tensor
    inside: tuple[int, ...]


@dataclass
class Recording:
    """One forward pass. strays: modules whose weight is used by others than themselves."""

    visits: list[Visit] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    strays: set[str] = field(default_factory=set)


def is_linear(module: nn.Module) -> bool:
    """Exactly a linear layer: a subclass may do anything."""
    return type(module) is nn.Linear or is_conv1d(module)


def record(bones: nn.Module, inputs: Any, device: torch.device) -> Recording:
    """Run the model once on `inputs`. Raises what the model raises on tensors without values."""
    found = Recording()
    stack: list[int] = []

    def enter(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if is_linear(module) and args:
                found.calls.append(Call(name, args[0], tuple(stack)))
            stack.append(len(found.visits))
            # Leaves are never what two linear layers have in common.
            deep = next(module.children(), None) is not None
            found.visits.append(
                Visit(name, *(mapped((args, kwargs), kept) if deep else (None, None)))
            )

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    with faked(bones, device) as (model, mode):
        owners: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(enter(name), with_kwargs=True)
            module.register_forward_hook(leave)
            if is_linear(module) or type(module) is nn.Embedding:
                for param in module.parameters(recurse=False):
                    owners.setdefault(id(param), set()).add(name)
        fakes = fake_like(inputs, mode, device)
        watch = _Watch(owners, lambda: found.visits[stack[-1]].name if stack else "")
        with mode, watch:
            model(fakes)
        found.strays = watch.strays
    if found.visits[0].args is not None:
        found.visits[0] = Visit("", (inputs,), {})
    return found


class _Watch(TorchFunctionMode):
    """Notes which parameters meet an operation outside of the modules they belong to."""

    def __init__(self, owners: dict[int, set[str]], where: Callable[[], str]) -> None:
        super().__init__()
        self.owners = owners
        self.where = where
        self.strays: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS:
            for leaf in tree_leaves((args, kwargs)):
                owners = self.owners.get(id(leaf)) if isinstance(leaf, Tensor) else None
                if owners and self.where() not in owners:
                    self.strays |= owners
        return func(*args, **(kwargs or {}))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of whatever lies in nested tuples, lists and dicts, and is none itself."""
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def kept(value: Any) -> Any:
    """An argument to be made anew later: a tensor as Seen, an object such as a cache as it is."""
    if isinstance(value, Tensor):
        return Seen(tuple(value.shape), value.dtype, value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - an object of the user's that cannot be copied is shared
        return value
