"""Steps that count under a fault each FAULT_S seconds, over those of the same time without any.

Ours: a rank is killed every FAULT_S seconds under `%dist_start --spares 1`, where the state comes
from the other ranks (dp4) or from a checkpoint of every SAVE_EVERY steps (fsdp4). The rival is the
script of benchmarks/recovery.py, which saves as often, under torchrun --max-restarts, killed as
often. Each is measured against its own speed without faults, so that only what faults cost is
compared; a step that is taken again counts once.
`python -m benchmarks.goodput 60` measures so many seconds of faults instead of STORM_S.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.machine import Kernel, kernel, report
from benchmarks.recovery import BEGIN, LOST, RANKS, rival, torchrun_with_restarts

FAULT_S, CALM_S, STORM_S, SAVE_EVERY, SIZE = 20.0, 20.0, 80.0, 20, "tiny"
STORM = """
def until(is_so):
    while not is_so():
        time.sleep(0.01)

until(lambda: run.step_now >= 12)
first, began_s = run.step_now, time.monotonic()
time.sleep({calm_s})
rate = (run.step_now - first) / (time.monotonic() - began_s)
first, began_s = run.step_now, time.monotonic()
for number in range(1, round({storm_s} / {fault_s}) + 1):
    # In the middle of its share of the time.
    time.sleep(max(0.0, began_s + (number - 0.5) * {fault_s} - time.monotonic()))
    os.kill(engines.ranks[number % {ranks}]["pid"], signal.SIGKILL)
time.sleep(max(0.0, began_s + {storm_s} - time.monotonic()))
took_s = time.monotonic() - began_s
totals = run.snapshot()["faults"]
told = [run.step_now - first, took_s, rate, totals["faults"], totals["lost_steps"]]
print("took", json.dumps([*told, totals["goodput"]]))
"""


class Reached:
    """The steps that a script has printed; read in a thread."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.step = 0
        self._lines = process.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines or ():
            if line.startswith("step "):
                self.step = max(self.step, int(line.split()[1]))


def theirs(script: Path, storm_s: float) -> tuple[float, int]:
    """Share of the undisturbed steps that were taken, and the number of faults."""
    num_faults = round(storm_s / FAULT_S)
    with torchrun_with_restarts(script, num_faults) as process:
        reached = Reached(process)
        while reached.step < 12:
            if process.poll() is not None:
                raise RuntimeError(f"{script} ended before its twelfth step.")
            time.sleep(0.01)
        first, began_s = reached.step, time.monotonic()
        time.sleep(CALM_S)
        rate = (reached.step - first) / (time.monotonic() - began_s)
        first, began_s = reached.step, time.monotonic()
        for number in range(1, num_faults + 1):
            time.sleep(max(0.0, began_s + (number - 0.5) * FAULT_S - time.monotonic()))
            workers = psutil.Process(process.pid).children()
            workers[LOST].kill()
        time.sleep(max(0.0, began_s + storm_s - time.monotonic()))
        if process.poll() is not None:
            raise RuntimeError(f"{script} did not outlive {num_faults} faults.")
        return (reached.step - first) / (rate * (time.monotonic() - began_s)), num_faults


def ours(notebook: Kernel, storm_s: float) -> list[float]:
    """Steps that count, seconds, steps a second without faults, faults, lost steps, goodput."""
    told = STORM.format(calm_s=CALM_S, storm_s=storm_s, fault_s=FAULT_S, ranks=RANKS)
    return json.loads(notebook.run(told, CALM_S + storm_s + 120).rpartition("took")[2])


def main() -> None:
    """Replicas and shards, and the rival on the work of the replicas."""
    storm_s = float(sys.argv[1]) if sys.argv[1:] else STORM_S
    for layout in "dp4", "fsdp4":
        with kernel() as notebook, tempfile.TemporaryDirectory() as folder:
            exported = Path(folder) / "exported.py"
            notebook.run("%load_ext workbench")
            how = {"ranks": RANKS, "spares": 1, "size": SIZE, "layout": layout}
            how |= {"directory": folder, "script": str(exported), "save_every": SAVE_EVERY}
            notebook.run(BEGIN.format(**how))
            steps, took_s, rate, faults, lost_steps, goodput = ours(notebook, storm_s)
            notebook.run("%dist_stop --all")
            share = None
            if layout == "dp4":
                share, _ = theirs(rival(exported, Path(folder), SAVE_EVERY), storm_s)
        report(
            bench="goodput", layout=layout, size=f"pytext {SIZE}", fault_s=FAULT_S,
            ours=steps / (rate * took_s), theirs=share, told_in_panel=goodput, faults=faults,
            lost_steps=lost_steps, steps_per_s=rate, seconds=took_s, n=RANKS,
        )  # fmt: skip


if __name__ == "__main__":
    main()
