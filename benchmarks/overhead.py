"""Steps per second with meters and panel on, against a hand-written DDP loop under torchrun.

Same model, batch, ranks and threads; runs interleaved; ratio = ours / theirs, the median of the
pairs. Ours is timed in the kernel from run.resume to the end of run.wait, evaluation included.
"""

from __future__ import annotations

import statistics
import tempfile

from benchmarks.machine import Kernel, kernel, report, torchrun

RANKS = 2
# recipe: size, steps to warm up, steps timed, runs.
CASES = {"digits": ("-", 50, 600, 5), "pytext": ("small", 2, 8, 3)}
TRAIN = """
import time
line = "{recipe} {size} --steps {warmup} --dir {directory}"
run = get_ipython().run_line_magic("dist_train", line)
run.wait()
began_s = time.perf_counter()
run.resume({steps})
run.wait()
print("took", time.perf_counter() - began_s)
"""


def ours(
    notebook: Kernel, recipe: str, size: str, warmup: int, steps: int, directory: str
) -> float:
    """Steps per second of one run in a kernel, by the clock of the kernel."""
    option = "" if size == "-" else f"--size {size}"
    printed = notebook.run(
        TRAIN.format(recipe=recipe, size=option, warmup=warmup, steps=steps, directory=directory)
    )
    return steps / float(printed.rpartition("took")[2].split()[0])


def theirs(recipe: str, size: str, warmup: int, steps: int) -> float:
    """Steps per second of the rival, as it prints them."""
    _, printed = torchrun(RANKS, "ddp_loop.py", recipe, size, str(warmup), str(steps))
    return float(printed.rpartition("steps_per_s")[2].split()[0])


def main() -> None:
    """Alternate; the engines idle while the rival runs."""
    with kernel() as notebook, tempfile.TemporaryDirectory() as directory:
        notebook.run("%load_ext workbench")
        notebook.run(f"%dist_start -n {RANKS}")
        for recipe, (size, warmup, steps, runs) in CASES.items():
            pairs = [
                (
                    ours(notebook, recipe, size, warmup, steps, directory),
                    theirs(recipe, size, warmup, steps),
                )
                for _ in range(runs)
            ]
            report(
                bench="overhead", case=recipe, ratio=statistics.median(a / b for a, b in pairs),
                ours_steps_per_s=statistics.median(a for a, _ in pairs),
                theirs_steps_per_s=statistics.median(b for _, b in pairs), n=RANKS, runs=runs,
            )  # fmt: skip
        notebook.run("%dist_stop --all")


if __name__ == "__main__":
    main()
