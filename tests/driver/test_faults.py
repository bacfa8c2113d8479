"""What goes wrong on one rank outside a step: told at once, and the next command works."""

from __future__ import annotations

import time

import pytest
import torch

from tests.contract.test_one_trajectory import plain
from tests.driver.test_run import GOOD
from workbench.engine import recipe as recipes
from workbench.errors import (
    EnginesError,
    InputError,
    RankError,
    RecipeError,
    RunError,
    WorkbenchError,
)

BROKEN = {
    "model raises on one rank": ("return nn.Linear(4, 1)", "if rank == 1: raise ValueError('boo')\n    return nn.Linear(4, 1)", "ValueError: boo"),  # noqa: E501
    "model differs in shape": ("nn.Linear(4, 1)", "nn.Linear(4, 1 + rank)", "."),
    "data raises on one rank": ("    x = torch", "    if rank == 0: raise OSError('no file')\n    x = torch", "OSError: no file"),  # noqa: E501
    "data differs in length": ("torch.randn(40, 4", "torch.randn(40 + rank, 4", "another data"),
    "model takes an argument": ("def model():", "def model(size):", "size"),
    "optimizer without the model": ("batch = 8", "batch = 8\ndef optimizer(p): return torch.optim.SGD([torch.zeros(2, requires_grad=True)])", "no parameter of the model"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_recipe_that_breaks_is_told_at_once_and_the_training_before_goes_on(
    clusters, tmp_path, case
):
    old, new, says = BROKEN[case]
    engines = clusters(2)
    before = engines.train(cell=GOOD, steps=100, directory=tmp_path, start=False)
    before.step(3)
    began_s = time.monotonic()
    with pytest.raises(WorkbenchError, match=says) as caught:
        engines.train(cell=GOOD.replace(old, new), steps=3, directory=tmp_path)
    assert time.monotonic() - began_s < 15
    assert "\n" not in str(caught.value)
    assert "gloo" not in str(caught.value)
    assert engines.run is before
    assert before.step(2) == 5
    again = engines.train(cell=GOOD, steps=3, directory=tmp_path)
    assert again.wait(30)["state"] == "finished"


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("where", ["optimizer", "evaluate"])
def test_what_raises_after_the_backward_pass_leaves_a_world_that_works(
    clusters, tmp_path, where, shard
):
    cell = GOOD + (
        "\nclass Raises(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        raise ArithmeticError('no')\n"
        "def optimizer(params):\n"
        "    return Raises(params, lr=0.1)\n"
        if where == "optimizer"
        else "\ndef evaluate(model):\n    if rank == 1: raise ArithmeticError('no')\n"
        "    return {'sum': float(model(torch.ones(1, 4)).sum())}\n"
    )
    engines = clusters(2)
    run = engines.train(cell=cell, steps=3, shard=shard, directory=tmp_path)
    shown = run.wait(60)
    assert shown["state"] == "failed"
    assert "ArithmeticError" in shown["message"]
    good = engines.train(cell=GOOD, steps=3, shard=shard, directory=tmp_path)
    assert good.wait(30)["state"] == "finished"


def test_a_group_destroyed_in_a_cell_is_made_anew(clusters, tmp_path):
    engines = clusters(2)
    engines.run_cell("dist.destroy_process_group()")
    run = engines.train(cell=GOOD, steps=3, directory=tmp_path)
    assert run.wait(30)["state"] == "finished"


@pytest.mark.parametrize("name", ["last", "12", "", 5, "../x", "a b"])
def test_names_that_could_not_be_asked_for_are_refused(clusters, tmp_path, name):
    run = clusters(2).train(cell=GOOD, steps=2, directory=tmp_path)
    run.wait(30)
    with pytest.raises(WorkbenchError):
        run.save(name)
    assert run.save("fine") == "fine"


UNUSED = """
import torch
from torch import nn
batch = 8

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.never, self.seldom = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x) + (self.seldom(x[:, :4]) if {when} else 0)

def model():
    return Net()

def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)

loss = nn.functional.mse_loss
"""


@pytest.mark.parametrize("when", ["False", "x.sum() > 0"])
def test_parameters_that_take_no_part_change_nothing(clusters, tmp_path, when):
    cell = UNUSED.format(when=when)
    namespace: dict = {}
    exec(cell, namespace)
    run = clusters(2).train(cell=cell, steps=6, directory=tmp_path)
    assert run.wait(30)["state"] == "finished"
    if when == "False":
        expected = plain(recipes.from_namespace(namespace), 6)
        assert run.history.loss == pytest.approx(expected, rel=1e-5)
        run.switch(shard=True)
        run.resume(steps=2)
        assert run.wait(30)["state"] == "finished"


def test_a_parameter_that_drops_out_later_is_named_and_the_step_not_taken(clusters, tmp_path):
    cell = GOOD.replace(
        "return nn.Linear(4, 1)",
        "return Net()\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two, self.n = nn.Linear(4, 1), nn.Linear(4, 1), 0\n"
        "    def forward(self, x):\n"
        "        self.n += 1\n"
        "        return self.one(x) + (self.two(x) if self.n < 4 else 0)\n",
    )
    run = clusters(2).train(cell=cell, steps=6, directory=tmp_path)
    shown = run.wait(30)
    assert shown["state"] == "failed"
    assert shown["step"] == 3
    assert "two.weight" in shown["message"]


def test_a_rank_in_an_endless_loop_is_named_and_nothing_waits_behind_it(clusters, tmp_path):
    from workbench.driver.engines import start

    clusters.stop()
    engines = start(2, timeout=4)
    try:
        cell = GOOD.replace("    pass\n", "    while rank == 1 and calls == 3: pass\n")
        run = engines.train(cell=cell, steps=6, directory=tmp_path)
        shown = run.wait(40)
        assert shown["state"] == "failed"
        assert "Rank 1" in shown["message"]
        with pytest.raises(RunError, match="failed"):
            run.ask("pause").result(5)
        with pytest.raises(EnginesError, match="Rank 1 does not answer"):
            engines.run_cell("1")
        # The way out: an interrupt ends the loop, and the ranks meet again.
        engines.interrupt([1])
        deadline_s = time.monotonic() + 20
        while _is_stuck(engines) and time.monotonic() < deadline_s:
            try:
                engines.call("is_broken")
            except EnginesError:
                time.sleep(0.05)
        again = engines.train(cell=GOOD, steps=3, directory=tmp_path)
        assert again.wait(30)["state"] == "finished"
    finally:
        engines.stop()


def test_a_cell_that_ignores_interrupts_is_named_to_the_next(clusters):
    engines = clusters(2)
    engines.mark_stuck({1: torch.futures.Future()}, "it is still in cell 3")
    with pytest.raises(EnginesError, match="Rank 1 does not answer: it is still in cell 3"):
        engines.call("is_broken")
    engines.roster.members[1]._stuck = None


def test_long_texts_are_cut(clusters, tmp_path):
    cell = GOOD.replace("    pass\n", "    raise ValueError('x' * 100_000)\n")
    run = clusters(2).train(cell=cell, steps=3, directory=tmp_path)
    assert len(run.wait(30)["message"]) < 800


def test_batch_norm_and_dropout_are_noted(clusters, tmp_path):
    cell = GOOD.replace("nn.Linear(4, 1)", "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))")
    run = clusters(2).train(cell=cell, steps=2, accumulate=2, directory=tmp_path)
    run.wait(30)
    assert any("BatchNorm" in event["text"] for event in run.events)


def test_counts_that_are_none_are_refused(clusters, tmp_path):
    run = clusters(2).train(cell=GOOD, steps=2, directory=tmp_path, start=False)
    with pytest.raises(InputError):
        run.step(0)
    with pytest.raises(InputError):
        run.resume(steps=-1)
    with pytest.raises(RecipeError):
        run.engines.train(directory=tmp_path)


def test_metrics_that_raise_at_the_goal_stop_the_run(clusters, tmp_path):
    cell = f"{GOOD}\ndef evaluate(model): raise ArithmeticError('no')\n"
    run = clusters(2).train(cell=cell, steps=2, directory=tmp_path, start=False)
    for ask in (lambda: run.step(2), lambda: run.profile("deep.json")):
        with pytest.raises(RankError, match="ArithmeticError: no"):
            ask()
        assert run.state == "failed"
    assert (tmp_path / "deep.json").is_file()
    assert run.step_now == 3


def test_a_step_that_raises_under_the_profiler_stops_the_run_as_any_other(clusters, tmp_path):
    cell = GOOD.replace("    pass\n", "    if calls == 2: raise ArithmeticError('no')\n")
    run = clusters(2).train(cell=cell, steps=9, directory=tmp_path, start=False)
    run.step()
    with pytest.raises(RankError, match="at step 2: ArithmeticError: no"):
        run.profile("deep.json")
    assert (run.state, run.step_now) == ("failed", 1)
    assert not (tmp_path / "deep.json").exists()
    run.profile("deep.json")
    assert (run.state, run.step_now) == ("paused", 2)


def _is_stuck(engines):
    return any(member.is_stuck() for member in engines.roster.members)
