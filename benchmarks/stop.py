"""From %dist_stop until no engine and no controller is left; the fork server stays warm."""

from __future__ import annotations

import statistics

from benchmarks.machine import kernel, report

RUNS, RANKS = 7, 4
CELL = f"""
import time, psutil
from workbench.driver import session
get_ipython().run_line_magic("dist_start", "-n {RANKS}")
server = psutil.Process(session.current().forks.pid)
before = server.children()
began_s = time.perf_counter()
get_ipython().run_line_magic("dist_stop", "")
taken_s = time.perf_counter() - began_s
left = [child for child in before if child.is_running()] + server.children()
print("took", taken_s, len(before), len(left))
"""


def main() -> None:
    """One kernel, several starts and stops."""
    taken_s, left = [], 0
    with kernel() as notebook:
        notebook.run("%load_ext workbench")
        for _ in range(RUNS):
            words = notebook.run(CELL).rpartition("took")[2].split()
            taken_s.append(float(words[0]))
            left += int(words[2])
        notebook.run("%dist_stop --all")
    report(
        bench="stop", case="warm", ours_s=statistics.median(taken_s), left=left, n=RANKS, runs=RUNS
    )


if __name__ == "__main__":
    main()
