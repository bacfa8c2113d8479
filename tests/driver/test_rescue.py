"""Ranks that are lost come back, and the curve is that of one plain process that lost nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.contract.test_one_trajectory import CELL, own_recipe, plain
from tests.driver.test_run import GOOD
from workbench.errors import EnginesError, InputError, RunError, WorkbenchError

STEPS = 12
# The loss of one rank kills its process at the step it is told, once: the marker says it did.
SUICIDE = CELL.replace(
    "loss = nn.functional.mse_loss",
    """calls = 0
def loss(output, target):
    global calls
    calls += output.requires_grad
    import os, pathlib
    marker = pathlib.Path({marker!r})
    if rank in {ranks} and calls == {call} and output.requires_grad:
        if not pathlib.Path(f"{{marker}}{{rank}}").exists() or {always}:
            pathlib.Path(f"{{marker}}{{rank}}").touch()
            {how}
    return nn.functional.mse_loss(output, target)
""",
)
KILL = "os.kill(os.getpid(), 9)"


def dying(tmp_path, *, ranks=(1,), call=5, how=KILL, always=False):
    marker = str(tmp_path / "died")
    return SUICIDE.format(marker=marker, ranks=ranks, call=call, how=how, always=always)


def is_undisturbed(run, steps=STEPS):
    assert run.history.steps == list(range(1, steps + 1))
    assert run.history.loss == pytest.approx(plain(own_recipe(), steps), rel=1e-5)


def faults(run):
    return run.snapshot()["faults"]


@pytest.mark.parametrize("how", [KILL, "os._exit(3)", "os.kill(os.getpid(), 11)", "os.abort()"])
def test_a_spare_takes_the_place_of_a_rank_however_it_was_lost(clusters, tmp_path, how):
    engines = clusters(2, spares=1)
    run = engines.train(cell=dying(tmp_path, how=how), steps=STEPS, directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    is_undisturbed(run)
    told = faults(run)
    assert (told["faults"], told["lost_steps"]) == (1, 0)
    assert told["outages"][0]["filled"] == "a spare one is rank 1"
    assert [what for what, _ in told["outages"][0]["marks"]][-1] == "first new step"
    assert 0 < told["goodput"] < 1
    by_rank = run.to_frame(by_rank=True)
    assert sorted(by_rank["step"]) == sorted([*range(1, STEPS + 1)] * 2)
    parts = by_rank.drop(columns=["step", "rank", "loss", "wall_s", "sent_bytes"], errors="ignore")
    assert (parts.select_dtypes("number") >= 0).all().all()


LAYOUTS = ["dp3", "fsdp2", "pp2, 1f1b x5", "pp2 dp2, gpipe x2", "dp2 fsdp2", "none"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_the_same_under_every_layout(clusters, tmp_path, layout):
    """Where the others hold the whole, nothing is lost; else the last checkpoint has it."""
    n = 4 if layout in ("pp2 dp2, gpipe x2", "dp2 fsdp2") else 3 if layout == "dp3" else 2
    engines = clusters(n)
    how = {"strategy": layout, "save_every": 3, "directory": tmp_path}
    at = 0 if layout == "none" else 1
    ranks = (n - 1,) if layout.startswith("pp") else (at,)
    calls = {"pp2, 1f1b x5": 25, "pp2 dp2, gpipe x2": 10}.get(layout, 5)
    cell = dying(tmp_path, ranks=ranks, call=calls)
    run = engines.train(cell=cell, steps=STEPS, **how)
    assert run.wait(90)["state"] == "finished", run.message
    is_undisturbed(run)
    told = faults(run)
    assert told["faults"] == 1
    # A checkpoint that was being written is none.
    lost = {"the other ranks": 0, "step-3": 1, "the beginning": 4}
    assert told["lost_steps"] == lost[told["outages"][0]["source"]]
    if layout in ("dp3", "dp2 fsdp2", "pp2 dp2, gpipe x2"):
        assert told["lost_steps"] == 0


def test_without_a_checkpoint_it_begins_again(clusters, tmp_path):
    run = clusters(2).train(cell=dying(tmp_path), steps=STEPS, strategy="fsdp2", directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    is_undisturbed(run)
    assert faults(run)["outages"][0]["source"] == "the beginning"


def test_all_ranks_lost_at_once(clusters, tmp_path):
    engines = clusters(3)
    run = engines.train(cell=CELL, steps=10**6, save_every=5, directory=tmp_path)
    wait_for_step(run, 12)
    for row in engines.ranks:
        os.kill(row["pid"], signal.SIGKILL)
    wait_until(lambda: run.outages.all and run.outages.all[-1].is_over)
    step = run.pause()
    is_undisturbed(run, step)


def test_the_one_that_took_the_place_is_lost_as_well(clusters, tmp_path):
    """Two ranks die one after the other, the second in the first step after the recovery."""
    engines = clusters(3, spares=1)
    cell = dying(tmp_path, ranks=(1, 2), call=5)
    run = engines.train(cell=cell, steps=STEPS, save_every=2, directory=tmp_path)
    assert run.wait(90)["state"] == "finished"
    is_undisturbed(run)


EVALUATED = """

def evaluate(model):
    import os, pathlib
    marker = pathlib.Path({marker!r})
    if rank == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)
    return {{"one": 1.0}}
"""


@pytest.mark.parametrize("ask", ["", "step", "evaluate", "profile", "switch", "save"])
def test_in_a_command_which_is_then_done(clusters, tmp_path, ask):
    """The rank dies when the metrics are taken; at the goal, or where a command asks for them."""
    engines = clusters(2, spares=1)
    cell = CELL + EVALUATED.format(marker=str(tmp_path / "died"))
    run = engines.train(cell=cell, steps=STEPS, directory=tmp_path, start=not ask)
    if ask == "step":
        assert run.step(STEPS) == STEPS
    elif ask == "evaluate":
        assert run.evaluate() == {"one": 1.0}
        run.resume()
    elif ask:
        (tmp_path / "died").touch()
        os.kill(engines.ranks[1]["pid"], signal.SIGKILL)
        args = {"profile": [tmp_path / "deep.json"], "switch": ["fsdp2"], "save": ["mine"]}
        getattr(run, ask)(*args[ask])
        run.resume()
    wait_until(lambda: run.state == "finished" or (ask == "step" and run.step_now == STEPS))
    is_undisturbed(run)
    assert faults(run)["faults"] == 1


def test_while_paused(clusters, tmp_path):
    engines = clusters(2, spares=1)
    run = engines.train(cell=CELL, steps=STEPS, directory=tmp_path, start=False)
    run.step(3)
    os.kill(engines.ranks[0]["pid"], signal.SIGKILL)
    wait_until(lambda: run.outages.all and engines.alive)
    assert run.step(2) == 5
    assert run.state == "paused"
    run.resume()
    assert run.wait(60)["state"] == "finished"
    is_undisturbed(run)


def test_elastic_goes_on_with_those_that_are_left(clusters, tmp_path):
    engines = clusters(3)
    cell = dying(tmp_path)
    run = engines.train(cell=cell, steps=STEPS, on_loss="shrink", directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    assert (engines.num_ranks, str(run.layout)) == (2, "dp2")
    assert [row["rank"] for row in engines.ranks] == [0, 1]
    is_undisturbed(run)
    seen = engines.run_cell("import os\n[rank, world_size, os.environ['RANK'], dist.get_rank()]")
    assert seen.values == {0: "[0, 2, '0', 0]", 1: "[1, 2, '1', 1]"}
    # And back again, with those that were missing.
    run.recover()
    assert (engines.num_ranks, str(run.layout)) == (3, "dp3")
    run.resume(steps=4)
    assert run.wait(60)["state"] == "finished"
    is_undisturbed(run, STEPS + 4)


def test_waiting_for_the_user(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=dying(tmp_path), steps=STEPS, on_loss="wait", directory=tmp_path)
    shown = run.wait(30)
    assert shown["state"] == "waiting"
    assert "%dist_recover" in shown["message"]
    with pytest.raises(RunError, match="recover"):
        run.save()
    with pytest.raises(InputError, match="use replace or shrink"):
        run.recover("somehow")
    run.recover()
    assert run.wait(60)["state"] == "finished"
    is_undisturbed(run)


def test_a_run_that_waits_can_be_stopped_and_brought_back_later(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=dying(tmp_path), steps=STEPS, on_loss="wait", directory=tmp_path)
    shown = run.wait(30)
    assert shown["state"] == "waiting"
    assert [(place["is_gone"], place["held"]) for place in shown["places"]] == [
        (False, 1),
        (True, 0),
    ]
    assert [row["rank"] for row in shown["memory"]] == [0]
    with pytest.raises(RunError, match="recover"):
        run.switch("model")
    assert "stop" in shown["allowed"]
    at = run.stop()
    assert run.snapshot()["state"] == "stopped"
    assert not any("switch" in event["text"] for event in run.events)
    run.resume()
    assert run.wait(30)["state"] == "waiting"
    run.stop()
    assert run.recover() == at
    assert run.snapshot()["state"] == "stopped"
    assert not any(place["is_gone"] for place in run.snapshot()["places"])
    run.resume()
    assert run.wait(60)["state"] == "finished"
    is_undisturbed(run)
    # However often it was waited for, it was lost once, and waiting is no part of the first step.
    assert [event.get("name") for event in run.events].count("lost") == 1
    (outage,) = faults(run)["outages"]
    assert outage["why"].count("rank 1") == 1
    assert [what for what, _ in outage["marks"]][-3:] == ["state", "asked", "first new step"]


def test_what_is_asked_amiss_is_no_part_of_the_story(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=4, directory=tmp_path)
    run.wait(60)
    before = run.events
    for amiss in (
        lambda: run.switch("modell"),
        lambda: run.inject("lunch"),
        lambda: run.restore("nothing"),
        lambda: run.policy(on_stall="no"),
        lambda: run.switch("pp9"),
    ):
        with pytest.raises(WorkbenchError):
            amiss()
    assert run.events == before


def test_a_recipe_that_always_kills_its_rank_ends_in_waiting(clusters, tmp_path):
    engines = clusters(2)
    cell = dying(tmp_path, call=1, always=True)
    run = engines.train(cell=cell, steps=STEPS, directory=tmp_path)
    assert run.wait(90)["state"] == "waiting"
    assert any("may be the cause" in event["text"] for event in run.events)


def test_what_earlier_cells_defined_is_there_again(clusters, tmp_path):
    engines = clusters(2)
    engines.run_cell("width = 7")
    engines.run_cell("def inner():\n    return width\nunrelated = 1 / 1")
    engines.run_cell("dist.barrier(); other = 3")
    cell = dying(tmp_path).replace("nn.Linear(7, 2)", "nn.Linear(inner(), 2)")
    run = engines.train(cell=cell, steps=STEPS, directory=tmp_path)
    assert run.wait(60)["state"] == "finished", run.message
    is_undisturbed(run)


def test_a_rank_that_is_lost_while_nothing_is_trained(clusters):
    engines = clusters(2)
    engines.run_cell("mine = rank")
    with pytest.raises(EnginesError, match="Rank 1 is gone"):
        engines.run_cell("import os\nif rank == 1: os._exit(4)\ndist.barrier()")
    found = engines.run_cell("dist.barrier()\n[rank, world_size]")
    assert found.values == {0: "[0, 2]", 1: "[1, 2]"}
    assert engines.run_cell("mine", ranks=[0]).values == {0: "0"}


def test_a_rank_that_only_waited(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=10**6, strategy="none", directory=tmp_path)
    wait_for_step(run, 3)
    os.kill(engines.ranks[1]["pid"], signal.SIGKILL)
    wait_until(lambda: run.outages.all and run.outages.all[-1].is_over)
    assert faults(run)["lost_steps"] == 0
    run.pause()
    run.switch("dp2")
    assert run.step(2)


def wait_for_step(run, step):
    wait_until(lambda: run.step_now >= step)


def wait_until(is_so, limit_s=60):
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)
