"""Probe: call a unit with made-up values where it does not run without any.

A mixture of experts looks at where its router sends each token, though the shape of what it gives
does not depend on it. Only the shapes, and what was written in place, are taken from the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from workbench.engine.nest import filled, template, tensors

SCALE = 0.02


def probed(
    module: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict
) -> tuple[Any, list[Tensor]]:
    """What call(*args, **kwargs) of the module returns, without values, and what it writes.

    The module's parameters are made up for the time of the call, which takes their memory.

    Raises what the call raises, and ValueError when the shapes depend on the values.
    """
    first, second = (_Call(module, args, kwargs, seed) for seed in (0, 1))
    one, other = first.run(call), second.run(call)
    shapes = [[(t.shape, t.dtype) for t in tensors(result)] for result in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError("the shape of what it returns depends on values")
    return filled(template(one, first.without_value)), first.written()


class _Call:
    """One call with the values of one seed; made: by id of each tensor, it and its stand-in."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, seed: int) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._generator = torch.Generator().manual_seed(seed)
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._versions: dict[int, int] = {}
        self._replaced: list[Tensor] = []

    def run(self, call: Callable[..., Any]) -> Any:
        """The result with values. No random number is taken from the process."""
        fork = torch.random.fork_rng()
        with unset_fake_temporarily(), fork, self._state_made():
            args = filled(template(self._args, self._stand_in))
            kwargs = filled(template(self._kwargs, self._stand_in))
            self._versions = {key: made._version for key, (_, made) in self._made.items()}
            return call(*args, **kwargs)

    def written(self) -> list[Tensor]:
        """The tensors whose stand-ins were written in place, or put another one in the place of."""
        changed = [
            tensor
            for key, (tensor, made) in self._made.items()
            if made._version != self._versions[key]
        ]
        return changed + self._replaced

    def without_value(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor of the result: what was given, or a new one."""
        given = next((own for own, made in self._made.values() if made is tensor), None)
        if given is not None:
            return given
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    @contextmanager
    def _state_made(self) -> Iterator[None]:
        owners: list[dict[str, Any]] = [
            owner for part in self._module.modules() for owner in (part._parameters, part._buffers)
        ]
        before = [(owner, key, t) for owner in owners for key, t in owner.items() if t is not None]
        try:
            for owner, key, tensor in before:
                owner[key] = self._stand_in(tensor)
            yield
        finally:
            for owner, key, tensor in before:
                if owner[key] is not self._stand_in(tensor):
                    self._replaced.append(tensor)
                owner[key] = tensor

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._made:
            if tensor.dtype.is_floating_point:
                values = torch.randn(tensor.shape, generator=self._generator).to(tensor.dtype)
                made = (values * SCALE).to(tensor.device)
            else:  # 0 is an index and a token of any table
                made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            made.requires_grad_(tensor.requires_grad)
            # A unit may write over what it is given, which no leaf of a graph allows.
            leaf = tensor.is_leaf or not tensor.requires_grad
            self._made[id(tensor)] = tensor, made if leaf else made.view_as(made).clone()
        return self._made[id(tensor)][1]
