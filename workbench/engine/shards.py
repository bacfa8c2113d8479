"""Shards: which box of a whole tensor this rank holds, for plain tensors and for DTensors.

A dim of n rows sharded over k ranks is cut as torch.chunk cuts it, into chunks of ceil(n/k) rows:
the last one may be short, and ranks may be left without any. All names used are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from workbench.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A part of a tensor: first index and number of entries in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box; 1 for a scalar."""
        return Size(self.shape).numel()

    def slices(self, within: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """The box as an index into the tensor, or into a part of it that starts at `within`."""
        start = within or (0,) * len(self.offset)
        return tuple(
            slice(first - base, first - base + size)
            for first, size, base in zip(self.offset, self.shape, start, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """What both boxes cover, None when that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - first for end, first in zip(ends, offset, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def memory_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing memory and without a graph."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # with gradients it would take an autograd function for each
        return tensor.to_local().detach()


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """The tensor this rank holds, sharing memory, and its box in the whole.

    Raises CheckpointError for a placement other than Replicate and Shard.
    """
    local = memory_of(tensor)
    if not isinstance(tensor, DTensor):
        return local, whole(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or coordinate is None:
            raise CheckpointError(
                f"A tensor of shape {list(tensor.shape)} is placed as {placement}, which has no "
                "box of its own on each rank. Use replicated or sharded parameters."
            )
        dim, ranks = placement.dim, tensor.device_mesh.size(axis)
        chunk = -(-shape[dim] // ranks)
        begin = min(coordinate[axis] * chunk, shape[dim])
        offset[dim], shape[dim] = offset[dim] + begin, min(chunk, shape[dim] - begin)
    if tuple(local.shape) != tuple(shape):
        raise CheckpointError(
            f"A shard has shape {list(local.shape)} where {shape} follows from its placement."
        )
    return local, Box(tuple(offset), tuple(shape))
