"""State: parameters, buffers and optimizer state as named boxes, whatever the layout.

Keys are `model/<fqn>` and `optim/<fqn>/<name>`. A replicated rank holds the whole box of each
key, a sharded one its rows, so one dict describes both, and moving between them is copying boxes.
A switch in memory is `moves.move` from the pieces of one layout to those of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workbench.engine.held import Held
from workbench.engine.shards import Box, local_part, memory_of
from workbench.errors import CheckpointError

# How a tensor is stepped on a device is the machine's business, not the training's.
HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")
# What differs from zero in the state of an optimizer that has seen one gradient of zeros.
AT_START = {"step": 0, "mu_product": 1}


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor: `local` is the box at `offset` of a tensor of `shape`.

    local shares memory with the model where it can (numbers in optimizer state cannot).
    buffer: kept by replicas each for itself, so that the first rank's copy counts.
    """

    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    buffer: bool = False

    @property
    def box(self) -> Box:
        """Where local lies in the whole."""
        return Box(self.offset, tuple(self.local.shape))


def take(
    model: Held | nn.Module, optimizer: Optimizer | None = None, *, create: bool = True
) -> dict[str, Piece]:
    """The pieces this rank holds, in the order of the model, sharing memory with it.

    create: make optimizer state that is not there yet as it is before the first step, so that the
    keys are the same for a fresh training and one under way. Tied parameters come once.
    """
    held = held_of(model)
    reshard(held)
    pieces = {}
    for name, param in held.named_parameters():
        pieces[f"model/{name}"] = _cut_piece(held, name, param)
    for name, buffer in held.named_buffers():
        pieces[f"model/{name}"] = _piece(buffer, buffer=True)
    if optimizer is not None:
        if create:
            _create_missing(optimizer)
        for name, param in optimized(held, optimizer):
            for key, value in optimizer.state.get(param, {}).items():
                if value is not None:
                    tensor = _as_tensor(value, f"{name}/{key}")
                    like = pieces[f"model/{name}"]
                    pieces[f"optim/{name}/{key}"] = (
                        replace(like, local=memory_of(tensor))
                        if _is_alike(tensor, param)
                        else _state_piece(held, name, param, tensor, key)
                    )
    return pieces


def load(
    model: Held | nn.Module,
    optimizer: Optimizer | None,
    pieces: Mapping[str, Piece],
    *,
    create: bool = True,
) -> None:
    """Put the pieces of this same layout back; the inverse of `take`, with its `create`.

    Raises CheckpointError, with nothing changed, when keys or shapes differ.
    """
    mine = take(model, optimizer, create=create)
    problem = differences(
        {key: piece.shape for key, piece in pieces.items()},
        {key: piece.shape for key, piece in mine.items()},
    )
    if problem:
        raise CheckpointError(f"This state is of another model: {problem}.")
    for key, piece in pieces.items():
        if piece.box != mine[key].box:
            raise CheckpointError(f"This state is of another layout: {key} lies elsewhere.")
    with torch.no_grad():
        for key, piece in pieces.items():
            if mine[key].local.data_ptr() != piece.local.data_ptr():
                mine[key].local.copy_(piece.local)
    put_numbers(model, optimizer, mine)


def fill(model: Held, whole_model: nn.Module) -> None:
    """Give this rank's part the values of the whole module, which has the same names."""
    tensors = {**dict(whole_model.named_parameters()), **dict(whole_model.named_buffers())}
    with torch.no_grad():
        for key, piece in take(model).items():
            piece.local.copy_(tensors[key.removeprefix("model/")][piece.box.slices()])


def digest(model: nn.Module) -> str:
    """The same for models of the same names and shapes."""
    text = ";".join(f"{name}{tuple(tensor.shape)}" for name, tensor in model.named_parameters())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tied(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another one's tensor: each with the name it is kept under."""
    first: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[param] for name, param in every if first[param] != name}


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The FQNs in each group of the optimizer of a whole model."""
    names = {param: name for name, param in model.named_parameters()}
    if strangers := [p for g in optimizer.param_groups for p in g["params"] if p not in names]:
        raise CheckpointError(_strangers(len(strangers)))
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def settings(optimizer: Optimizer, names: list[list[str]]) -> list[dict[str, Any]]:
    """Hyper-parameters of each group as plain values; names: the whole model's FQNs in each."""
    groups = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        values = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params" and key not in HOW_NOT_WHAT
        }
        groups.append({**values, "params": members})
    return groups


def set_settings(
    optimizer: Optimizer, names: list[list[str]], groups: list[dict[str, Any]]
) -> None:
    """Give the optimizer the hyper-parameters that `settings` read from one with the same groups.

    Raises CheckpointError, with nothing changed, when the groups are not the same.
    """
    check_settings(optimizer, names, groups)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if key != "params" and key in group and key not in HOW_NOT_WHAT:
                now = group[key]
                if isinstance(now, Tensor):
                    now.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(now, tuple) else value


def check_settings(
    optimizer: Optimizer, names: list[list[str]], groups: list[dict[str, Any]]
) -> None:
    """Raises CheckpointError for hyper-parameters that are not of this optimizer."""
    if names != [group.get("params") for group in groups]:
        raise CheckpointError(
            f"The optimizer settings are of another optimizer: {len(groups)} groups there, "
            f"{len(names)} here, or other parameters in them. Use the recipe it was saved with."
        )
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if key in group and key != "params" and _kind(value) != _kind(group[key]):
                raise CheckpointError(
                    f"The optimizer settings have {key}={str(value)[:40]!r}, and here it is "
                    f"{str(group[key])[:40]!r}. Use the recipe it was saved with."
                )


def _kind(value: Any) -> str:
    """Number, flag, text, list; nothing, which any of them may be instead."""
    if isinstance(value, bool) or value is None:
        return "flag"
    if isinstance(value, (int, float, Tensor)):
        return "number"
    return "list" if isinstance(value, (list, tuple)) else type(value).__name__


def differences(
    theirs: Mapping[str, tuple[int, ...]], mine: Mapping[str, tuple[int, ...]]
) -> str | None:
    """How two sets of keys and shapes differ, shortly; None when they do not.

    Where the models differ, what follows from that for the optimizer is left out.
    """
    models = [
        {k: tuple(some[k]) for k in some if k.startswith("model/")} for some in (theirs, mine)
    ]
    if models[0] != models[1]:
        theirs, mine = models
    found = []
    if lacking := [key for key in mine if key not in theirs]:
        found.append(f"it lacks {short(lacking)}")
    if extra := [key for key in theirs if key not in mine]:
        found.append(f"it has {short(extra)} besides")
    for key in [key for key in mine if key in theirs and tuple(theirs[key]) != mine[key]][:3]:
        found.append(f"{key} has shape {list(theirs[key])} there and {list(mine[key])} here")
    return "; ".join(found) or None


def short(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def reshard(held: Held) -> None:
    """Have the parameters that the optimizer knows in their places.

    After a forward pass without a backward one (an evaluation) FSDP2 leaves the root's whole.
    """
    for part in held.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def held_of(model: Held | nn.Module) -> Held:
    """A module that no rank cuts, as what is held of it."""
    return model if isinstance(model, Held) else Held([model])


def _piece(tensor: Tensor, *, buffer: bool = False) -> Piece:
    local, box = local_part(tensor)
    return Piece(local, box.offset, tuple(tensor.shape), buffer)


def _cut_piece(held: Held, name: str, tensor: Tensor) -> Piece:
    local, box = held.local(name, tensor)
    return Piece(local, box.offset, held.shape_of(name, tensor))


def _is_alike(tensor: Tensor, param: Tensor) -> bool:
    """Whether a tensor lies on the ranks as the parameter does, for which its box is known."""
    if tensor.shape != param.shape:
        return False
    if isinstance(tensor, DTensor) and isinstance(param, DTensor):
        where = tensor.placements, tensor.device_mesh
        return where == (param.placements, param.device_mesh)
    return type(tensor) is Tensor and not isinstance(param, DTensor)


def _state_piece(held: Held, name: str, param: Tensor, tensor: Tensor, key: str) -> Piece:
    if tensor.shape == param.shape:
        return _cut_piece(held, name, tensor)
    if tensor.numel() > 1 and name in held.cuts:
        raise CheckpointError(
            f"Optimizer state {name}/{key} has shape {list(tensor.shape)} and its parameter "
            f"{list(param.shape)}: it cannot be cut with it. Use another strategy or optimizer."
        )
    return _piece(tensor)


def optimized(held: Held, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that the optimizer steps, by name. Raises CheckpointError for strangers."""
    known = {param for group in optimizer.param_groups for param in group["params"]}
    names = {param: name for name, param in held.named_parameters()}
    if strangers := known - set(names):
        raise CheckpointError(_strangers(len(strangers)))
    return ((name, param) for param, name in names.items() if param in known)


def _strangers(count: int) -> str:
    return (
        f"The optimizer has {count} parameters that are not the model's, so they have "
        "no name to be saved under. Build it from model.parameters()."
    )


def _as_tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise CheckpointError(
        f"Optimizer state {where} is a {type(value).__name__}, which cannot be saved. "
        "Use an optimizer whose state is tensors and numbers."
    )


def put_numbers(
    model: Held | nn.Module, optimizer: Optimizer | None, pieces: Mapping[str, Piece]
) -> None:
    """Put back the numbers of optimizer state, which share no memory with their pieces."""
    if optimizer is None:
        return
    for name, param in optimized(held_of(model), optimizer):
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                state[key] = type(value)(pieces[f"optim/{name}/{key}"].local.item())


def _create_missing(optimizer: Optimizer) -> None:
    """Let the optimizer make its state: one step with gradients of zero at a learning rate of 0.

    Source: torch.distributed.checkpoint.state_dict makes it so too; what that step counts is
    taken back here, so that training on from it is training from the start.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    fresh = [param for param in params if param.requires_grad and not optimizer.state.get(param)]
    if not fresh:
        return
    with _no_change(optimizer, params):
        for param in fresh:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    for param in fresh:
        state = optimizer.state.get(param, {})
        for key in state.keys() & AT_START.keys():
            if isinstance(state[key], Tensor):
                state[key].fill_(AT_START[key])
            else:
                state[key] = AT_START[key]


@contextmanager
def _no_change(optimizer: Optimizer, params: list[nn.Parameter]) -> Iterator[None]:
    """No gradients, no learning rate and no decay inside; as before afterwards."""
    grads = [param.grad for param in params]
    names = ("lr", "weight_decay")
    values = [
        {key: group[key] for key in names if key in group} for group in optimizer.param_groups
    ]
    try:
        for param in params:
            param.grad = None
        for group, kept in zip(optimizer.param_groups, values, strict=True):
            group.update(dict.fromkeys(kept, 0.0))
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, kept in zip(optimizer.param_groups, values, strict=True):
            group.update(kept)
