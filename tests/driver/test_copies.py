"""Copies in the memory of other ranks: a lost rank costs no disk, and few steps."""

from __future__ import annotations

import os
import signal

import pytest

from tests.driver.test_rescue import dying, faults, is_undisturbed, wait_until

STEPS = 12
# The rank dies while it makes its copies for the so-manieth time, after it has begun to send.
IN_A_COPY = """
import os, pathlib
import torch.distributed as D
from workbench.engine import copies
marker, known, copied = pathlib.Path({marker!r}), copies.send_and_receive, 0
def dies(*args):
    global copied
    copied += 1
    if copied == 2 and rank == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)
    return known(*args)
copies.send_and_receive = dies
"""


@pytest.mark.parametrize(
    ("layout", "ranks", "calls"),
    [("fsdp3", (1,), 8), ("fsdp3", (2,), 8), ("pp2, 1f1b x5", (1,), 40)],
)
def test_a_lost_rank_costs_the_steps_since_the_last_copy(clusters, tmp_path, layout, ranks, calls):
    """It dies in step 8, and there are copies of step 6."""
    engines = clusters(3 if layout == "fsdp3" else 2)
    cell = dying(tmp_path, ranks=ranks, call=calls)
    run = engines.train(
        cell=cell, steps=STEPS, strategy=layout, replicate_state=3, directory=tmp_path
    )
    assert run.wait(90)["state"] == "finished", run.message
    is_undisturbed(run)
    told = faults(run)
    assert (told["faults"], told["lost_steps"]) == (1, 1)
    assert told["outages"][0]["source"] == "copies in memory"
    assert not run.checkpoints()
    # Before the loss, and anew with the first steps after it.
    copied = [event["values"]["step"] for event in run.events if event.get("name") == "copied"]
    assert int(copied[0]) in (3, 6)
    assert int(copied[-1]) >= 7


def test_what_others_hold_is_not_copied(clusters, tmp_path):
    run = clusters(2).train(
        cell=dying(tmp_path), steps=STEPS, replicate_state=2, directory=tmp_path
    )
    assert run.wait(60)["state"] == "finished", run.message
    is_undisturbed(run)
    assert faults(run)["outages"][0]["source"] == "the other ranks"
    assert any(event.get("name") == "uncopied" for event in run.events)
    assert all("copies" not in row for row in run.memory)


def test_a_rank_that_dies_in_a_copy_leaves_the_one_before(clusters, tmp_path):
    engines = clusters(3)
    engines.run_cell(IN_A_COPY.format(marker=str(tmp_path / "died")))
    cell = dying(tmp_path, ranks=())
    run = engines.train(
        cell=cell, steps=STEPS, strategy="fsdp3", replicate_state=4, directory=tmp_path
    )
    assert run.wait(90)["state"] == "finished", run.message
    is_undisturbed(run)
    outage = faults(run)["outages"][0]
    assert (outage["source"], outage["lost_steps"]) == ("copies in memory", 4)


def test_with_the_keeper_gone_too_the_checkpoint_counts(clusters, tmp_path):
    engines = clusters(3)
    run = engines.train(
        cell=dying(tmp_path, ranks=(1, 2), call=8), steps=STEPS, strategy="fsdp3",
        replicate_state=3, save_every=4, directory=tmp_path,
    )  # fmt: skip
    assert run.wait(90)["state"] == "finished", run.message
    is_undisturbed(run)
    assert {one["source"] for one in faults(run)["outages"]} <= {"step-4", "copies in memory"}
    assert faults(run)["outages"][-1]["is_over"]


def test_copies_outlast_a_switch_and_take_no_more_memory(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(
        cell=dying(tmp_path, ranks=()), steps=60, strategy="fsdp2", replicate_state=2,
        directory=tmp_path, start=False,
    )  # fmt: skip
    run.step(4)
    first = [row["copies"] for row in run.memory]
    run.step(40)
    assert [row["copies"] for row in run.memory] == first
    assert min(first) > 0
    run.switch("pp2, 1f1b x5")
    assert run.step(1) == 45
    os.kill(engines.ranks[1]["pid"], signal.SIGKILL)
    wait_until(lambda: run.outages.all and engines.alive)
    assert run.step(2) == 46
    is_undisturbed(run, 46)
    outage = faults(run)["outages"][0]
    assert (outage["source"], outage["lost_steps"]) == ("copies in memory", 1)
    # Of a training that went back there are none.
    name = run.save()
    run.step(3)
    run.restore(name)
    assert run.step(1) == 47
    is_undisturbed(run, 47)
