"""BatchNorm over the batch of all data-parallel ranks, exactly as one process would take it.

Each rank sends the mean, the sum of squared deviations and the count of its share, 2C+1 numbers for
C channels, and merges those of all; the way back sums 2C numbers. Deviations are merged rather than
squares, whose difference loses every digit when the mean is large. torch's own SyncBatchNorm does
the same on accelerators only. It is exact for the samples of one forward: with several microbatches
a step each is normalised for itself, in one process as here.

Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167; Chan, Golub and LeVeque 1979,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (the merging).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


def is_batchnorm(module: nn.Module) -> bool:
    """Whether make_exact takes the module: torch's BatchNorm1d, 2d and 3d with torch's forward."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return isinstance(module, kinds) and type(module).forward is _BatchNorm.forward


def make_exact(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace the forward of each BatchNorm (on the instance: names stay) where it trains.

    Every rank of the group must run forward and backward through the model together, each with its
    share of the batch, of any size. Gradients of weight and bias stay those of the share, to be
    summed like all others; running statistics are the same on all ranks, and those of one process.
    """
    if dist.get_world_size(group) == 1:
        return
    for module in model.modules():
        if is_batchnorm(module):
            assert isinstance(module, _BatchNorm)
            module.forward = Shared(module, group)


@dataclass
class Shared:
    """The forward of one BatchNorm module."""

    module: _BatchNorm
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict) -> Shared:
        # The copy of the module is in the memo while its attributes are copied; groups have none.
        return Shared(memo.get(id(self.module), self.module), self.group)

    def __call__(self, input: Tensor) -> Tensor:
        """input [n, channels, ...] -> the same shape and dtype."""
        module = self.module
        if not module.training:
            return type(module).forward(module, input)
        module._check_input_dim(input)
        with torch.no_grad():
            stats = merged(input.detach(), self.group)
            if module.track_running_stats:
                _run_on(module, stats)
        return Normalised.apply(  # pyright: ignore[reportReturnType]
            input, module.weight, module.bias, stats, module.eps, self.group
        )


@dataclass(frozen=True)
class Stats:
    """Of every channel over the whole batch: mean and biased variance [C], values in each []."""

    mean: Tensor
    var: Tensor
    count: Tensor


def merged(x: Tensor, group: dist.ProcessGroup) -> Stats:
    """Statistics of x [n, C, ...] over the ranks of a group; the same bits on all of them."""
    channels = x.shape[1]
    x = x.to(_dtype(x))
    count = x.numel() // channels
    var, mean = torch.var_mean(x, _others(x), correction=0)
    mine = torch.cat([mean, var * count, mean.new_tensor([count])])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    means, squares, counts = torch.stack(every).split([channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squares = squares.sum(0) + ((means - mean).square() * counts).sum(0)
    return Stats(mean, squares / total, total)


def _run_on(module: _BatchNorm, stats: Stats) -> None:
    """Running statistics, moved as torch moves them."""
    factor: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / module.num_batches_tracked.to(stats.mean.dtype)
    if factor is None:
        factor = 0.0
    unbiased = stats.var * (stats.count / (stats.count - 1))
    for running, now in ((module.running_mean, stats.mean), (module.running_var, unbiased)):
        if running is not None:
            running.copy_(running * (1 - factor) + now.to(running.dtype) * factor)


class Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with statistics that depend on all ranks."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd's signature
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stats: Stats,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """x [n, C, ...] -> the same."""
        ctx.group = group
        rstd = torch.rsqrt(stats.var + eps)
        ctx.save_for_backward(x, weight, stats.mean, rstd, stats.count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        # torch wants statistics in the dtype of the weight.
        dtype = stats.mean.dtype if weight is None else weight.dtype
        mean, var = stats.mean.to(dtype), stats.var.to(dtype)
        return functional.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's signature
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, mean, rstd, count = ctx.saved_tensors
        dtype, over = _dtype(x), _others(x)
        shape = (1, -1, *(1,) * (x.ndim - 2))
        grad = grads[0].to(dtype)
        hat = (x.to(dtype) - mean.view(shape)) * rstd.view(shape)
        sums = torch.stack([grad.sum(over), (grad * hat).sum(over)])
        bias_grad = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        weight_grad = None if weight is None else sums[1].to(weight.dtype)
        x_grad = None
        if ctx.needs_input_grad[0]:
            sums = sums.clone()
            dist.all_reduce(sums, group=ctx.group)
            means = (sums / count).view(2, *shape[:1], -1, *shape[2:])
            scale = rstd if weight is None else rstd * weight
            x_grad = (grad - means[0] - hat * means[1]) * scale.view(shape)
            x_grad = x_grad.to(x.dtype)
        return x_grad, weight_grad, bias_grad, None, None, None


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _dtype(x: Tensor) -> torch.dtype:
    """What statistics are computed in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
