"""Sharded data parallelism: each rank holds 1/n of parameters, gradients and optimizer state.

Parameters are all-gathered before use and gradients reduce-scattered after: half as much traffic
again as replicas, for 1/n of the memory.

Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from workbench.engine.world import World


def spread(module: nn.Module, world: World, *, seeks_unused: bool) -> nn.Module:
    """The module with FSDP2 over all ranks: each repeated block one unit, the rest another."""
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
    for block in blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the longest ModuleList of one class: gathered one at a time, not all."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    repeated = [part for part in lists if len({type(block) for block in part}) == 1]
    return list(max(repeated, key=len, default=[]))


def without_sync(module: nn.Module) -> AbstractContextManager:
    """Backward passes in here accumulate on the rank."""
    assert isinstance(module, FSDPModule)
    return _unsynced(module)


@contextmanager
def _unsynced(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
