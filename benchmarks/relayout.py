"""Moving the state of a GPT between layouts, on ranks: ours, and the same bytes sent raw.

Raw is what the wire and the memory take: for each pair of ranks one message of all bytes that go
between them, posted at once, and a copy of what stays. Both write into memory just allocated, as
a new layout has to.

`python -m benchmarks.relayout` measures the move alone, without a training.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.machine import report
from workbench.engine import remote
from workbench.engine.carry import Carried
from workbench.engine.moves import Moved, move
from workbench.engine.shards import Box
from workbench.engine.state import Piece
from workbench.spec.layout import Layout, parse_layout

RANKS, RUNS = 4, 3
LAYOUTS = ("dp4", "tp4", "pp4", "fsdp4", "pp2 dp2", "dp2 tp2")
WIDTH, BLOCKS, VOCABULARY, CONTEXT = 512, 10, 256, 256


def shapes() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Parameters of a GPT of 31.8 million: shape, and the dim tensor parallelism cuts."""
    block = {
        "ln1.weight": ((WIDTH,), None), "ln1.bias": ((WIDTH,), None),
        "qkv.weight": ((3 * WIDTH, WIDTH), 0), "qkv.bias": ((3 * WIDTH,), 0),
        "proj.weight": ((WIDTH, WIDTH), 1), "proj.bias": ((WIDTH,), None),
        "ln2.weight": ((WIDTH,), None), "ln2.bias": ((WIDTH,), None),
        "up.weight": ((4 * WIDTH, WIDTH), 0), "up.bias": ((4 * WIDTH,), 0),
        "down.weight": ((WIDTH, 4 * WIDTH), 1), "down.bias": ((WIDTH,), None),
    }  # fmt: skip
    found: dict[str, tuple[tuple[int, ...], int | None]] = {
        "tokens.weight": ((VOCABULARY, WIDTH), 0),
        "places.weight": ((CONTEXT, WIDTH), None),
        "head.weight": ((VOCABULARY, WIDTH), 0),
    }
    for index in range(BLOCKS):
        found |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    return found


def box_of(layout: Layout, rank: int, name: str, shape: tuple[int, ...], dim: int | None) -> Any:
    """What a rank holds of a parameter: its stage's, its part of dim, its rows of that."""
    where = layout.coordinate(rank)
    block = re.findall(r"blocks\.(\d+)", name)
    stage = int(block[0]) * layout.pp // BLOCKS if block else (layout.pp - 1) * (name[0] == "h")
    if stage != where["pp"]:
        return None
    offset, size = [0] * len(shape), list(shape)
    if dim is not None:
        size[dim] //= layout.tp
        offset[dim] = size[dim] * where["tp"]
    chunk = -(-size[0] // layout.dp_shard)
    begin = min(chunk * where["dp_shard"], size[0])
    offset[0], size[0] = offset[0] + begin, min(chunk, size[0] - begin)
    return Box(tuple(offset), tuple(size))


def synthetic(text: str, rank: int, *, filled: bool) -> dict[str, Piece]:
    """The parameters and AdamW's state of a rank under a layout, 382 MB in all."""
    found = {}
    for name, (shape, dim) in shapes().items():
        box = box_of(parse_layout(text), rank, name, shape, dim)
        if box is None:
            continue
        for key in (f"model/{name}", f"optim/{name}/exp_avg", f"optim/{name}/exp_avg_sq"):
            # By position, so that what arrives can be told right from wrong.
            local = torch.empty(box.shape)
            if filled:
                _number(local, box, shape)
            found[key] = Piece(local, box.offset, shape)
        found[f"optim/{name}/step"] = Piece(torch.ones(()) if filled else torch.zeros(()), (), ())
    return found


def _number(local: Tensor, box: Box, shape: tuple[int, ...]) -> None:
    strides = torch.empty(shape, device="meta").stride()
    places = torch.zeros(())
    for dim, stride in enumerate(strides):
        steps = torch.arange(box.offset[dim], box.offset[dim] + box.shape[dim]) * float(stride)
        places = places.unsqueeze(-1) + steps
    local.copy_(places)


def wrong(pieces: dict[str, Piece]) -> list[str]:
    """Keys that did not arrive as `synthetic` fills them."""
    found = []
    for key, piece in pieces.items():
        expected = torch.ones(piece.shape) if not piece.shape else torch.empty(piece.box.shape)
        if piece.shape:
            _number(expected, piece.box, piece.shape)
        if not torch.equal(expected, piece.local):
            found.append(key)
    return found


def raw_s(sent_to_bytes: tuple[int, ...], copied_bytes: int) -> float:
    """Seconds, of the slowest rank, that these bytes of each rank take; collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows: list[Any] = [None] * size
    dist.all_gather_object(rows, sent_to_bytes)
    out = {peer: _bytes(n).fill_(1) for peer, n in enumerate(sent_to_bytes) if n}
    into = {peer: _bytes(row[rank]) for peer, row in enumerate(rows) if row[rank]}
    source, target = _bytes(copied_bytes).fill_(1), _bytes(copied_bytes)
    dist.barrier()
    began_s = time.perf_counter()
    works = [dist.irecv(buffer, peer) for peer, buffer in into.items()]
    works += [dist.isend(buffer, peer) for peer, buffer in out.items()]
    target.copy_(source)
    for work in works:
        assert work is not None
        work.wait()
    return slowest(time.perf_counter() - began_s)


def moved_s(before: str, after: str) -> tuple[float, Moved]:
    """Seconds, of the slowest rank, from before planning to the last byte; collective.

    Raises RuntimeError when what arrived is not what was there.
    """
    have = synthetic(before, dist.get_rank(), filled=True)
    want = synthetic(after, dist.get_rank(), filled=False)
    dist.barrier()
    began_s = time.perf_counter()
    moved = move(have, want)
    took_s = time.perf_counter() - began_s
    if keys := wrong(want):
        raise RuntimeError(f"{before} to {after}: {', '.join(keys[:3])} arrived changed.")
    return slowest(took_s), moved


class Watch:
    """On a rank that trains: has each switch of its layout timed, from all ranks ready to moved."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self.moved: Moved | None = None
        self._carry = remote.carry
        remote.carry = self._timed

    def _timed(self, kept: Any, new: Any) -> Carried | None:
        dist.barrier()
        began_s = time.perf_counter()
        carried = self._carry(kept, new)
        self.took_s = time.perf_counter() - began_s
        self.moved = None if carried is None else carried.moved
        return carried

    def figures(self) -> dict[str, float]:
        """Of the last switch: ours, the same bytes raw, how many; collective."""
        assert self.moved is not None
        theirs_s = raw_s(self.moved.sent_to_bytes, self.moved.copied_bytes)
        return {
            "ours_s": slowest(self.took_s),
            "theirs_s": theirs_s,
            "bytes": total(self.moved.sent_bytes),
        }


def slowest(took_s: float) -> float:
    """The longest of all ranks; collective."""
    longest = torch.tensor([took_s], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def total(count: int) -> int:
    """The sum over all ranks; collective."""
    summed = torch.tensor([count])
    dist.all_reduce(summed)
    return int(summed)


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _measure(rank: int, directory: str, pairs: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    lines = []
    for before, after in pairs:
        runs, sent, copied = [], 0, 0
        for _ in range(RUNS):
            ours_s, moved = moved_s(before, after)
            theirs_s = raw_s(moved.sent_to_bytes, moved.copied_bytes)
            runs.append((ours_s, theirs_s, slowest(moved.plan_s)))
            sent, copied = total(moved.sent_bytes), total(moved.copied_bytes)
        lines.append({
            "bench": "move", "case": f"{before} to {after}",
            "ratio": statistics.median(ours / theirs for ours, theirs, _ in runs),
            "ours_s": statistics.median(ours for ours, _, _ in runs),
            "theirs_s": statistics.median(theirs for _, theirs, _ in runs),
            "plan_s": statistics.median(plan for _, _, plan in runs),
            "bytes": sent, "copied_bytes": copied,
        })  # fmt: skip
    if rank == 0:
        Path(directory, "lines").write_text(json.dumps(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """All ordered pairs, one after the other in the same processes."""
    pairs = list(itertools.permutations(LAYOUTS, 2))
    with tempfile.TemporaryDirectory() as directory:
        spawn(_measure, (directory, pairs), nprocs=RANKS)
        lines = json.loads(Path(directory, "lines").read_text())
    for line in lines:
        report(**line, n=RANKS, runs=RUNS)
    ratios = sorted(line["ratio"] for line in lines)
    report(
        bench="move", case="all pairs", ratio=statistics.median(ratios), worst=ratios[-1],
        n=RANKS, runs=RUNS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
