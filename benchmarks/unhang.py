"""From an interrupt of ranks that hang until they have done the next collective, or step, together.

cell: `dist.barrier()` on one rank of four, ended as the kernel's stop button does. step: an endless
loop on one rank while three wait for it, ended as %dist_interrupt does, and resumed.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import workbench
from benchmarks.detect import CELL, VICTIM
from benchmarks.machine import report
from workbench.driver import watch
from workbench.driver.pulses import Pulses
from workbench.errors import RankError

RANKS, RUNS = 4, 15
HANGS = "kept = rank\nif rank == 0: dist.barrier()"
NEXT = "t = torch.ones(1); dist.all_reduce(t); kept, int(t)"


def await_still(engines: Any) -> None:
    """Return once a rank has waited for others for half a second."""
    pulses = Pulses(engines, 0.05)
    while not any(one.waits and one.still_s > 0.5 for one in pulses.look().values()):
        time.sleep(0.05)


def of_a_cell(engines: Any) -> float:
    """Seconds until the ranks are back with their variables."""
    began: list[float] = []

    def interrupt() -> None:
        await_still(engines)
        began.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with contextlib.suppress(RankError):
        engines.run_cell(HANGS, out=io.StringIO(), err=io.StringIO())
    values = engines.run_cell(NEXT, out=io.StringIO()).values
    taken_s = time.perf_counter() - began[0]
    assert values == {rank: f"({rank}, {RANKS})" for rank in range(RANKS)}
    return taken_s


def of_a_step(engines: Any, run: Any, flag: Path) -> float:
    """Seconds until the next step is taken."""
    run.resume(steps=10**6)
    step = run.step_now
    while run.step_now < step + 20:
        time.sleep(0.005)
    flag.touch()
    await_still(engines)
    flag_s = time.perf_counter()
    watch.break_off(engines)
    while run.state == "running":
        time.sleep(0.001)
    flag.unlink()
    run.step()
    return time.perf_counter() - flag_s


def main() -> None:
    """Both on the same ranks."""
    engines = workbench.start(n=RANKS)
    with tempfile.TemporaryDirectory() as directory:
        try:
            say("cell", [of_a_cell(engines) for _ in range(RUNS)])
            flag = Path(directory, "loop")
            cell = CELL.format(victim=VICTIM, flag=str(flag))
            run = engines.train(cell=cell, steps=10**6, directory=directory, start=False)
            say("step", [of_a_step(engines, run, flag) for _ in range(RUNS)])
        finally:
            engines.stop()


def say(case: str, taken_s: list[float]) -> None:
    """One line."""
    report(
        bench="unhang", case=case, ours_s=statistics.median(taken_s), most_s=max(taken_s), n=RANKS,
        runs=RUNS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
