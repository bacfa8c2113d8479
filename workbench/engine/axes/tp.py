"""Tensor parallelism: each rank of the axis holds a part of every large matrix.

A column-parallel layer keeps rows of its weight [out/n, in] and gives its part of the features;
the row-parallel layer after it keeps columns [out, in/n] and sums over the ranks. Such a group
costs one all-reduce of its output forward and one of its input's gradient backward. Parameters that
stay whole see the same values on all ranks, so their gradients agree bit for bit.

The tensors are plain local ones, not DTensors: those mix neither with plain ones in foreach
optimizers nor with DDP, and their dispatch in Python costs more than a small layer.

Source: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from workbench.engine.held import TensorCut


@dataclass(frozen=True)
class Group:
    """Layers cut together: the rows of `columns`, the columns of `row` that comes after them.

    heads: (module, attribute) of whole numbers to be divided by the degree, such as a number of
    attention heads that the code between the layers goes by.
    """

    columns: tuple[str, ...]
    row: str
    heads: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """What tensor parallelism cuts of a model, by the names of its modules.

    embeddings: cut along the vocabulary. gathered: linear layers that compute a part of their
    features on each rank and give the whole. sizes: what a degree must divide, by its name. why:
    why there is no tensor parallelism, in one sentence, "" if there is. notes: what stays whole.
    """

    groups: tuple[Group, ...] = ()
    embeddings: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    why: str = ""
    notes: list[str] = field(default_factory=list)

    def inside(self, units: Iterable[str]) -> TensorPlan:
        """The plan without the groups that reach over several of the units, given by their names.

        Between two units of a pipeline all that is passed on is whole.
        """
        starts = [f"{name}." for name in units]
        kept = [
            group
            for group in self.groups
            if any(all(n.startswith(s) for n in (*group.columns, group.row)) for s in starts)
        ]
        return replace(self, groups=tuple(kept))


@dataclass(frozen=True)
class Place:
    """Rank `index` of the `of` ranks in `group`; without a group nothing is sent, which is how a
    plan is checked in one process.
    """

    group: dist.ProcessGroup | None
    index: int
    of: int

    def part(self, size: int) -> tuple[int, int]:
        """First index and number of this rank's entries in a dim of `size`."""
        return self.index * (size // self.of), size // self.of


class _Copy(torch.autograd.Function):
    """Forward the same tensor; backward the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In place: the layers after it have just made this gradient, and nobody else sees it.
        return _summed(grad.contiguous(), ctx.place), None


class _Sum(torch.autograd.Function):
    """Forward the sum over all ranks, in place; backward the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        return _summed(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Gather(torch.autograd.Function):
    """Forward the features of all ranks [..., n] -> [..., n * of]; backward this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.place = place
        parts = [torch.empty_like(x) for _ in range(place.of)]
        dist.all_gather(parts, x.contiguous(), group=place.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.narrow(-1, *ctx.place.part(grad.shape[-1])).contiguous(), None


def _summed(x: Tensor, place: Place) -> Tensor:
    if place.group is not None:
        dist.all_reduce(x, group=place.group)
    return x


class _Entry:
    """The way into a group: columns that take the same tensor share one all-reduce of its gradient.

    It is forgotten when the row takes over, so that no activation outlives its pass.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._seen: tuple[weakref.ref[Tensor], bool, Tensor] | None = None

    def enter(self, x: Tensor) -> Tensor:
        if self._seen is not None:
            last, grad, copied = self._seen
            if last() is x and grad == torch.is_grad_enabled():
                return copied
        copied = _Copy.apply(x, self.place)
        self._seen = (weakref.ref(x), torch.is_grad_enabled(), copied)
        return copied

    def leave(self) -> None:
        self._seen = None


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of Hugging Face's GPT-2, whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _matrix(module: nn.Module) -> Tensor:
    """The weight as [out, in]."""
    weight: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
    return weight.t() if is_conv1d(module) else weight


def outputs(module: nn.Module) -> int:
    """Number of features that a linear layer gives."""
    return _matrix(module).shape[0]


def inputs(module: nn.Module) -> int:
    """Number of features that a linear layer takes."""
    return _matrix(module).shape[1]


def _column(module: nn.Module, entry: _Entry, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out / n]."""
    return functional.linear(entry.enter(x), _matrix(module), module.bias)  # pyright: ignore[reportArgumentType]


def _row(module: nn.Module, entry: _Entry, x: Tensor) -> Tensor:
    """x [..., in / n] -> [..., out]: parts are summed, then the whole bias is added once."""
    entry.leave()
    total: Tensor = _Sum.apply(functional.linear(x, _matrix(module)), entry.place)  # pyright: ignore[reportAssignmentType]
    bias: Tensor | None = module.bias  # pyright: ignore[reportAssignmentType]
    return total if bias is None else total + bias.to(total.dtype)


def _gathered(module: nn.Module, place: Place, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out]: each rank computes a part of the features, all get the whole."""
    part = functional.linear(_Copy.apply(x, place), _matrix(module), module.bias)  # pyright: ignore[reportArgumentType]
    return _Gather.apply(part, place)  # pyright: ignore[reportReturnType]


def _vocabulary(module: nn.Embedding, place: Place, ids: Tensor) -> Tensor:
    """ids [...] -> [..., width]: each rank looks up the ids of its rows, the rest is zero."""
    rows = module.weight.shape[0]
    first = place.index * rows
    # An id below or above the whole vocabulary is left to raise on the first and the last rank.
    outside = torch.zeros_like(ids, dtype=torch.bool)
    if place.index > 0:
        outside |= ids < first
    if place.index < place.of - 1:
        outside |= ids >= first + rows
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + rows else None
    found = functional.embedding((ids - first).masked_fill(outside, 0), module.weight, padding)
    return _Sum.apply(found.masked_fill(outside.unsqueeze(-1), 0), place)  # pyright: ignore[reportReturnType]


def cut(
    model: nn.Module, plan: TensorPlan, group: dist.ProcessGroup | None, index: int, of: int
) -> dict[str, TensorCut]:
    """Leave this rank's part of what the plan cuts in `model`, and make its layers work together.

    model: a copy of the skeleton; a module whose weight is None belongs to another stage and is
    passed over. group: the ranks of the axis, this one being `index`; None sends nothing. Every
    size must divide by `of`. Returns what was cut, by the name of the parameter.
    """
    place = Place(group, index, of)
    modules = dict(model.named_modules())
    dims: dict[int, int] = {}  # id of a parameter -> the dim it is cut along
    for each in plan.groups:
        entry = _Entry(place)
        for name in each.columns:
            _cut_outputs(modules[name], dims)
            _set_width(modules[name], "out_features", "nf", of)
            modules[name].forward = partial(_column, modules[name], entry)
        row = modules[each.row]
        _mark(dims, row.weight, 0 if is_conv1d(row) else 1)
        _set_width(row, "in_features", "nx", of)
        row.forward = partial(_row, row, entry)
        for name, attribute in each.heads:
            setattr(modules[name], attribute, getattr(modules[name], attribute) // of)
    for name in plan.gathered:
        _cut_outputs(modules[name], dims)
        modules[name].forward = partial(_gathered, modules[name], place)
    for name in plan.embeddings:
        _mark(dims, modules[name].weight, 0)
        modules[name].forward = partial(_vocabulary, modules[name], place)  # pyright: ignore[reportArgumentType]
    return _replace(model, dims, place)


def _cut_outputs(module: nn.Module, dims: dict[int, int]) -> None:
    _mark(dims, module.weight, 1 if is_conv1d(module) else 0)
    _mark(dims, module.bias, 0)


def _mark(dims: dict[int, int], param: Any, dim: int) -> None:
    if param is not None:
        assert dims.setdefault(id(param), dim) == dim, "a tied parameter has one cut"


def _set_width(module: nn.Module, ours: str, theirs: str, of: int) -> None:
    """Code that asks a layer for its width gets that of the part."""
    name = theirs if is_conv1d(module) else ours
    if hasattr(module, name):
        setattr(module, name, getattr(module, name) // of)


def _replace(model: nn.Module, dims: dict[int, int], place: Place) -> dict[str, TensorCut]:
    """Put parts in the place of the parameters, one for each, so that ties stay ties."""
    parts: dict[int, nn.Parameter] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in dims:
                continue
            if id(param) not in parts:
                dim = dims[id(param)]
                part = param.detach().narrow(dim, *place.part(param.shape[dim]))
                parts[id(param)] = nn.Parameter(
                    part.clone(memory_format=torch.contiguous_format), param.requires_grad
                )
            setattr(module, name, parts[id(param)])
    return {
        names[key]: TensorCut(dims[key], place.index, place.of) for key in names if key in parts
    }
