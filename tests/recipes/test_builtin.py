import importlib

import pytest
import torch

from workbench.engine import recipe as recipes

SLOW = {("pytext", "small"), ("pytext", "medium")}  # seconds a step


def every_size():
    for name in recipes.names():
        module = importlib.import_module(f"{recipes.FOLDER}.{name}")
        for size in getattr(module, "SIZES", [None]):
            if (name, size) not in SLOW:
                yield name, size


@pytest.mark.parametrize(("name", "size"), list(every_size()))
def test_a_built_in_recipe_takes_a_step_and_measures_itself(name, size):
    recipe = recipes.builtin(name, size)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    losses = []
    for _ in range(3):
        inputs, targets = recipe.samples.fetch(0, 4)
        loss = recipe.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert recipe.evaluate is not None
    metrics = recipe.evaluate(model)
    assert all(isinstance(value, float) for value in metrics.values())


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    from workbench.recipes import digits

    inputs, targets = (torch.cat(parts) for parts in zip(*digits._split(), strict=True))
    table = load_digits()
    ours = torch.cat([inputs * 16, targets[:, None]], 1).long()
    theirs = torch.cat([torch.from_numpy(table.data), torch.from_numpy(table.target)[:, None]], 1)
    assert sorted(ours.tolist()) == sorted(theirs.long().tolist())


@pytest.mark.parametrize(("size", "parameters"), [("mlp", 282_378), ("cnn", 47_610)])
def test_digits_are_learned_in_300_steps(size, parameters):
    recipe = recipes.builtin("digits", size)
    torch.manual_seed(0)
    model = recipe.model()
    assert sum(param.numel() for param in model.parameters()) == parameters
    optimizer = recipe.optimizer(model.parameters())
    for step in range(300):
        inputs, targets = recipe.samples.fetch(step * recipe.batch, recipe.batch)
        optimizer.zero_grad()
        recipe.loss(model(inputs), targets).backward()
        optimizer.step()
    assert recipe.evaluate is not None
    assert recipe.evaluate(model.eval())["accuracy"] > 0.95


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.8), ("small", 10), ("medium", 30)])
def test_pytext_sizes_are_about_what_they_say(size, millions):
    recipe = recipes.builtin("pytext", size)
    with torch.device("meta"):
        count = sum(param.numel() for param in recipe.model().parameters())
    assert millions <= count / 1e6 <= millions * 1.15
    assert (recipe.unit, recipe.units_per_sample, recipe.size) == ("tokens", 128, size)


def test_pytext_holds_text_out_and_asks_for_the_next_byte():
    from workbench.recipes import pytext

    train, held_out = pytext._text()
    assert len(held_out) > 10_000
    assert bytes(held_out[:200].tolist()) not in bytes(train.tolist())
    inputs, targets = pytext.data()
    assert torch.equal(inputs[7][1:], targets[7][:-1])
