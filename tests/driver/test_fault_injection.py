"""Faults that are asked for: they strike where they are to, once, and are told as they happen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import psutil
import pytest

from tests.contract import test_skipped_updates as skipped_updates
from workbench.errors import InputError, RankError, RunError, WorkbenchError
from workbench.spec.fault import PHASES, kinds

LIMIT_S = 60.0
# Four blocks that each layout takes.
CELL = f"BAD = None\n{skipped_updates.CELL}"
# Kinds that cost the process, and what is said of its end.
LETHAL = {"kill": "SIGKILL", "exit": "exit code 3", "segfault": "SIGSEGV", "oom": "SIGKILL"}


def plain(steps: int) -> list[float]:
    """The undisturbed curve."""
    return skipped_updates.plain(None)[0][:steps]


def wait_for(reached: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def texts(run, name: str) -> list[str]:
    return [event["text"] for event in run.events if event.get("name") == name]


@pytest.mark.parametrize("kind", LETHAL)
def test_a_lost_rank_is_told_first_comes_back_and_is_not_struck_again(clusters, tmp_path, kind):
    run = clusters(2).train(cell=CELL, steps=8, directory=tmp_path, start=False)
    run.inject(kind, rank=1, at_step=4)
    assert run.faults.rows()[0]["state"] == "armed"
    run.resume()
    shown = run.wait(LIMIT_S)
    assert shown["state"] == "finished"
    (fault,) = texts(run, "fault")
    (lost,) = texts(run, "lost")
    assert fault == f"fault injected: {kind} of rank 1 in forward of step 4"
    assert LETHAL[kind] in lost
    order = [event["text"] for event in run.events]
    assert order.index(fault) < order.index(lost)
    assert {"step": 3, "label": "fault"} in run.marks
    assert [row["state"] for row in run.faults.rows()] == ["struck"]
    assert run.faults.rows()[0]["struck"] == 4
    assert run.history.steps == list(range(1, 9))
    known = [(i, loss) for i, loss in enumerate(run.history.loss) if not math.isnan(loss)]
    expected = plain(8)
    assert [loss for _, loss in known] == pytest.approx([expected[i] for i, _ in known], rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2, 1f1b x2", "tp2"])
def test_it_strikes_in_any_part_of_a_step(clusters, tmp_path, layout):
    run = clusters(2).train(cell=CELL, steps=4, strategy=layout, directory=tmp_path, start=False)
    for phase in PHASES:
        run.inject("slow", rank=1, at_step=2, phase=phase, for_s=0.01)
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    struck = {row["phase"]: row["struck"] for row in run.faults.rows() if row["struck"]}
    assert struck == dict.fromkeys(PHASES, 2)
    assert run.history.loss == pytest.approx(plain(4), rel=1e-5)
    assert run.clear_faults() == len(PHASES)


def test_a_slow_rank_is_slow_until_it_is_cleared(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=100, directory=tmp_path, start=False)
    run.step(3)
    run.inject("slow", rank=0, for_s=0.2)
    run.step(3)
    wall_s = [part.sums[0]["wall_s"] / part.num_steps for part in run.history.recent]
    assert wall_s[-1] >= 0.2
    run.clear_faults()
    run.step(3)
    last = run.history.recent[-1]
    assert last.sums[0]["forward_s"] / last.num_steps < 0.2
    assert run.faults.rows()[0]["state"] == "cleared"


def test_a_stalled_rank_goes_on_after_its_time(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=CELL, steps=6, directory=tmp_path, start=False)
    run.inject("stall", rank=1, at_step=3, for_s=0.5)
    began_s = time.monotonic()
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    assert time.monotonic() - began_s >= 0.5
    assert run.history.loss == pytest.approx(plain(6), rel=1e-5)


def test_a_stopped_rank_goes_on_when_faults_are_cleared(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=CELL, steps=6, directory=tmp_path, start=False)
    run.inject("stall", rank=1, at_step=3)
    rank = psutil.Process(engines.ranks[1]["pid"])
    run.resume()
    wait_for(lambda: rank.status() == psutil.STATUS_STOPPED and texts(run, "fault"))
    run.clear_faults()
    assert run.wait(LIMIT_S)["state"] == "finished"
    assert run.history.loss == pytest.approx(plain(6), rel=1e-5)


def test_a_loop_ends_after_its_time(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=5, directory=tmp_path, start=False)
    run.inject("stall", rank=0, at_step=2, how="loop", for_s=0.3)
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    assert run.history.loss == pytest.approx(plain(5), rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2, 1f1b x2", "tp2"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_nan_is_skipped_together(clusters, tmp_path, layout, rank, how):
    run = clusters(2).train(
        cell=CELL, steps=6, strategy=layout, on_nan="skip", directory=tmp_path, start=False
    )
    run.inject("nan", rank=rank, at_step=3, how=how)
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    skipped = [event["values"] for event in run.events if event.get("name") == "skipped"]
    assert [values["step"] for values in skipped] == ["3"]
    before = plain(3)
    assert run.history.loss[:2] == pytest.approx(before[:2], rel=1e-5)
    assert all(map(math.isfinite, run.history.loss[3:]))


def test_nan_stops_the_run_with_the_state_before(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=6, directory=tmp_path, start=False)
    run.inject("nan", at_step=3)
    with pytest.raises(RunError, match="loss is nan at step 3"):
        run.step(6)
    assert run.step_now == 2
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    assert run.history.loss == pytest.approx(plain(6), rel=1e-5)


@pytest.mark.parametrize("strategy", ["dp2", "pp2, 1f1b x4"])
def test_ranks_whose_link_drops_meet_again_and_go_on(clusters, tmp_path, strategy):
    how = {"strategy": strategy, "directory": tmp_path, "start": False}
    run = clusters(2).train(cell=CELL, steps=10, **how)
    run.inject("drop-link", rank=1, at_step=3, phase="backward")
    run.inject("drop-link", rank=0, at_step=7, phase="optimizer")
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    assert run.history.steps == list(range(1, 11))
    assert run.history.loss == pytest.approx(plain(10), rel=1e-5)
    told = run.snapshot()["faults"]
    assert told["faults"] == len(texts(run, "reunited")) == 2
    assert told["lost_steps"] == 0
    assert [what for what, _ in told["outages"][0]["marks"]][-1] == "first new step"


def test_ranks_that_lose_each_other_by_what_they_do_stop(clusters, tmp_path):
    cell = CELL.replace(
        "loss = nn.functional.mse_loss",
        """def loss(output, target):
    if rank == 1 and output.requires_grad:
        from workbench.engine.here import here
        here.world.free()
    return nn.functional.mse_loss(output, target)
""",
    )
    run = clusters(2).train(cell=cell, steps=4, directory=tmp_path)
    told = run.wait(LIMIT_S)
    assert told["state"] == "failed"
    assert "the ranks lost each other" in told["message"]
    assert (told["step"], told["faults"]["faults"]) == (0, 1)


def test_a_refused_allocation_is_an_error_of_the_rank(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=6, directory=tmp_path, start=False)
    run.inject("oom", rank=1, at_step=3, how="allocation")
    with pytest.raises(RankError, match="Rank 1 at step 3: RuntimeError"):
        run.step(6)
    assert run.step(4) == 6


def test_a_full_disk_is_told_and_the_journal_is_whole_in_the_end(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=100, directory=tmp_path, start=False)
    for rank in (0, 1):
        run.inject("disk-full", rank=rank)
    run.step(2)
    assert any("the journal cannot be written" in event["text"] for event in run.events)
    with pytest.raises(WorkbenchError, match="No space left"):
        run.save("full")
    assert run.checkpoints() == []
    assert run.clear_faults() == 2
    run.step(2)
    assert run.save("room") == "room"
    for rank in (0, 1):
        lines = (run.directory / "journal" / f"rank{rank}.jsonl").read_text().splitlines()
        assert len(lines) == sum(line.startswith('{"time_s"') for line in lines) >= 2
    assert run.history.loss == pytest.approx(plain(4), rel=1e-5)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"kind": "kil"}, "kill"),
        ({"kind": "kill", "rank": 2}, "rank=2: ranks 0 to 1 train"),
        ({"kind": "kill", "at_step": 2}, "at_step=2: step 2 is taken. Use 3 or later"),
        ({"kind": "kill", "phase": "lunch"}, "phase='lunch': use one of forward"),
        ({"kind": "stall", "how": "gently"}, "how='gently': stall knows stop, loop"),
        ({"kind": "slow", "for_s": -1.0}, "for_s=-1.0: use seconds > 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(clusters, tmp_path, how, says):
    run = clusters(2).train(cell=CELL, steps=2, directory=tmp_path)
    run.wait(LIMIT_S)
    with pytest.raises(InputError, match=says) as caught:
        run.inject(**how)
    assert "\n" not in str(caught.value)
    assert run.faults.rows() == []


def test_what_was_armed_and_cleared_does_not_strike(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=4, directory=tmp_path, start=False)
    run.inject("kill", at_step=2)
    assert run.clear_faults() == 1
    run.resume()
    assert run.wait(LIMIT_S)["state"] == "finished"
    assert texts(run, "fault") == []


def test_all_kinds_are_tried_here():
    tried = {*LETHAL, "slow", "stall", "nan", "drop-link", "disk-full"}
    assert tried == set(kinds())
