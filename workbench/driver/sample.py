"""Sample: one step as all ranks lived it, on one clock, with who waited for whom.

Time that a rank was held by communication is split in two. Until the last of its partners came it
was waiting, whatever the wire is; from then on it was the transfer. So a slow rank is not called
communication, and neither is the bubble of a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from workbench.spec.layout import Layout, axis_of
from workbench.spec.records import OP_FIELDS

# Bytes that a rank sends for each byte of payload among n ranks, as nccl-tests count them.
# Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
BUS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,  # the payload is one rank's part
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
# Axes where all ranks do the same work at the same time: who comes late there is slow.
ALIKE = ("dp_replicate", "dp_shard", "tp", "dp", "all")
# A lateness below this, or below this share of the step, is noise.
LEAST_LATE_MS, LEAST_LATE_SHARE = 1.0, 0.05
# Spans shorter than this part of a step are drawn with the one before.
SEEN = 2000


@dataclass(frozen=True)
class Op:
    """One operation as one rank saw it; times in seconds on the clock that all ranks share."""

    kind: str
    ranks: tuple[int, ...]
    peer: int | None
    num_bytes: int
    launched_s: float
    done_s: float | None
    key: tuple

    @property
    def partners(self) -> tuple[int, ...]:
        """The ranks that must have come for it to go on, this one among them or not."""
        return self.ranks if self.peer is None else (self.peer,)


@dataclass
class Comm:
    """Sums of one kind of communication on one axis, in one step, over its ranks."""

    count: int = 0
    num_bytes: int = 0
    exposed_s: float = 0.0
    waiting_s: float = 0.0
    under_way_s: float = 0.0
    wire_bytes: float = 0.0
    wire_s: float = 0.0
    is_done_known: bool = True
    ranks: set[int] = field(default_factory=set)


def joined(told: Sequence[Mapping[str, Any]], layout: Layout) -> dict[str, Any]:
    """What the ranks told of the same step, as the panel draws it (see docs/meters.md).

    told: by rank, `sample` of the replies of a slice.
    """
    origin_s = min(one["began_s"] - one["offset_s"] for one in told)
    ops = [_ops(rank, one) for rank, one in enumerate(told)]
    arrived = {op.key: op.launched_s for of in ops for op in of}
    comms: dict[tuple[str, str], Comm] = defaultdict(Comm)
    late_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    error_s = max(one["error_s"] for one in told)
    rows, waited_s = [], {}
    for rank, one in enumerate(told):
        shift_s = one["began_s"] - one["offset_s"] - origin_s
        split = _Split(rank, ops[rank], arrived, layout, comms, late_s, error_s)
        rows.append(_row(rank, one, shift_s, split))
        waited_s[rank] = split.waiting_s
    for rank, of in enumerate(ops):
        _count(rank, of, arrived, layout, comms)
    # From the first rank's begin to the last rank's end.
    wall_ms = max((row["spans"][-1][2] for row in rows if row["spans"]), default=0.0)
    return {
        "step": told[0]["step"],
        "layout": str(layout),
        "wall_ms": wall_ms,
        "ranks": rows,
        "comms": [_shown(axis, kind, of) for (axis, kind), of in sorted(comms.items())],
        "straggler": _straggler(late_s, waited_s, wall_ms),
        "clock_error_ms": 1e3 * error_s,
    }


def bubble(sample: Mapping[str, Any]) -> float | None:
    """The share of forward, backward and waiting that was waiting, over all ranks."""
    busy_ms = waiting_ms = 0.0
    for row in sample["ranks"]:
        for kind, begin_ms, end_ms, *_ in row["spans"]:
            busy_ms += end_ms - begin_ms if kind in ("forward", "backward") else 0.0
            waiting_ms += end_ms - begin_ms if kind == "idle" else 0.0
    return waiting_ms / (busy_ms + waiting_ms) if busy_ms else None


def _ops(rank: int, one: Mapping[str, Any]) -> list[Op]:
    """The operations of a rank, each with the key its partners know it by.

    The n-th operation of a group is the same on all its ranks; the n-th message from one rank to
    another is the n-th that the other gets.
    """
    found, counts = [], defaultdict(int)
    for values in one["ops"]:
        told = dict(zip(OP_FIELDS, values, strict=True))
        ranks, peer = tuple(told["ranks"]), told["peer"]
        if peer is None:
            group: tuple = (ranks, told["kind"])
        else:
            group = (ranks, rank, peer) if told["kind"] == "send" else (ranks, peer, rank)
        way = (group, told["kind"])
        key = (group, counts[way], rank)
        counts[way] += 1
        at_s = one["began_s"] - one["offset_s"]
        done = told["done_s"]
        found.append(
            Op(
                told["kind"], ranks, peer, told["bytes"], at_s + told["launched_s"],
                None if done is None else at_s + done, key,
            )
        )  # fmt: skip
    return found


@dataclass
class _Split:
    """Splits what one rank was held by into waiting and transfer, and books both."""

    rank: int
    ops: list[Op]
    arrived: Mapping[tuple, float]
    layout: Layout
    comms: dict[tuple[str, str], Comm]
    late_s: dict[int, dict[int, float]]
    error_s: float  # of the clocks against each other
    held_s: float = 0.0
    waiting_s: float = 0.0

    def span(self, begin_s: float, end_s: float, numbers: Sequence[int]) -> tuple[float, str]:
        """-> (when the last partner had come, what it was) of a span held by these operations."""
        last_s, who = begin_s, None
        for number in numbers:
            op = self.ops[number]
            for partner in op.partners:
                came_s = self.arrived.get((*op.key[:2], partner))
                if came_s is not None and came_s > last_s:
                    last_s, who = came_s, partner
        # Nobody waits beyond the end: what ended before a partner came did without it.
        last_s = begin_s if last_s > end_s + self.error_s else min(last_s, end_s)
        op = self.ops[numbers[-1]]
        axis = axis_of(self.layout, op.ranks)
        of = self.comms[axis, op.kind]
        for sums in (of, self):
            sums.waiting_s += last_s - begin_s
        of.exposed_s += end_s - begin_s
        self.held_s += end_s - begin_s
        # All ranks of a pipeline are no such axis: its stages end at different times.
        is_alike = axis in ALIKE and not (axis == "all" and self.layout.pp > 1)
        if is_alike and who is not None:
            self.late_s[who][self.rank] += last_s - begin_s
        return last_s, f"{axis} {op.kind}"


def _row(rank: int, one: Mapping[str, Any], shift_s: float, split: _Split) -> dict[str, Any]:
    at_s = one["began_s"] - one["offset_s"]
    wall_s = max((end_s for _, _, end_s, _ in one["spans"]), default=0.0)
    spans: list[list[Any]] = []

    def add(kind: str, begin_s: float, end_s: float, *more: Any) -> None:
        begin_ms, end_ms = (round(1e3 * (shift_s + at), 3) for at in (begin_s, end_s))
        # What cannot be seen belongs to what was before it.
        if spans and (end_s - begin_s < wall_s / SEEN or [kind, *more] == _what(spans[-1])):
            spans[-1][2] = end_ms
        elif end_ms > begin_ms:
            spans.append([kind, begin_ms, end_ms, *more])

    for kind, begin_s, end_s, detail in one["spans"]:
        if kind != "comm":
            add(kind, begin_s, end_s, *(detail or (None, None)), "")
            continue
        came_s, what = split.span(at_s + begin_s, at_s + end_s, detail)
        add("idle", begin_s, came_s - at_s, None, None, what)
        add("wire", came_s - at_s, end_s, None, None, what)
    under = [
        [
            f"{axis_of(split.layout, op.ranks)} {op.kind}",
            round(1e3 * (op.launched_s - at_s + shift_s), 4),
            round(1e3 * (op.done_s - at_s + shift_s), 4),
            op.num_bytes,
        ]
        for op in split.ops
        if op.done_s is not None
    ]
    waiting = split.waiting_s / split.held_s if split.held_s else 0.0
    return {
        "rank": rank, "wall_ms": 1e3 * wall_s, "waiting": waiting, "spans": spans, "under": under
    }  # fmt: skip


def _what(span: list[Any]) -> list[Any]:
    return [span[0], *span[3:]]


def _count(
    rank: int,
    ops: Sequence[Op],
    arrived: Mapping[tuple, float],
    layout: Layout,
    comms: dict[tuple[str, str], Comm],
) -> None:
    for op in ops:
        of = comms[axis_of(layout, op.ranks), op.kind]
        of.ranks.add(rank)
        of.count += 1
        of.num_bytes += op.num_bytes
        if op.done_s is None:
            of.is_done_known = False
            continue
        came_s = max(arrived.get((*op.key[:2], who), 0.0) for who in (*op.partners, rank))
        transfer_s = max(0.0, op.done_s - came_s)
        of.under_way_s += transfer_s
        if op.kind in BUS and transfer_s:
            of.wire_bytes += op.num_bytes * BUS[op.kind](len(op.ranks))
            of.wire_s += transfer_s


def _shown(axis: str, kind: str, of: Comm) -> dict[str, Any]:
    n = max(len(of.ranks), 1)
    exposed_s = of.exposed_s - of.waiting_s
    overlapped_s = max(0.0, of.under_way_s - exposed_s) if of.is_done_known else None
    return {
        "axis": axis,
        "op": kind,
        "count": of.count / n,
        "bytes": of.num_bytes / n,
        "exposed_ms": 1e3 * of.exposed_s / n,
        "waiting_ms": 1e3 * of.waiting_s / n,
        "overlapped_ms": None if overlapped_s is None else 1e3 * overlapped_s / n,
        "bus_gbps": of.wire_bytes / of.wire_s / 1e9 if of.wire_s else None,
    }


def _straggler(
    late_s: Mapping[int, Mapping[int, float]], waited_s: Mapping[int, float], wall_ms: float
) -> dict[str, Any] | None:
    """The rank that the others waited longest for, and how long; None when nobody did.

    What it waited for others itself is not its doing.
    """
    waits = {
        who: 1e3 * (median(by_rank.values()) - waited_s[who]) for who, by_rank in late_s.items()
    }
    if not waits:
        return None
    rank = max(waits, key=waits.__getitem__)
    if waits[rank] < max(LEAST_LATE_MS, LEAST_LATE_SHARE * wall_ms):
        return None
    return {"rank": rank, "ms": waits[rank]}
