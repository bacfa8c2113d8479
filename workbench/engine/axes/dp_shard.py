"""Sharded data parallelism: each rank holds 1/n of parameters, gradients and optimizer state.

Parameters are all-gathered before use and gradients reduce-scattered after: half as much traffic
again as replicas, for 1/n of the memory. With replicas besides, the shards' gradients are then
averaged over them (hybrid sharding).

Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

# Optimizers of torch that do not run on DTensors (seen with torch 2.13).
UNSHARDED = {"Adafactor", "Rprop", "LBFGS"}


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


def why_not(bones: nn.Module, optimizer_kind: str) -> str:
    """Why FSDP2 cannot shard this model, or its optimizer not what is sharded; "" when both can.

    Asked before anything is built: torch says it late, and in its own words.
    """
    if optimizer_kind in UNSHARDED:
        return (
            f"{optimizer_kind} mixes sharded and plain tensors, which torch refuses. "
            "Use another optimizer, such as AdamW."
        )
    units = blocks(bones)
    if len(set(units)) < len(units):
        return "A block stands twice in its list, which FSDP2 cannot shard."
    of_param: dict[int, set[int]] = {}
    for number, unit in enumerate(units):
        for param in unit.parameters():
            of_param.setdefault(id(param), set()).add(number)
    dtypes: dict[frozenset[int], torch.dtype] = {}
    outside = {id(p) for p in _outside(bones, units)}
    for name, param in bones.named_parameters():
        if why := _param_why(param):
            return f"{name} {why}, which FSDP2 cannot shard."
        homes = of_param.get(id(param), set()) | ({-1} if id(param) in outside else set())
        if len(homes) > 1:
            return (
                f"{name} is shared by two blocks, or a block and the rest, which FSDP2 gathers at "
                "different times."
            )
        if dtypes.setdefault(frozenset(homes), param.dtype) != param.dtype:
            return (
                f"{name} is {str(param.dtype).removeprefix('torch.')} and others beside it are "
                "not, which FSDP2 cannot gather together. Use one dtype."
            )
    return ""


def _outside(bones: nn.Module, units: list[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of modules that lie in no unit."""
    inside = {module for unit in units for module in unit.modules()}
    for module in bones.modules():
        if module not in inside:
            yield from module.parameters(recurse=False)


def _param_why(param: nn.Parameter) -> str:
    if param.ndim == 0:
        return "is a single number"
    return "" if param.is_contiguous() else "does not lie contiguous in memory"


@contextmanager
def without_sync(part: nn.Module) -> Iterator[None]:
    """Backward passes in here accumulate on the rank."""
    assert isinstance(part, FSDPModule)
    part.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        part.set_requires_gradient_sync(True)


def let_go(part: nn.Module) -> None:
    """Back to shards after a step that broke off; the part takes no other step.

    In the middle of a forward pass FSDP2 keeps what it would not gather again, unless told so.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
