"""An update that is left out is left out on all ranks: the curve is that of one plain process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workbench.engine import recipe as recipes
from workbench.engine.finite import MOST_IN_A_ROW
from workbench.errors import InputError

STEPS = 10
# Sample 17 has a loss that is no number, or a gradient of `scale` alone, as BAD says.
CELL = """
import torch
from torch import nn

batch, seed, WIDTH = 8, 3, 8

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        is_odd = (x[:, :1] > 50).to(x.dtype)
        for block in self.blocks:
            x = block(x - 100 * is_odd)
        if BAD is None:
            return x
        if BAD == "loss":
            return x * self.scale + is_odd / (1 - is_odd) * 0
        # Of the root of 0 the gradient is infinite, whatever it is multiplied by.
        return x + torch.sqrt((1 - is_odd) * self.scale.abs()) * (1 - is_odd)

def model():
    return Net()

def data():
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
    x[17, 0] = 100.0
    return x, torch.sin(x)

loss = nn.functional.mse_loss

def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)
"""
WHAT = {"loss": "loss is nan", "gradient": "gradient of scale is not finite"}
LAYOUTS = ("dp1", "dp2", "fsdp2", "pp2, gpipe x2", "tp2")


def plain(bad: str | None, clip: float | None = None) -> tuple[list[float], list[int]]:
    """Losses of one process, and the steps whose update it leaves out."""
    namespace: dict[str, Any] = {"BAD": bad}
    exec(CELL, namespace)
    recipe = recipes.from_namespace(namespace)
    torch.manual_seed(recipe.seed)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    losses, skipped = [], []
    for step in range(1, STEPS + 1):
        inputs, target = recipe.samples.fetch((step - 1) * recipe.batch, recipe.batch)
        loss = recipe.loss(model(inputs), target)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if math.isfinite(loss.item()) and all(bool(g.isfinite().all()) for g in grads):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        else:
            skipped.append(step)
        optimizer.zero_grad()
        losses.append(value if math.isfinite(value := loss.item()) else math.nan)
    return losses, skipped


def begin(clusters, tmp_path, bad: str, layout: str, **how: Any):
    text = f"BAD = {bad!r}\n{CELL}"
    return clusters(2).train(
        cell=text, strategy=layout, steps=STEPS, on_nan="skip", directory=tmp_path, **how
    )


@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", WHAT)
def test_one_curve_whatever_the_layout(clusters, tmp_path, bad, layout, clip):
    losses, skipped = plain(bad, clip)
    assert 0 < len(skipped) < 3
    run = begin(clusters, tmp_path, bad, layout, clip=clip)
    assert run.wait(60)["state"] == "finished"
    assert run.history.steps == list(range(1, STEPS + 1))
    assert run.history.loss == pytest.approx(losses, rel=1e-5, nan_ok=True)
    told = [event["values"] for event in run.events if event.get("name") == "skipped"]
    assert told == [{"step": str(step), "cause": WHAT[bad]} for step in skipped]
    marked = [mark["step"] for mark in run.marks if mark["label"] == "skipped"]
    assert marked == skipped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_it_the_run_stops_before_the_update_and_names_the_parameter(
    clusters, tmp_path, layout
):
    losses, (first, *_) = plain("gradient")
    text = f"BAD = 'gradient'\n{CELL}"
    run = clusters(2).train(cell=text, strategy=layout, steps=STEPS, directory=tmp_path)
    shown = run.wait(60)
    assert shown["state"] == "failed"
    assert shown["step"] == first - 1
    assert f"gradient of scale is not finite at step {first}" in shown["message"]
    assert run.history.loss == pytest.approx(losses[: first - 1], rel=1e-5)
    assert run.save()


def test_after_so_many_in_a_row_it_stops_all_the_same(clusters, tmp_path):
    text = f"BAD = 'loss'\n{CELL}".replace("x[17, 0]", "x[:, 0]")
    run = clusters(2).train(cell=text, steps=100, on_nan="skip", directory=tmp_path)
    shown = run.wait(60)
    assert shown["state"] == "failed"
    assert shown["step"] == MOST_IN_A_ROW
    assert f"{MOST_IN_A_ROW} updates in a row were left out" in shown["message"]


def test_other_policies_are_refused(clusters, tmp_path):
    with pytest.raises(InputError, match="on_nan='ignore': use one of stop, skip"):
        clusters(2).train("digits", on_nan="ignore", directory=tmp_path)
