"""Steps per second with meters and panel on, against a hand-written DDP loop under torchrun.

Same model, batch, ranks and threads; runs interleaved; ratio = ours / theirs. Ours is counted
from the journal's clock: steps after the warm-up over the time they took, gaps included.
"""

from __future__ import annotations

import statistics

from benchmarks.machine import kernel, report, torchrun

RUNS, RANKS = 5, 2
CASES = {"digits": ("-", 100, 1500), "pytext": ("small", 3, 12)}
TRAIN = """
import time
run = get_ipython().run_line_magic("dist_train", "{recipe} {size} --steps {warmup} --dir {directory}")
run.wait()
began_step, wall_s = run.step_now, run.history.wall_s
began_s = time.perf_counter()
run.resume({steps})
run.wait()
print("took", run.history.wall_s - wall_s, time.perf_counter() - began_s)
"""


def ours(notebook, recipe: str, size: str, warmup: int, steps: int, directory: str) -> float:  # noqa: ANN001
    """Steps per second of one run in a kernel, by the clock of the kernel."""
    option = "" if size == "-" else f"--size {size}"
    printed = notebook.run(
        TRAIN.format(recipe=recipe, size=option, warmup=warmup, steps=steps, directory=directory)
    )
    return steps / float(printed.rsplit("took", 1)[1].split()[1])


def theirs(recipe: str, size: str, warmup: int, steps: int) -> float:
    """Steps per second of the rival, as it prints them."""
    _, printed = torchrun(RANKS, "ddp_loop.py", recipe, size, str(warmup), str(steps))
    return float(printed.rsplit("steps_per_s", 1)[1].split()[0])


def main() -> None:
    """Alternate; the engines idle while the rival runs."""
    import tempfile

    with kernel() as notebook, tempfile.TemporaryDirectory() as directory:
        notebook.run("%load_ext workbench")
        notebook.run(f"%dist_start -n {RANKS}")
        for recipe, (size, warmup, steps) in CASES.items():
            pairs = [
                (
                    ours(notebook, recipe, size, warmup, steps, directory),
                    theirs(recipe, size, warmup, steps),
                )
                for _ in range(RUNS)
            ]
            report(
                bench="overhead", case=recipe, ratio=statistics.median(a / b for a, b in pairs),
                ours_steps_per_s=statistics.median(a for a, _ in pairs),
                theirs_steps_per_s=statistics.median(b for _, b in pairs), n=RANKS, runs=RUNS,
            )  # fmt: skip
        notebook.run("%dist_stop --all")


if __name__ == "__main__":
    main()
