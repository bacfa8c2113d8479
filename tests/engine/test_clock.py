"""The clock: one state at a time, so that the parts are the whole."""

from __future__ import annotations

import itertools
import threading

import pytest

from workbench.engine.clock import BACKWARD, COMM, DATA, FORWARD, OTHER, Clock
from workbench.engine.metered_group import Op

OPS = (Op("all-reduce", (0, 1), None, 4, 0.0),)


class Ticks:
    """A timer that goes on by one with each stamp; stamps are no numbers, as a device's are not."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self.settled = 0

    def stamp(self) -> tuple[int]:
        """The next one."""
        return (next(self._count),)

    def seconds(self, begin: tuple[int], end: tuple[int]) -> float:
        """Between two stamps."""
        return float(end[0] - begin[0])

    def settle(self) -> None:
        """Count."""
        self.settled += 1


def test_states_are_entered_and_left_and_add_up():
    timer = Ticks()
    clock = Clock(timer)
    clock.begin(follows=False)  # 0
    with clock.during(DATA):  # 1, 2
        pass
    with clock.during(FORWARD, (0, 3)):  # 3
        before = clock.enter(COMM, OPS)  # 4
        clock.back(before)  # 5
    ticked = clock.end()  # 6, 7
    sums = ticked.sums(timer)
    assert sums == {
        "forward": 2, "backward": 0, "optimizer": 0, "data": 1, "comm": 1, "other": 3
    }  # fmt: skip
    spans = ticked.spans(timer)
    assert [(s.kind, s.begin_s, s.end_s) for s in spans] == [
        (OTHER, 0, 1), (DATA, 1, 2), (OTHER, 2, 3), (FORWARD, 3, 4), (COMM, 4, 5),
        (FORWARD, 5, 6), (OTHER, 6, 7),
    ]  # fmt: skip
    assert spans[3].detail == (0, 3)
    assert spans[4].detail == OPS


def test_a_step_that_follows_begins_where_the_last_one_ended():
    timer = Ticks()
    clock = Clock(timer)
    clock.begin(follows=True)  # nothing to follow: 0
    first = clock.end()  # 1
    for _ in range(3):
        timer.stamp()  # what a driver takes between two slices
    clock.begin(follows=True)
    assert clock.end().sums(timer)[OTHER] == 4
    assert first.sums(timer)[OTHER] == 1


def test_what_passed_since_the_last_mark_may_turn_out_to_be_something_else():
    timer = Ticks()
    clock = Clock(timer)
    clock.begin(follows=False)  # 0
    with clock.during(BACKWARD):  # 1
        clock.back(clock.enter(COMM))  # 2, 3: the last bucket is on its way
        clock.since_last_mark(COMM, OPS)  # until 4
    sums = clock.end().sums(timer)  # left at 5, ended at 6
    assert (sums[BACKWARD], sums[COMM]) == (2, 2)


@pytest.mark.parametrize("how", ["before", "after", "off"])
def test_outside_of_a_step_nothing_is_kept(how):
    timer = Ticks()
    clock = Clock(timer)
    if how != "before":
        clock.begin(follows=False)
    if how == "after":
        clock.end()
    if how == "off":
        clock.off()  # a step that broke
    before = list(clock._marks)
    for _ in range(5):
        with clock.during(FORWARD):
            clock.back(clock.enter(COMM))
            clock.since_last_mark(COMM)
    assert clock._marks == before
    clock.begin(follows=False)
    assert clock.end().sums(timer)[FORWARD] == 0


def test_what_other_threads_communicate_is_no_state_of_the_step():
    timer = Ticks()
    clock = Clock(timer)
    clock.begin(follows=False)  # 0
    with clock.during(FORWARD):  # 1
        thread = threading.Thread(target=lambda: clock.back(clock.enter(COMM)))
        thread.start()
        thread.join()
    sums = clock.end().sums(timer)  # left at 2, ended at 3
    assert (sums[FORWARD], sums[COMM], sums[OTHER]) == (1, 0, 2)
