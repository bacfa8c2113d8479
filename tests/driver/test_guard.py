"""Controller, spares and fork server that are stopped (SIGSTOP): nobody waits for them for ever."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest

from tests.driver.test_controller import journaled, takeovers
from tests.driver.test_rescue import wait_until
from tests.driver.test_run import GOOD
from workbench.driver import watch
from workbench.driver.engines import start
from workbench.errors import EnginesError

SLOW = GOOD.replace("    pass\n", "    import time; time.sleep(0.002)\n")


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def texts(run, name: str) -> list[str]:
    return [event["text"] for event in run.events if event.get("name") == name]


def test_a_controller_that_is_stopped_is_followed_by_another(clusters, tmp_path):
    engines = clusters(2)
    stop(engines.processes.controller_pid)
    assert engines.run_cell("1 + 1", out=io.StringIO()).values == {0: "2", 1: "2"}
    run = engines.train(cell=SLOW, steps=1_000_000, directory=tmp_path)
    pid = engines.processes.controller_pid
    stop(pid)
    wait_until(lambda: takeovers(run))
    assert texts(run, "controller_stopped") == [
        f"The controller (process {pid:d}) was stopped: another takes its place."
    ]
    at = run.step_now
    wait_until(lambda: run.step_now > at)
    run.pause()
    assert journaled(run) == [list(range(1, run.step_now + 1))] * 2
    # What is stopped is no reason to wait at the end, either.
    run.resume()
    for pid in (engines.processes.controller_pid, engines.status()[1]["pid"]):
        stop(pid)
    began_s = time.monotonic()
    clusters.stop()
    assert time.monotonic() - began_s < 20


def test_a_spare_that_is_stopped_takes_no_place(clusters, tmp_path):
    engines = clusters(2, spares=1)
    run = engines.train(cell=SLOW, steps=1_000_000, directory=tmp_path)
    (spare,) = engines.roster.spares
    stop(spare.info["pid"])
    os.kill(engines.status()[1]["pid"], signal.SIGKILL)
    wait_until(lambda: texts(run, "recovered"))
    assert "a fresh one is rank 1" in texts(run, "recovered")[0]
    wait_until(lambda: spare.gone and engines.roster.num_ready() == 1)
    (spare,) = engines.roster.ready()
    stop(spare.info["pid"])
    wait_until(lambda: spare.gone and engines.roster.num_ready() == 1)
    assert texts(run, "spare_stopped")[-1] == (
        f"A spare (process {spare.info['pid']}) was stopped: another takes its place."
    )
    run.pause()
    assert run.history.steps == list(range(1, run.step_now + 1))


def test_a_fork_server_that_is_stopped_is_named(tmp_path):
    with start(2, spares=1, timeout=20) as engines:
        run = engines.train(cell=SLOW, steps=1_000_000, directory=tmp_path)
        pid = engines.processes.forks.pid  # type: ignore[attr-defined]
        stop(pid)
        try:
            wait_until(lambda: texts(run, "forks_stopped"))
            assert f"`kill -CONT {pid}` lets it go on" in texts(run, "forks_stopped")[0]
            with pytest.raises(EnginesError, match=rf"fork server \(process {pid}\) is stopped"):
                watch.fence(engines, 1)
            assert watch.stacks.take(engines)[1].state == "running"
            os.kill(engines.status()[1]["pid"], signal.SIGKILL)
            wait_until(lambda: run.state == "failed")
            assert f"fork server (process {pid}) is stopped" in run.message
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: texts(run, "recovered"))
        stop(pid)
        began_s = time.monotonic()
        engines.stop()
        assert time.monotonic() - began_s < 15
        os.kill(pid, signal.SIGCONT)
