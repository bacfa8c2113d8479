"""What a panel costs over time: memory of its page and kernel, the browser's share of a core.

A real training in real JupyterLab with the panel open, drawn five times a second, for MINUTES
(the first argument, 10). Every 15 s the page's heap after a garbage collection, its DOM nodes and
the kernel's resident memory are read; slopes are those of a line through the second half. The
kernel keeps each step's loss and rate: 90 bytes a step that are no leak.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import CDPSession, sync_playwright

from benchmarks.machine import ROOT, report

EVERY_S, WARM_UP_S = 15.0, 20.0
CELLS = (
    "%load_ext workbench\n%dist_start -n 2",
    "run = %dist_train pytext --size tiny --steps 1000000",
    "import os\nprint(os.getpid())",
)


def slope(times_s: list[float], values: list[float]) -> float:
    """Of the second half, a minute."""
    half = len(values) // 2
    line = statistics.linear_regression(times_s[half:], values[half:])
    return 60 * line.slope


def _heap(session: CDPSession) -> tuple[float, float]:
    session.send("HeapProfiler.collectGarbage")
    told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return told["JSHeapUsedSize"], told["Nodes"]


def _renderer() -> psutil.Process:
    """The browser process that draws the page: the one that used most time."""
    children = psutil.Process().children(recursive=True)
    found = [one for one in children if "--type=renderer" in " ".join(one.cmdline())]
    return max(found, key=lambda one: sum(one.cpu_times()[:2]))


def main() -> None:
    """One training, watched."""
    sys.path.insert(0, str(ROOT / "tests" / "browser"))
    from lab import browse, serve  # pyright: ignore[reportMissingImports]

    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rows: list[tuple[float, float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        serve(Path(folder)) as server,
        browse(playwright, server) as lab,
    ):
        lab.open(lab.write("page.ipynb", CELLS))
        for index in range(len(CELLS)):
            assert lab.run(index)
        kernel = psutil.Process(int(lab.output(2).split()[-1]))
        session = lab.page.context.new_cdp_session(lab.page)
        session.send("Performance.enable")
        lab.page.wait_for_timeout(1e3 * WARM_UP_S)
        drawing = _renderer()
        used_s, began_s = sum(drawing.cpu_times()[:2]), time.monotonic()
        while time.monotonic() - began_s < 60 * minutes:
            lab.page.wait_for_timeout(1e3 * EVERY_S)
            heap, nodes = _heap(session)
            rows.append((time.monotonic() - began_s, heap, nodes, kernel.memory_info().rss))
        share = (sum(drawing.cpu_times()[:2]) - used_s) / rows[-1][0]
        server.end_kernels()
    times_s, heaps, nodes, resident = (list(column) for column in zip(*rows, strict=True))
    report(
        bench="page", case=f"{minutes:g} minutes, 2 ranks", n=2, browser_share=share,
        page_bytes=heaps[-1], page_bytes_a_min=slope(times_s, heaps), nodes=int(nodes[-1]),
        nodes_a_min=slope(times_s, nodes), kernel_bytes=resident[-1],
        kernel_bytes_a_min=slope(times_s, resident),
    )  # fmt: skip


if __name__ == "__main__":
    main()
