"""What the pulse costs: slices with its notes and without them, in turn, in one training.

Without means: no mark, no record of a step and no operation is noted; the heart beats in both. Both
are measured around the same number of steps. ratio = with / without of the processor time of all
ranks, which other programs change less than the clock; the median over pairs of neighbours.
"""

from __future__ import annotations

import io
import statistics
import tempfile
from typing import Any

import workbench
from benchmarks.machine import report
from workbench.driver.cells import run_cell

PAIRS, STEPS, RANKS = 24, 300, 2
# Run on the ranks: the product has no such switch.
PREPARE = """
from workbench.engine.pulse import Pulse

kept = {name: getattr(Pulse, name) for name in ("at", "finished", "launched")}

def notes(on):
    for name, method in kept.items():
        setattr(Pulse, name, method if on else lambda self, *given: None)
"""


def used_s(engines: Any) -> float:
    """Processor time of all ranks so far."""
    told = run_cell(engines, "import time; time.process_time()", out=io.StringIO()).values
    return sum(float(value) for value in told.values())


def main() -> None:
    """Digits on two replicas: the shortest steps there are."""
    engines = workbench.start(n=RANKS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            run = engines.train("digits", steps=10**9, directory=directory, start=False)
            run_cell(engines, PREPARE)
            measure(engines, run)
    finally:
        engines.stop()


def measure(engines: Any, run: Any) -> None:
    """Alternate."""
    run.step(50)
    took: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        # Which comes first changes, or what drifts would count for one of them.
        for on in (True, False) if pair % 2 else (False, True):
            run_cell(engines, f"notes({on})")
            began_s = used_s(engines)
            run.step(STEPS)
            took[on].append(used_s(engines) - began_s)
    report(
        bench="pulse", case="digits, dp2", n=RANKS, runs=PAIRS, steps=STEPS,
        ratio=statistics.median(a / b for a, b in zip(took[True], took[False], strict=True)),
        ours_s=statistics.median(took[True]) / STEPS / RANKS,
        theirs_s=statistics.median(took[False]) / STEPS / RANKS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
