"""How long from %dist_start to the first finished all-reduce, against torchrun doing the same.

cold: the extension has just been loaded, so the fork server is still importing torch.
warm: again after %dist_stop. ours_s is the time of the magic alone, load_s that of %load_ext.
"""

from __future__ import annotations

import statistics

from benchmarks.machine import kernel, report, torchrun

RUNS, RANKS = 5, 4
START = f"""
import time
began_s = time.perf_counter()
get_ipython().run_line_magic("dist_start", "-n {RANKS}")
print("took", time.perf_counter() - began_s)
"""
LOAD = """
import time
began_s = time.perf_counter()
get_ipython().run_line_magic("load_ext", "workbench")
print("took", time.perf_counter() - began_s)
"""


def took_s(printed: str) -> float:
    """The number behind `took`."""
    return float(printed.rpartition("took")[2].split()[0])


def main() -> None:
    """Interleave torchrun, cold and warm; medians."""
    cold, warm, load, theirs = [], [], [], []
    for _ in range(RUNS):
        theirs.append(torchrun(RANKS, "hello.py")[0])
        with kernel() as notebook:
            load.append(took_s(notebook.run(LOAD)))
            cold.append(took_s(notebook.run(START)))
            notebook.run("%dist_stop")
            warm.append(took_s(notebook.run(START)))
            notebook.run("%dist_stop --all")
    base_s = statistics.median(theirs)
    for case, ours in (("cold", cold), ("warm", warm)):
        ours_s = statistics.median(ours)
        report(
            bench="startup", case=case, ratio=ours_s / base_s, ours_s=ours_s, theirs_s=base_s,
            n=RANKS, runs=RUNS, load_s=statistics.median(load),
        )  # fmt: skip


if __name__ == "__main__":
    main()
