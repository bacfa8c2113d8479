"""Utilisation is of what the ranks that train can do, and is not shown where it cannot be."""

from __future__ import annotations

import pytest

GOOD = """
import torch
from torch import nn
batch = 8
def model(): return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
def data(): return torch.ones(64, 16), torch.ones(64, 1)
loss = nn.functional.mse_loss
"""


def test_the_peak_is_of_the_ranks_that_train(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=10, directory=tmp_path)
    run.wait(60)
    both = run.peaks
    assert both[0] == both[1] > 0
    assert run.snapshot()["derived"]["peak_flops"] == sum(both)
    run.switch("dp1")
    assert run.peaks[0] > 0 == run.peaks[1]
    assert run.snapshot()["derived"]["peak_flops"] == run.peaks[0]
    run.step(2)
    assert 0 < run.snapshot()["derived"]["mfu"] <= 1
    run.switch("dp2")
    # Never less than was found before.
    assert run.peaks[0] == run.peaks[1] >= both[0]


def test_more_than_the_peak_is_not_shown(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=10, directory=tmp_path)
    run.wait(60)
    derived = run.snapshot()["derived"]
    factor = 2 * derived["mfu"]
    # As if the machine had been busy while it was measured.
    run.peaks = [peak * factor for peak in run.peaks]
    assert run.snapshot()["derived"]["mfu"] == pytest.approx(0.5)
    run.peaks = [peak / 4 for peak in run.peaks]
    found = run.snapshot()["derived"]
    assert found["mfu"] is None
    assert found["flops"] == derived["flops"]
