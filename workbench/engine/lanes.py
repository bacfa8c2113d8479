"""Lanes: what goes from one rank to another in a move, as messages in rounds.

Each pair of ranks exchanges its messages in rounds of a fixed size, two rounds in flight, so that
the memory beyond the pieces is bounded and no order of waiting can block: a rank waits for round n
only after it has posted round n + 1, so whatever it waits for was posted before its peer waited.

Messages follow from sizes and dtypes alone. Both ends cut alike, and each decides for itself
whether a message is the memory of a piece or goes through a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engine.shards import Box
from workbench.engine.state import Piece

# From this size on, a message of its own costs less than a copy into a common one.
DIRECT_BYTES = 256 << 10
# Where a message begins in a buffer, so that it can be seen as any dtype.
ALIGN_BYTES = 16


@dataclass(frozen=True)
class Part:
    """A part of a piece, as cuts of its local tensor: (dim, first, count); none where it is all."""

    cuts: tuple[tuple[int, int, int], ...]
    numel: int
    dtype: torch.dtype
    nbytes: int


# A key, and the part of its piece.
Item = tuple[str, Part]


@dataclass(frozen=True)
class Message:
    """What goes in one piece: parts of one dtype, one after the other."""

    items: Sequence[Item]
    nbytes: int

    @property
    def room_bytes(self) -> int:
        """Bytes in a buffer, where the next message can be seen as any dtype."""
        return -(-self.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def part_of(box: Box, within: Box, dtype: torch.dtype) -> Part:
    """The part that a box is of a piece whose box is `within`."""
    sides = zip(box.offset, box.shape, within.offset, within.shape, strict=True)
    cuts = [
        (dim, first - base, count)
        for dim, (first, count, base, size) in enumerate(sides)
        if count != size
    ]
    numel = box.numel
    return Part(tuple(cuts), numel, dtype, numel * dtype.itemsize)


def pieces_of(box: Box, most: int) -> Iterator[Box]:
    """The box cut by rows into boxes of at most so many elements, by columns where a row is more.

    Parts of what is contiguous are contiguous.
    """
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if dim is None or box.numel <= most:
        yield box
        return
    step = max(most // (box.numel // box.shape[dim]), 1)
    for first in range(0, box.shape[dim], step):
        count = min(step, box.shape[dim] - first)
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        yield from pieces_of(Box(offset, (*box.shape[:dim], count, *box.shape[dim + 1 :])), most)


@dataclass
class Wire:
    """What the lanes of a move share. round_bytes: of each lane; two rounds are in flight."""

    group: dist.ProcessGroup | None
    device: torch.device
    round_bytes: int


class Lane:
    """All that goes to one peer, or comes from it."""

    def __init__(
        self,
        wire: Wire,
        peer: int,
        pieces: Mapping[str, Piece],
        items: Sequence[Item],
        sending: bool,
    ) -> None:
        self.wire, self.peer, self.sending = wire, peer, sending
        self.pieces = pieces
        self.rounds = list(_rounds(items, wire.round_bytes))
        self.num_bytes = sum(m.nbytes for messages in self.rounds for m in messages)
        self._buffers: dict[int, Tensor] = {}
        self._posted: dict[int, list[tuple[dist.Work, list[Tensor], list[Tensor]]]] = {}

    def post(self, number: int) -> None:
        """Hand the messages of a round over; nothing for a lane that has no such round."""
        if number >= len(self.rounds):
            return
        begin = 0
        posted = self._posted[number] = []
        for message in self.rounds[number]:
            views = [view(self.pieces, item) for item in message.items]
            flat, places = views[0], []
            direct = flat.is_contiguous() and flat.device == self.wire.device
            if len(views) > 1 or not direct:
                flat = self._buffer(number % 2)[begin : begin + message.nbytes].view(flat.dtype)
                begin += message.room_bytes
                places, views = _paired(flat, views)
            if self.sending:
                copy_all(places, views)
                work = dist.isend(flat, group=self.wire.group, group_dst=self.peer)
            else:
                work = dist.irecv(flat, group=self.wire.group, group_src=self.peer)
            assert work is not None  # it is for ranks outside of the group
            posted.append((work, places, views))

    def finish(self, number: int) -> None:
        """Wait for the messages of a round, and copy what came to where it belongs."""
        for work, places, views in self._posted.pop(number, ()):
            work.wait()
            if not self.sending:
                copy_all(views[: len(places)], places)

    def _buffer(self, which: int) -> Tensor:
        # Kept for the rounds to come: fresh memory costs a page fault for each 4 KB.
        if which not in self._buffers:
            most = max(sum(m.room_bytes for m in messages) for messages in self.rounds)
            self._buffers[which] = torch.empty(most, dtype=torch.uint8, device=self.wire.device)
        return self._buffers[which]


def run(lanes: Sequence[Lane], meanwhile: Callable[[], int]) -> int:
    """All rounds of all lanes; returns what `meanwhile`, called with the first under way, does."""
    for lane in lanes:
        lane.post(0)
    result = meanwhile()
    for number in range(max((len(lane.rounds) for lane in lanes), default=0)):
        for lane in lanes:
            lane.post(number + 1)
        for lane in lanes:
            lane.finish(number)
    return result


def view(pieces: Mapping[str, Piece], item: Item) -> Tensor:
    """The memory of a part."""
    found = pieces[item[0]].local
    for dim, first, count in item[1].cuts:
        found = found.narrow(dim, first, count)
    return found


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in one call: many are small."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _paired(flat: Tensor, views: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Places in a message and the views that belong there, of the same shapes."""
    places = list(flat.split([found.numel() for found in views]))
    for index, found in enumerate(views):
        if found.dim() == 1:
            continue
        if found.is_contiguous():
            views[index] = found.view(-1)
        else:
            places[index] = places[index].view(found.shape)
    return places, views


def _rounds(items: Sequence[Item], most_bytes: int) -> Iterator[list[Message]]:
    """The messages, as many a round as fit in most_bytes."""
    messages, size = [], 0
    for message in _messages(items, most_bytes):
        if messages and size + message.room_bytes > most_bytes:
            yield messages
            messages, size = [], 0
        messages.append(message)
        size += message.room_bytes
    if messages:
        yield messages


def _messages(items: Sequence[Item], most_bytes: int) -> Iterator[Message]:
    """Large parts alone, to need no copy where contiguous; small ones of a dtype together."""
    batch, size, dtype = [], 0, None
    for item in items:
        part = item[1]
        if part.nbytes >= DIRECT_BYTES:
            yield Message([item], part.nbytes)
            continue
        if batch and (size + part.nbytes > most_bytes or part.dtype != dtype):
            yield Message(batch, size)
            batch, size = [], 0
        batch.append(item)
        size += part.nbytes
        dtype = part.dtype
    if batch:
        yield Message(batch, size)
