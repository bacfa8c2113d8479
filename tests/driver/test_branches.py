"""Going back to a checkpoint keeps what was left behind as a branch of the curves."""

from __future__ import annotations

import pytest

from tests.contract.test_one_trajectory import CELL
from workbench.driver.history import BRANCH_POINTS, BRANCHES_KEPT, History


def history(steps: int) -> History:
    numbers = list(range(1, steps + 1))
    return History(1, numbers, [1 / step for step in numbers], [float(step) for step in numbers])


def test_a_branch_begins_where_it_was_left_and_is_thinned():
    known = history(1000)
    known.rewind(400, "dp4")
    (branch,) = known.branches
    assert branch["layout"] == "dp4"
    assert branch["step"][-1] == 1000
    assert 400 <= branch["step"][0] < 406
    assert 100 < len(branch["step"]) <= BRANCH_POINTS
    assert branch["loss"][-1] == 1 / 1000
    assert known.steps[-1] == 400


def test_only_the_last_branches_stay():
    known = history(50)
    for step in range(49, 49 - 2 * BRANCHES_KEPT, -1):
        known.rewind(step, "dp4")
    assert len(known.branches) == BRANCHES_KEPT
    assert known.branches[-1]["step"] == [49 - 2 * BRANCHES_KEPT + 1, 49 - 2 * BRANCHES_KEPT + 2]


def test_what_is_taken_again_after_a_fault_is_no_branch():
    known = history(50)
    known.rewind(40)
    known.rewind(40, "dp4")  # nothing came after it
    assert known.branches == []


def test_going_back_and_on_under_another_strategy(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=20, directory=tmp_path, start=False)
    run.step(4)
    run.save("here")
    run.step(5)
    run.restore("here")
    run.switch("fsdp2")
    run.step(5)
    (branch,) = run.snapshot()["branches"]
    assert branch["step"] == [4, 5, 6, 7, 8, 9]
    assert branch["layout"] == "dp2"
    assert run.history.steps == list(range(1, 10))
    # Another strategy is the same mathematics.
    assert run.history.loss[3:] == pytest.approx(branch["loss"], rel=1e-5)
