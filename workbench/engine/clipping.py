"""Clipping by the norm of the whole gradient, whatever part of it each rank holds.

Every element counts once: the squares a rank adds are divided by the number of ranks that hold the
same elements, and one sum over all ranks gives the norm that a single process would find.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from workbench.engine.held import Held
from workbench.spec.layout import Layout


def clip(
    held: Held,
    max_norm: float,
    layout: Layout,
    *,
    holders: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Scale the gradients on all ranks so that their norm is at most `max_norm`; the norm before.

    To be called on every rank of the layout, once the gradients are summed over the data-parallel
    ranks. holders: on how many ranks of the pp axis a parameter lies, by its name in `held`, where
    that is more than one. group: the ranks of the layout, all ranks when None. Parameters without
    gradient are passed over. Same scale as torch.nn.utils.clip_grad_norm_; a norm that is not
    finite scales nothing.
    """
    is_cut = layout.pp * layout.dp_shard * layout.tp > 1
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for name, param in held.named_parameters():
        device = param.device
        if param.grad is not None:
            copies = _copies(held, name, param.grad, layout) if is_cut else 1
            copies *= (holders or {}).get(name, 1)
            by_copies[copies].append(_local(param.grad))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        squares += torch.nn.utils.get_total_norm(grads).double() ** 2 / copies
    if is_cut:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt().item()
    scale = max_norm / (norm + 1e-6)
    if scale < 1 and math.isfinite(norm):  # else they stay, and tell where they are not
        for grads in by_copies.values():
            torch._foreach_mul_(grads, scale)
    return norm


def _copies(held: Held, name: str, grad: Tensor, layout: Layout) -> int:
    """On how many ranks of the axes other than pp the same elements lie."""
    copies = layout.dp_replicate
    if name not in held.cuts:
        copies *= layout.tp
    if not isinstance(grad, DTensor) or not any(type(p) is Shard for p in grad.placements):
        copies *= layout.dp_shard
    return copies


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
