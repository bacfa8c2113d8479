"""Carry: a training's state into a trainer just built, from wherever the ranks hold it.

A switch carries it from one layout to another; a recovery from the ranks that are left to those
that took the places of lost ones. Both are the same move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workbench.engine import state
from workbench.engine.kept import Kept
from workbench.engine.moves import Moved, move
from workbench.engine.slots import make_slots
from workbench.engine.trainer import Trainer


@dataclass(frozen=True)
class _Mine:
    """What a rank tells of what it holds; step: -1 for nothing."""

    step: int
    samples: int
    slots: dict[str, dict[str, Any]]
    settings: list[dict[str, Any]]


def carry(kept: Kept | None, new: Trainer) -> Moved | None:
    """Fill a new trainer from what all ranks have kept; collective over its world.

    kept: what this rank held, under any layout, or nothing. The latest step that any rank has
    counts; what is of an earlier one does not. None: no rank has anything.

    Raises CheckpointError on all ranks when the ranks together do not hold the whole, with what
    was kept unchanged.
    """
    mine = _Mine(-1, 0, {}, [])
    if kept is not None:
        mine = _Mine(kept.step, kept.samples, kept.slots, kept.settings)
    every: list[Any] = [None] * new.world.size
    torch.distributed.all_gather_object(every, mine)
    latest = max(every, key=lambda one: one.step)
    if latest.step < 0:
        return None
    known: dict[str, dict[str, Any]] = {}
    for found in every:
        if found.step == latest.step:
            known |= found.slots
    make_slots(new.held, new.optimizer, known)
    have = dict(kept.pieces) if kept is not None and kept.step == latest.step else {}
    _take_over(have, new)
    want = state.take(new.held, new.optimizer, create=False)
    moved = move(have, want)
    state.put_numbers(new.held, new.optimizer, want)
    state.set_settings(new.optimizer, new.blueprint.groups, latest.settings)
    new.step, new.samples = latest.step, latest.samples
    return moved


def _take_over(have: dict[str, state.Piece], new: Trainer) -> None:
    """What lies alike in both layouts is not copied: the new one gets the old one's memory."""
    for name, param in new.held.named_parameters():
        if isinstance(param, DTensor):
            continue  # FSDP keeps its own memory
        box = new.held.local(name, param)[1]
        kept = have.get(f"model/{name}")
        if kept is None or kept.box != box or not _is_own(kept.local):
            continue
        param.data = kept.local
        slots_of = new.optimizer.state.get(param, {})
        for key, value in slots_of.items():
            kept = have.get(f"optim/{name}/{key}")
            if isinstance(value, Tensor) and kept is not None and _is_own(kept.local):
                slots_of[key] = kept.local if kept.local.shape == value.shape else value


def _is_own(tensor: Tensor) -> bool:
    """Whether it is all of its memory: a view would keep the rest of it."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
