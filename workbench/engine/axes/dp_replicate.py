"""Data parallelism with replicas: every rank holds the same, gradients are averaged.

Gradients go in buckets, each all-reduced while the backward pass computes the next (ring:
2(n-1)/n of the gradient's bytes over each link). A stage of a pipeline has several backward passes
in flight; there they are averaged in buckets after the last one.

Source: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.engine.metered_group import Meter

BUCKET_BYTES = 25 << 20
# The name since torch 2.13, and before.
_NAMES = inspect.signature(DistributedDataParallel).parameters
_SYNCS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


def spread(
    part: nn.Module, group: dist.ProcessGroup, meter: Meter, *, seeks_unused: bool
) -> nn.Module:
    """The module in DDP; seeks_unused: some parameter may get no gradient."""
    # The gradients live in the buckets: no copy before and after the all-reduce. The state was
    # put in by us, the same on all ranks.
    syncs: dict[str, Any] = {_SYNCS: _has_own_buffers(part)}
    wrapped = DistributedDataParallel(
        part,
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=seeks_unused,
        init_sync=False,
        **syncs,
    )
    if not seeks_unused:
        _fix_order(wrapped, part, meter)
    return wrapped


def any_knows(is_known: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any rank knows of a thing, which is then so for all; collective."""
    told = torch.tensor([int(is_known)], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return bool(told.item())


class _Each(nn.Module):
    """In the place of a model: a value with each of its parameters, in their order."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._params = [param for param in part.parameters() if param.requires_grad]

    def forward(self) -> Tensor:
        total = torch.zeros((), device=self._params[0].device)
        for param in self._params:
            total = total + 0.0 * param.sum()
        return total


def _fix_order(wrapped: DistributedDataParallel, part: nn.Module, meter: Meter) -> None:
    """Have DDP fill its buckets in one order from the first step on, the last parameter first.

    DDP puts its buckets in order after the first backward pass, as the gradients came. In which
    order a sum over ranks adds up depends on the place in a bucket, so that the first step after a
    restore would differ in its last bits from the same step of a training that goes on.
    """
    wrapped.module = _Each(part)
    wrapped.require_forward_param_sync = False  # the buffers it would send are the model's
    try:
        with meter.dry(), torch.enable_grad():  # metrics may be asked for before any step
            wrapped().backward()
    finally:
        wrapped.module = part
        wrapped.require_forward_param_sync = True
        for param in part.parameters():
            param.grad = None


def why_not(bones: nn.Module) -> str:
    """Why gradients of this model cannot be averaged over replicas; "" when they can.

    With sparse gradients DDP over gloo gives another sum (seen with torch 2.13).
    """
    for name, module in bones.named_modules():
        if getattr(module, "sparse", False) is True:
            return f"{name} has sparse gradients, which DDP does not sum right. Use sparse=False."
    return ""


def without_sync(module: nn.Module) -> AbstractContextManager:
    """Backward passes in here accumulate on the rank."""
    assert isinstance(module, DistributedDataParallel)
    return module.no_sync()


def average(params: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over the group, in place; what no rank used stays without one."""
    used = torch.tensor([float(param.grad is not None) for param in params])
    dist.all_reduce(used.to(params[0].device), group=group)
    taking = [param for param, count in zip(params, used.tolist(), strict=True) if count]
    for bucket in _buckets(taking):
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for param, mean in zip(bucket, flat.split([g.numel() for g in grads]), strict=True):
            param.grad = mean.view_as(param)


def _buckets(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for param in params:
        if bucket and (
            bucket[0].dtype != param.dtype
            or sum(held.nbytes for held in bucket) + param.nbytes > BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(param)
    if bucket:
        yield bucket


def _has_own_buffers(part: nn.Module) -> bool:
    """Whether buffers other than batch statistics, which are the same on all ranks, may change."""
    norms = tuple(m for m in part.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    known = {id(buffer) for norm in norms for buffer in norm.buffers()}
    return any(id(buffer) not in known for buffer in part.buffers())


class Uses:
    """Which parameters got a gradient since this was made."""

    def __init__(self, module: nn.Module) -> None:
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._missing = set(params)
        self._hooks = [p.register_hook(partial(self._got, name)) for name, p in params.items()]

    def _got(self, name: str, _gradient: object) -> None:
        self._missing.discard(name)

    def unused(self) -> list[str]:
        """Names of those that got none on this rank."""
        return sorted(self._missing)

    def close(self) -> None:
        """Stop looking."""
        for hook in self._hooks:
            hook.remove()
