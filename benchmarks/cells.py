"""A warm %%dist cell of one line on all ranks: median time in the kernel."""

from __future__ import annotations

import statistics

from benchmarks.machine import kernel, report

WARMUP, RUNS, RANKS = 10, 100, 4
CELL = f"""
import time
taken_s = []
for _ in range({WARMUP + RUNS}):
    began_s = time.perf_counter()
    get_ipython().run_cell_magic("dist", "", "x = 1")
    taken_s.append(time.perf_counter() - began_s)
print("took", *taken_s[{WARMUP}:])
"""


def main() -> None:
    """One kernel, one cluster, many cells."""
    with kernel() as notebook:
        notebook.run("%load_ext workbench")
        notebook.run(f"%dist_start -n {RANKS}")
        taken_s = [float(word) for word in notebook.run(CELL).rpartition("took")[2].split()]
        notebook.run("%dist_stop --all")
    cuts = statistics.quantiles(taken_s, n=20)
    report(
        bench="cells",
        case="warm",
        ours_s=statistics.median(taken_s),
        p95_s=cuts[18],
        n=RANKS,
        runs=RUNS,
    )


if __name__ == "__main__":
    main()
