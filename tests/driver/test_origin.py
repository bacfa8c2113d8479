"""What a training goes back to whose shards are lost: a checkpoint that it has come by."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from tests.contract.test_one_trajectory import CELL, own_recipe, plain
from tests.driver.test_rescue import wait_until

HOW = {"cell": CELL, "strategy": "fsdp2", "start": False}


def lose(run, rank=1):
    """SIGKILL to a rank, until the run has what there is to have again."""
    count = len(run.outages.all)
    os.kill(run.engines.ranks[rank]["pid"], signal.SIGKILL)
    wait_until(lambda: len(run.outages.all) > count or run.state != "paused")
    run.wait(60)


def is_curve_from(run, first):
    assert run.history.steps == list(range(first, run.step_now + 1))
    curve = plain(own_recipe(), run.step_now)[first - 1 :]
    assert run.history.loss == pytest.approx(curve, rel=1e-5)


@pytest.fixture
def begun(clusters, tmp_path):
    """A training that began from another's checkpoint, three steps ago."""
    first = clusters(2).train(**HOW, directory=tmp_path)
    first.step(4)
    first.save("four")
    run = first.engines.train(**HOW, directory=tmp_path, restore="cell-1/four")
    assert run.step(3) == 7
    return run


def test_another_trainings_checkpoint_from_which_it_began(begun):
    lose(begun)
    assert begun.step(6) == 10
    is_curve_from(begun, 5)
    assert begun.outages.last.source.endswith("cell-1/checkpoints/four")
    assert begun.outages.last.lost_steps == 3
    begun.save("own")
    begun.step(2)
    lose(begun)
    assert begun.step(3) == 13
    assert begun.outages.last.source == "own"
    is_curve_from(begun, 5)


def test_without_it_there_is_no_such_training_any_more(begun, tmp_path):
    shutil.rmtree(tmp_path / "cell-1")
    lose(begun)
    wait_until(lambda: begun.state == "gone")
    assert "cell-1/checkpoints/four, from which it began, is not whole" in begun.message


def test_what_was_saved_before_it_went_back_is_of_another_curve(clusters, tmp_path):
    run = clusters(2).train(**HOW, directory=tmp_path)
    for name in ("one", "two", "three"):
        run.step(2)
        run.save(name)
    run.restore("two")
    run.step(1)
    lose(run)
    assert run.step(3) == 7
    assert run.outages.last.source == "two"
    is_curve_from(run, 1)
    shutil.rmtree(run.directory / "checkpoints" / "two")
    lose(run)
    assert run.step(5) == 7
    assert run.outages.last.source == "one"
    is_curve_from(run, 1)
