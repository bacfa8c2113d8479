"""One step that nobody took: spans of every rank as a schedule would lay them, made in no time.

Durations are in units in which forward and backward of the whole model are 3 on one rank; `step`
scales them. Parts of each rank sum to its wall, and the waiting is what the schedule leaves.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from workbench.spec.layout import Layout

PARTS = ("forward", "backward", "optimizer", "data", "wire", "idle", "other")
FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER = 1.0, 2.0, 0.12, 0.02, 0.03
HOP, REDUCE, SLICE = 0.012, 0.14, 0.03
PARAMETER_BYTES = 1_129_512
Op = tuple[str, int, int]


def order(layout: Layout, place: int) -> deque[Op]:
    """What a pipeline rank does, in order: kind, stage, microbatch."""
    held, micros = layout.order.stages_of(place, layout.pp), range(layout.microbatches)
    if layout.schedule == "1f1b":
        ahead = min(layout.pp - place - 1, layout.microbatches)
        steady = layout.microbatches - ahead
        ops = [("forward", place, n) for n in range(ahead)]
        for n in range(steady):
            ops += [("forward", place, ahead + n), ("backward", place, n)]
        return deque(ops + [("backward", place, steady + n) for n in range(ahead)])
    ops = [("forward", stage, n) for stage in held for n in micros]
    return deque(ops + [("backward", stage, n) for stage in reversed(held) for n in micros])


class Lane:
    """The spans of one rank, laid end to end."""

    def __init__(self) -> None:
        self.spans: list[list] = []
        self.under: list[list] = []
        self.now = 0.0

    def add(self, kind: str, length: float, stage: int | None, micro: int | None, what: str = ""):
        """One more span, when it takes time at all."""
        if length > 1e-9:
            self.spans.append([kind, self.now, self.now + length, stage, micro, what])
            self.now += length

    def wait(self, until: float, what: str) -> None:
        """Be idle until then."""
        self.add("idle", until - self.now, None, None, what)

    def work(self, layout: Layout, op: Op, length: float) -> None:
        """Compute; slices of a tensor meet in the middle and at the end."""
        if layout.tp == 1:
            self.add(op[0], length, op[1], op[2])
            return
        for _ in range(2):
            self.add(op[0], length / 2, op[1], op[2])
            self.add("wire", SLICE / layout.microbatches, op[1], op[2], "tp all-reduce")


def lay(layout: Layout, ranks: int, number: int, slow: Mapping[int, float]) -> dict[int, Lane]:
    """The lanes of all ranks that take part; slow: so much later by rank."""
    lanes = {rank: Lane() for rank in range(min(ranks, layout.world_size))}
    where = {rank: layout.coordinate(rank) for rank in lanes}
    lines: dict[tuple, dict[int, int]] = defaultdict(dict)
    for rank, at in where.items():
        lines[at["dp_replicate"], at["dp_shard"], at["tp"]][at["pp"]] = rank
    for line in lines.values():
        pipeline(layout, {place: lanes[rank] for place, rank in line.items()}, number, slow, line)
    groups: dict[tuple, list[int]] = defaultdict(list)
    for rank, at in where.items():
        groups[at["pp"], at["tp"]].append(rank)
    for group in groups.values():
        meet(layout, [lanes[rank] for rank in group])
    for lane in lanes.values():
        lane.add("optimizer", OPTIMIZER / layout.pp / layout.tp / layout.dp_shard, None, None)
        lane.add("other", OTHER, None, None)
    end = max(lane.now for lane in lanes.values())
    for lane in lanes.values():
        lane.wait(end, "pp recv" if layout.pp > 1 else "")
    return lanes


def pipeline(
    layout: Layout,
    lanes: dict[int, Lane],
    number: int,
    slow: Mapping[int, float],
    line: dict[int, int],
) -> None:
    """Forward and backward of one share of the batch over its pipeline ranks."""
    done: dict[Op, float] = {}
    queues = {place: order(layout, place) for place in lanes}
    cost = {"forward": FORWARD, "backward": BACKWARD}
    scale = 1 / layout.num_stages / layout.microbatches / layout.tp
    for place, lane in lanes.items():
        lane.add("data", DATA, None, None)
        lane.add("other", slow.get(line[place], 0.0), None, None)
        if layout.dp_shard > 1:
            lane.add("wire", REDUCE / 3, None, None, "dp_shard all-gather")
    while any(queues.values()):
        for place, queue in queues.items():
            while queue and (ready := _ready(layout, queue[0], done)) is not None:
                kind, stage, micro = op = queue.popleft()
                lane = lanes[place]
                if ready[1] != place:
                    lane.wait(ready[0], "pp recv")
                    lane.add("wire", HOP, stage, micro, "pp recv")
                wobble = 1 + 0.06 * math.sin(7.1 * line[place] + 3.3 * micro + 1.7 * number)
                begin = lane.now
                lane.work(layout, op, cost[kind] * scale * wobble)
                if layout.dp_shard > 1 and micro == 0:
                    lane.under.append(["dp_shard all-gather", begin, lane.now, PARAMETER_BYTES])
                done[op] = lane.now


def _ready(layout: Layout, op: Op, done: Mapping[Op, float]) -> tuple[float, int] | None:
    """When and on which pipeline rank the input of an operation is there."""
    kind, stage, micro = op
    last = layout.num_stages - 1
    if kind == "forward":
        before = ("forward", stage - 1, micro) if stage else None
    else:
        before = ("backward", stage + 1, micro) if stage < last else ("forward", stage, micro)
    if before is None:
        return 0.0, layout.rank_of_stage(stage)
    if before not in done:
        return None
    return done[before], layout.rank_of_stage(before[1])


def meet(layout: Layout, lanes: list[Lane]) -> None:
    """Gradients are summed over the copies; most of it goes on behind the backward pass."""
    if layout.dp == 1:
        return
    axis, kind = (
        ("dp_shard", "reduce-scatter") if layout.dp_shard > 1 else ("dp_replicate", "all-reduce")
    )
    what, end = f"{axis} {kind}", max(lane.now for lane in lanes)
    for lane in lanes:
        backward = [span for span in lane.spans if span[0] == "backward"][-1]
        middle = (backward[1] + backward[2]) / 2
        lane.wait(end, what)
        lane.add("wire", REDUCE / layout.pp / layout.tp, None, None, what)
        num_bytes = PARAMETER_BYTES // layout.pp // layout.tp
        lane.under += [
            [what, middle, backward[2], num_bytes // 2],
            [what, backward[2], lane.now, num_bytes // 2],
        ]


@functools.lru_cache(maxsize=16)
def length(layout: Layout, ranks: int) -> float:
    """How long a step takes in these units when nobody is slow."""
    return max(lane.now for lane in lay(layout, ranks, 0, {}).values())


def sample(
    layout: Layout, ranks: int, number: int, wall_ms: float, slow_ms: Mapping[int, float]
) -> dict[str, Any]:
    """A step as the driver tells it; slow_ms: by rank, on top of wall_ms."""
    unit_ms = wall_ms / length(layout, ranks)
    lanes = lay(layout, ranks, number, {rank: ms / unit_ms for rank, ms in slow_ms.items()})

    def timed(rows: list[list]) -> list[list]:
        return [[row[0], row[1] * unit_ms, row[2] * unit_ms, *row[3:]] for row in rows]

    rows = [
        {"rank": rank, "wall_ms": lane.now * unit_ms, "spans": timed(lane.spans),
         "under": timed(lane.under)}
        for rank, lane in lanes.items()
    ]  # fmt: skip
    worst = max(slow_ms, key=lambda rank: slow_ms[rank], default=None)
    return {
        "step": number, "layout": str(layout), "wall_ms": max(row["wall_ms"] for row in rows),
        "ranks": rows, "comms": comms(rows), "clock_error_ms": 0.02,
        "straggler": None if worst is None else {"rank": worst, "ms": slow_ms[worst]},
    }  # fmt: skip


def comms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Communication by axis and kind, mean over ranks."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        for kind, begin, end, _, _, what in row["spans"]:
            if kind in ("wire", "idle") and what:
                found[what][kind] += end - begin
                found[what]["count"] += kind == "wire"
        for what, begin, end, num_bytes in row["under"]:
            found[what]["overlapped"] += end - begin
            found[what]["bytes"] += num_bytes
    out = []
    for what, sums in sorted(found.items()):
        mean = {name: value / len(rows) for name, value in sums.items()}
        mean = defaultdict(float, mean)
        num_bytes = mean["bytes"] or 16_384 * mean["count"]
        axis, op = what.split(" ")
        gbps = num_bytes / 1e6 / (mean["wire"] + mean["overlapped"]) if mean["wire"] else None
        out.append({
            "axis": axis, "op": op, "count": round(mean["count"]), "bytes": round(num_bytes),
            "exposed_ms": mean["wire"], "waiting_ms": mean["idle"],
            "overlapped_ms": mean["overlapped"],
            "bus_gbps": gbps,
        })  # fmt: skip
    return out


def by_rank(taken: Mapping[str, Any], sent_bytes: int) -> list[dict[str, Any]]:
    """The parts of a step by rank; they sum to the wall."""
    rows = []
    for row in taken["ranks"]:
        sums = dict.fromkeys(PARTS, 0.0)
        for kind, begin, end, *_ in row["spans"]:
            sums[kind] += end - begin
        parts = {f"{part}_ms": value for part, value in sums.items()}
        rows.append(
            {"rank": row["rank"], **parts, "wall_ms": row["wall_ms"], "sent_bytes": sent_bytes}
        )
    return rows
