"""A controller that is killed: another takes over, and nothing is lost or done twice."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import threading
import time

import pytest

from tests.contract.test_one_trajectory import plain
from tests.driver.test_run import GOOD
from workbench.driver.engines import start
from workbench.engine import recipe as recipes
from workbench.errors import EnginesError

TIMES = 3


def kill_controller(engines) -> int:
    """SIGKILL the controller there is -> its pid."""
    pid = engines.processes.controller_pid
    os.kill(pid, signal.SIGKILL)
    return pid


def taken_over(engines, pid) -> None:
    """Wait until another controller is known of."""
    deadline_s = time.monotonic() + 20
    while engines.processes.controller_pid == pid:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def takeovers(run) -> list[str]:
    """What the run says of them."""
    return [event["text"] for event in run.events if event.get("name") == "controller_back"]


def journaled(run) -> list[list[int]]:
    """By rank the numbers of the steps in its journal."""
    found = []
    for rank in range(run.layout.world_size):
        lines = (run.directory / "journal" / f"rank{rank}.jsonl").read_text().splitlines()
        slices = [json.loads(line) for line in lines]
        found.append([s["first"] + i for s in slices for i in range(len(s["columns"]["loss"]))])
    return found


def test_a_training_goes_on_as_if_nothing_had_been(clusters, tmp_path):
    engines = clusters(2)
    cell = GOOD.replace("    pass\n", "    import time; time.sleep(0.002)\n")
    steps = 1500
    namespace: dict = {}
    exec(GOOD, namespace)
    run = engines.train(cell=cell, steps=steps, directory=tmp_path)
    for number in range(TIMES):
        taken_over(engines, kill_controller(engines))
        deadline_s = time.monotonic() + 30
        while len(takeovers(run)) <= number and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert run.state == "running"
    assert run.wait(90)["state"] == "finished"
    assert run.history.steps == list(range(1, steps + 1))
    assert run.history.loss == pytest.approx(plain(recipes.from_namespace(namespace), steps), 1e-5)
    assert journaled(run) == [list(range(1, steps + 1))] * 2
    assert len(takeovers(run)) == TIMES
    assert all("killed by SIGKILL; a new one took over" in text for text in takeovers(run))


def test_cells_are_executed_once(clusters):
    engines = clusters(2)
    engines.run_cell("done = []")
    for number in range(TIMES):
        source = f"import time; done.append({number}); time.sleep(0.6); len(done)"
        result: list = []
        cell = threading.Thread(
            target=lambda source=source, result=result: result.append(
                engines.run_cell(source, out=io.StringIO())
            )
        )
        cell.start()
        time.sleep(0.2)
        kill_controller(engines)
        cell.join(30)
        assert not cell.is_alive()
        assert result[0].values == dict.fromkeys(range(2), str(number + 1))
    assert engines.run_cell("done", out=io.StringIO()).values[1] == "[0, 1, 2]"


def test_one_that_is_killed_while_nothing_happens_is_not_missed(clusters):
    engines = clusters(2)
    for number in range(TIMES):
        pid = kill_controller(engines)
        if number:  # at first at once, then when another is known of
            taken_over(engines, pid)
        assert engines.call("is_broken") == [False, False]


def test_a_second_crash_while_another_one_starts(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=100_000, directory=tmp_path)
    for _ in range(2):
        taken_over(engines, kill_controller(engines))
    at = run.step_now
    deadline_s = time.monotonic() + 30
    while run.step_now < at + 10 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert run.pause() > at
    assert journaled(run)[0] == run.history.steps == list(range(1, run.step_now + 1))


def test_one_that_cannot_be_started_leaves_ranks_that_are_out_of_reach(clusters):
    engines = start(2)
    try:
        security = engines.directory / "security"
        port = json.loads((security / "ipcontroller-client.json").read_text())["registration"]
        (security / "ipcontroller-engine.json").write_text("{")
        kill_controller(engines)
        deadline_s = time.monotonic() + 20
        while engines.alive and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with pytest.raises(EnginesError, match="out of reach, controller: exit code 1"):
            engines.call("is_broken")
    finally:
        engines.stop()
    # The port may be another controller's by now, where a stranger is refused and counted.
    with socket.create_server(("127.0.0.1", port)) as server:
        assert select.select([server], [], [], 2.0)[0] == []
