"""Sharded data parallelism: each rank holds 1/n of parameters, gradients and optimizer state.

Parameters are all-gathered before use and gradients reduce-scattered after: half as much traffic
again as replicas, for 1/n of the memory. With replicas besides, the shards' gradients are then
averaged over them (hybrid sharding).

Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def spread(part: nn.Module, mesh: DeviceMesh) -> None:
    """Put a part of the model in FSDP2: each repeated block one unit, the rest another.

    mesh: dp_shard alone, or dp_replicate x dp_shard.
    """
    for block in blocks(part):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(part, mesh=mesh)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the longest ModuleList of one class: gathered one at a time, not all."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    repeated = [part for part in lists if len({type(block) for block in part}) == 1]
    return list(max(repeated, key=len, default=[]))


@contextmanager
def without_sync(part: nn.Module) -> Iterator[None]:
    """Backward passes in here accumulate on the rank."""
    assert isinstance(part, FSDPModule)
    part.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        part.set_requires_gradient_sync(True)
