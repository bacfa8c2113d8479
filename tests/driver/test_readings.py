"""What a run gives away: recorded steps, traces, tables, event files, what its processes use."""

from __future__ import annotations

import csv
import json

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
