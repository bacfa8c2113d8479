"""A detached training goes on when its kernel is killed, and stops for the next one as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from left import Left

from tests.contract.test_one_trajectory import plain
from tests.driver.test_attach import HALF, stop_all
from tests.driver.test_controller import journaled
from tests.driver.test_run import GOOD
from workbench.driver import session
from workbench.driver.attach import attach
from workbench.engine import recipe as recipes

SLOW = GOOD.replace("    pass\n", "    import time; time.sleep(0.003)\n")
DETACHED = {"start": {"lease": None}}


@pytest.fixture
def left(clusters, tmp_path):
    """`left(cell, ...)` is a detached training whose kernel can be killed; nothing of it stays."""
    clusters.stop()
    session.end_abandoned()  # which an attach without a name would find, too
    made: list[Left] = []

    def begin(cell=SLOW, **how):
        made.append(Left(tmp_path, cell, **DETACHED, **how))
        made[-1].wait()
        made[-1].kill()
        return made[-1]

    yield begin
    stop_all()
    session.end_abandoned()


def until(tmp_path: Path, step: int) -> int:
    """Wait until the journal of rank 0 has a step -> the last it has."""
    journal = tmp_path / "cell-1" / "journal" / "rank0.jsonl"
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        lines = journal.read_text().splitlines()
        if lines and (last := json.loads(lines[-1])["step"]) >= step:
            return last
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come: {last}")


def is_whole(run, steps: int) -> None:
    """Each step once, in history and journals, with the losses of one process."""
    namespace: dict = {}
    exec(GOOD, namespace)
    assert run.history.steps == list(range(1, steps + 1))
    assert run.history.loss == pytest.approx(plain(recipes.from_namespace(namespace), steps), 1e-5)
    assert journaled(run) == [list(range(1, steps + 1))] * run.layout.world_size


def test_it_goes_on_and_the_next_kernel_stops_it_and_feeds_it_again(left, tmp_path):
    left(steps=100_000, then="while run.step_now < 30: time.sleep(0.01)")
    at = until(tmp_path, 400)
    run = attach().run
    assert run is not None
    assert run.state == "running"
    assert run.step_now >= at
    now = run.pause()
    assert run.step(3) == now + 3
    is_whole(run, now + 3)


def test_it_reaches_its_goal_and_saves_on_the_way(left, tmp_path):
    left(
        steps=500, save_every=100, keep=2, ranks=1,
        then="while run.step_now < 30: time.sleep(0.01)",
    )  # fmt: skip
    until(tmp_path, 500)
    run = attach().run
    assert run is not None
    assert (run.state, run.step_now) == ("finished", 500)
    assert [one["step"] for one in run.checkpoints()][-2:] == [400, 500]
    assert {"step": 500, "label": "saved"} in run.marks
    is_whole(run, 500)


def test_a_training_that_was_paused_stays_so(left):
    left(steps=500, then="run.pause(); at = run.step_now")
    time.sleep(2)  # so long nothing must happen
    run = attach().run
    assert run is not None
    assert run.state == "paused"
    assert run.history.steps == list(range(1, run.step_now + 1))


def test_a_slice_that_was_sent_to_one_rank_only_is_no_hindrance(left, tmp_path):
    begun = "while run.step_now < 30: time.sleep(0.01)"
    left(steps=100_000, then=f"{begun}\nrun.hold().__enter__()\n{HALF}")
    until(tmp_path, 300)
    run = attach().run
    assert run is not None
    is_whole(run, run.pause())


def test_when_a_rank_is_lost_the_others_stop_and_wait_for_a_kernel(left, tmp_path):
    dead = left(steps=1500, then="while run.step_now < 30: time.sleep(0.01)")
    until(tmp_path, 300)
    os.kill(dead.pids[1], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(dead.pids[1])], timeout=10)
    run = attach().run
    assert run is not None
    assert 300 <= run.step_now < 1500
    assert run.wait(90)["state"] == "finished", [run.message, *run.events[-6:]]
    is_whole(run, 1500)


def test_two_kernels_one_after_the_other(left, tmp_path):
    left(steps=100_000, then="while run.step_now < 30: time.sleep(0.01)")
    until(tmp_path, 200)
    code = (
        "from workbench.driver.attach import attach; import os, signal, time\n"
        "run = attach().run\n"
        "at = run.step_now\n"
        "while run.step_now < at + 50: time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    second = subprocess.run([sys.executable, "-c", code], timeout=90, check=False)
    assert second.returncode == -signal.SIGKILL
    at = until(tmp_path, 400)
    run = attach().run
    assert run is not None
    assert run.step_now >= at
    is_whole(run, run.pause())
