"""Law 1 through the product: switches, saves, restores and pauses in any order, one curve."""

from __future__ import annotations

import random

import pytest

from tests.contract.batteries import GPT, gpt, plain
from workbench.spec.options import TrainOptions

# Minutes on a busy machine, a quarter of that on a quiet one.
pytestmark = pytest.mark.timeout(900)

CELL = f"BLOCKS, DROP = 2, 0.1\n{GPT}"
WAYS = (
    ("data", {}), ("data", {"shard": True}), ("data", {"ranks": 2}), ("none", {}),
    ("model", {}), ("model", {"by": "tensor"}), ("pipeline", {}),
    ("pipeline", {"microbatches": 4, "schedule": "gpipe"}), ("hybrid", {}),
    ("hybrid", {"dp": 1, "pp": 2, "tp": 2, "microbatches": 3, "schedule": "gpipe"}),
    ("pp2 dp2, zero-bubble x4", {}), ("dp2 tp2", {}), ("fsdp2 tp2", {}), ("dp2 fsdp2", {}),
)  # fmt: skip
STEPS = 25


def test_a_random_walk_of_thirty_switches_leaves_the_curve(clusters, tmp_path):
    chance = random.Random(11)
    how = {"clip": 1.0, "accumulate": 1, "directory": tmp_path, "start": False}
    run = clusters(4).train(cell=CELL, steps=STEPS, **how)
    saved: dict[str, int] = {}
    for _ in range(30):
        strategy, options = chance.choice(WAYS)
        run.switch(strategy, **options)
        what = chance.choice(("step", "step", "nothing", "save", "restore"))
        if what == "step":
            run.step(1)
        elif what == "save":
            saved[run.save()] = run.step_now
        elif what == "restore" and saved:
            name = max(saved, key=lambda key: saved[key])
            assert run.restore(name) == saved[name]
    run.resume()
    assert run.wait(60)["state"] == "finished"
    assert run.history.steps == list(range(1, STEPS + 1))
    right = plain(gpt(blocks=2), STEPS, TrainOptions(clip=1.0))
    assert run.history.loss == pytest.approx([loss for loss, _ in right], rel=1e-5)
    assert sum(mark["label"] == "restored" for mark in run.marks) > 0
