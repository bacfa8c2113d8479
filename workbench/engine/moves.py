"""Moves: state from one layout to another in memory, rank to rank.

All ranks tell each other which boxes they have and want, and each makes the same plan. What a rank
has itself it copies; every other element it wants crosses the wire once, from the replica that has
least to send so far. Keys with the same boxes on all ranks (a parameter and its moments, the same
weight of equal layers) share one geometry, which later moves between the same layouts find again.

Each pair of ranks exchanges messages in rounds of a fixed size, two rounds in flight, so that the
memory beyond the pieces is bounded and no order of waiting can block: a rank waits for round n
only after it has posted round n + 1, so whatever it waits for was posted before its peer waited.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engine.cells import cells_wanted
from workbench.engine.shards import Box
from workbench.engine.state import Piece
from workbench.errors import CheckpointError

# From this size on, a call for each part costs less than copying it into a common message.
DIRECT_BYTES = 1 << 20
# Where parts begin in a message, so that each can be seen as its own dtype.
ALIGN_BYTES = 16


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
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if _is_group() else (0, 1)
    plan = _plan(_tables(have, want, group, size), rank)
    planned_s = time.perf_counter()
    # A pair has two directions, each with two rounds in flight.
    wire = _Wire(group, _device(have, want), max(buffer_bytes // (2 * max(size - 1, 1)), 1))
    lanes = [_Lane(wire, peer, have, parts, True) for peer, parts in plan.sent.items()]
    lanes += [_Lane(wire, peer, want, parts, False) for peer, parts in plan.received.items()]
    # The lower rank of a pair sends first: right also for a backend that keeps to the order.
    lanes.sort(key=lambda lane: (lane.peer, lane.sending == (lane.peer < rank)))
    with torch.no_grad():
        copied_bytes = _transfer(lanes, lambda: _copy(have, want, plan.kept))
    ended_s = time.perf_counter()
    sent_to = [sum(part.nbytes for part in plan.sent.get(peer, ())) for peer in range(size)]
    received = sum(part.nbytes for parts in plan.received.values() for part in parts)
    return Moved(
        sum(sent_to), received, copied_bytes, planned_s - began_s, ended_s - planned_s,
        tuple(sent_to),
    )  # fmt: skip


@dataclass
class _Key:
    """What all ranks say of one key: `kind` is (shape, dtype, bytes an element)."""

    kind: tuple[tuple[int, ...], str, int]
    haves: list[Box | None]
    wants: list[Box | None]
    buffer: bool


@dataclass(frozen=True)
class _Part:
    """A box of a key that goes from one rank to another, or stays."""

    key: str
    box: Box
    nbytes: int


@dataclass
class _Plan:
    """One rank's part: what it keeps, and by peer what it sends and receives, in order."""

    kept: list[_Part] = field(default_factory=list)
    sent: dict[int, list[_Part]] = field(default_factory=dict)
    received: dict[int, list[_Part]] = field(default_factory=dict)


def _is_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _tables(
    have: Mapping[str, Piece],
    want: Mapping[str, Piece],
    group: dist.ProcessGroup | None,
    size: int,
) -> dict[str, _Key]:
    """What all ranks have and want of each key; collective.

    Raises CheckpointError for a key that is not the same everywhere.
    """
    # Few boxes are distinct: each is sent once, and the keys by number.
    numbers: dict[tuple, int] = {}
    mine = [
        [(key, numbers.setdefault(_spec(piece), len(numbers))) for key, piece in pieces.items()]
        for pieces in (have, want)
    ]
    everyone: list[Any] = [(list(numbers), mine)]
    if size > 1:
        everyone = [None] * size
        dist.all_gather_object(everyone, (list(numbers), mine), group=group)
    tables: dict[str, _Key] = {}
    first_with: dict[str, int] = {}
    for rank, (specs, sides) in enumerate(everyone):
        boxes = [Box(offset, shape) for offset, shape, *_ in specs]
        for is_want, side in enumerate(sides):
            for key, number in side:
                _, _, kind, buffer = specs[number]
                table = tables.get(key)
                if table is None:
                    table = tables[key] = _Key(kind, [None] * size, [None] * size, buffer)
                    first_with[key] = rank
                elif table.kind != kind:
                    raise CheckpointError(
                        _differs(key, (first_with[key], table.kind), (rank, kind))
                    )
                table.buffer |= buffer
                (table.wants if is_want else table.haves)[rank] = boxes[number]
    return tables


def _spec(piece: Piece) -> tuple:
    local = piece.local
    kind = (tuple(piece.shape), str(local.dtype).removeprefix("torch."), local.element_size())
    return tuple(piece.offset), tuple(local.shape), kind, piece.buffer


def _differs(key: str, *ranks_and_kinds: tuple[int, tuple]) -> str:
    said = [f"{kind[1]} {list(kind[0])} on rank {rank}" for rank, kind in ranks_and_kinds]
    return (
        f"{key} is {' and '.join(said)}, so it cannot be moved between them. "
        "Build both layouts from one recipe."
    )


def _plan(tables: Mapping[str, _Key], me: int) -> _Plan:
    """This rank's part of the plan; every rank goes through the whole, so that they agree."""
    plan = _Plan()
    wanted = {key: table for key, table in tables.items() if any(table.wants)}
    # The largest first: the small ones then even the loads out.
    sizes = {key: -torch.Size(table.kind[0]).numel() for key, table in wanted.items()}
    loads = [0] * max((len(table.wants) for table in wanted.values()), default=0)
    for key in sorted(wanted, key=lambda key: (sizes[key], key)):
        table = wanted[key]
        for rank, cell in cells_wanted(tuple(table.haves), tuple(table.wants), table.buffer):
            if not cell.sources:
                raise CheckpointError(
                    f"No rank has {key} from {list(cell.box.offset)} on for {list(cell.box.shape)} "
                    f"of its {list(table.kind[0])}, and rank {rank} needs it. Restore a checkpoint."
                )
            source, nbytes = cell.sources[0], cell.numel * table.kind[2]
            if len(cell.sources) > 1:
                source = min(cell.sources, key=loads.__getitem__)
            if source != rank:
                loads[source] += nbytes
            if me in (source, rank):
                part = _Part(key, cell.box, nbytes)
                if source == rank:
                    plan.kept.append(part)
                elif me == source:
                    plan.sent.setdefault(rank, []).append(part)
                else:
                    plan.received.setdefault(source, []).append(part)
    return plan


def _device(*sides: Mapping[str, Piece]) -> torch.device:
    """Where messages lie: where the model is. Optimizers keep their step counts on the CPU."""
    devices = {piece.local.device for pieces in sides for piece in pieces.values()}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


@dataclass(frozen=True)
class _Wire:
    """What all lanes of a move share."""

    group: dist.ProcessGroup | None
    device: torch.device
    round_bytes: int


class _Lane:
    """All that goes to one peer, or comes from it, as messages in rounds.

    Messages and rounds follow from the sizes alone, so both ends cut alike, whether or not they
    copy through a buffer.
    """

    def __init__(
        self,
        wire: _Wire,
        peer: int,
        pieces: Mapping[str, Piece],
        parts: Sequence[_Part],
        sending: bool,
    ) -> None:
        self.wire, self.peer, self.sending = wire, peer, sending
        self.pieces = pieces
        self.rounds = list(_rounds(parts, wire.round_bytes))
        self._buffers: dict[int, Tensor] = {}
        self._posted: dict[int, list[tuple[dist.Work, list[tuple[Tensor, Tensor]]]]] = {}

    def post(self, number: int) -> None:
        """Hand the messages of a round over; nothing for a lane that has no such round."""
        if number >= len(self.rounds):
            return
        used_bytes, posted = 0, []
        for message in self.rounds[number]:
            views = [_view(self.pieces[part.key], part.box) for part in message]
            flat, staged = views[0], []
            direct = flat.is_contiguous() and flat.device == self.wire.device
            if len(views) > 1 or not direct:
                size = _wire_bytes(message)
                flat = self._buffer(number % 2)[used_bytes : used_bytes + size]
                used_bytes += _aligned(size)
                staged = list(_places(flat, views))
            if self.sending:
                for place, view in staged:
                    place.copy_(view)
                work = dist.isend(flat, group=self.wire.group, group_dst=self.peer)
            else:
                work = dist.irecv(flat, group=self.wire.group, group_src=self.peer)
            assert work is not None  # it is for ranks outside of the group
            posted.append((work, staged))
        self._posted[number] = posted

    def finish(self, number: int) -> None:
        """Wait for the messages of a round, and copy what came to where it belongs."""
        for work, staged in self._posted.pop(number, ()):
            work.wait()
            if not self.sending:
                for place, view in staged:
                    view.copy_(place)

    def _buffer(self, which: int) -> Tensor:
        # Kept for the rounds to come: fresh memory costs a page fault for each 4 KB.
        if which not in self._buffers:
            most = max(sum(_aligned(_wire_bytes(m)) for m in messages) for messages in self.rounds)
            self._buffers[which] = torch.empty(most, dtype=torch.uint8, device=self.wire.device)
        return self._buffers[which]


def _transfer(lanes: Sequence[_Lane], copy: Any) -> int:
    """Run all rounds, and the copying within the rank beside the first; what copy returns."""
    for lane in lanes:
        lane.post(0)
    copied_bytes = copy()
    for number in range(max((len(lane.rounds) for lane in lanes), default=0)):
        for lane in lanes:
            lane.post(number + 1)
        for lane in lanes:
            lane.finish(number)
    return copied_bytes


def _copy(have: Mapping[str, Piece], want: Mapping[str, Piece], kept: Sequence[_Part]) -> int:
    copied_bytes = 0
    for part in kept:
        source, target = _view(have[part.key], part.box), _view(want[part.key], part.box)
        if (source.data_ptr(), source.stride()) != (target.data_ptr(), target.stride()):
            target.copy_(source)
            copied_bytes += part.nbytes
    return copied_bytes


def _view(piece: Piece, box: Box) -> Tensor:
    return piece.local[box.slices(piece.offset)]


def _rounds(parts: Sequence[_Part], most_bytes: int) -> Iterator[list[list[_Part]]]:
    """The messages, as many a round as fit in most_bytes."""
    messages, size = [], 0
    for message in _messages(parts, most_bytes):
        more = _aligned(_wire_bytes(message))
        if messages and size + more > most_bytes:
            yield messages
            messages, size = [], 0
        messages.append(message)
        size += more
    if messages:
        yield messages


def _messages(parts: Sequence[_Part], most_bytes: int) -> Iterator[list[_Part]]:
    """Large parts alone, to need no copy where they are contiguous; small ones together."""
    batch, size = [], 0
    for whole in parts:
        for part in _pieces(whole, most_bytes):
            if part.nbytes >= DIRECT_BYTES:
                yield [part]
                continue
            if batch and size + _aligned(part.nbytes) > most_bytes:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += _aligned(part.nbytes)
    if batch:
        yield batch


def _pieces(part: _Part, most_bytes: int) -> Iterator[_Part]:
    """The part cut by rows into parts of at most most_bytes, by columns where one row is more."""
    if part.nbytes <= most_bytes or part.box.numel == 1:
        yield part
        return
    box = part.box
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    row_bytes = part.nbytes // box.shape[dim]
    step = max(most_bytes // row_bytes, 1)
    for first in range(0, box.shape[dim], step):
        rows = min(step, box.shape[dim] - first)
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], rows, *box.shape[dim + 1 :])
        yield from _pieces(_Part(part.key, Box(offset, shape), rows * row_bytes), most_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _wire_bytes(message: Sequence[_Part]) -> int:
    """Bytes of a message: those of a part alone, or of several with the gaps between them."""
    if len(message) == 1:
        return message[0].nbytes
    return sum(_aligned(part.nbytes) for part in message)


def _places(flat: Tensor, views: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each view its place in the message, as a tensor of its dtype and shape."""
    begin = 0
    for view in views:
        place = flat[begin : begin + view.numel() * view.element_size()]
        yield place.view(view.dtype).view(view.shape), view
        begin += _aligned(view.numel() * view.element_size())
