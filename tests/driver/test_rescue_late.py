"""What comes late, or apart: notices of exits, processes that were given up, ranks a step apart."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.contract.test_one_trajectory import CELL
from tests.driver.test_rescue import is_undisturbed, wait_until
from workbench.driver.engines import start
from workbench.driver.watch import fence


def test_an_exit_of_which_nobody_hears_in_time_costs_no_step(clusters, tmp_path):
    """Who tells of exits is stopped while a rank dies, so that the run fails before it is told."""
    clusters.stop()
    with start(2, spares=1, timeout=10) as engines:
        run = engines.train(cell=CELL, steps=10**6, directory=tmp_path)
        wait_until(lambda: run.step_now > 10)
        server = engines.processes.forks.pid
        os.kill(server, signal.SIGSTOP)
        try:
            os.kill(engines.ranks[1]["pid"], signal.SIGKILL)
            wait_until(lambda: run.state == "failed")
        finally:
            os.kill(server, signal.SIGCONT)
        wait_until(lambda: run.outages.all and not engines.roster.gone() and not run.pending)
        assert run.step(5) == run.step_now
        is_undisturbed(run, run.step_now)


@pytest.mark.parametrize("strategy", ["data", "pp2, 1f1b x5"])
def test_steps_that_were_asked_for_are_taken_where_a_rank_is_found_gone(
    clusters, tmp_path, monkeypatch, strategy
):
    run = clusters(2).train(
        cell=CELL, steps=100, strategy=strategy, save_every=4, directory=tmp_path, start=False
    )
    assert run.step(4) == 4
    # The news may reach the thread of the run later than what was asked of it.
    monkeypatch.setattr(run, "look", lambda: None)
    fence(run.engines, 1)
    assert run.step(6) == 10
    assert run.state == "paused"
    is_undisturbed(run, 10)


def test_a_process_that_was_given_up_and_comes_late_is_taken_for_no_other(clusters):
    engines = clusters(2)
    roster = engines.roster
    late = 50
    roster._begun.add(late)
    engines.processes.start(late, roster.places[0]).result(60)
    assert roster.mail is not None
    wait_until(lambda: late in roster.mail.engines())
    (fresh,) = engines.enlist([None])
    assert fresh.info["key"] == fresh.key != late
    engines.end_process(fresh)


def test_ranks_that_lose_each_other_a_step_apart_go_on(clusters, tmp_path):
    """Whether they come apart is chance: it is tried until they do."""
    run = clusters(4).train(
        cell=CELL, steps=3, strategy="pp2 dp2, 1f1b x5", save_every=5, directory=tmp_path
    )
    end_s = time.monotonic() + 100
    while not any("state from" in event["text"] for event in run.events):
        assert time.monotonic() < end_s
        assert run.wait(60)["state"] == "finished", run.message
        run.inject("drop-link", rank=1, phase="optimizer", at_step=run.step_now + 2)
        run.resume(4)
    assert run.wait(60)["state"] == "finished", run.message
    is_undisturbed(run, run.step_now)
    assert not any(one.ranks for one in run.outages.all)
