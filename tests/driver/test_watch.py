"""Ranks that stand still: told within seconds with where, never confused with slow or busy ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.driver.test_run import GOOD
from workbench.driver import stacks, watch
from workbench.driver.engines import start
from workbench.errors import EnginesError, InputError, WorkbenchError

STALLS = ("busy", "busy_awaited", "halted", "halted_awaited", "deadlock")
AT = "if rank == 1 and calls == 20: "
FAULTS = {
    "loop": (AT + "\n        while True: pass", "busy_awaited", "Rank 1: still in forward after"),
    "lock": (AT + "sum(range(10**9))", "busy_awaited", "which holds the interpreter's lock)"),
    "deadlock": (
        "if rank == 1 and calls == 20: torch.distributed.barrier()",
        "deadlock",
        "rank 1 in barrier (cell {cell}, line 17, in loss)",
    ),
}


@pytest.fixture(autouse=True)
def _let_go(clusters):
    """What a test that failed has left standing is not met by the next."""
    yield
    engines = clusters.engines
    if engines is not None and engines.run is not None and engines.run.state == "running":
        clusters.stop()


def recipe(fault: str) -> str:
    return GOOD.replace("    pass\n", f"    {fault}\n")


def told(run, names=STALLS, limit_s=30.0) -> dict:
    """The first event with one of these names; waits for it."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for event in run.events:
            if event.get("name") in names:
                return event
        time.sleep(0.01)
    raise AssertionError(f"none of {names} in {[event['text'] for event in run.events]}")


def ended(run, limit_s=30.0) -> str:
    deadline_s = time.monotonic() + limit_s
    while run.state == "running" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return run.state


@pytest.mark.parametrize("fault", ["loop", "deadlock"])
def test_a_rank_that_stands_still_is_named_with_where_and_an_interrupt_keeps_the_state(
    clusters, tmp_path, fault
):
    text, name, says = FAULTS[fault]
    engines = clusters(2)
    run = engines.train(cell=recipe(text), steps=40, directory=tmp_path)
    event = told(run)
    assert (event["name"], event["kind"]) == (name, "warning")
    cell = engines.echo.watch([0]).number - 1
    assert says.format(cell=cell) in event["text"]
    if fault == "loop":
        assert f"(cell {cell}, line 18, in loss); held up: rank 0 in all-reduce." in event["text"]
    watch.break_off(engines)
    assert ended(run) == "failed"
    assert run.step_now == 19
    if fault == "loop":
        assert run.message.startswith("Rank 1: interrupted at step 20 (cell ")
        assert "is that of step 19: %dist_resume goes on" in run.message
    engines.run_cell("calls += 10")
    run.resume()
    assert run.wait(60)["state"] == "finished"
    good = engines.train(cell=GOOD, steps=40, directory=tmp_path)
    good.wait(60)
    assert run.history.loss == pytest.approx(good.history.loss, rel=1e-5)


def test_code_that_holds_the_interpreters_lock_is_told_with_where(clusters, tmp_path):
    text, name, says = FAULTS["lock"]
    engines = clusters(2)
    run = engines.train(cell=recipe(text), steps=40, directory=tmp_path)
    event = told(run)
    assert (event["name"], event["values"]["ranks"]) == (name, "1")
    assert says in event["text"]
    assert stacks.take(engines)[1].where.endswith("in loss")
    clusters.stop()  # it would go on for half a minute


def test_a_process_that_is_stopped_is_told_and_goes_on_with_nothing_lost(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=400, directory=tmp_path, start=False)
    run.step(2)
    pid = engines.status()[1]["pid"]
    run.resume()
    os.kill(pid, signal.SIGSTOP)
    event = told(run)
    assert event["text"].startswith("Rank 1: the process is stopped for ")
    assert stacks.take(engines)[1].state == "stopped"
    os.kill(pid, signal.SIGCONT)
    again = told(run, ["moves_again"])
    assert again["text"].startswith("Rank 1: moves again after ")
    assert run.wait(60)["state"] == "finished"
    assert run.history.steps == list(range(1, 401))


def test_a_process_that_is_stopped_while_nothing_is_asked_is_told_too(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=4, directory=tmp_path, start=False)
    run.step(2)
    pid = engines.status()[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert told(run)["name"] == "halted"
    os.kill(pid, signal.SIGCONT)
    told(run, ["moves_again"])
    assert run.step() == 3


def test_an_honest_long_computation_is_told_and_left_alone(clusters, tmp_path):
    engines = clusters(2)
    slow = (
        "import time; end = time.monotonic() + 5 * (rank == 1 and calls == 20)\n"
        "    while time.monotonic() < end: pass"
    )
    run = engines.train(cell=recipe(slow), steps=40, directory=tmp_path)
    event = told(run)
    assert "Rank 1: still in forward after" in event["text"]
    assert told(run, ["moves_again"])["values"]["ranks"] == "1"
    assert run.wait(60)["state"] == "finished"
    assert run.history.steps == list(range(1, 41))


def test_steps_that_are_long_all_the_time_are_no_stall(clusters, tmp_path):
    slow = "import time; time.sleep(2.5 if rank == 1 else 0)"
    run = clusters(2).train(cell=recipe(slow), steps=5, directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    assert not [event for event in run.events if event.get("name") in STALLS]


def test_on_a_busy_machine_nothing_that_moves_is_called_still(clusters, tmp_path):
    burn = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burn) for _ in range(8)]
    try:
        run = clusters(2).train("digits", steps=10**6, directory=tmp_path)
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            run.step(5)
            run.switch(shard=True)
            run.save()
            run.evaluate()
            run.profile("deep.json", force=True)
            run.step(20)
            run.switch("pipeline")
            run.step(5)
            run.switch("data")
        run.pause()
        assert not [event["text"] for event in run.events if event.get("name") in STALLS]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_the_policy_interrupts_what_stands_still(clusters, tmp_path):
    clusters.stop()
    with start(2, timeout=8) as engines:
        text = FAULTS["loop"][0]
        run = engines.train(cell=recipe(text), steps=40, directory=tmp_path, on_stall="interrupt")
        assert ended(run) == "failed"
        assert told(run, ["stall_ends"])["text"].startswith("Rank 1: interrupt after ")
        assert run.step_now == 19
        engines.run_cell("calls += 10")
        run.resume()
        assert run.wait(60)["state"] == "finished"


def plain(engines, tmp_path, steps: int) -> list[float]:
    good = engines.train(cell=GOOD, steps=steps, directory=tmp_path)
    good.wait(60)
    return good.history.loss


def test_the_policy_replaces_a_process_that_is_stopped(clusters, tmp_path):
    engines = clusters(2)
    expected = plain(engines, tmp_path, 300)
    run = engines.train(cell=GOOD, steps=300, directory=tmp_path, start=False, on_stall="replace")
    run.step(2)
    pid = engines.status()[1]["pid"]
    run.resume()
    os.kill(pid, signal.SIGSTOP)
    assert told(run, ["stall_ends"])["text"].startswith("Rank 1: replace after ")
    assert run.wait(60)["state"] == "finished"
    assert engines.status()[1]["pid"] != pid
    assert run.history.loss == pytest.approx(expected, rel=1e-5)
    assert not [event for event in run.events if event.get("name") == "moves_again"]


def test_a_rank_in_a_loop_can_be_replaced_and_the_training_goes_on(clusters, tmp_path):
    engines = clusters(2)
    flag = tmp_path / "loop"
    loop = f"import os\n    while rank == 1 and os.path.exists({str(flag)!r}): pass"
    expected = plain(engines, tmp_path, 300)
    run = engines.train(cell=recipe(loop), steps=300, directory=tmp_path, start=False)
    run.step(4)
    flag.touch()
    run.resume()
    assert told(run)["values"]["ranks"] == "1"
    flag.unlink()
    watch.fence(engines, 1)
    assert run.wait(60)["state"] == "finished"
    assert run.history.loss == pytest.approx(expected, rel=1e-5)


def test_what_is_asked_amiss_is_refused(clusters, tmp_path):
    engines = clusters(2)
    with pytest.raises(InputError, match="on_stall='kill': use one of wait, interrupt, replace"):
        engines.train(cell=GOOD, steps=2, directory=tmp_path, on_stall="kill")
    with pytest.raises(InputError, match="There is no rank 2: use 0 to 1"):
        watch.fence(engines, 2)
    assert watch.break_off(engines) == []
    assert {stack.is_idle for stack in stacks.take(engines).values()} == {True}


def test_a_rank_that_is_gone_has_no_stack_and_cannot_be_killed_again(clusters):
    engines = clusters(2)
    pid = engines.status()[1]["pid"]
    assert watch.fence(engines, 1) == pid
    deadline_s = time.monotonic() + 20
    while engines.alive and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert stacks.take(engines)[1].state == "gone: killed by SIGKILL"
    with pytest.raises(EnginesError, match="Rank 1 is gone already"):
        watch.fence(engines, 1)
    with pytest.raises(WorkbenchError):
        engines.call("is_broken")
    clusters.stop()
