"""How long a training stands still for a save: ours beside it, and torch.save in its way.

A net of 36 million parameters trains with AdamW on 2 ranks: 432 MB of state. ours_s: from the end
of the last step before a save to the begin of the next, on the rank that stood longest, as the
manifests have it. theirs_s: the same ranks in the same training call torch.save between two
barriers, rank 0 for all of the state where it is replicated, each rank for its shards where it is
not; without fsync, as scripts do. share_s: replicas that share the work out as ours do. written_s:
from then on until all files of ours are on the disk, hashed and synced, while the training goes on.
first_s: ours the first time, when the memory for the copy is touched.
"""

from __future__ import annotations

import io
import shutil
import statistics
import tempfile
import time
from typing import Any

import workbench
from benchmarks.machine import report
from workbench.driver.cells import run_cell

RANKS, RUNS = 2, 9
CELL = """
import torch
from torch import nn

batch = 2

def model():
    return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(9)))

def data():
    x = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
    return x, x

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-5)
"""
# Runs on ranks; `shares`: each rank takes its share of a state that all hold.
THEIRS = """
import os, tempfile, time
import torch
from workbench.engine import state
from workbench.engine.here import here

def theirs(directory, shares):
    pieces = state.take(here.trainer.held, here.trainer.optimizer)
    mine = {{key: piece.local for key, piece in pieces.items()}}
    if shares:
        mine = {{key: mine[key] for key in sorted(mine)[rank::world_size]}}
    is_replica = here.trainer.layout.dp_replicate > 1
    path = os.path.join(directory, f"rank-{{rank}}.pt")
    dist.barrier()
    began_s = time.perf_counter()
    if rank == 0 or shares or not is_replica:
        torch.save(mine, path)
    dist.barrier()
    took_s = time.perf_counter() - began_s
    if os.path.exists(path):
        os.remove(path)
    return took_s

took_s = theirs({directory!r}, {shares})
if rank == 0:
    print("TOOK", took_s)
"""


def theirs_s(engines: Any, directory: str, *, shares: bool) -> float:
    """Seconds that all ranks stand for torch.save."""
    printed = io.StringIO()
    run_cell(engines, THEIRS.format(directory=directory, shares=shares), out=printed)
    return float(printed.getvalue().split("TOOK")[1].split()[0])


def ours_s(run: Any) -> tuple[float, float, int]:
    """A save of the training that runs -> seconds that it stood, seconds to write, bytes."""
    step = run.step_now
    while run.step_now < step + 2:  # what came before is over
        time.sleep(0.01)
    name = run.save()
    entry = next(entry for entry in run.checkpoints() if entry["name"] == name)
    return entry["stall_ms"] / 1e3, entry["write_ms"] / 1e3, entry["bytes"]


def measured(engines: Any, directory: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """One layout, ours and theirs in turns -> medians."""
    run = engines.train(cell=CELL, steps=10**6, directory=directory, **strategy)
    first_s, _, num_bytes = ours_s(run)
    found: dict[str, list[float]] = {}
    for _ in range(RUNS):
        stood_s, written_s, _ = ours_s(run)
        found.setdefault("ours_s", []).append(stood_s)
        found.setdefault("written_s", []).append(written_s)
        found.setdefault("theirs_s", []).append(theirs_s(engines, directory, shares=False))
        if not strategy.get("shard"):
            found.setdefault("share_s", []).append(theirs_s(engines, directory, shares=True))
        for entry in run.checkpoints():
            shutil.rmtree(entry["path"])  # the disk is the same for each
    run.stop()
    middle = {name: statistics.median(values) for name, values in found.items()}
    pairs = zip(found["ours_s"], found["theirs_s"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return {"ratio": ratio, **middle, "first_s": first_s, "bytes": num_bytes}


def main() -> None:
    """Replicated and sharded, in one session."""
    engines = workbench.start(n=RANKS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for case, strategy in (("dp2", {}), ("fsdp2", {"shard": True})):
                figures = measured(engines, directory, strategy)
                report(bench="checkpoint", n=RANKS, runs=RUNS, case=case, **figures)
    finally:
        engines.stop()


if __name__ == "__main__":
    main()
