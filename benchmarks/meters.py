"""What the meters cost: slices with them and without them, in turn, in one training.

Without means: collectives go straight to the backend, no mark is set, nothing is recorded whole
and no byte counter is read. Both are timed around the same number of steps, from one command to its
end. ratio = with / without, the median over pairs of neighbours.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import workbench
from benchmarks.machine import report
from workbench.driver.cells import run_cell

PAIRS, SLICE_S, RANKS = 24, 0.6, 2
CASES = (
    ("digits", {}, "dp2"),
    ("digits", {}, "fsdp2"),
    ("pytext", {"size": "tiny"}, "dp2"),
    ("pytext", {"size": "tiny"}, "tp2"),
    ("pytext", {"size": "tiny"}, "pp2, 1f1b x8"),
)
# Run on the ranks: the product has no such switch, since it never wants one.
PREPARE = """
from workbench.engine import clock, metered_group, remote, trainer, world

kept = {name: getattr(metered_group.MeteredGroup, name) for name in metered_group.METHODS
        if hasattr(metered_group.MeteredGroup, name)}
timed = {name: getattr(clock.Clock, name) for name in ("enter", "back")}
bytes_sent, run_steps = world.World.bytes_sent, trainer.Trainer.run_steps

def straight(name):
    def method(self, *args, **kwargs):
        while args and args[-1] is None:
            args = args[:-1]
        return getattr(self.inner, name)(*args, **kwargs)
    return method

def meters(on):
    for name, method in kept.items():
        setattr(metered_group.MeteredGroup, name, method if on else straight(name))
    for name, method in timed.items():
        setattr(clock.Clock, name, method if on else lambda self, *a: (clock.OTHER, None))
    world.World.bytes_sent = bytes_sent if on else lambda self: None
"""


def main() -> None:
    """All cases on the same ranks."""
    engines = workbench.start(n=RANKS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for recipe, how, layout in CASES:
                run = engines.train(recipe, steps=10**9, directory=directory, start=False, **how)
                if str(run.layout) != layout:
                    run.switch(layout)
                run_cell(engines, PREPARE)
                say(engines, run, f"{recipe}, {layout}")
    finally:
        engines.stop()


def say(engines: Any, run: Any, case: str) -> None:
    """Measure one training."""
    run.step(20)
    began_s = time.perf_counter()
    run.step(20)
    steps = max(5, round(20 * SLICE_S / (time.perf_counter() - began_s)))
    took: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        # Which comes first changes, or what drifts would count for one of them.
        for on in (True, False) if pair % 2 else (False, True):
            run_cell(engines, f"meters({on})")
            began_s = time.perf_counter()
            run.step(steps)
            took[on].append(time.perf_counter() - began_s)
    run_cell(engines, "meters(True)")
    report(
        bench="meters", case=case, n=RANKS, runs=PAIRS, steps=steps,
        ratio=statistics.median(a / b for a, b in zip(took[True], took[False], strict=True)),
        ours_s=statistics.median(took[True]) / steps,
        theirs_s=statistics.median(took[False]) / steps,
    )  # fmt: skip


if __name__ == "__main__":
    main()
