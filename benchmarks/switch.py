"""A live switch between any two of six layouts: moving the state, and the pause of the training.

A GPT of 31.9 million parameters trains with AdamW on 4 ranks and walks through all ordered pairs.
ours_s: from all ranks having built the new layout to all state moved. theirs_s: the same bytes
between the same ranks as raw gloo messages and copies, one step later. Where nothing moves, since
each rank has what it needs already, there is no ratio. pause_s: from the end of the last step under
the old layout to the begin of the first under the new one, as the ranks' journals have it. The last
line is what saving, stopping, starting and restoring take instead of a switch.
"""

from __future__ import annotations

import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workbench
from benchmarks.machine import ROOT, report
from workbench.driver.cells import run_cell

RANKS, TOURS, RESTARTS = 4, 3, 3
# What raw takes for no bytes at all is below this.
NOTHING_S = 1e-3
LAYOUTS = ("dp4", "tp4", "pp4", "fsdp4", "pp2 dp2", "dp2 tp2")
# A small batch, for short steps: what a switch moves does not depend on it.
TRAIN = {"recipe": "pytext", "size": "medium", "batch": 4, "steps": 100_000, "start": False}
PREPARE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.relayout import Watch
watch = Watch()
"""
FIGURES = """
import json, torch.distributed
figures = watch.figures()
if torch.distributed.get_rank() == 0:
    print(json.dumps(figures))
"""


def tour(names: Sequence[str]) -> list[str]:
    """A walk from the first name and back that takes each ordered pair once (Hierholzer)."""
    left = {name: [other for other in names if other != name] for name in names}
    walk, trail = [], [names[0]]
    while trail:
        if left[trail[-1]]:
            trail.append(left[trail[-1]].pop())
        else:
            walk.append(trail.pop())
    return walk[::-1]


def pause_s(directory: Path) -> float:
    """Seconds without a step before the last slice, on the rank that had the most."""
    pauses = []
    for path in (directory / "journal").glob("rank*.jsonl"):
        before, after = (json.loads(line) for line in path.read_text().splitlines()[-2:])
        pauses.append(after["time_s"] - sum(after["columns"]["wall_s"]) - before["time_s"])
    return max(pauses)


def switched(engines: Any, run: Any, after: str) -> dict[str, float]:
    """One switch between two steps -> ours_s, theirs_s, bytes, pause_s."""
    run.step(1)  # the raw messages of the pair before are no part of this pause
    run.switch(after)
    run.step(1)
    paused_s = pause_s(run.directory)
    printed = io.StringIO()
    run_cell(engines, FIGURES, out=printed)
    text = printed.getvalue()
    figures = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {**figures, "pause_s": paused_s}


def restart_s(engines: Any, run: Any, directory: str) -> tuple[float, Any, Any]:
    """Seconds without a step when a checkpoint stands in for a switch, and what runs then."""
    began_s = time.perf_counter()
    path = run.directory / "checkpoints" / run.save()
    engines.stop()
    engines = workbench.start(n=RANKS)
    run = engines.train(**TRAIN, directory=directory, restore=str(path), strategy="data")
    return time.perf_counter() - began_s, engines, run


def main() -> None:
    """Tours, then restarts, in one session."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    walk = tour(LAYOUTS)
    with tempfile.TemporaryDirectory() as directory:
        engines = workbench.start(n=RANKS)
        try:
            run = engines.train(**TRAIN, directory=directory, strategy="data")
            run.step(1)
            run_cell(engines, PREPARE)
            for _ in range(TOURS):
                for pair in itertools.pairwise(walk):
                    runs.setdefault(pair, []).append(switched(engines, run, pair[1]))
            taken_s = []
            for _ in range(RESTARTS):
                took_s, engines, run = restart_s(engines, run, directory)
                taken_s.append(took_s)
        finally:
            engines.stop()
    say(runs, statistics.median(taken_s))


def say(runs: dict[tuple[str, str], list[dict[str, float]]], restarted_s: float) -> None:
    """A line for each pair, one for all, one for the restart."""
    common = {"bench": "switch", "n": RANKS, "runs": TOURS}
    ratios, pauses = [], []
    for (before, after), found in sorted(runs.items()):
        names = ("ours_s", "theirs_s", "pause_s")
        middle = {name: statistics.median(one[name] for one in found) for name in names}
        ratio = None
        if min(one["theirs_s"] for one in found) >= NOTHING_S:
            ratio = statistics.median(one["ours_s"] / one["theirs_s"] for one in found)
            ratios.append(ratio)
        pauses.append(middle["pause_s"])
        report(
            **common, case=f"{before} to {after}", ratio=ratio, **middle,
            bytes=int(found[0]["bytes"]),
        )  # fmt: skip
    paused_s = statistics.median(pauses)
    report(
        **common, case="all pairs", ratio=statistics.median(ratios), worst=max(ratios),
        pause_s=paused_s,
    )  # fmt: skip
    report(
        **{**common, "runs": RESTARTS}, case="restart from a checkpoint",
        ratio=paused_s / restarted_s, ours_s=paused_s, theirs_s=restarted_s,
    )  # fmt: skip


if __name__ == "__main__":
    main()
