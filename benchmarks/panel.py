"""What a panel costs the kernel: share of a core and bytes a second at 8 and at 1,024 ranks.

A stand-in for a run makes a snapshot with every number of a real one five times a second, in a
thread of its own whose time does not count; that of all other threads of the kernel does. The last
line is what the history of 100,000 steps of 8 ranks takes in the kernel: losses and rates, and
nothing by rank.
"""

from __future__ import annotations

import os
import threading
import time
from queue import Empty

import psutil

from benchmarks.machine import ROOT, Kernel, kernel, report
from workbench.driver.history import History
from workbench.spec.layout import Layout
from workbench.spec.records import COLUMNS

SECONDS, PERIOD_S = 20.0, 0.2
RUN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.browser.panel_run import StandIn
from workbench.notebook.panel import Panel
run = StandIn(ranks={{ranks}}, step=100, goal=10**6)
run.change(state="running")
thread = run.train(period_s={PERIOD_S})
"""
WHICH = "import os; print(os.getpid(), thread.native_id)"
PANEL = "panel = Panel(run)\npanel"
END = "panel.close()\nrun.end()"


def watched(notebook: Kernel, pid: int, apart: int) -> tuple[float, float]:
    """(share of a core, bytes a second from the kernel) for some seconds.

    apart: the thread that does not count.
    """
    process, total, over = psutil.Process(pid), 0, threading.Event()

    def used_s() -> float:
        return sum(of.user_time + of.system_time for of in process.threads() if of.id != apart)

    def listen() -> None:
        nonlocal total
        while not over.is_set():
            try:
                message = notebook.client.get_iopub_msg(timeout=0.2)
            except Empty:
                continue
            total += sum(len(buffer) for buffer in message["buffers"])
            total += len(str(message["content"]))

    thread = threading.Thread(target=listen)
    before_s, began_s = used_s(), time.perf_counter()
    thread.start()
    time.sleep(SECONDS)
    over.set()
    thread.join()
    after_s, took_s = used_s(), time.perf_counter() - began_s
    return (after_s - before_s) / took_s, total / took_s


def history_bytes(steps: int, ranks: int) -> float:
    """Memory that a history keeps of so many steps."""
    process = psutil.Process(os.getpid())
    history, before, slice_steps = History(), process.memory_info().rss, 100
    for first in range(1, steps + 1, slice_steps):
        columns = {name: [0.001 * first] * slice_steps for name in COLUMNS}
        history.add(
            [{"rank": rank, "first": first, "columns": columns} for rank in range(ranks)],
            Layout(dp_replicate=ranks),
        )
    return process.memory_info().rss - before


def main() -> None:
    """Each size in a kernel of its own."""
    for ranks in (8, 1024):
        with kernel() as notebook:
            notebook.run(RUN.format(ranks=ranks))
            pid, apart = (int(number) for number in notebook.run(WHICH).split())
            notebook.run(PANEL)
            share, bytes_per_s = watched(notebook, pid, apart)
            notebook.run(END)
        report(
            bench="panel", case=f"{ranks} ranks", n=ranks, ours_share=share, bytes_per_s=bytes_per_s
        )
    report(bench="panel", case="history of 100,000 steps", n=8, bytes=history_bytes(100_000, 8))


if __name__ == "__main__":
    main()
