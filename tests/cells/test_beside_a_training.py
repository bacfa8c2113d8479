"""Cells while a training runs on the same ranks."""

from __future__ import annotations

import pytest

from workbench.driver import watch
from workbench.driver.training import train
from workbench.errors import RankError


def test_a_cell_that_breaks_the_group_leaves_the_training_running(run):
    training = train(run.engines, "digits", steps=100_000)
    try:
        with pytest.raises(RankError, match="rank 0: ZeroDivisionError"):
            run("if rank == 0:\n    1 / 0\ndist.barrier()")
        assert run("rank").values == {0: "0", 1: "1", 2: "2"}
        assert training.state == "running"
        assert training.pause() == training.step_now
    finally:
        training.stop()


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_cell_right_after_a_rank_was_ended_finds_all_ranks(run, monkeypatch, is_paused):
    training = train(run.engines, "digits", steps=100_000)
    try:
        if is_paused:
            training.pause()
        # The news may reach the thread of the run later than the cell does.
        monkeypatch.setattr(training, "look", lambda: None)
        watch.fence(run.engines, 1)
        assert run("rank").values == {0: "0", 1: "1", 2: "2"}
        assert training.state == ("paused" if is_paused else "running")
    finally:
        training.stop()
