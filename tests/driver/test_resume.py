"""New ranks that restore a checkpoint in the same layout go on bit for bit as the old ones did."""

from __future__ import annotations

import pytest

from workbench.spec import manifest as manifests

CELL = """
import math
import torch
from torch import nn
batch = 12
seed = 5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.Dropout(0.2)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

def model():
    return Net()

def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(50, 6, generator=draw)
    return x, torch.randint(0, 3, (50,), generator=draw)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)

def lr(step):
    return 0.01 * (1 + math.cos(step / 7)) / 2
"""
# At the goal the data is in its third epoch.
SAVED, GOAL = 6, 13
LAYOUTS = {
    "dp3": 3, "fsdp3": 3, "dp2": 2, "tp2": 2, "pp2, 1f1b x2": 2, "pp2, gpipe x3": 2,
}  # fmt: skip


def written(run, name):
    """Size and hash of each file of a checkpoint that is made now, what the manifest says else."""
    run.save(name)
    found = manifests.read(run.directory / "checkpoints" / name)
    told = {key: found[key] for key in ("step", "samples", "optimizer", "layout")}
    return found["files"], told


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"clip": 0.5, "accumulate": 2}], ids=["", "clip"])
def test_save_then_new_ranks_then_restore_is_as_going_on(clusters, tmp_path, layout, options):
    num, how = LAYOUTS[layout], {"cell": CELL, "strategy": layout, "directory": tmp_path}
    run = clusters(num).train(**how, steps=GOAL, start=False, **options)
    run.step(SAVED)
    run.save("middle")
    run.step(GOAL - SAVED)
    on = run.history.loss[SAVED:], written(run, "end")
    clusters.stop()
    path = run.directory / "checkpoints" / "middle"
    again = clusters(num).train(**how, steps=GOAL, restore=str(path), **options)
    assert again.wait(60)["state"] == "finished"
    assert again.history.steps == list(range(SAVED + 1, GOAL + 1))
    assert (again.history.loss, written(again, "end")) == on


def test_replicas_are_measured_after_the_first_step_and_train_on(clusters, tmp_path):
    run = clusters(2).train("digits", steps=1, directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    assert set(run.metrics) == {"accuracy"}
    run.resume(steps=3)
    assert run.wait(60)["step"] == 4
