"""From SIGKILL of a rank in mid-step to the end of the next new step, against torchrun.

Case spare: a warm process takes its place; fresh: one is forked for it. State comes from the other
ranks (dp4) or, where they do not hold the whole, from a checkpoint of every SAVE_EVERY steps
(fsdp4). The rival is what %dist_export writes, with a hand-written save of every SAVE_EVERY steps
and resume, under torchrun --max-restarts; timed by when its lines come, and a step it takes again
is not a new one, as with ours.
`python -m benchmarks.recovery tiny` measures one size alone.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.machine import Kernel, kernel, report

RUNS, RANKS, SAVE_EVERY, LOST = 5, 4, 5, 2
SIZES = ("tiny", "small")
BEGIN = """
import json, os, signal, statistics, time
get_ipython().run_line_magic("dist_start", "-n {ranks} --spares {spares}")
run = get_ipython().run_line_magic(
    "dist_train", "pytext --size {size} --steps 0 --dir {directory} --save-every {save_every}"
)
run.switch({layout!r})
run.export({script!r}, force=True)
engines = run.engines
run.resume(10**6)
"""
LOSE = """
def until(is_so):
    while not is_so():
        time.sleep(0.002)

begun, spares = run.step_now, engines.roster.num_spares
until(lambda: run.step_now >= begun + 12)
# A spare counts as warm once it has got ready for this training.
until(lambda: sum(one.prepared is not None and one.prepared[1].done()
                  for one in engines.roster.spares) == spares)
num_outages = len(run.outages.all)
step_s = run.history.units_per_step / statistics.median(run.history.rate[-8:])
killed_s = time.monotonic()
os.kill(engines.ranks[{lost}]["pid"], signal.SIGKILL)
until(lambda: len(run.outages.all) > num_outages)
outage = run.outages.all[-1]
last_step = outage.step
until(lambda: outage.is_over and run.step_now > last_step)
marks = dict(outage.marks)
# Steps that were lost are taken again before there is a new one.
end_s = time.monotonic() if outage.lost_steps else outage.began_s + outage.took_s
print("took", json.dumps([end_s - killed_s, step_s, outage.source, marks]))
"""
# Added to the script: a checkpoint of every SAVE_EVERY steps, written aside and then renamed.
RESUME = """
    import os, pathlib
    first, kept = 0, pathlib.Path({kept!r})
    if kept.exists():
        told = torch.load(kept, weights_only=True)
        net.load_state_dict(told["model"])
        opt.load_state_dict(told["optimizer"])
        first = told["step"]

    def save(step):
        if step % {save_every} == 0 and rank == 0:
            told = {{"model": net.state_dict(), "optimizer": opt.state_dict(), "step": step}}
            torch.save(told, f"{{kept}}.partial")
            os.replace(f"{{kept}}.partial", kept)

    for step in range(first, STEPS):
"""


def ours(notebook: Kernel) -> tuple[float, float, str, dict[str, float]]:
    """One loss -> seconds, those of an undisturbed step, source of the state, end of each phase."""
    told = notebook.run(LOSE.format(lost=LOST)).rpartition("took")[2]
    took_s, step_s, source, marks = json.loads(told)
    return took_s, step_s, "peers" if source == "the other ranks" else "checkpoint", marks


@contextmanager
def torchrun_with_restarts(script: Path, restarts: int) -> Iterator[subprocess.Popen]:
    """The script on RANKS ranks; its lines come as they are printed. Ended with the context."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts",
        str(restarts), "--monitor-interval", "0.1", "--nproc-per-node", str(RANKS), str(script),
    ]  # fmt: skip
    told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    # Else the second generation finds addresses of the first in the agent's store, and ends.
    told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env={**os.environ, **told}, **how) as process:
        try:
            yield process
        finally:
            process.terminate()


def theirs(script: Path) -> float:
    """Seconds from the kill of one rank to the line of the first step that is new."""
    with torchrun_with_restarts(script, 1) as process:
        killed_s, last = 0.0, 0
        for line in process.stdout or ():
            if not line.startswith("step "):
                continue
            step = int(line.split()[1])
            if killed_s and step > last:
                return time.monotonic() - killed_s
            last = max(last, step)
            if not killed_s and step == 12:
                killed_s = time.monotonic()
                psutil.Process(process.pid).children()[LOST].kill()
    raise RuntimeError(f"{script} took no step after a rank was killed.")


def rival(exported: Path, folder: Path, save_every: int = SAVE_EVERY) -> Path:
    """The exported script with saves and resume."""
    text, loop = exported.read_text(), "    for step in range(STEPS):\n"
    tail = "        opt.zero_grad()\n"
    if loop not in text or tail not in text:
        raise RuntimeError(f"{exported} has no loop to add saves to.")
    added = RESUME.format(kept=str(folder / "kept.pt"), save_every=save_every).lstrip("\n")
    text = re.sub(r"(?m)^STEPS = .*", "STEPS = 10**6", text.replace(loop, added))
    script = folder / "rival.py"
    script.write_text(text.replace(tail, f"{tail}        save(step + 1)\n"))
    return script


def main() -> None:
    """Each case RUNS times; the rival on the work of the replicated cases."""
    for size in sys.argv[1:] or SIZES:
        for case, layout in (("spare", "dp4"), ("fresh", "dp4"), ("spare", "fsdp4")):
            with kernel() as notebook, tempfile.TemporaryDirectory() as folder:
                exported = Path(folder) / "exported.py"
                notebook.run("%load_ext workbench")
                how = {"ranks": RANKS, "spares": int(case == "spare"), "size": size}
                how |= {"layout": layout, "directory": folder, "script": str(exported)}
                notebook.run(BEGIN.format(**how, save_every=SAVE_EVERY))
                found = [ours(notebook) for _ in range(RUNS)]
                notebook.run("%dist_stop --all")
                rival_s = None
                if (case, layout) == ("spare", "dp4"):
                    script = rival(exported, Path(folder))
                    taken_s = []
                    for _ in range(RUNS):
                        (Path(folder) / "kept.pt").unlink(missing_ok=True)
                        taken_s.append(theirs(script))
                    rival_s = statistics.median(taken_s)
            phases = {
                name: round(statistics.median(marks.get(name, 0.0) for *_, marks in found), 3)
                for name in found[0][3]
            }
            report(
                bench="recovery", case=case, size=f"pytext {size}", layout=layout,
                state=found[0][2], ours_s=statistics.median(took_s for took_s, *_ in found),
                step_s=statistics.median(step_s for _, step_s, *_ in found),
                worst_s=max(took_s for took_s, *_ in found), theirs_s=rival_s, phases=phases,
                n=RANKS, runs=RUNS,
            )  # fmt: skip


if __name__ == "__main__":
    main()
