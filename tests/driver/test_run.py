"""Run: commands act between slices, and what goes wrong keeps the state of the last step."""

from __future__ import annotations

import io
import json
import re

import pytest

from workbench.errors import (
    CheckpointError,
    InputError,
    LayoutError,
    RecipeError,
    RunError,
    WorkbenchError,
)

CELL = """
import torch
from torch import nn
batch = 8
calls = 0

def model():
    return nn.Linear(4, 1)

def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)

def loss(output, target):
    global calls
    calls += output.requires_grad
    {fault}
    return nn.functional.mse_loss(output, target)
"""
GOOD = CELL.format(fault="pass")


def test_pause_resume_step_and_stop(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=100_000, directory=tmp_path)
    at = run.pause()
    assert run.state == "paused"
    assert run.step() == at + 1
    assert run.step(3) == at + 4
    assert run.state == "paused"
    run.resume()
    assert run.state == "running"
    stopped = run.stop()
    assert run.state == "stopped"
    assert run.resume(steps=5) == stopped
    assert run.wait(30)["step"] == stopped + 5


def test_a_pause_ends_steps_that_would_take_long(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=1, directory=tmp_path, start=False)
    asked = run.ask("step", n=1_000_000)
    at = run.pause()
    assert asked.result(10) == at < 1_000_000
    assert run.state == "paused"
    assert run.step(2) == at + 2


def test_cells_run_while_it_trains_and_all_ranks_are_at_one_step(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=100_000, directory=tmp_path)
    values = engines.run_cell("t = torch.tensor([calls]); dist.all_reduce(t); (calls, int(t))",
                              out=io.StringIO()).values  # fmt: skip
    calls, total = eval(values[0])
    assert total == 2 * calls
    assert run.state == "running"
    run.stop()


def test_each_step_is_in_every_ranks_journal_once(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=120, directory=tmp_path)
    run.wait(60)
    for rank in range(2):
        lines = (run.directory / "journal" / f"rank{rank}.jsonl").read_text().splitlines()
        steps = []
        for slice_ in map(json.loads, lines):
            steps += range(slice_["first"], slice_["first"] + len(slice_["columns"]["loss"]))
        assert steps == list(range(1, 121))


def test_the_books_balance_on_every_rank(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=300, directory=tmp_path)
    for row in run.wait(60)["by_rank"]:
        names = ("forward", "backward", "optimizer", "data", "wire", "idle", "other")
        parts = [row[f"{part}_ms"] for part in names]
        assert all(part >= 0 for part in parts)
        wall = sum(s.sums[row["rank"]]["wall_s"] for s in run.history.recent)
        steps = sum(s.num_steps for s in run.history.recent)
        assert sum(parts) == pytest.approx(1e3 * wall / steps, rel=0.02)
        assert row["wire_ms"] > 0
        assert row["sent_bytes"] > 0


FAULTS = {
    "one rank raises": (
        'if rank == 1 and calls == 13: raise KeyError("nowhere")',
        "Rank 1 at step 13: KeyError",
    ),
    "all ranks raise": (
        'if calls == 13: raise KeyError("nowhere")',
        "Ranks 0-2 at step 13: KeyError",
    ),
    "one rank's loss is NaN": (
        "if rank == 0 and calls == 13: output = output * float('nan')",
        "loss is nan at step 13",
    ),
}


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_with_one_sentence_and_the_state_before(
    clusters, tmp_path, fault, shard
):
    line, says = FAULTS[fault]
    engines = clusters(3)
    cell = CELL.format(fault=line)
    run = engines.train(cell=cell, steps=30, shard=shard, directory=tmp_path)
    shown = run.wait(60)
    assert shown["state"] == "failed"
    assert shown["step"] == 12
    assert "\n" not in shown["message"]
    assert "Traceback" not in shown["events"][-1]["text"]
    assert re.search(says, shown["message"])
    assert run.save() == "step-12"
    # The fault was at one call: what follows is the curve without it.
    run.resume()
    assert run.wait(60)["state"] == "finished"
    good = engines.train(cell=GOOD, steps=30, shard=shard, directory=tmp_path)
    good.wait(60)
    assert run.history.steps == list(range(1, 31))
    assert run.history.loss == pytest.approx(good.history.loss, rel=1e-5)


def test_the_report_of_a_fault_names_the_line_of_the_cell(clusters, tmp_path):
    cell = CELL.format(fault='if rank == 1 and calls == 5: raise KeyError("nowhere")')
    run = clusters(2).train(cell=cell, steps=30, directory=tmp_path)
    run.wait(60)
    assert "raise KeyError" in run.events[-1]["text"]
    assert ", in loss" in run.events[-1]["text"]


def test_saves_every_n_steps(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=25, save_every=10, directory=tmp_path)
    run.wait(60)
    assert [row["step"] for row in run.checkpoints()] == sorted(
        row["step"] for row in run.checkpoints()
    )
    assert len(run.checkpoints()) == 2


def test_old_automatic_checkpoints_go_and_those_asked_for_stay(clusters, tmp_path):
    how = {"save_every": 2, "keep": 2, "keep_every": 8}
    run = clusters(2).train(cell=GOOD, steps=3, directory=tmp_path, **how)
    run.wait(60)
    run.save("mine")
    run.save()
    run.resume(steps=14)
    run.wait(60)
    saved = [(row["step"], row["by_itself"]) for row in run.checkpoints()]
    named = [row["step"] for row in run.checkpoints() if not row["by_itself"]]
    assert named == [3, 3]
    assert [step for step, by_itself in saved if by_itself] == [8, 14, 16]
    assert run.snapshot()["checkpoints"][-1]["name"] == run.checkpoints()[-1]["name"]
    assert {path.name for path in (run.directory / "checkpoints").iterdir()} >= {"mine"}
    assert not list((run.directory / "checkpoints").glob(".*.partial-*"))


BAD = {
    "unknown recipe": (("digit",), {}, RecipeError, "Did you mean 'digits'"),
    "unknown strategy": (("digits",), {"strategy": "dat"}, LayoutError, "Did you mean 'data'"),
    "unknown option": (("digits",), {"step": 5}, InputError, "Did you mean 'steps'"),
    "negative steps": (("digits",), {"steps": -1}, InputError, "steps=-1"),
    "batch below ranks": (("digits",), {"batch": 1}, LayoutError, "batch=1"),
    "no recipe": ((), {}, RecipeError, "digits"),
    "unknown size": (("pytext",), {"size": "huge"}, RecipeError, "tiny"),
    "restore of nothing": (("digits",), {"restore": "/nowhere"}, CheckpointError, "nowhere"),
    "unwritable folder": (("digits",), {"directory": "/proc/runs"}, CheckpointError, "--dir"),
    "cell without model": ((), {"cell": "x = 1"}, RecipeError, "model"),
    "cell that is no code": ((), {"cell": "def"}, Exception, "SyntaxError"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_loses_nothing(clusters, tmp_path, case):
    args, how, kind, says = BAD[case]
    engines = clusters(2)
    with pytest.raises(kind, match=says) as caught:
        engines.train(*args, **{"directory": tmp_path, **how})
    assert "\n" not in str(caught.value)
    good = engines.train(cell=GOOD, steps=3, directory=tmp_path)
    assert good.wait(30)["state"] == "finished"


def test_model_and_loss_that_do_not_fit_are_told_with_shapes(clusters, tmp_path):
    cell = GOOD.replace("nn.functional.mse_loss(output, target)",
                        "nn.functional.cross_entropy(output, target[:3, 0].long())")  # fmt: skip
    run = clusters(2).train(cell=cell, steps=3, directory=tmp_path)
    shown = run.wait(30)
    assert shown["state"] == "failed"
    assert "[4, 1]" in shown["message"]


def test_two_trainings_at_once_are_refused_and_the_first_goes_on(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=100_000, directory=tmp_path)
    with pytest.raises(RunError, match="%dist_pause"):
        engines.train("digits", directory=tmp_path)
    assert run.state == "running"
    run.stop()


def test_commands_that_do_not_fit_the_state_say_which_do(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=2, directory=tmp_path)
    run.wait(30)
    with pytest.raises(RunError, match="finished"):
        run.ask("stop").result()
    with pytest.raises(RunError, match="No command named"):
        run.ask("paus").result()
    with pytest.raises(CheckpointError):
        run.restore("nothing")


BAD_SWITCHES = {
    "too few parts": ("pp8", {}, "there are 2"),
    "does not divide": ("tp3", {}, "there are 2"),
    "a name mistyped": ("pipelin", {}, "Did you mean 'pipeline'"),
    "not a layout": ("pp2 xx2", {}, "'xx2' in 'pp2 xx2' is no degree"),
    "an option of another": ("data", {"microbatches": 4}, "an option of pipeline and hybrid"),
    "too many microbatches": ("pipeline", {"microbatches": 65}, '"pp2, 1f1b x64"'),
    "too few microbatches": ("pipeline", {"microbatches": 1, "schedule": "1f1b"}, '"pp2, 1f1b x2"'),
    "no such schedule": ("pipeline", {"schedule": "gpip"}, "Did you mean 'gpipe'"),
    "more ranks than there are": ("data", {"ranks": 9}, "Use 1 to 2"),
    "no hybrid of two": ("hybrid", {}, 'Use the layout "pp2, 1f1b x4"'),
    "a schedule": ("zbv", {}, "Use pipeline --schedule zbv"),
    "no comma": ("pp2 1f1b x4", {}, 'Use "pp2, 1f1b x4"'),
    "nothing said": (None, {}, "Say to what"),
}


@pytest.mark.parametrize("what", BAD_SWITCHES)
def test_a_switch_that_cannot_be_is_one_sentence_and_the_training_goes_on(paused, what):
    strategy, how, says = BAD_SWITCHES[what]
    before = paused.layout
    with pytest.raises(WorkbenchError, match=says) as raised:
        paused.switch(strategy, **how)
    assert str(raised.value).count("\n") == 0
    assert paused.layout == before
    paused.step(1)


@pytest.fixture
def paused(tmp_path, clusters):
    return clusters(2).train("digits", steps=50, start=False, directory=tmp_path)


def test_a_switch_to_fewer_ranks_leaves_the_others_waiting(paused):
    paused.switch("none")
    before = paused.step_now
    assert paused.step(2) == before + 2
    shown = paused.snapshot()
    assert [place["idle"] for place in shown["places"]] == [False, True]
    assert [[place[axis] for axis in ("pp", "dp", "tp")] for place in shown["places"]] == [
        [0, 0, 0],
        [None, None, None],
    ]
    assert [len(shown["by_rank"]), shown["strategy"], shown["layout"]] == [1, "none", "dp1"]
    paused.switch("pipeline", microbatches=4)
    paused.step(2)
    shown = paused.snapshot()
    assert [place["stages"] for place in shown["places"]] == [[0], [1]]
    assert sum(stage["share"] for stage in shown["stages"]) == pytest.approx(1)
    assert sum(place["held"] for place in shown["places"]) == pytest.approx(1)
    mark = shown["marks"][-1]
    assert (mark["label"], mark["layout"]) == ("pipeline", "pp2, 1f1b x4")
    assert mark["took_s"] > 0
    assert mark["moved_bytes"] > 0
    paused.switch("data")
    assert set(paused.evaluate()) == {"accuracy"}


def test_a_sharded_training_that_was_measured_can_be_switched(clusters, tmp_path):
    run = clusters(2).train("pytext", steps=1, batch=4, shard=True, directory=tmp_path)
    assert run.wait(60)["metrics"]
    run.switch("pipeline", microbatches=2)
    before = run.evaluate()
    run.switch("data")
    run.metrics_step = None
    assert run.evaluate() == pytest.approx(before, rel=1e-5)


SUM = GOOD.replace("nn.functional.mse_loss(output, target)", "(output - target).square().sum()")


def test_a_loss_that_is_no_mean_is_noted(clusters, tmp_path):
    told = []
    for cell in (SUM, GOOD):
        run = clusters(2).train(cell=cell, steps=0, directory=tmp_path)
        told.append(any("no mean over the samples" in event["text"] for event in run.events))
    assert SUM != GOOD
    assert told == [True, False]


def test_an_optimizer_that_cannot_be_sharded_is_refused_before_anything_changes(clusters, tmp_path):
    cell = f"{GOOD}\ndef optimizer(params):\n    return torch.optim.Adafactor(params)\n"
    run = clusters(2).train(cell=cell, steps=4, directory=tmp_path, start=False)
    with pytest.raises(LayoutError, match="Adafactor mixes"):
        run.switch("data", shard=True)
    with pytest.raises(LayoutError, match="pp='a' is not a degree"):
        run.switch("hybrid", pp="a")
    with pytest.raises(InputError, match="3 is no strategy"):
        run.switch(3)
    run.step(2)
    with pytest.raises(InputError, match="more than the 1,437 samples"):
        run.engines.train("digits", batch=10**9)


def test_a_goal_behind_the_checkpoint_is_refused_with_the_one_that_is_meant(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=8, directory=tmp_path)
    run.wait()
    run.save()
    says = r"The checkpoint is at step 8 and steps=5 is the step to go to\. Use steps=13 for 5 more"
    with pytest.raises(InputError, match=says):
        engines.train(cell=GOOD, steps=5, directory=tmp_path, restore="last")
    assert engines.run is run
    again = engines.train(cell=GOOD, steps=13, directory=tmp_path, restore="last")
    assert again.wait()["step"] == 13


def test_metrics_can_be_asked_for_before_any_step(clusters, tmp_path):
    run = clusters(2).train("digits", steps=5, directory=tmp_path, start=False)
    before = run.evaluate()
    assert run.step(2) == 2
    assert before.keys() == run.evaluate().keys() != set()
