"""Skeleton: the user's module with everything but the values of its parameters.

It is made once from the module that the recipe built; each layout starts from a copy of it, so that
a switch never holds the whole model. Names, ties between parameters, buffers and plain attributes
are those of the user's module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters have no memory; buffers are shared with the module."""
    memo: dict[int, object] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(model, memo)


def copy_of(bones: nn.Module) -> nn.Module:
    """A skeleton to build on: own modules, own parameters without memory, own buffers."""
    return copy.deepcopy(bones)


@contextmanager
def faked(bones: nn.Module, device: torch.device) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
    """A copy whose tensors have shape and device but no values, and the mode to run it in.

    What looks at values (`.item()`, `if tensor:`) raises. Real tensors that the code brings along
    are taken as fake ones. No memory is used, no random number drawn.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = copy_of(bones)
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            with mode:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            is_param = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_param else made
        return known[id(tensor)]

    for module in model.modules():
        kinds: list[Any] = [module._parameters, module._buffers]
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)
    with torch.random.fork_rng(devices=[]):
        yield model, mode


def fake_like(value: object, mode: FakeTensorMode, device: torch.device) -> object:
    """The tensors of nested tuples, lists and dicts without their values."""
    if isinstance(value, Tensor):
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, (tuple, list)):
        return type(value)(fake_like(item, mode, device) for item in value)
    if isinstance(value, dict):
        return {key: fake_like(item, mode, device) for key, item in value.items()}
    return value
