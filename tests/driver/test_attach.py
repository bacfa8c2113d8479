"""A kernel that is killed: another one takes over its ranks, and the training goes on."""

from __future__ import annotations

import io
import math
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from left import Left

from tests.contract import test_skipped_updates as skipped_updates
from tests.contract.test_one_trajectory import plain
from tests.driver.test_controller import journaled
from tests.driver.test_run import GOOD
from workbench.driver import clusters as there
from workbench.driver import current, session
from workbench.driver.attach import attach
from workbench.engine import recipe as recipes
from workbench.errors import EnginesError, InputError

SLOW = GOOD.replace("    pass\n", "    import time; time.sleep(0.002)\n")

# A slice goes to rank 0 alone, which then waits in it for the other.
HALF = """
from workbench.spec import pulse
engines.submit("run_slice", 3, False, ranks=[0])
path = pulse.path_of(engines.status()[0]["log"])
while pulse.read(path).phase == "idle": time.sleep(0.01)
"""


@pytest.fixture
def left(clusters, tmp_path):
    """`left(cell, ...)` is a training whose kernel can be killed; nothing of it stays."""
    clusters.stop()
    session.end_abandoned()  # which an attach without a name would find, too
    made: list[Left] = []

    def begin(cell=SLOW, **how):
        made.append(Left(tmp_path, cell, **how))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            one.kill()
    stop_all()
    session.end_abandoned()


def stop_all() -> None:
    """End what this process has attached to, with its threads and connections."""
    for engines in current.all_engines():
        engines.stop()
    session.close()


def expected(steps: int) -> list[float]:
    namespace: dict = {}
    exec(GOOD, namespace)
    return plain(recipes.from_namespace(namespace), steps)


def test_a_training_goes_on_with_no_gap_and_no_step_twice(left):
    dead = left(steps=900, then="while run.step_now < 50: time.sleep(0.01)")
    dead.wait()
    dead.kill()
    engines = attach()
    run = engines.run
    assert run is not None
    at = run.step_now
    assert at >= 50
    assert run.history.steps[:at] == list(range(1, at + 1))
    assert run.wait(60)["state"] == "finished"
    assert run.history.steps == list(range(1, 901))
    assert run.history.loss == pytest.approx(expected(900), 1e-5)
    assert journaled(run) == [list(range(1, 901))] * 2
    assert [row["pid"] for row in engines.status()] == dead.pids
    engines.stop()
    assert not any(map(psutil.pid_exists, dead.pids))


def test_a_slice_that_was_sent_to_some_ranks_only_holds_nobody(left):
    dead = left(steps=20, then=f"run.wait(60)\n{HALF}")
    dead.wait()
    dead.kill()
    run = attach().run
    assert run is not None
    assert (run.state, run.step_now) == ("finished", 20)
    assert run.step(5) == 25
    assert run.history.loss == pytest.approx(expected(25), 1e-5)
    assert journaled(run) == [list(range(1, 26))] * 2


def test_what_only_the_driver_knew_is_there_again(left, tmp_path):
    then = (
        "run.wait(60); run.save('before'); run.switch('data', shard=True); run.resume(5);"
        "run.wait(60); run.evaluate()"
    )
    cell = f"{GOOD}\ndef evaluate(model): return {{'one': 1.0}}\n"
    dead = left(cell, steps=20, batch=4, seed=3, then=then, tensorboard=str(tmp_path / "tb"))
    dead.wait()
    dead.kill()
    run = attach().run
    assert run is not None
    assert (run.state, run.step_now, run.goal) == ("finished", 25, 25)
    assert run.history.steps == list(range(1, 26))
    assert str(run.layout) == "fsdp2"
    assert (run.options.batch, run.options.seed) == (4, 3)
    assert [mark["label"] for mark in run.marks] == ["saved", "shards"]
    assert [one["name"] for one in run.checkpoints()] == ["before"]
    assert (run.metrics, run.metrics_step) == ({"one": 1.0}, 25)
    names = [event.get("name") for event in run.events]
    assert names[0] == "built"
    assert "switched" in names
    assert names[-1] == "attached"
    shown = run.snapshot()
    assert shown["sample"]["step"] == 25
    assert [row["rank"] for row in shown["by_rank"]] == [0, 1]
    assert run.restore("before") == 20
    assert run.step(3) == 23
    assert len(list((tmp_path / "tb" / run.name).iterdir())) == 2


def test_ranks_that_no_training_was_begun_on(left):
    dead = left(None, then="engines.run_cell('x = rank + 40')")
    dead.wait()
    with pytest.raises(EnginesError, match=rf"notebook of process {dead.process.pid}, which"):
        attach()
    dead.kill()
    engines = attach()
    assert engines.run is None
    assert engines.run_cell("x", out=io.StringIO()).values == {0: "40", 1: "41"}


def test_a_rank_that_was_lost_meanwhile_is_replaced(left):
    dead = left(steps=100_000)
    dead.wait()
    dead.kill()
    os.kill(dead.pids[1], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(dead.pids[1])], timeout=10)
    engines = attach()
    run = engines.run
    assert run is not None
    deadline_s = time.monotonic() + 30
    while not (run.outages.all and run.outages.all[-1].is_over):
        assert time.monotonic() < deadline_s, (run, run.events)
        time.sleep(0.01)
    step = run.pause()
    assert run.outages.all[-1].why == "rank 1: ended while no kernel was there"
    assert run.history.steps == list(range(1, step + 1))
    assert run.history.loss == pytest.approx(expected(step), rel=1e-5)


def test_an_error_that_nobody_heard_of_is_told(left):
    cell = GOOD.replace("    pass\n", "    if calls == 30: raise ValueError('boo')\n")
    failing = "[future.result() for future in engines.submit('run_slice', 20, False)]"
    dead = left(cell, steps=20, then=f"run.wait(60); {failing}")
    dead.wait()
    dead.kill()
    run = attach().run
    assert run is not None
    assert run.state == "failed"
    assert "ValueError: boo" in run.message
    assert run.history.steps == list(range(1, run.step_now + 1))
    assert run.step(2) == run.step_now


def test_of_several_one_is_chosen_by_number_or_name(left):
    dead = [left(steps=2, then="run.wait(60)"), left(None)]
    for one in dead:
        one.wait()
        one.kill()
    with pytest.raises(InputError, match=r"2 clusters: 1 \(cell-1\), 2 \(cluster1\)"):
        attach()
    with pytest.raises(InputError, match="None is called 'zebra'"):
        attach("zebra")
    assert attach("2").run is None
    assert [cluster.name for cluster in there.others()] == ["cell-1"]
    run = attach("cell-1").run
    assert run is not None
    assert run.step_now == 2
    with pytest.raises(EnginesError, match="controls every cluster"):
        attach()


def test_attaching_leaves_nothing_behind(left):
    dead = left(steps=10, then="run.wait(60)")
    dead.wait()
    dead.kill()
    engines = attach()
    directory = engines.directory
    engines.stop()
    session.close()
    assert not directory.parent.exists()
    assert not list(Path(directory.parents[1]).glob("workbench-*"))


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
@pytest.mark.parametrize(("strategy", "spares"), [("data", 0), ("pipeline", 1)])
def test_a_kernel_that_ends_in_a_recovery_loses_nothing(left, strategy, spares, delay_s):
    then = (
        "import os\nrun.step(4); run.save('here'); run.step(2)\n"
        "run.inject('kill', rank=1, at_step=8); run.resume()\n"
        "while not run.outages.all: time.sleep(0.001)\n"
        f"time.sleep({delay_s}); os.kill(os.getpid(), 9)"
    )
    how = {"start": {"spares": spares}, "strategy": strategy}
    cell = f"BAD = None\n{skipped_updates.CELL}"
    dead = left(cell, steps=10, runs=False, **how, then=then)
    dead.ended()
    began_s = time.monotonic()
    run = attach().run
    assert run is not None
    assert time.monotonic() - began_s < 30
    assert run.wait(60)["state"] == "finished", run.message
    assert run.history.steps == list(range(1, 11))
    known = [(i, loss) for i, loss in enumerate(run.history.loss) if not math.isnan(loss)]
    curve = skipped_updates.plain(None)[0]
    assert [loss for _, loss in known] == pytest.approx([curve[i] for i, _ in known], rel=1e-5)


def test_branches_outages_and_faults_are_known_to_the_next_kernel(left):
    then = (
        "run.wait(60); run.save('here'); run.step(4); run.restore('here'); run.policy('shrink')\n"
        "run.inject('kill', rank=1, at_step=22); run.step(4)\n"
        "run.inject('kill', rank=0, at_step=27)"
    )
    dead = left(steps=20, start={"spares": 1}, then=then)
    dead.wait()
    dead.kill()
    run = attach().run
    assert run is not None
    told = run.snapshot()
    assert [branch["step"][-1] for branch in told["branches"]] == [24]
    assert (told["faults"]["faults"], told["faults"]["policy"]) == (1, "shrink")
    (outage,) = told["faults"]["outages"]
    assert "SIGKILL" in outage["why"]
    assert outage["marks"][-1][0] == "first new step"
    deadline_s = time.monotonic() + 60
    while not run.engines.roster.num_ready():  # the one whose place was taken is made anew
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert run.faults.under_way() == ["kill of rank 0 in forward of step 27"]
    assert run.step(6) == 30
    assert [row["state"] for row in run.faults.rows()] == ["struck", "struck"]
    assert len(run.outages.all) == 2
    assert run.history.loss == pytest.approx(expected(30), 1e-5)


@pytest.mark.parametrize("is_journal_lost", [False, True])
def test_steps_that_a_full_disk_did_not_take_are_known_to_the_next_kernel(
    left, tmp_path, is_journal_lost
):
    then = (
        "run.step(4); run.inject('disk-full', rank=0); run.inject('disk-full', rank=1)\n"
        "run.step(6); run.step(5)"
    )
    dead = left(steps=20, runs=False, then=then)
    dead.wait()
    dead.kill()
    if is_journal_lost:
        shutil.rmtree(tmp_path / "cell-1" / "journal")
    run = attach().run
    assert run is not None
    assert run.step_now == 15
    missing = [event["text"] for event in run.events if event.get("name") == "unknown_steps"]
    first = 5 if is_journal_lost else 1
    assert run.history.steps == list(range(first, 16))
    assert run.history.loss == pytest.approx(expected(15)[first - 1 :], 1e-5)
    assert len(missing) == int(is_journal_lost)
    if not is_journal_lost:
        assert run.clear_faults() == 2
        assert run.step(2) == 17
        assert journaled(run) == [list(range(1, 18))] * 2
