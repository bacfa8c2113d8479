"""Cells that hang: said with where, and an interrupt gives the ranks back as they were."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest

from tests.cells.conftest import Trigger
from workbench.driver import watch
from workbench.errors import RankError

TOGETHER = "t = torch.ones(1); dist.all_reduce(t); (kept, int(t))"
# What hangs, and what is said of it before anybody interrupts.
WAITING = {
    "barrier": ("if rank == 0: dist.barrier()", "rank 0 in barrier (cell {n}, line 3); ranks 1-2"),
    "recv": ("if rank == 0: dist.recv(torch.ones(1), 1)", "rank 0 in recv from 1 (cell {n}, line"),
    "different": (
        "if rank == 0: dist.barrier()\nelse: dist.all_reduce(torch.ones(3))",
        "rank 0 in barrier (cell {n}, line 3); ranks 1-2 in all-reduce (cell {n}, line 4).",
    ),
    "own group": (
        "two = dist.new_group([0, 1])\nif rank == 0: dist.broadcast(torch.ones(1), 1, group=two)",
        "rank 0 in broadcast (cell {n}, line 4)",
    ),
}  # fmt: skip
WORKING = {
    "sleep": "import time; time.sleep(60)",
    "loop": "while True: pass",
    "loop and wait": "while rank == 1: pass\ndist.barrier()",
}
KEEP = "kept = rank\nprint('now', flush=True)\n"


class Teller(io.StringIO):
    """A screen on which it is written what the user is to do, and who does it."""

    def write(self, text: str) -> int:
        count = super().write(text)
        if "Interrupt the kernel" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return count


def usable(engines) -> dict[int, str]:
    return engines.run_cell(TOGETHER, out=io.StringIO()).values


@pytest.mark.parametrize("what", WAITING)
def test_ranks_that_wait_for_each_other_are_told_and_come_back(clusters, what):
    source, says = WAITING[what]
    engines = clusters(3)
    number = engines.echo.watch([0]).number + 1
    interrupted = Teller()
    with pytest.raises(RankError, match="interrupted"):
        engines.run_cell(KEEP + source, out=io.StringIO(), err=interrupted)
    said = interrupted.getvalue()
    assert said.startswith("The ranks wait for each other: ")
    assert says.format(n=number) in said
    assert usable(engines) == {rank: f"({rank}, 3)" for rank in range(3)}


@pytest.mark.parametrize("what", [*WAITING, *WORKING])
def test_an_interrupt_gives_the_ranks_back_within_seconds(clusters, what):
    source = WORKING[what] if what in WORKING else WAITING[what][0]
    engines = clusters(3)
    began = []

    class Screen(Trigger):
        def write(self, text: str) -> int:
            began.append(time.monotonic())
            return super().write(text)

    with pytest.raises(RankError, match="interrupted"):
        engines.run_cell(KEEP + source, out=Screen("now"), err=io.StringIO())
    assert usable(engines) == {rank: f"({rank}, 3)" for rank in range(3)}
    assert time.monotonic() - began[0] < 15  # 0.5 s on a quiet machine


def test_a_call_that_hears_no_interrupt_is_said_and_its_rank_can_be_replaced(clusters):
    engines = clusters(3)
    source = KEEP + "if rank == 1: sum(range(10**11))\ndist.barrier()"
    with pytest.raises(
        RankError, match=r"not yet ended the cell on rank 1: .*%dist_replace 1 ends"
    ):
        engines.run_cell(source, out=Trigger("now"), err=io.StringIO())
    watch.fence(engines, 1)
    values = engines.run_cell("kept if 'kept' in dir() else None", out=io.StringIO()).values
    assert (values[0], values[2]) == ("0", "2")
    values = engines.run_cell("t = torch.ones(1); dist.all_reduce(t); int(t)", out=io.StringIO())
    assert set(values.values.values()) == {"3"}


def test_a_cell_whose_ranks_compute_apart_is_left_alone(clusters):
    engines = clusters(3)
    err = io.StringIO()
    source = "import time\ntime.sleep(4 if rank == 1 else 0)\ndist.barrier()"
    engines.run_cell(source, out=io.StringIO(), err=err)
    assert err.getvalue() == ""
