"""Carry: a training's state into a trainer just built, from wherever the ranks hold it.

A switch carries it from one layout to another; a recovery from the ranks that are left to those
that took the places of lost ones. Both are the same move. A recovery may find that the ranks that
are left do not hold the whole any more; then they go back to a step of which copies were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workbench.engine import state
from workbench.engine.copies import About, Block, Entry, Version, send_and_receive, size_of
from workbench.engine.kept import Kept
from workbench.engine.moves import Moved, check, move
from workbench.engine.slots import make_slots
from workbench.engine.trainer import Trainer
from workbench.errors import CheckpointError


@dataclass(frozen=True)
class _Mine:
    """What a rank tells of what it holds; step: -1 for nothing. copies: by step."""

    step: int
    samples: int
    slots: dict[str, dict[str, Any]]
    settings: list[dict[str, Any]]
    copies: dict[int, About]


@dataclass(frozen=True)
class Carried:
    """What became of it. is_copy: what was kept of an earlier step counted."""

    moved: Moved
    is_copy: bool


def carry(
    kept: Kept | None, new: Trainer, versions: Mapping[int, Version] | None = None
) -> Carried | None:
    """Fill a new trainer from what all ranks have kept; collective over its world.

    kept: what this rank held, under any layout, or nothing. versions: copies of earlier steps, its
    own and a peer's. The latest step counts that the ranks together hold the whole of; what is of
    another one does not. None: no rank has anything.

    Raises CheckpointError on all ranks when the ranks together hold no step whole, with what was
    kept unchanged.
    """
    versions = versions or {}
    copies = {step: one.about for step, one in versions.items()}
    mine = _Mine(-1, 0, {}, [], copies)
    if kept is not None:
        mine = _Mine(kept.step, kept.samples, kept.slots, kept.settings, copies)
    every: list[Any] = [None] * new.world.size
    torch.distributed.all_gather_object(every, mine)
    latest = max(one.step for one in every)
    steps = sorted({step for one in every for step in one.copies}, reverse=True)
    first: CheckpointError | None = None
    if latest >= 0:
        try:
            return Carried(_from_kept(kept, new, every, is_last=not steps), False)
        except CheckpointError as error:
            first = error
    for step in steps:
        try:
            return Carried(_from_copies(versions.get(step), new, every, step), True)
        except CheckpointError as error:
            first = first or error
    if first is not None:
        raise first
    return None


def _from_kept(kept: Kept | None, new: Trainer, every: list[_Mine], *, is_last: bool) -> Moved:
    """From the latest step that any rank stands at. is_last: there is nothing else to try."""
    latest = max(every, key=lambda one: one.step)
    _slots(new, [one.slots for one in every if one.step == latest.step])
    have = dict(kept.pieces) if kept is not None and kept.step == latest.step else {}
    if not is_last:  # what is taken over is lost to the next try
        check(have, state.take(new.held, new.optimizer, create=False))
    _take_over(have, new)
    return _filled(have, new, latest.settings, (latest.step, latest.samples))


def _from_copies(version: Version | None, new: Trainer, every: list[_Mine], step: int) -> Moved:
    """From what was kept of a step, own parts and those of ranks that are gone."""
    told = [one.copies.get(step) for one in every]
    some = next(one for one in told if one is not None)
    have = {} if version is None else version.own.pieces()
    handed = _handed_over(told, some.senders)
    for keeper, receiver, entries in handed:
        if new.world.rank == keeper:
            assert version is not None
            assert version.peer is not None
            send_and_receive([(receiver, version.peer.memory, True)], keeper, None)
        elif new.world.rank == receiver:
            room = torch.empty(size_of(entries), dtype=torch.uint8, device=new.world.device)
            send_and_receive([(keeper, room, False)], receiver, None)
            have = Block(receiver, entries, room).pieces()
    # A stage that is gone knew of parameters that nobody else has.
    _slots(new, [kinds for one in told if one for kinds in (one.peer_slots, one.slots)])
    # What lies here stays as it was: another rank may be lost before the next copy.
    return _filled(have, new, some.settings, (step, some.samples))


def _handed_over(
    told: list[About | None], senders: tuple[int, ...]
) -> list[tuple[int, int, tuple[Entry, ...]]]:
    """(who has it, who gets it, what) for each part whose rank is gone.

    Raises CheckpointError where nobody has it, or nobody is free to take it.
    """
    there = {one.owner for one in told if one is not None}
    free = [rank for rank, one in enumerate(told) if one is None]
    peers = {
        one.peer[0]: (rank, one.peer[1])
        for rank, one in enumerate(told)
        if one is not None and one.peer is not None
    }
    found = []
    for owner in senders:
        if owner in there:
            continue
        if owner not in peers:
            raise CheckpointError(
                f"What rank {owner} held is gone with the rank that kept the copy. "
                "Restore a checkpoint."
            )
        if not free:
            raise CheckpointError(
                f"No new rank is there for the copy of rank {owner}. Restore a checkpoint."
            )
        receiver = owner if owner in free else free[0]
        free.remove(receiver)
        keeper, entries = peers[owner]
        found.append((keeper, receiver, entries))
    return found


def _slots(new: Trainer, found: list[dict[str, dict[str, Any]]]) -> None:
    known: dict[str, dict[str, Any]] = {}
    for one in found:
        known |= one
    new.optimizer.state.clear()
    make_slots(new.held, new.optimizer, known)


def _filled(
    have: Mapping[str, state.Piece],
    new: Trainer,
    settings: list[dict[str, Any]],
    position: tuple[int, int],
) -> Moved:
    """position: steps and samples taken."""
    want = state.take(new.held, new.optimizer, create=False)
    moved = move(have, want)
    state.put_numbers(new.held, new.optimizer, want)
    state.set_settings(new.optimizer, new.blueprint.groups, settings)
    new.step, new.samples = position
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
