"""Data parallelism with replicas: every rank holds the model, gradients are averaged.

Gradients go in buckets, each all-reduced while the backward pass computes the next (ring:
2(n-1)/n of the gradient's bytes over each link).

Source: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.engine.world import World


def spread(module: nn.Module, world: World, *, seeks_unused: bool) -> nn.Module:
    """The module in DDP over all ranks; seeks_unused: some parameter may get no gradient."""
    # The gradients live in the buckets: no copy before and after the all-reduce.
    return DistributedDataParallel(
        module, gradient_as_bucket_view=True, find_unused_parameters=seeks_unused
    )


def without_sync(module: nn.Module) -> AbstractContextManager:
    """Backward passes in here accumulate on the rank."""
    assert isinstance(module, DistributedDataParallel)
    return module.no_sync()
