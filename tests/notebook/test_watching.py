"""Two real kernels on one training: one controls, the other watches and may take over."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kernel import Kernel

from workbench.driver import session

UNTIL = (
    "import time\n"
    "def until(holds, limit_s=60):\n"
    "    end_s = time.monotonic() + limit_s\n"
    "    while not holds():\n"
    "        assert time.monotonic() < end_s\n"
    "        time.sleep(0.02)\n"
)
FIND = "import workbench; run = workbench.driver.current.run()"
WHOLE = "run.history.steps == list(range(1, run.step_now + 1))"


@pytest.fixture(autouse=True)
def _nobody_else(clusters) -> None:
    """No other cluster is there to attach to."""
    clusters.close()
    session.end_abandoned()


@pytest.fixture
def pair(tmp_path) -> Iterator[list[Kernel]]:
    """A kernel that trains, and one beside it."""
    kernels = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            kernels.append(Kernel(tmp_path / name))
            kernels[-1]("%load_ext workbench")
            assert kernels[-1](UNTIL).status == "ok"
        kernels[0]("%dist_start -n 2;")
        kernels[0]("run = %dist_train digits --steps 1000000 ;")
        assert kernels[0]("until(lambda: run.step_now > 20)").status == "ok"
        yield kernels
    finally:
        for kernel in reversed(kernels):
            kernel("%dist_stop --all")
            kernel.close()
        session.end_abandoned()


def said(reply) -> str:
    """The error of a cell without its colours and line breaks."""
    return " ".join(reply.error.split())


def test_a_second_notebook_watches_takes_over_and_gives_back(pair):
    first, second = pair
    pids = first("print([r['pid'] for r in run.engines.ranks])").out
    directory = Path(eval(first("str(run.engines.directory)").text))
    assert stat.S_IMODE((directory / "share.sock").stat().st_mode) == 0o600

    shown = second("seen = %dist_attach")
    assert shown.panels == 1, shown
    second("before = seen.snapshot()['step']")
    assert second("until(lambda: seen.snapshot()['step'] > before + 20)").status == "ok"
    snapshot = eval(second("{k: seen.snapshot()[k] for k in ('watching', 'allowed')}").text)
    assert snapshot["watching"]["how"] == "controls"
    assert snapshot["allowed"] == ["take_over"]
    assert second("seen.snapshot()['curve']['step'][0] <= 2").text == "True"
    for verb in ("%dist_pause", "%%dist\n1", "seen.pause()"):
        refused = said(second(verb))
        assert "This notebook watches digits-1, which process" in refused, verb
        assert "%dist_attach --take-over takes it over." in refused

    taken = second("%dist_attach --take-over")
    assert taken.panels == 1, taken
    second(FIND)
    assert second("print([r['pid'] for r in run.engines.ranks])").out == pids
    second("before = run.step_now")
    assert second("until(lambda: run.step_now > before + 20)").status == "ok"
    assert second("seen.snapshot()['allowed'] != ['take_over'], seen.run is run").text == (
        "(True, True)"
    )
    told = first("run.state, run.message").text
    assert "'gone'" in told
    assert f"process {second.manager.provisioner.pid}" in told
    assert "%dist_attach --take-over takes it back." in said(first("%dist_pause"))

    assert first("%dist_attach --take-over").panels == 1
    first(FIND)
    assert first("run.pause(); " + WHOLE).text == "True"
    assert first("run.step_now > 40").text == "True"
    first("losses = run.history.loss[:40]")
    first("alone = %dist_train digits --steps 40 --wait ;")
    assert first("current = workbench.driver.current.run(); current is not run").text == "True"
    assert first("current.history.loss == losses").text == "True"
    assert "2 ranks stopped" in first("%dist_stop").out
    assert not directory.exists()
    assert not any(map(psutil.pid_exists, eval(pids)))


def test_of_a_kernel_that_is_stopped_or_gone_is_told_and_its_training_goes_on(pair):
    first, second = pair
    pid = first.manager.provisioner.pid
    second("seen = %dist_attach ;")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert f"Process {pid}, which controls digits-1, is stopped" in said(
            second("%dist_attach --take-over")
        )
        assert (
            second("until(lambda: seen.snapshot()['watching']['how'] == 'silent')").status == "ok"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert second("until(lambda: seen.snapshot()['watching']['how'] == 'controls')").status == "ok"
    os.kill(pid, signal.SIGKILL)
    first.close()
    assert second("until(lambda: seen.snapshot()['watching']['how'] == 'gone')").status == "ok"
    assert "is gone" in said(second("%dist_pause"))
    # As the button of its panel does.
    assert second("seen.ask('take_over').result(60)").status == "ok"
    second(FIND)
    assert second("run.pause(); seen.run is run, " + WHOLE).text == "(True, True)"
    pair.remove(first)
