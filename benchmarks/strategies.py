"""Steps per second of every strategy, against the same thing as a plain torchrun script.

The rival is what %dist_export writes: a loop for this recipe and this layout alone, with torch's
parts and nothing of ours. Ours has meters, journal and panel on. Runs interleaved; ratio = ours /
theirs, the median of the pairs; both are timed from the end of the warm-up to the last step.
`python -m benchmarks.strategies "pp2, 1f1b x8"` measures these layouts alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.machine import Kernel, kernel, report
from workbench.spec.layout import parse_layout

RUNS, WARMUP, STEPS = 5, 5, 30
# Data twice, model by layers and by tensor, pipelines, hybrid.
CASES = (
    "dp2", "fsdp2", "pp2, gpipe x1", "tp2", "pp2, gpipe x8", "pp2, 1f1b x8", "pp2 dp2, 1f1b x4",
)  # fmt: skip
TRAIN = """
import time
run = get_ipython().run_line_magic("dist_train", "pytext --size tiny --steps 0 --dir {directory}")
"""
SWITCH = """
if str(run.layout) != {layout!r}:
    run.switch({layout!r})
run.restore({begin!r}) if {begin!r} in [c["name"] for c in run.checkpoints()] else run.save("begin")
run.step({warmup})
began_s = time.perf_counter()
run.step({steps})
print("took", time.perf_counter() - began_s)
"""
EXPORT = """
run.goal = {steps}
run.export({path!r}, force=True)
"""


def ours(notebook: Kernel, layout: str) -> float:
    """Steps per second under a layout, by the clock of the kernel."""
    code = SWITCH.format(layout=layout, begin="begin", warmup=WARMUP, steps=STEPS)
    return STEPS / float(notebook.run(code).rpartition("took")[2].split()[0])


def theirs(script: Path, ranks: int) -> float:
    """Steps per second of the script, by when its lines come."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), str(script),
    ]  # fmt: skip
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        came_s = [time.perf_counter() for line in process.stdout if line.startswith("step ")]
    if process.returncode or len(came_s) != WARMUP + STEPS:
        raise RuntimeError(f"{script} ended with {process.returncode} after {len(came_s)} steps.")
    return STEPS / (came_s[-1] - came_s[WARMUP - 1])


def main() -> None:
    """Alternate; the engines idle while the rival runs."""
    layouts_of = defaultdict(list)
    for layout in sys.argv[1:] or CASES:
        layouts_of[parse_layout(layout).world_size].append(layout)
    for ranks, layouts in layouts_of.items():
        with kernel() as notebook, tempfile.TemporaryDirectory() as directory:
            notebook.run("%load_ext workbench")
            notebook.run(f"%dist_start -n {ranks}")
            notebook.run(TRAIN.format(directory=directory))
            for layout in layouts:
                pairs = []
                for _ in range(RUNS):
                    mine = ours(notebook, layout)
                    script = Path(directory) / "rival.py"
                    notebook.run(EXPORT.format(steps=WARMUP + STEPS, path=str(script)))
                    pairs.append((mine, theirs(script, ranks)))
                report(
                    bench="strategies", case=f"pytext tiny, {layout}", n=ranks, runs=RUNS,
                    ratio=statistics.median(a / b for a, b in pairs),
                    ours_s=1 / statistics.median(a for a, _ in pairs),
                    theirs_s=1 / statistics.median(b for _, b in pairs),
                )  # fmt: skip
            notebook.run("%dist_stop --all")


if __name__ == "__main__":
    main()
