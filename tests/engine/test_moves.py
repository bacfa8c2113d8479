"""Moves: bit-equal between any two layouts, each missing byte sent once, bounded memory."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engine.procs import ranks
from tests.engine.test_metered_group import _world
from workbench.engine import lanes
from workbench.engine.cells import cells
from workbench.engine.moves import Moved, move
from workbench.engine.shards import Box, whole
from workbench.engine.state import Piece
from workbench.errors import CheckpointError
from workbench.spec.layout import parse_layout

LAYOUTS = (
    "dp1", "dp4", "fsdp4", "fsdp3", "tp4", "pp4", "pp2 dp2", "pp2 tp2", "fsdp2 tp2",
)  # fmt: skip
# Key: shape, and the dim that tensor parallelism cuts. Rows that divide by nothing, all dtypes.
SHAPES = {
    "model/0.weight": ((8, 6), 0),
    "model/1.weight": ((5, 8), 1),
    "model/2.weight": ((7, 3), None),
    "model/3.weight": ((4, 2, 3), 0),
    "model/3.bias": ((1,), None),
    "model/2.empty": ((0, 3), None),
    "optim/0.weight/step": ((), None),
    "optim/1.weight/step": ((), None),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def tensors():
    """The whole tensors: no two elements of a wide dtype are the same."""
    found, start = {}, 1
    for index, (key, (shape, _)) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        values = torch.arange(start, start + count).reshape(shape)
        found[key] = values.to(DTYPES[index % len(DTYPES)])
        start += count
    return found


def cut(layout, rank, key, shape, dim):
    """The box a rank holds under a layout, None for nothing: block n is of stage n % pp."""
    block = int(re.findall(r"/(\d)", key)[0])
    where = layout.coordinate(rank)
    if rank >= layout.world_size or block % layout.pp != where["pp"]:
        return None
    offset, size = [0] * len(shape), list(shape)
    if dim is not None and layout.tp > 1:
        size[dim] //= layout.tp
        offset[dim] = size[dim] * where["tp"]
    if layout.dp_shard > 1 and shape:
        chunk = -(-size[0] // layout.dp_shard)
        begin = min(chunk * where["dp_shard"], size[0])
        offset[0], size[0] = offset[0] + begin, min(chunk, size[0] - begin)
    return Box(tuple(offset), tuple(size))


def held(text, rank, *, filled):
    """The pieces of a rank; those not filled are of another memory order as well."""
    layout, found = parse_layout(text), {}
    for key, tensor in tensors().items():
        box = cut(layout, rank, key, *SHAPES[key])
        if box is not None:
            local = tensor[box.slices()].clone()
            if not filled:
                local = torch.zeros_like(local.mT.contiguous().mT if local.ndim > 1 else local)
            found[key] = Piece(local, box.offset, tuple(tensor.shape))
    return found


def wrong(pieces):
    """Keys whose pieces are not their box of the whole."""
    return [
        key
        for key, tensor in tensors().items()
        if key in pieces and not torch.equal(pieces[key].local, tensor[pieces[key].box.slices()])
    ]


def lacking_bytes(have, want):
    """What must come from elsewhere, counted element by element."""
    total = 0
    for key, piece in want.items():
        lacks = torch.zeros(piece.shape, dtype=torch.bool)
        lacks[piece.box.slices()] = True
        if key in have:
            lacks[have[key].box.slices()] = False
        total += int(lacks.sum()) * piece.local.element_size()
    return total


def _all_pairs(rank, buffer_bytes, direct_bytes):
    lanes.DIRECT_BYTES = direct_bytes
    found = {}
    for pair in itertools.product(LAYOUTS, repeat=2):
        have, want = held(pair[0], rank, filled=True), held(pair[1], rank, filled=False)
        moved = move(have, want, buffer_bytes=buffer_bytes)
        lacking = lacking_bytes(have, want)
        found[pair] = (wrong(want) + wrong(have), moved, lacking)
    return found


# All of a pair of ranks in one message; a few bytes a round; each part a message of its own.
@pytest.mark.parametrize(
    ("buffer_bytes", "direct_bytes"), [(32 << 20, 1 << 20), (128, 1 << 20), (32 << 20, 1)]
)
def test_every_pair_is_bit_equal_and_each_missing_byte_is_sent_once(buffer_bytes, direct_bytes):
    answers = ranks(4, _all_pairs, buffer_bytes, direct_bytes)
    for pair in answers[0]:
        for wrong_keys, moved, lacking in (answer[pair] for answer in answers):
            assert wrong_keys == [], pair
            assert moved.received_bytes == lacking, pair
            assert sum(moved.sent_to_bytes) == moved.sent_bytes
        sent, received = (
            sum(getattr(answer[pair][1], side) for answer in answers)
            for side in ("sent_bytes", "received_bytes")
        )
        assert sent == received, pair
    assert sum(answer["fsdp4", "dp4"][1].sent_bytes for answer in answers) > 0


def _metered(rank, store):
    world = _world(rank, 2, store)
    try:
        world.meter.take()
        before = world.bytes_sent()
        size = 3 << 20  # large enough to be sent without a copy
        whole_tensor = torch.arange(size, dtype=torch.float32).reshape(2, -1)
        rows = Piece(whole_tensor[rank : rank + 1].clone(), (rank, 0), (2, size // 2))
        want = {
            "model/a": Piece(torch.zeros(2, size // 2), (0, 0), (2, size // 2)),
            "model/b": Piece(torch.zeros(()), (), ()),
        }
        have = {"model/a": rows}
        if rank == 1:
            have["model/b"] = Piece(torch.tensor(3.0), (), ())
        moved = move(have, want)
        equal = torch.equal(want["model/a"].local, whole_tensor) and want["model/b"].local == 3
        noted_bytes = sum(op.num_bytes for op in world.meter.take())
        return bool(equal), moved, world.bytes_sent() - before, noted_bytes
    finally:
        dist.barrier()
        world.close()


def test_inside_a_metered_world_the_bytes_are_on_the_wire_and_noted(tmp_path):
    for rank, (equal, moved, wire, noted) in enumerate(ranks(2, _metered, str(tmp_path / "s"))):
        assert equal
        assert moved.sent_bytes == (3 << 20) * 2 + 4 * rank
        assert moved.copied_bytes == (3 << 20) * 2 + 4 * rank
        assert moved.sent_bytes <= wire < moved.sent_bytes * 1.2
        assert noted >= moved.sent_bytes + moved.received_bytes


def _shared_out(rank):
    pieces = {
        f"model/{name}": Piece(torch.full((10, 10), float(name)), (0, 0), (10, 10))
        for name in range(6)
    }
    want = {key: Piece(torch.zeros(10, 10), (0, 0), (10, 10)) for key in pieces}
    return move(pieces if rank < 2 else {}, want if rank >= 2 else {})


def test_replicas_share_the_sending():
    assert [moved.sent_bytes for moved in ranks(4, _shared_out)] == [2400, 2400, 0, 0]


def _buffers(rank):
    """Each rank has its own running statistics; rank 0 has none, rank 3 half of them."""
    have = {"model/mean": Piece(torch.full((4,), float(rank)), (0,), (4,), buffer=True)}
    if rank == 0:
        have = {}
    if rank == 3:
        have = {"model/mean": Piece(torch.full((2,), 3.0), (2,), (4,), buffer=True)}
    mine = have["model/mean"].local if rank in (1, 2) else torch.zeros(4)
    want = {"model/mean": Piece(mine, (0,), (4,), buffer=True)}
    moved = move(have, want)
    return mine.tolist(), moved.copied_bytes


def test_buffers_come_from_the_first_rank_that_holds_them():
    assert ranks(4, _buffers) == [([1.0] * 4, 0)] * 4


def _same_memory(rank):
    have = held("fsdp4", rank, filled=True)
    moved = move(have, dict(have))
    return wrong(have), moved


def test_what_is_the_same_memory_is_left_alone():
    for wrong_keys, moved in ranks(4, _same_memory):
        assert wrong_keys == []
        assert (moved.sent_bytes, moved.received_bytes, moved.copied_bytes) == (0, 0, 0)


def _refused(rank, spoil):
    """The error of a move that rank 1 spoils, and whether the pieces and the group are intact."""
    have, want = held("fsdp4", rank, filled=True), held("dp4", rank, filled=False)
    if rank == 1:
        spoil(have, want)
    try:
        move(have, want)
    except CheckpointError as error:
        dist.barrier()
        untouched = all(not piece.local.any() for piece in want.values())
        return str(error), untouched


def _lose(have, want):
    del have["model/0.weight"]


def _widen(have, want):
    key = "model/1.weight"
    piece = want[key]
    want[key] = Piece(piece.local.to(torch.float16), piece.offset, piece.shape)


def _reshape(have, want):
    want["model/3.bias"] = Piece(torch.zeros(2, dtype=torch.bool), (0,), (2,))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_lose, "No rank has model/0.weight from [2, 0] on for [2, 6] of its [8, 6]"),
        (_widen, "model/1.weight is float64 [5, 8] on rank 0 and float16 [5, 8] on rank 1"),
        (_reshape, "model/3.bias is bool [1] on rank 0 and bool [2] on rank 1"),
    ],
    ids=["lost", "dtype", "shape"],
)
def test_what_cannot_be_moved_is_the_same_error_on_all_before_anything_is_sent(spoil, text):
    answers = ranks(4, _refused, spoil)
    assert set(answers) == {answers[0]}
    assert text in answers[0][0]
    assert answers[0][1]


def _in_part_of_the_world(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    have = {"model/a": Piece(torch.ones(3), (0,), (3,))} if rank == 2 else {}
    want = {"model/a": Piece(torch.zeros(3), (0,), (3,))} if rank == 1 else {}
    moved = move(have, want, group=group)
    return moved.sent_to_bytes, [piece.local.tolist() for piece in want.values()]


def test_a_move_within_a_group_leaves_the_other_ranks_out():
    answers = ranks(3, _in_part_of_the_world)
    assert answers == [None, ((0, 0), [[1.0] * 3]), ((12, 0), [])]


def test_alone_a_move_is_a_copy():
    have, want = held("dp1", 0, filled=True), held("dp1", 0, filled=False)
    moved = move(have, want)
    assert wrong(want) == []
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert moved == Moved(0, 0, total, moved.plan_s, moved.transfer_s, (0,))


def _high_water_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def _memory(rank, buffer_bytes):
    """Bytes above old and new state that a move by columns takes, all of it through buffers."""
    rows, columns = 4096, 4096
    half = columns // 2
    have = {
        f"model/{n}": Piece(torch.rand(rows // 2, columns), (rank * rows // 2, 0), (rows, columns))
        for n in range(2)
    }
    want = {key: Piece(torch.zeros(rows, half), (0, rank * half), (rows, columns)) for key in have}
    move({}, {}, buffer_bytes=buffer_bytes)  # what a first move loads
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _high_water_bytes()
    moved = move(have, want, buffer_bytes=buffer_bytes)
    right = all(
        torch.equal(
            want[key].local[rank * rows // 2 : (rank + 1) * rows // 2],
            have[key].local[:, rank * half : (rank + 1) * half],
        )
        for key in have
    )
    return right, _high_water_bytes() - before, moved.received_bytes


def test_memory_beyond_the_pieces_is_bounded_by_the_buffers():
    buffer_bytes = 4 << 20
    for right, more_bytes, received_bytes in ranks(2, _memory, buffer_bytes):
        assert right
        assert received_bytes == 32 << 20
        assert more_bytes < 2 * buffer_bytes + (4 << 20)


def test_cells_cover_each_element_once_and_name_who_holds_it():
    box = whole((6, 6))
    halves = (Box((0, 0), (3, 6)), Box((3, 0), (3, 6)), None, box, Box((2, 2), (2, 2)))
    for first in (None, 0, 3, 4):
        count = torch.zeros(6, 6)
        for cell in cells(box, halves, first):
            count[cell.box.slices()] += 1
            assert 3 in cell.sources
            for rank in cell.sources:
                assert halves[rank].common(cell.box) == cell.box
        assert (count == 1).all()
    assert cells(box, halves, 3)[0].box == box
    (gap,) = [cell for cell in cells(box, halves[1:3]) if not cell.sources]
    assert gap.box == halves[0]
