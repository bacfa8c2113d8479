"""Moves: state from one layout to another in memory, rank to rank.

All ranks tell each other which boxes they have and want, and each makes the same plan. What a rank
has itself it copies; every other element it wants crosses the wire once, from the replica that has
least to send so far. Keys with the same boxes on all ranks (a parameter and its moments, the same
weight of equal layers) are planned together, so that planning costs little for each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.cells import Cell, cells_wanted
from workbench.engine.lanes import Item, Lane, Part, Wire, copy_all, part_of, pieces_of, run, view
from workbench.engine.shards import Box
from workbench.engine.state import Piece
from workbench.errors import CheckpointError

# Larger rounds touch more fresh memory than they save in waits.
MOST_ROUND_BYTES = 2 << 20


@dataclass(frozen=True)
class Moved:
    """What one rank did in a move.

    copied_bytes: within the rank. sent_to_bytes: sent_bytes by receiving rank of the group.
    plan_s: with the wait for the last rank to come.
    """

    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    plan_s: float
    transfer_s: float
    sent_to_bytes: tuple[int, ...]


def move(
    have: Mapping[str, Piece],
    want: Mapping[str, Piece],
    *,
    group: dist.ProcessGroup | None = None,
    buffer_bytes: int = 32 << 20,
) -> Moved:
    """Fill the wanted pieces, in place, from what the ranks have; collective over the group.

    A rank may have or want nothing, and keys that others lack. Buffers come from the first rank
    that has them, to all. Pieces that are the same memory in both are left alone. Memory beyond
    the pieces stays under 2 * buffer_bytes.

    Raises the same CheckpointError on all ranks, with nothing sent, when a wanted element is held
    by no rank, or a key is of several shapes or dtypes.
    """
    began_s = time.perf_counter()
    rank, size = _place(group)
    # A pair of ranks has two lanes, each with two rounds in flight.
    round_bytes = max(min(buffer_bytes // (2 * max(size - 1, 1)), MOST_ROUND_BYTES), 1)
    plan = _planned(have, want, group, round_bytes)
    planned_s = time.perf_counter()
    wire = Wire(group, _device(have, want), round_bytes)
    lanes = [Lane(wire, peer, have, items, True) for peer, items in plan.sent.items()]
    lanes += [Lane(wire, peer, want, items, False) for peer, items in plan.received.items()]
    # The lower rank of a pair sends first: right also for a backend that keeps to the order.
    lanes.sort(key=lambda lane: (lane.peer, lane.sending == (lane.peer < rank)))
    with torch.no_grad():
        copied_bytes = run(lanes, lambda: _copy(have, want, plan.kept))
    ended_s = time.perf_counter()
    sent_to = [0] * size
    for lane in lanes:
        if lane.sending:
            sent_to[lane.peer] = lane.num_bytes
    return Moved(
        sent_bytes=sum(sent_to),
        received_bytes=sum(lane.num_bytes for lane in lanes if not lane.sending),
        copied_bytes=copied_bytes,
        plan_s=planned_s - began_s,
        transfer_s=ended_s - planned_s,
        sent_to_bytes=tuple(sent_to),
    )


def check(have: Mapping[str, Piece], want: Mapping[str, Piece]) -> None:
    """Raises what `move` would over all ranks, with nothing sent; collective."""
    _planned(have, want, None, MOST_ROUND_BYTES)


def _planned(
    have: Mapping[str, Piece],
    want: Mapping[str, Piece],
    group: dist.ProcessGroup | None,
    round_bytes: int,
) -> _Plan:
    rank, size = _place(group)
    plan = _Plan(rank, round_bytes, [0] * size)
    for keys in _groups(have, want, group, size):
        plan.add(keys)
    return plan


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if _is_group() else (0, 1)


@dataclass(frozen=True)
class _Keys:
    """Keys of the same shape and dtype, with the same boxes on all ranks."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    haves: tuple[Box | None, ...]
    wants: tuple[Box | None, ...]
    buffer: bool

    @property
    def order(self) -> tuple:
        """By dtype, as messages are; the largest first: the small ones then even the loads out."""
        return str(self.dtype), -torch.Size(self.shape).numel(), self.names[0]


def _is_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _groups(
    have: Mapping[str, Piece],
    want: Mapping[str, Piece],
    group: dist.ProcessGroup | None,
    size: int,
) -> list[_Keys]:
    """All keys that any rank wants, in the order they are planned and sent; collective.

    Raises CheckpointError for a key that is not the same everywhere.
    """
    # Few pieces are of different boxes: those are sent once, and each key as two numbers.
    numbers: dict[tuple, int] = {}
    rows = {key: [numbers.setdefault(_spec(p), len(numbers)), -1] for key, p in have.items()}
    for key, piece in want.items():
        rows.setdefault(key, [-1, -1])[1] = numbers.setdefault(_spec(piece), len(numbers))
    mine = list(numbers), rows
    everyone: list[Any] = [mine]
    if size > 1:
        everyone = [None] * size
        dist.all_gather_object(everyone, mine, group=group)
    absent = (-1, -1)
    signatures: dict[str, list[Sequence[int]]] = {}
    for rank, (_, told) in enumerate(everyone):
        for key, pair in told.items():
            signatures.setdefault(key, [absent] * size)[rank] = tuple(pair)
    same: dict[tuple, list[str]] = {}
    for key, signature in signatures.items():
        same.setdefault(tuple(signature), []).append(key)
    specs = [told for told, _ in everyone]
    found = [_keys(sorted(names), signature, specs) for signature, names in same.items()]
    return sorted((keys for keys in found if any(keys.wants)), key=lambda keys: keys.order)


def _spec(piece: Piece) -> tuple:
    local = piece.local
    return tuple(piece.offset), tuple(local.shape), tuple(piece.shape), local.dtype, piece.buffer


def _keys(names: list[str], signature: tuple, specs: list[list[tuple]]) -> _Keys:
    """The group that a signature means. Raises CheckpointError when it is of two kinds."""
    sides: list[list[Box | None]] = [[], []]
    kinds: dict[tuple, int] = {}
    is_buffer = False
    for rank, pair in enumerate(signature):
        for side, number in zip(sides, pair, strict=True):
            if number < 0:
                side.append(None)
                continue
            offset, local_shape, shape, dtype, buffer = specs[rank][number]
            side.append(Box(offset, local_shape))
            kinds.setdefault((shape, dtype), rank)
            is_buffer |= buffer
    if len(kinds) > 1:
        said = [
            f"{str(dtype).removeprefix('torch.')} {list(shape)} on rank {rank}"
            for (shape, dtype), rank in kinds.items()
        ]
        raise CheckpointError(
            f"{names[0]} is {' and '.join(said)}, so it cannot be moved between them. "
            "Build both layouts from one recipe."
        )
    ((shape, dtype),) = kinds
    return _Keys(tuple(names), shape, dtype, tuple(sides[0]), tuple(sides[1]), is_buffer)


@dataclass
class _Plan:
    """One rank's part of the plan; every rank goes through the whole, so that they agree.

    kept: (key, part it has, part it wants). sent, received: by peer, in the order of the wire.
    """

    rank: int
    most_bytes: int
    loads: list[int]
    kept: list[tuple[str, Part, Part]] = field(default_factory=list)
    sent: dict[int, list[Item]] = field(default_factory=dict)
    received: dict[int, list[Item]] = field(default_factory=dict)

    def add(self, keys: _Keys) -> None:
        """Find a source for all that is wanted of some keys.

        Raises CheckpointError when there is none.
        """
        cells = cells_wanted(keys.haves, keys.wants, keys.buffer)
        for rank, cell in cells:
            if not cell.sources:
                raise CheckpointError(
                    f"No rank has {keys.names[0]} from {list(cell.box.offset)} on for "
                    f"{list(cell.box.shape)} of its {list(keys.shape)}, and rank {rank} needs it. "
                    "Restore a checkpoint."
                )
        ends = [(rank, cell, *self._ends(rank, cell, keys)) for rank, cell in cells]
        for name in keys.names:
            for rank, cell, here, there in ends:
                source = cell.sources[0]
                if len(cell.sources) > 1:
                    source = min(cell.sources, key=self.loads.__getitem__)
                if source == rank:
                    self.kept += [(name, *both) for both in zip(here, there, strict=True)]
                    continue
                self.loads[source] += cell.numel * keys.dtype.itemsize
                if source == self.rank:
                    self.sent.setdefault(rank, []).extend([(name, part) for part in here])
                elif rank == self.rank:
                    self.received.setdefault(source, []).extend([(name, part) for part in there])

    def _ends(self, rank: int, cell: Cell, keys: _Keys) -> tuple[list[Part], list[Part]]:
        """A cell as parts of what this rank has, and of what it wants, where it does.

        What crosses the wire is cut so that each part fits in a round.
        """
        here = keys.haves[self.rank] if self.rank in cell.sources else None
        there = keys.wants[self.rank] if self.rank == rank else None
        most = max(self.most_bytes // keys.dtype.itemsize, 1)
        boxes = [cell.box] if cell.sources == (rank,) else list(pieces_of(cell.box, most))
        return (
            [] if here is None else [part_of(box, here, keys.dtype) for box in boxes],
            [] if there is None else [part_of(box, there, keys.dtype) for box in boxes],
        )


def _device(*sides: Mapping[str, Piece]) -> torch.device:
    """Where messages lie: where the model is. Optimizers keep their step counts on the CPU."""
    devices = {piece.local.device for pieces in sides for piece in pieces.values()}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _copy(
    have: Mapping[str, Piece], want: Mapping[str, Piece], kept: Sequence[tuple[str, Part, Part]]
) -> int:
    """Copy what stays on the rank, but what is the same memory; bytes copied."""
    sources, targets, copied_bytes = [], [], 0
    for key, here, there in kept:
        source, target = view(have, (key, here)), view(want, (key, there))
        if source.data_ptr() != target.data_ptr() or source.stride() != target.stride():
            sources.append(source)
            targets.append(target)
            copied_bytes += here.nbytes
    copy_all(targets, sources)
    return copied_bytes
