"""Copies: what a rank alone holds of a training, in the memory of another one, too.

Every K steps each rank copies what it holds, and sends what nobody else holds to the next rank of a
ring, in which neighbours are on different hosts where there are several. Those that are left after
a loss go back to that step together with the copy, so each keeps its own part of it as well.

There are two versions of everything: the older one is written over only when all ranks are known to
have the newer whole, so that a loss at any moment leaves one whole. Memory: four times what a rank
holds. Traffic: what it alone holds, once every K steps.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engine import state
from workbench.engine.shards import Box
from workbench.engine.slots import slots
from workbench.engine.state import Piece
from workbench.engine.trainer import Trainer

# Where a piece begins in a block, so that it can be seen as any dtype.
ALIGN_BYTES = 16
# See engine/slots.py.
Slots = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A piece without its values."""

    key: str
    box: Box
    whole: tuple[int, ...]
    dtype: torch.dtype
    buffer: bool

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Block:
    """Pieces that the rank `owner` held, one after the other in memory, uint8 [bytes]."""

    owner: int
    entries: tuple[Entry, ...]
    memory: Tensor

    def pieces(self) -> dict[str, Piece]:
        """As the training has them, by key."""
        found, begin = {}, 0
        for entry in self.entries:
            values = self.memory[begin : begin + entry.nbytes].view(entry.dtype)
            local = values.view(entry.box.shape)
            found[entry.key] = Piece(local, entry.box.offset, entry.whole, entry.buffer)
            begin += _room(entry)
        return found


@dataclass(frozen=True)
class About:
    """What a rank tells of a version it has. senders: ranks that hold something alone."""

    samples: int
    slots: Slots
    settings: list[dict[str, Any]]
    senders: tuple[int, ...]
    owner: int
    peer: tuple[int, tuple[Entry, ...]] | None
    peer_slots: Slots


@dataclass(frozen=True)
class Version:
    """What a rank has of one step: its own part, and that of the rank before it in the ring."""

    step: int
    about: About
    own: Block
    peer: Block | None


@dataclass(frozen=True)
class Plan:
    """Who sends what to whom. mine: all that this rank holds, first the `num_sent` that go."""

    mine: tuple[Entry, ...]
    num_sent: int
    to: int
    source: int
    received: tuple[Entry, ...]
    received_slots: Slots
    senders: tuple[int, ...]


class Copies:
    """Those that this rank keeps, of whatever training it holds."""

    def __init__(self) -> None:
        self._versions: list[Version | None] = [None, None]
        self._memory: list[list[Tensor]] = [[], []]
        self._plan: Plan | None = None
        self._next = 0
        self._last: dict[str, Any] | None = None

    @property
    def versions(self) -> dict[int, Version]:
        """By step."""
        return {one.step: one for one in self._versions if one is not None}

    @property
    def num_bytes(self) -> int:
        """Memory that is taken."""
        return sum(memory.nbytes for pair in self._memory for memory in pair)

    def drop(self, step: int | None = None) -> None:
        """None is of this training any more; it gets new ones after its next step past `step`."""
        self.__init__()  # the memory goes, too
        self._next = 0 if step is None else step + 1

    def told(self) -> dict[str, Any] | None:
        """Of the last copy: its step, what it took the training, and what was sent to the peer.

        sent_bytes: 0 where no rank holds anything alone. None: there was none, or ranks were lost.
        """
        return self._last

    def back_to(self, step: int) -> None:
        """A training goes on from this step with other ranks: they get copies with the next."""
        for number, one in enumerate(self._versions):
            if one is not None and one.step > step:
                self._versions[number] = None
        self._next, self._plan, self._last = step + 1, None, None

    def run_steps(
        self, trainer: Trainer, num_steps: int, columns: dict[str, list], *, follows: bool
    ) -> dict[str, Any] | None:
        """`trainer.run_steps`, with a copy made where one is due; collective, as a step is."""
        every = trainer.plan.options.replicate_state
        if not every or trainer.spread.is_idle or trainer.layout.world_size == 1:
            return trainer.run_steps(num_steps, columns, follows=follows)
        sample = None
        while num_steps:
            # All ranks find the same steps, whatever they have been through.
            due = (trainer.step // every + 1) * every
            if trainer.step < self._next:
                due = min(due, self._next)
            count = min(num_steps, due - trainer.step)
            sample = trainer.run_steps(count, columns, follows=follows)
            follows, num_steps = True, num_steps - count
            if trainer.step == due:
                self.make(trainer)
        return sample

    def make(self, trainer: Trainer) -> None:
        """Copy what all ranks hold now; collective over those that train."""
        began_s = time.perf_counter()
        group = trainer.spread.everyone
        pieces = state.take(trainer.held, trainer.optimizer, create=False)
        # Who comes out of this knows that all others have come here, so have the last copy whole.
        mine = _entries(pieces), slots(trainer.held, trainer.optimizer)
        plan = self._plan = _agreed(*mine, self._plan, group)
        if plan.senders:
            self._fill(trainer, pieces, plan, group)
        else:
            self._versions, self._memory = [None, None], [[], []]
        self._last = {
            "step": trainer.step,
            "layout": str(trainer.layout),
            "took_ms": 1e3 * (time.perf_counter() - began_s),
            "sent_bytes": size_of(plan.mine[: plan.num_sent]),
        }

    def _fill(
        self,
        trainer: Trainer,
        pieces: Mapping[str, Piece],
        plan: Plan,
        group: dist.ProcessGroup | None,
    ) -> None:
        rank, versions = dist.get_rank(group), self._versions
        steps = [-1 if one is None or one.step == trainer.step else one.step for one in versions]
        number = steps.index(min(steps))
        versions[number] = None
        own, peer = self._rooms(number, plan, trainer.world.device)
        block = Block(rank, plan.mine, own)
        theirs = Block(plan.source, plan.received, peer) if plan.received else None
        with torch.no_grad():
            for key, piece in block.pieces().items():
                piece.local.copy_(pieces[key].local)
        sent = own[: size_of(plan.mine[: plan.num_sent])]
        send_and_receive([(plan.to, sent, True), (plan.source, peer, False)], rank, group)
        told = None if theirs is None else (theirs.owner, theirs.entries)
        about = About(
            trainer.samples,
            slots(trainer.held, trainer.optimizer),
            state.settings(trainer.optimizer, trainer.blueprint.groups),
            plan.senders,
            rank,
            told,
            plan.received_slots,
        )
        versions[number] = Version(trainer.step, about, block, theirs)

    def _rooms(self, number: int, plan: Plan, device: torch.device) -> list[Tensor]:
        """Memory for a version, kept from one to the next: fresh pages cost more than the copy."""
        sizes = [size_of(entries) for entries in (plan.mine, plan.received)]
        if [memory.nbytes for memory in self._memory[number]] != sizes:
            self._memory[number] = []  # before the new one is made
            self._memory[number] = [
                torch.empty(size, dtype=torch.uint8, device=device) for size in sizes
            ]
        return self._memory[number]


def size_of(entries: Sequence[Entry]) -> int:
    """Bytes of a block of these."""
    return sum(map(_room, entries))


def send_and_receive(
    messages: Sequence[tuple[int, Tensor, bool]], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Each (peer, memory, whether it is sent), all at once; empty ones are left out."""
    works: list[Any] = []
    # The lower rank of a pair sends first: right also for a backend that keeps to the order.
    for peer, memory, is_sent in sorted(messages, key=lambda m: (m[0], m[2] == (m[0] < rank))):
        if not memory.numel():
            continue
        if is_sent:
            works.append(dist.isend(memory, group=group, group_dst=peer))
        else:
            works.append(dist.irecv(memory, group=group, group_src=peer))
    for work in works:
        work.wait()


def _room(entry: Entry) -> int:
    return -(-entry.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _entries(pieces: Mapping[str, Piece]) -> tuple[Entry, ...]:
    return tuple(
        Entry(key, piece.box, tuple(piece.shape), piece.local.dtype, piece.buffer)
        for key, piece in pieces.items()
    )


def _agreed(
    mine: tuple[Entry, ...], kinds: Slots, before: Plan | None, group: dist.ProcessGroup | None
) -> Plan:
    """The plan of before where it fits all ranks, else a new one; collective."""
    is_same = before is not None and sorted(before.mine, key=_key) == sorted(mine, key=_key)
    if all(_gathered(is_same, group)):
        assert before is not None
        return before
    told = _gathered((socket.gethostname(), mine, kinds), group)
    return plan(told, dist.get_rank(group))


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def plan(told: Sequence[tuple[str, tuple[Entry, ...], Slots]], mine: int) -> Plan:
    """The plan of rank `mine`. told: of each rank its host, what it holds, and its slots."""
    ring = _ring([host for host, *_ in told])
    place = ring.index(mine)
    to, source = ring[(place + 1) % len(ring)], ring[place - 1]
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for rank, (_, entries, _) in enumerate(told):
        for entry in entries:
            boxes.setdefault(entry.key, []).append((rank, entry.box))
    alone = [_alone(rank, entries, boxes) for rank, (_, entries, _) in enumerate(told)]
    rest = tuple(entry for entry in told[mine][1] if entry not in set(alone[mine]))
    senders = tuple(rank for rank, entries in enumerate(alone) if entries)
    return Plan(
        mine=(*alone[mine], *rest),
        num_sent=len(alone[mine]),
        to=to,
        source=source,
        received=alone[source],
        received_slots=told[source][2],
        senders=senders,
    )


def _alone(
    rank: int, entries: Sequence[Entry], boxes: Mapping[str, list[tuple[int, Box]]]
) -> tuple[Entry, ...]:
    """What no other rank holds whole; with it the buffers of which this rank's copy counts."""

    def is_alone(entry: Entry) -> bool:
        others = (box for other, box in boxes[entry.key] if other != rank)
        return bool(entry.box.numel) and all(box.common(entry.box) != entry.box for box in others)

    found = [entry for entry in entries if not entry.buffer and is_alone(entry)]
    if not found:
        return ()
    firsts = (entry for entry in entries if entry.buffer and boxes[entry.key][0][0] == rank)
    return (*found, *firsts)


def _ring(hosts: Sequence[str]) -> list[int]:
    """All ranks, those of the hosts in turn."""
    turns: dict[str, int] = {}
    keyed = []
    for rank, host in enumerate(hosts):
        keyed.append((turns.setdefault(host, 0), rank))
        turns[host] += 1
    return [rank for _, rank in sorted(keyed)]


def _key(entry: Entry) -> str:
    return entry.key
