"""%dist_attach in real kernels, the one before killed as Jupyter does when it restarts one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from kernel import Kernel

from workbench.driver import session


@pytest.fixture(autouse=True)
def _nobody_else(clusters) -> None:
    """No other cluster is there to attach to."""
    clusters.close()
    session.end_abandoned()


@pytest.fixture
def killed(tmp_path) -> Iterator[list[int]]:
    """Pids of the ranks of a training whose kernel was killed."""
    kernel = Kernel(tmp_path)
    kernel("%load_ext workbench")
    kernel("%dist_start -n 2;")
    kernel("run = %dist_train digits --steps 100000 --save-every 50 ;")
    pids = kernel("while run.step_now < 60: pass\nprint([r['pid'] for r in run.engines.ranks])")
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    kernel.close()
    yield eval(pids.out)
    session.end_abandoned()


def test_the_next_kernel_has_panel_history_checkpoints_and_control(killed, tmp_path):
    kernel = Kernel(tmp_path)
    try:
        kernel("%load_ext workbench")
        told = kernel("%dist_status")
        assert "processes of kernels that are gone wait" in told.error
        assert "%dist_attach takes over" in told.error
        assert kernel("%dist_attach").panels == 1
        kernel("import workbench; run = workbench.driver.current.run()")
        assert kernel("run.state, run.name").text == "('running', 'digits-1')"
        assert kernel("%dist_pause").status == "ok"
        steps = "run.history.steps == list(range(1, run.step_now + 1)) and run.step_now > 60"
        assert kernel(steps).text == "True"
        assert (
            "digits-1" in kernel("%dist_checkpoints").text
            or "step-50" in kernel("%dist_checkpoints").text
        )
        assert "goes on from" in kernel("run.resume(); run.events[-1]['text']").text
        assert eval(kernel("[row['pid'] for row in run.engines.ranks]").text) == killed
        assert "2 ranks stopped" in kernel("%dist_stop").out
    finally:
        kernel("%dist_stop --all")
        kernel.close()
    assert not any(map(psutil.pid_exists, killed))


def test_ranks_that_are_not_taken_over_are_ended(killed, tmp_path):
    kernel = Kernel(tmp_path)
    try:
        kernel("%load_ext workbench")
        kernel("%dist_stop --all")
        deadline_s = time.monotonic() + 20
        while any(map(psutil.pid_exists, killed)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not any(map(psutil.pid_exists, killed))
        assert "No cluster is there to attach to" in kernel("%dist_attach").error
    finally:
        kernel.close()
