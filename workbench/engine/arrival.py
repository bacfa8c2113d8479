"""Arrival: how a process becomes a rank, meets the others, and runs cells."""

from __future__ import annotations

import gc
import linecache
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.engine import alone, cell, output, recompute, source, stacks
from workbench.engine import recipe as recipes
from workbench.engine.blueprint import Plan
from workbench.engine.breakable import Breakable
from workbench.engine.here import here, world
from workbench.engine.kept import Kept
from workbench.engine.told import MOST_CHARS
from workbench.engine.world import Meeting, World
from workbench.spec import pulse
from workbench.spec.bound import bound
from workbench.spec.options import TrainOptions
from workbench.spec.stacks import path_of


def arrive(address: str, logs: dict[int, str], meeting: dict | None) -> dict:
    """First call: capture output, listen for the way out, meet the others if one is of the ranks.

    address: where the notebook pulls output. logs: where each process keeps its output whole, by
    key. -> what the driver shows of this process.
    """
    recompute.know_users()
    here.key = int(os.environ["WORKBENCH_KEY"])
    here.log = logs[here.key]
    # ipykernel makes the shell's namespace, in which cells run, that of `__main__`.
    here.namespace = vars(sys.modules["__main__"])
    output.start(here.rank, address, here.log)
    here.meter.beat(pulse.path_of(here.log))
    stacks.listen(path_of(here.log))
    threading.Thread(target=_way_out, name="way-out", daemon=True).start()
    alone.watch(Path(here.log).parent)
    if meeting is not None and here.key in meeting["keys"]:
        join(meeting)
    return introduced()


def introduced() -> dict:
    """What the driver shows of this process."""
    return {
        "key": here.key,
        "rank": here.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "log": here.log,
    }


def join(meeting: dict) -> str:
    """Meet the other ranks of an attempt, leaving the world before it, and keep the training.

    -> "", or why the training could not be kept: the user's optimizer raises when asked for its
    state, say. The ranks have met all the same.
    """
    lost = ""
    # It outlasts a meeting that comes to nothing, to be held in the next.
    if here.trainer is not None:
        here.kept = None
        try:
            here.kept = Kept.of(here.trainer)
        except Exception as error:  # noqa: BLE001 - said, and the ranks meet
            lost = f"{type(error).__name__}: {error}"[:MOST_CHARS]
    leave()
    meet(meeting)
    if here.kept is not None:
        try:
            here.trainer = here.kept.rebuilt(world())
            here.kept = None
        except Exception as error:  # noqa: BLE001 - said, and the ranks meet
            lost = f"{type(error).__name__}: {error}"[:MOST_CHARS]
    return lost


def meet(meeting: dict) -> World:
    """Take the rank that the meeting gives this process, and join its world."""
    keys, environments = meeting.pop("keys"), meeting.pop("environments")
    here.rank = keys.index(here.key)
    # What binds a spare to the device of its rank; nothing has touched an accelerator before.
    os.environ.update(environments[here.rank])
    # One that has moved up keeps its device, and has another number.
    for name in ("WORKBENCH_RANK", "RANK", "LOCAL_RANK"):
        os.environ[name] = str(here.rank)
    os.environ["WORLD_SIZE"] = str(len(keys))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    output.relabel(here.rank)
    chosen = Meeting(rank=here.rank, size=len(keys), **meeting)
    # What was to free this rank from the world before must not meet the next.
    while signal.SIGUSR1 in signal.sigpending():
        time.sleep(0.001)
    here.store = Breakable(chosen.store_path, chosen.rendezvous_s)
    here.world = World(chosen, here.meter, here.store)
    here.broken = False
    _name()
    return here.world


def leave() -> None:
    """Close the world, and free the ranks that wait for this one."""
    here.trainer = here.store = None
    if here.world is not None:
        here.world.close()
        here.world = None
    gc.collect()


def _name() -> None:
    """What a cell may count on; anew for each: one that sets `rank` must not mislead the next.

    A process that has no rank yet is as rank 0 to what it prepares.
    """
    world = here.world
    here.namespace |= {
        "rank": max(here.rank, 0),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "device": torch.device("cpu") if world is None else world.device,
        "dist": torch.distributed,
        "torch": torch,
    }


def run_cell(text: str, number: int) -> dict:
    """Execute a user's cell; see engine/cell.py."""
    _name()
    streams = sys.stdout, sys.stderr
    try:
        return cell.run(text, number, here.namespace)
    finally:
        here.cell, here.cells = source.file_name(number), number
        # The engine flushes them before it answers: a cell may not take them away.
        sys.stdout, sys.stderr = streams


def reseed(seed: int) -> None:
    """Have all ranks draw the same random numbers in what follows."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def is_broken() -> bool:
    """Whether the world must be joined anew."""
    return here.broken


def _way_out() -> None:
    """Free the main thread from a collective on SIGUSR1, which only this thread takes.

    A signal handler would not do: Python runs it in the main thread, which waits in C++.
    """
    while True:
        signal.sigwait({signal.SIGUSR1})
        if here.store is not None:
            here.store.break_off()
        # It may be on the way into its world.
        if (waits := here.meter.waits) is not None:
            waits.free()
        if (sockets := here.meter.sockets) is not None:
            sockets.shut_down()
        if here.world is not None:
            here.broken = True
            here.world.free()


def planned(recipe: str | None, from_cell: bool, chosen: TrainOptions) -> Plan:
    """A built-in recipe by name, or what the last cell defined, with what the user has chosen.

    Raises RecipeError.
    """
    if from_cell:
        found = recipes.from_namespace(_defined_by_cell(), recipe, chosen.size)
    else:
        found = recipes.builtin(str(recipe), chosen.size)
    return Plan(found.changed(batch=chosen.batch, seed=chosen.seed), chosen)


def _defined_by_cell() -> dict[str, Any]:
    """What the last cell bound at its top level: earlier cells are no part of a recipe."""
    names = bound("".join(linecache.getlines(here.cell)))
    return {name: here.namespace[name] for name in names if name in here.namespace}
