"""Micro: one microbatch on its way through a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Micro:
    """Samples first .. first+count-1 of the endless stream.

    weight: of their mean loss in the step's. padded: length that inputs were brought to by
    repeating the last sample, so that all microbatches of a pipeline have one shape. number: in
    the step, among those of its share of the batch.
    """

    first: int
    count: int
    weight: float
    inputs: Any = None
    target: Any = None
    padded: int = 0
    number: int = 0


def padded(value: Any, count: int, length: int) -> Any:
    """Tensors of `count` samples with the last one repeated up to `length`."""
    if count == length:
        return value

    def longer(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.ndim == 0 or tensor.shape[0] != count:
            return tensor
        return tensor.index_select(0, _places(tensor, count, length))

    return pytree.tree_map(longer, value)


def _places(tensor: Tensor, count: int, length: int) -> Tensor:
    return torch.arange(length, device=tensor.device).clamp_(max=count - 1)


def shortened(value: Any, count: int, length: int) -> Any:
    """The first `count` samples of an output for `length`."""
    if count == length:
        return value

    def cut(tensor: Any) -> Any:
        is_batch = isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.shape[0] == length
        return tensor[:count] if is_batch else tensor

    return pytree.tree_map(cut, value)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors in nested tuples, lists and dicts, moved to the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value
