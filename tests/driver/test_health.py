"""A loss that runs away is told once; one that jumps and comes back is not."""

from __future__ import annotations

import math

import pytest

from tests.driver.test_run import GOOD
from workbench.driver.health import FACTOR, STEPS, Health


def told(losses: list[float], steps: list[int] | None = None) -> list[dict]:
    health = Health()
    steps = steps or list(range(1, len(losses) + 1))
    seen = [health.sees(step, loss) for step, loss in zip(steps, losses, strict=True)]
    return [values for values in seen if values is not None]


USUAL = [1.0 + 0.1 * (step % 3) for step in range(60)]


def test_a_loss_that_stays_high_is_told_once():
    (values,) = told([*USUAL, *[11.5] * (3 * STEPS)])
    assert values["step"] == len(USUAL) + STEPS
    assert values["loss"] == "11.5"
    assert values["factor"] == f"{FACTOR:g}"


@pytest.mark.parametrize(
    "after",
    [
        [9.0] * 60,
        [50.0] * (STEPS - 1) + [1.0] * 40,
        ([50.0] * 5 + [1.0]) * 20,
        [math.nan] * 60,
    ],
    ids=["not so high", "not so long", "now and then", "not known"],
)
def test_others_are_not(after):
    assert told([*USUAL, *after]) == []


def test_a_run_that_went_back_is_measured_anew():
    steps = [*range(1, 61), *range(61, 61 + STEPS), *range(30, 130)]
    losses = [*USUAL, *[20.0] * STEPS, *[30.0] * 100]
    assert len(told(losses, steps)) == 1


def test_the_first_steps_are_no_measure():
    assert told([0.001] * 5 + [1.0] * 100) == []


def test_it_is_told_of_a_training(clusters, tmp_path):
    cell = GOOD.replace("return nn.functional", "return (calls > 60) * 100 + nn.functional")
    run = clusters(2).train(cell=cell, steps=100, directory=tmp_path)
    assert run.wait(60)["state"] == "finished"
    told = [event["text"] for event in run.events if event.get("name") == "diverging"]
    assert len(told) == 1
    assert "times its usual" in told[0]
