"""A save is cut off at each of its system calls: the list of checkpoints is never wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engine.procs import ranks
from tests.engine.traced import IS_POSSIBLE, Traced
from workbench.engine import checkpoint, share, state
from workbench.engine.finish import Finish
from workbench.engine.staging import Staging
from workbench.engine.state import Piece
from workbench.engine.writing import Writing
from workbench.spec import aside
from workbench.spec import manifest as manifests

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="system calls are known for x86-64 Linux")
ROWS = 6
MOST_CALLS = 300


def _values() -> torch.Tensor:
    return torch.arange(4.0 * ROWS).reshape(ROWS, 4)


def _half(rank: int) -> dict[str, Piece]:
    """What rank 0 or rank 1 of two holds: the first rows, or the rest."""
    rows = ROWS // 2
    local = _values()[rank * rows : (rank + 1) * rows].clone()
    return {"model/weight": Piece(local, (rank * rows, 0), (ROWS, 4))}


def _staged(directory: Path, rank: int) -> Writing:
    """As begin does it on each of two ranks, less the collectives."""
    planned = share.plan([share.held(_half(rank)) for rank in (0, 1)], rank)
    return Writing(directory, rank, planned, Staging().fill(planned, _half(rank)))


def _first(root: Path, told: int, heard: int) -> None:
    """Rank 0: take the name, tell the other where, wait for its file, write and finish."""
    finish = Finish(root, "new", unique=False)
    directory = finish.open({}, 2)
    os.write(told, str(directory).encode())
    os.close(told)
    if not os.read(heard, 1):
        finish.discard()  # the other rank died in the collectives of begin
        return
    writing = _staged(directory, 0)
    writing.finish = finish
    writing.run()


def _second(told: int, heard: int) -> None:
    """Rank 1: open the file where rank 0 says, tell so, write."""
    if directory := os.read(told, 4096).decode():
        writing = _staged(Path(directory), 1)
        os.write(heard, b"1")
        os.close(heard)
        writing.run()


def _cut_off(root: Path, traced: int, number: int) -> str | None:
    """A save of two ranks, one of which is killed at its n-th call."""
    where, ready = os.pipe(), os.pipe()

    def run(rank: int) -> None:
        mine, theirs = (where[1], ready[0]) if rank == 0 else (where[0], ready[1])
        for end in {*where, *ready} - {mine, theirs}:
            os.close(end)
        if rank == 0:
            _first(root, mine, theirs)
        else:
            _second(mine, theirs)

    other = os.fork()
    if other == 0:
        try:
            run(1 - traced)
        finally:
            os._exit(0)
    child = Traced(lambda: run(traced))
    for end in (*where, *ready):
        os.close(end)
    call = child.kill_at(number)
    assert os.waitpid(other, 0)[1] == 0
    return call


def _visible(root: Path) -> list[str]:
    """The list, each of which loads with the right values in another layout."""
    names = sorted(path.name for path in root.iterdir() if manifests.is_checkpoint(path))
    for name in names:
        whole = Piece(torch.zeros(ROWS, 4), (0, 0), (ROWS, 4))
        checkpoint.load(root / name, {"model/weight": whole})
        assert torch.equal(whole.local, _values())
    return names


def _all_of_them(_: int, root: Path, traced: int) -> list[tuple[str, bool]]:
    """For each call: which one, and whether the new checkpoint was in the list."""
    dist.destroy_process_group()  # its threads do not survive a fork
    torch.set_num_threads(1)
    root.mkdir()
    checkpoint.save({"model/weight": Piece(_values(), (0, 0), (ROWS, 4))}, {}, root, "old")
    found = []
    for number in range(1, MOST_CALLS):
        call = _cut_off(root, traced, number)
        names = _visible(root)
        assert names in (["old"], ["new", "old"]), (call, number, names)
        if call is None:
            assert names == ["new", "old"]
            return found
        found.append((call, "new" in names))
        aside.sweep(root)
        assert {path.name for path in root.iterdir()} - {".lock"} == set(names)
        if "new" in names:
            (root / "new").rename(root.parent / f"new-{traced}-{number}")
    raise AssertionError(f"more than {MOST_CALLS} calls")


@pytest.mark.parametrize("traced", [0, 1])
def test_a_rank_killed_at_any_system_call_leaves_the_old_list_or_the_new_one(tmp_path, traced):
    (found,) = ranks(1, _all_of_them, tmp_path / "root", traced)
    calls = {call for call, _ in found}
    assert len(found) >= 15
    assert {"write", "fsync", "flock"} <= calls
    assert calls & {"rename", "renameat", "renameat2"}
    # Early kills leave the old list and late ones the new.
    assert (found[0][1], found[-1][1]) == (False, True)


def _killed_and_swept(_: int, root: Path) -> list[str]:
    """A writer that is killed holds no lock any more; the next save removes what it left."""
    dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        finish = Finish(root, "cut-off", unique=False)
        directory = finish.open({}, 1)
        (directory / "rank-0.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    left = [path for path in root.iterdir() if aside.MARK in path.name]
    assert len(left) == 2
    assert aside.is_free(next(path for path in left if path.suffix == ".lock"))
    checkpoint.save(state.take(torch.nn.Linear(2, 2)), {}, root, "next")
    return sorted(path.name for path in root.iterdir())


def test_what_a_killed_writer_left_is_swept_by_the_next_save(tmp_path):
    assert ranks(1, _killed_and_swept, tmp_path) == [[".lock", "next"]]
