"""Law 1: the same recipe, seed and global batch give the same loss at every step.

The yardstick is one plain process and a loop written out here, run beside the ranks.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract import batteries
from workbench.engine import recipe as recipes
from workbench.engine.data import Samples
from workbench.spec.options import TrainOptions

STEPS = 8
CELL = """
import torch
from torch import nn

batch = 10
seed = 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

def model():
    return Net()

def data():
    x = torch.randn(53, 7, generator=torch.Generator().manual_seed(5))
    return x, torch.stack([x.sum(1), x.prod(1)], 1)

loss = nn.functional.mse_loss

def optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
"""


def plain(recipe: recipes.Recipe, steps: int, *, clip: float | None = None) -> list[float]:
    """Losses of one process that takes every batch whole."""
    return [loss for loss, _ in batteries.plain(recipe, steps, TrainOptions(clip=clip))]


def own_recipe() -> recipes.Recipe:
    namespace: dict = {}
    exec(CELL, namespace)
    return recipes.from_namespace(namespace)


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_loss_equals_one_plain_process_at_every_step(clusters, tmp_path, n, shard):
    """Batch 10 divides by neither 3 nor 4 ranks."""
    run = clusters(n).train(cell=CELL, shard=shard, steps=STEPS, directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    assert run.history.steps == list(range(1, STEPS + 1))
    assert run.history.loss == pytest.approx(plain(own_recipe(), STEPS), rel=1e-5)


@pytest.mark.parametrize("name", recipes.names())
def test_built_in_recipes_are_the_same_on_three_ranks(clusters, tmp_path, name):
    run = clusters(3).train(name, steps=4, batch=8, directory=tmp_path)
    run.wait(120)
    recipe = recipes.builtin(name).changed(batch=8)
    assert run.history.loss == pytest.approx(plain(recipe, 4), rel=1e-5)


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_accumulation_and_clipping_change_nothing_but_memory(clusters, tmp_path, shard):
    options = {"accumulate": 2, "clip": 0.1, "shard": shard, "directory": tmp_path}
    run = clusters(3).train(cell=CELL, steps=STEPS, **options)
    run.wait(60)
    assert run.history.loss == pytest.approx(plain(own_recipe(), STEPS, clip=0.1), rel=1e-5)


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_bf16_autocast_is_close_and_said_to_be_lossy(clusters, tmp_path, shard):
    run = clusters(2).train(cell=CELL, steps=4, precision="bf16", shard=shard, directory=tmp_path)
    shown = run.wait(60)
    exact = plain(own_recipe(), 4)
    assert run.history.loss == pytest.approx(exact, rel=2e-2)
    assert run.history.loss != pytest.approx(exact, rel=1e-6)
    assert shown["lossy"] == "bf16 autocast"


def test_a_switch_between_replicated_and_sharded_leaves_the_curve(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=12, directory=tmp_path, start=False)
    for shard in (True, False, True):
        run.step(3)
        run.switch(shard=shard)
    run.resume()
    run.wait(60)
    assert run.history.loss == pytest.approx(plain(own_recipe(), 12), rel=1e-5)


def test_pause_step_save_and_restore_leave_the_curve(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=10, directory=tmp_path, start=False)
    run.step(4)
    name = run.save()
    run.step(3)
    assert run.restore(name) == 4
    run.resume()
    run.wait(60)
    assert run.history.steps == list(range(1, 11))
    assert run.history.loss == pytest.approx(plain(own_recipe(), 10), rel=1e-5)


def test_a_checkpoint_goes_on_at_another_number_of_ranks_and_sharded(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=5, directory=tmp_path)
    run.wait(60)
    path = run.directory / "checkpoints" / run.save("half")
    options = {"shard": True, "directory": tmp_path, "restore": str(path)}
    again = clusters(3).train(cell=CELL, steps=10, **options)
    again.wait(60)
    assert again.history.steps == list(range(6, 11))
    assert again.history.loss == pytest.approx(plain(own_recipe(), 10)[5:], rel=1e-5)


def test_a_random_dataset_gives_the_same_samples_at_any_number_of_ranks(clusters, tmp_path):
    cell = CELL.replace(
        "    return x, torch.stack([x.sum(1), x.prod(1)], 1)",
        "    class Noisy(torch.utils.data.Dataset):\n"
        "        def __len__(self): return 53\n"
        "        def __getitem__(self, i): return x[i] + torch.randn(7), x[i, :2]\n"
        "    return Noisy()",
    )
    losses = []
    for n in (1, 3):
        run = clusters(n).train(cell=cell, steps=4, directory=tmp_path)
        run.wait(60)
        losses.append(run.history.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_every_epoch_has_each_sample_once_at_any_number_of_ranks():
    samples = Samples((torch.arange(53), torch.arange(53)), seed=1)
    taken = torch.cat([samples.fetch(first, 10)[0] for first in range(0, 530, 10)])
    for epoch in taken.split(53):
        assert sorted(epoch.tolist()) == list(range(53))
    assert taken[:53].tolist() != taken[53:106].tolist()
