"""Who keeps the others waiting, from what the pulses of the ranks say."""

from __future__ import annotations

import time

import pytest

from workbench.driver.pulses import Seen
from workbench.driver.stacks import Stack
from workbench.driver.stall import (
    BUSY,
    DEADLOCK,
    STOPPED,
    held_up,
    judge,
    limit_s,
    places,
    standing,
)
from workbench.spec.pulse import IDLE, Beat
from workbench.spec.stacks import Frame

LIMIT_S = 2.0


def seen(*states: tuple) -> dict[int, Seen]:
    """One rank a tuple: phase, seconds in it, and what is true of it."""
    found = {}
    for rank, (phase, still_s, *flags) in enumerate(states):
        operation = "all-reduce" if "handed over" in flags else ""
        detail = "barrier" if phase == "comm" else ""
        now_s = time.monotonic()
        beat = Beat(1, 1, now_s, 3, phase, detail, now_s - still_s - 0.1, operation, 0.0)
        found[rank] = Seen(rank, beat, still_s, "silent" in flags, "stopped" in flags)
    return found


@pytest.mark.parametrize(
    ("states", "kind", "ranks", "waiting"),
    [
        ([("forward", 3), ("comm", 3), ("backward", 3, "handed over")], BUSY, (0,), (1, 2)),
        ([("forward", 3), ("forward", 4)], BUSY, (0, 1), ()),
        ([("comm", 3), ("comm", 3)], DEADLOCK, (0, 1), ()),
        ([("comm", 3), ("backward", 3, "handed over")], DEADLOCK, (0, 1), ()),
        ([("comm", 3), (IDLE, 3)], DEADLOCK, (0,), ()),
        ([("comm", 0.6, "stopped"), ("comm", 0.6)], STOPPED, (0,), (1,)),
        ([("comm", 9, "stopped"), ("forward", 9)], STOPPED, (0,), ()),
        ([("forward", 3, "silent", "handed over"), ("comm", 3)], BUSY, (0,), (1,)),
        ([("save", 11), ("comm", 11)], BUSY, (0,), (1,)),
    ],
)
def test_the_one_to_blame_is_never_one_that_waits(states, kind, ranks, waiting):
    found = judge(seen(*states), LIMIT_S)
    assert found is not None
    assert (found.kind, found.ranks, found.waiting) == (kind, ranks, waiting)


@pytest.mark.parametrize(
    "states",
    [
        [("forward", 1), ("comm", 1)],
        [("forward", 1), ("comm", 3)],  # slow, not still: it has moved since
        [("comm", 1), ("comm", 3)],
        [(IDLE, 100), (IDLE, 100)],
        [("save", 100), ("save", 100)],  # long for all of them is no stall
        [("save", 5), ("comm", 5)],
        [("run_cell", 100), ("run_cell", 100)],
    ],
)
def test_ranks_that_move_or_are_asked_for_what_takes_long_are_left_alone(states):
    assert judge(seen(*states), LIMIT_S) is None


def test_the_limit_follows_the_steps():
    assert limit_s(0.01) == 2
    assert limit_s(5.0) == 50
    assert limit_s(None) == 10  # the first steps of a layout are slow


def test_who_waits_in_what_is_said_once():
    ranks = seen(("forward", 3), ("comm", 3), ("backward", 3, "handed over"), ("comm", 3))
    assert held_up((1, 2, 3), ranks) == "ranks 1,3 in barrier, rank 2 in all-reduce"


def test_places_are_the_users_lines():
    library = Frame(__import__("threading").__file__, 1, "wait")
    net = Frame("/home/me/net.py", 12, "forward")
    cell = Frame("<cell 3>", 4, "<module>")
    stacks = {0: Stack("running", (library, net)), 1: Stack("running", (net,))}
    assert places(stacks) == "net.py:12 in forward"
    stacks[2] = Stack("running", (library, cell, net))
    assert places(stacks) == "ranks 0-1: net.py:12 in forward; rank 2: cell 3, line 4"
    told = standing(stacks, seen(("comm", 3), ("backward", 3, "handed over"), (IDLE, 3)))
    assert told == (
        "rank 0 in barrier (net.py:12 in forward); rank 1 in all-reduce (net.py:12 in forward); "
        "rank 2 idle"
    )
    assert places({0: Stack("stopped")}) == ""
