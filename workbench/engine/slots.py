"""Slots: what an optimizer keeps beside each parameter, made in another layout to be filled there.

Taking a step with gradients of zero would make them too, for the time and memory of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.engine.held import Held
from workbench.engine.state import held_of, optimized


class Kind(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def slots(model: Held | nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps for each of this rank's parameters, without the values.

    By FQN and key: None for a tensor of the parameter's shape, else what it is, or a zero of the
    number's kind. Plain values: a tensor would cost the ranks a tenth of a millisecond each.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, param in optimized(held_of(model), optimizer):
        kept = found.setdefault(name, {})
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                like = value.shape == param.shape and value.dtype == param.dtype
                kept[key] = (
                    None if like else Kind(tuple(value.shape), value.dtype, value.device.type)
                )
            elif value is not None:
                kept[key] = type(value)(0)
    return found


def make_slots(
    model: Held | nn.Module, optimizer: Optimizer, known: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give an optimizer the slots that `slots` found, on all ranks together, to be filled."""
    for name, param in optimized(held_of(model), optimizer):
        state = {
            key: torch.empty_like(param, requires_grad=False) if like is None else _made(like)
            for key, like in known.get(name, {}).items()
        }
        if state:
            optimizer.state[param] = state


def _made(like: Any) -> Any:
    if isinstance(like, Kind):
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return like
