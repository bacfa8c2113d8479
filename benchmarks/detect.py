"""From a fault on one rank until the run names it: a kill, a stop, an endless loop.

Four ranks train; the fault comes at a moment that has nothing to do with their steps. After each
the rank is brought back, and the training goes on.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workbench
from benchmarks.machine import report

RANKS, RUNS, VICTIM, LIMIT_S = 4, 9, 2, 60.0
STEPS_BEFORE = 40
CELL = """
import os
import torch
batch = 256

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

def data():
    inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :10].argmax(1)

def loss(output, target):
    while rank == {victim} and os.path.exists({flag!r}):
        pass
    return torch.nn.functional.cross_entropy(output, target)
"""


def named_after(run: Any, names: tuple[str, ...], fault: Callable[[], None]) -> float:
    """Seconds from the fault to the event."""
    known = len([event for event in run.events if event.get("name") in names])
    began_s = time.perf_counter()
    fault()
    while len([event for event in run.events if event.get("name") in names]) == known:
        if time.perf_counter() - began_s > LIMIT_S:
            raise TimeoutError(f"none of {names} in {[event['text'] for event in run.events]}")
        time.sleep(0.001)
    return time.perf_counter() - began_s


def main() -> None:
    """All kinds in turn, on one training."""
    engines = workbench.start(n=RANKS)
    with tempfile.TemporaryDirectory() as directory:
        try:
            flag = Path(directory, "loop")
            cell = CELL.format(victim=VICTIM, flag=str(flag))
            run = engines.train(cell=cell, steps=10**9, directory=directory)
            for case in ("kill", "stop", "loop"):
                taken_s = [once(engines, run, case, flag) for _ in range(RUNS)]
                report(
                    bench="detect", case=case, ours_s=statistics.median(taken_s),
                    most_s=max(taken_s), n=RANKS, runs=RUNS,
                )  # fmt: skip
        finally:
            engines.stop()


def once(engines: Any, run: Any, case: str, flag: Path) -> float:
    """One fault, and the way back."""
    goal = run.step_now + STEPS_BEFORE
    while run.step_now < goal:
        time.sleep(0.005)
    pid = engines.status()[VICTIM]["pid"]
    if case == "kill":
        taken_s = named_after(run, ("lost",), lambda: os.kill(pid, signal.SIGKILL))
    elif case == "stop":
        stop = ("halted", "halted_awaited")
        taken_s = named_after(run, stop, lambda: os.kill(pid, signal.SIGSTOP))
        os.kill(pid, signal.SIGCONT)
    else:
        taken_s = named_after(run, ("busy", "busy_awaited"), flag.touch)
        flag.unlink()
    return taken_s


if __name__ == "__main__":
    main()
