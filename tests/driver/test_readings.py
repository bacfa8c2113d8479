"""What a run gives away: recorded steps, traces, tables, event files, what its processes use."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest

from workbench.errors import InputError, RunError

GOOD = """
import torch
from torch import nn
batch = 8
def model(): return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
def data(): return torch.ones(64, 16), torch.ones(64, 1)
loss = nn.functional.mse_loss
"""
PARTS = {"forward", "backward", "optimizer", "data", "wire", "idle", "other"}


def test_a_run_is_read(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=40, directory=tmp_path, tensorboard=tmp_path / "board")
    run.wait(60)
    _check_snapshot(run.snapshot())
    assert {sample["step"] for sample in run.samples} <= set(range(1, 41))
    # Tables.
    run.write(tmp_path / "steps.csv")
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == run.history.steps
    assert [float(row["loss"]) for row in rows] == run.history.loss
    parts = ("forward_ms", "backward_ms", "optimizer_ms", "data_ms", "comm_ms", "other_ms")
    for row in rows:
        total = sum(float(row[part]) for part in parts)
        assert total == pytest.approx(float(row["wall_ms"]), rel=0.02)
    # Traces.
    last = run.samples[-1]["step"]
    trace = json.loads(run.trace(tmp_path / "one.json", last).read_text())
    assert [step["step"] for step in trace["otherData"]["steps"]] == [last]
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    with pytest.raises(InputError, match="is there already"):
        run.trace(tmp_path / "one.json")
    merged = json.loads(run.profile(tmp_path / "deep.json").read_text())
    names = {event["name"] for event in merged["traceEvents"]}
    assert {"aten::addmm", "workbench_step", "step 41"} <= names
    assert run.step_now == 41
    with pytest.raises(InputError, match="There is no folder"):
        run.profile(tmp_path / "no" / "deep.json")
    assert run.step_now == 41
    # After going back, what came later is gone from all of it.
    run.save("here")
    run.step(3)
    assert run.samples[-1]["step"] == 44
    run.restore("here")
    assert run.samples[-1]["step"] <= 41
    assert list((tmp_path / "board" / run.name).glob("events.out.tfevents.*"))


def _check_snapshot(shot):
    for row in shot["by_rank"]:
        parts = sum(row[f"{part}_ms"] for part in PARTS)
        assert parts == pytest.approx(row["wall_ms"], rel=0.02)
    assert 0 <= shot["idle"] <= 1
    assert 0 <= shot["comm"] <= 1
    sample = shot["sample"]
    assert {span[0] for row in sample["ranks"] for span in row["spans"]} <= PARTS
    assert [row["rank"] for row in sample["ranks"]] == [0, 1]
    parameters = 4 * (17 * 64 + 65)
    for row in shot["memory"]:
        assert row["parameters"] == row["gradients"] == parameters
        assert row["optimizer"] > 2 * parameters
        assert 0 < row["activations"] < row["resident"]
    derived = shot["derived"]
    assert derived["flops"] == 8 * (2 * 2 * 16 * 64 + 2 * 3 * 64)
    assert 0 < derived["mfu"] < 1
    assert derived["bubble"] is None
    for row in shot["engines"]:
        assert row["resident"] > 10 << 20
        assert row["cpu"] >= 0
        assert row["gpu"] is None


def test_nothing_recorded_is_said(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=10, directory=tmp_path, start=False)
    assert run.snapshot()["sample"] is None
    with pytest.raises(RunError, match="No step is recorded yet"):
        run.trace(tmp_path / "x.json")


def test_the_bubble_is_beside_its_formula(clusters, tmp_path):
    run = clusters(2).train("pytext", size="tiny", steps=10, directory=tmp_path, start=False)
    run.switch("pp2, gpipe x4")
    run.step(4)
    derived = run.snapshot()["derived"]
    assert derived["bubble_formula"] == pytest.approx(1 / 5)
    assert 0 < derived["bubble"] < 0.9


METRICS = f"{GOOD}\ndef evaluate(model): return {{'one': 1.0}}\n"


def test_a_profile_that_reaches_the_goal_ends_as_a_step_does(clusters, tmp_path):
    run = clusters(2).train(cell=METRICS, steps=3, directory=tmp_path, start=False)
    run.profile("a.json")
    assert (run.state, run.metrics) == ("paused", {})
    run.step()
    run.profile("b.json")
    assert (run.state, run.step_now, run.metrics) == ("finished", 3, {"one": 1.0})
    # Beyond the goal, and while it runs.
    run.profile("c.json")
    assert (run.state, run.step_now, run.goal, run.metrics_step) == ("finished", 4, 4, 4)
    run.resume(steps=100_000)
    run.profile("d.json")
    assert run.state == "running"
    at = run.stop()
    run.profile("e.json")
    assert (run.state, run.step_now) == ("paused", at + 1)


def test_a_name_is_looked_at_before_a_step_is_taken_under_the_profiler(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=3, directory=tmp_path, start=False)
    for name in ("a.txt", "", None, "nowhere/a.json"):
        with pytest.raises(InputError):
            run.profile(name)
    assert (run.step_now, run.state) == (0, "paused")


def test_a_step_that_was_not_recorded_is_the_nearest_and_told(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=100, directory=tmp_path, start=False)
    run.step(60)
    recorded = [sample["step"] for sample in run.samples]
    between = next(step for step in range(recorded[0], 61) if step not in recorded)
    nearest = min(recorded, key=lambda step: abs(step - between))
    found = json.loads(run.trace("between.json", np.int64(between)).read_text())
    assert [step["step"] for step in found["otherData"]["steps"]] == [nearest]
    told = f"between.json has step {nearest}, the recorded one nearest to {between}"
    assert run.events[-1]["text"] == told
    # One that was recorded, or all of them: nothing is to be told.
    run.trace("exact.json", recorded[0])
    run.trace("all.json")
    assert run.events[-1]["text"] == told
    # Of steps that the run has not been at nothing is near.
    del run.history.samples[0]
    first = run.history.samples[0]["step"]
    for step in (0, -3, 61, 10**9, recorded[0], "abc", 1.5, True):
        with pytest.raises(InputError) as caught:
            run.trace("no.json", step)
        assert str(caught.value) == (
            f"step={step!r}: use a whole number from {first} to 60; of these the nearest recorded "
            "is written."
        )
    assert not (tmp_path / "no.json").exists()


@pytest.mark.parametrize("by_rank", [False, True])
def test_the_table_of_a_run_has_its_columns_before_the_first_step(clusters, tmp_path, by_rank):
    run = clusters(2).train(cell=GOOD, steps=3, directory=tmp_path, start=False)
    before = run.to_frame(by_rank=by_rank)
    assert len(before) == 0
    run.step()
    after = run.to_frame(by_rank=by_rank)
    assert list(before.columns) == list(after.columns)
    assert before.dtypes.to_dict() == after.dtypes.to_dict()
    shutil.rmtree(run.directory / "journal")
    for take in (run.to_frame, lambda **how: run.write("x.csv", **how)):
        with pytest.raises(RunError, match=f"No rank's journal can be read in {run.directory}"):
            take(by_rank=by_rank)
    assert not (tmp_path / "x.csv").exists()
