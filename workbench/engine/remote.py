"""What the driver may call on a rank: every public function here, by name, through the door.

An engine is a process, so what it holds is the one object `_here`.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import linecache
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.engine import cell, checkpoint, flops, journal, output, recompute, source, state
from workbench.engine import recipe as recipes
from workbench.engine.blueprint import Plan
from workbench.engine.export import script
from workbench.engine.kept import Kept
from workbench.engine.metered_group import Meter
from workbench.engine.moves import move
from workbench.engine.told import MOST_CHARS, told
from workbench.engine.trainer import Trainer, first_trainer, move_state
from workbench.engine.world import Meeting, World
from workbench.errors import CheckpointError, RunError, WorldLostError
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions
from workbench.spec.records import COLUMNS


@dataclass
class Here:
    """All that this rank holds."""

    key: int = -1
    rank: int = -1
    namespace: dict[str, Any] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    world: World | None = None
    trainer: Trainer | None = None
    directory: Path | None = None
    broken: bool = False
    interruptible: bool = False
    cell: str = ""
    peaks: dict[tuple[torch.dtype, int], float] = field(default_factory=dict)


_here = Here()


def arrive(address: str, logs: dict[int, str], meeting: dict | None) -> dict:
    """First call: capture output, listen for the way out, meet the others if one is of the ranks.

    address: where the notebook pulls output. logs: where each process keeps its output whole, by
    key. -> what the driver shows of this process.
    """
    recompute.know_users()
    _here.key = int(os.environ["WORKBENCH_KEY"])
    log_path = logs[_here.key]
    # ipykernel makes the shell's namespace, in which cells run, that of `__main__`.
    _here.namespace = vars(sys.modules["__main__"])
    output.start(_here.rank, address, log_path)
    threading.Thread(target=_way_out, name="way-out", daemon=True).start()
    if meeting is not None and _here.key in meeting["keys"]:
        join(meeting)
    return {
        "key": _here.key,
        "rank": _here.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "log": log_path,
    }


def join(meeting: dict) -> str:
    """Meet the other ranks of an attempt, leaving the world before it, and keep the training.

    -> "", or why the training could not be kept: the user's optimizer raises when asked for its
    state, say. The ranks have met all the same.
    """
    lost = ""
    kept = None
    if _here.trainer is not None:
        try:
            kept = Kept.of(_here.trainer)
        except Exception as error:  # noqa: BLE001 - said, and the ranks meet
            lost = f"{type(error).__name__}: {error}"[:MOST_CHARS]
    leave()
    _meet(meeting)
    if kept is not None:
        try:
            _here.trainer = kept.rebuilt(_world())
        except Exception as error:  # noqa: BLE001 - said, and the ranks meet
            lost = f"{type(error).__name__}: {error}"[:MOST_CHARS]
    return lost


def _meet(meeting: dict) -> None:
    """Take the rank that the meeting gives this process, and join its world."""
    keys, environments = meeting.pop("keys"), meeting.pop("environments")
    _here.rank = keys.index(_here.key)
    # What binds a spare to the device of its rank; nothing has touched an accelerator before.
    os.environ.update(environments[_here.rank])
    os.environ["WORLD_SIZE"] = str(len(keys))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    output.relabel(_here.rank)
    _here.world = World(Meeting(rank=_here.rank, size=len(keys), **meeting), _here.meter)
    _here.broken = False


def leave() -> None:
    """Close the world, and free the ranks that wait for this one."""
    _here.trainer = None
    if _here.world is not None:
        _here.world.close()
        _here.world = None
    gc.collect()


def run_cell(text: str, number: int) -> dict:
    """Execute a user's cell; see engine/cell.py."""
    if _here.world is not None:
        # Anew for each cell: one that sets `rank` must not mislead the next.
        _here.namespace |= {
            "rank": _here.rank,
            "world_size": _here.world.size,
            "device": _here.world.device,
            "dist": torch.distributed,
            "torch": torch,
        }
    streams = sys.stdout, sys.stderr
    try:
        return cell.run(text, number, _here.namespace)
    finally:
        _here.cell = source.file_name(number)
        # The engine flushes them before it answers: a cell may not take them away.
        sys.stdout, sys.stderr = streams


def reseed(seed: int) -> None:
    """Have all ranks draw the same random numbers in what follows."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _defined_by_cell() -> dict[str, Any]:
    """What the last cell bound at its top level: earlier cells are no part of a recipe."""
    code = compile("".join(linecache.getlines(_here.cell)), _here.cell, "exec")
    bound = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    return {name: _here.namespace[name] for name in bound if name in _here.namespace}


def build(recipe: str | None, from_cell: bool, layout: dict, options: dict, directory: str) -> dict:
    """Make a training: a built-in recipe by name, or what the last cell defined.

    -> what the driver shows of the recipe. Raises RecipeError, LayoutError or InputError, and the
    training that was there is there still.
    """
    chosen, wanted = TrainOptions(**options), Layout(**layout)
    with _together():
        if from_cell:
            found = recipes.from_namespace(_defined_by_cell(), recipe, chosen.size)
        else:
            found = recipes.builtin(str(recipe), chosen.size)
        found = found.changed(batch=chosen.batch, seed=chosen.seed)
        trainer = first_trainer(Plan(found, chosen), wanted, _world())
    _here.trainer = trainer
    _here.directory = Path(directory)
    about = {
        "recipe": found.name,
        "batch": found.batch,
        "seed": found.seed,
        "unit": found.unit,
        "units_per_sample": found.units_per_sample,
        "size": found.size,
        "parameters": trainer.num_parameters(),
        "evaluates": found.evaluate is not None,
        "samples": found.samples.length,
        "limits": trainer.blueprint.limits.to_dict() if _here.rank == 0 else {},
        "flops": trainer.blueprint.flops,
        "peak_flops": peak(),
        **_spread_shown(trainer),
    }
    gc.collect()  # the training before is held in cycles by its reducer
    return about


def peak() -> float:
    """Operations a second that this rank can do while all others of its layout do; collective.

    The most that was found for so many ranks: a busy machine shows less, and nothing shows more.
    """
    trainer, world = _trainer(), _world()
    dtype, size = trainer.blueprint.precision_dtype or torch.float32, trainer.layout.world_size
    with _together():
        found = flops.peak_per_s(world.device, dtype, is_active=world.rank < size)
    _here.peaks[dtype, size] = max(found, _here.peaks.get((dtype, size), 0.0))
    return _here.peaks[dtype, size]


def _spread_shown(trainer: Trainer) -> dict:
    """How the training lies on the ranks, as plain values."""
    return {
        "notes": trainer.notes(),
        "stages": trainer.spread.stages_shown(),
        "held": trainer.held.num_elements() / trainer.num_parameters(),
    }


def run_slice(num_steps: int, follows: bool) -> dict:
    """Take steps -> {"rank", "first", "step", "columns", "error"}.

    first: number of the first step; step: steps taken so far. error: None, or what `told` says,
    after which the rank has freed the others. A slice that was queued behind an error takes none.
    """
    trainer = _trainer()
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    first = trainer.step + 1
    error = sample = None
    if _here.broken:
        error = {"name": "WorldLostError", "text": "queued behind an error", "lines": []}
    else:
        before = signal.signal(signal.SIGINT, _interrupted)
        try:
            _here.interruptible = True
            sample = trainer.run_steps(num_steps, columns, follows=follows)
            _here.interruptible = False
        except (Exception, KeyboardInterrupt, SystemExit) as raised:  # noqa: BLE001 - told
            _here.interruptible = False
            error = told(raised)
            _break_off(raised)
        finally:
            signal.signal(signal.SIGINT, before)
    reply = {"rank": _here.rank, "first": first, "step": trainer.step, "columns": columns}
    is_journaled = journal.append(_here.directory, reply)
    more = {"sample": sample, "memory": trainer.memory()}
    return {**reply, "error": error, "is_journaled": is_journaled, **more}


def profile_step() -> dict:
    """One step under torch.profiler -> as run_slice, and its trace as `profile`, JSON text."""
    with torch.profiler.profile() as profile:
        reply = run_slice(1, False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return {**reply, "profile": path.read_text()}


def _interrupted(*_: object) -> None:
    """SIGINT ends the step under way, once, and nothing of what follows it."""
    if _here.interruptible:
        _here.interruptible = False
        raise KeyboardInterrupt


def _break_off(raised: BaseException) -> None:
    """Free the ranks that wait for this one; nothing of the failed step stays."""
    _here.broken = True
    if _here.world is not None:
        _here.world.free()
    # The frames hold the graph and through it the group.
    for link in (raised, raised.__cause__, raised.__context__):
        if link is not None:
            traceback.clear_frames(link.__traceback__)
    if _here.trainer is not None:
        _here.trainer.optimizer.zero_grad(set_to_none=True)


def position() -> int:
    """Steps taken."""
    return _trainer().step


def is_broken() -> bool:
    """Whether the world must be joined anew."""
    return _here.broken


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Collective work: a rank that raises frees those that wait for it."""
    try:
        yield
    except CheckpointError:
        raise  # the ranks have agreed on it, and are together
    except (Exception, KeyboardInterrupt, SystemExit) as raised:
        _break_off(raised)
        raise


def evaluate() -> dict[str, float]:
    """The recipe's metrics for the model as it is."""
    with _together():
        return _trainer().evaluate()


def save(root: str, name: str, unique: bool, meta: dict) -> str:
    """Write a checkpoint together with the other ranks -> its name, which `unique` may extend."""
    trainer = _trainer()
    recipe = trainer.plan.recipe
    whole = {
        **meta,
        "step": trainer.step,
        "samples": trainer.samples,
        "seed": recipe.seed,
        "batch": recipe.batch,
        "recipe": recipe.name,
        "size": recipe.size,
        "layout": str(trainer.layout),
        "tied": state.tied(trainer.blueprint.bones),
        "optimizer": state.settings(trainer.optimizer, trainer.blueprint.groups),
    }
    with _together():
        pieces = state.take(trainer.held, trainer.optimizer)
        return checkpoint.save(pieces, whole, Path(root), name, unique=unique)["name"]


def restore(path: str) -> dict:
    """Read a checkpoint into the training, at any number of ranks -> its meta."""
    trainer = _trainer()
    with _together():
        pieces = state.take(trainer.held, trainer.optimizer)
        meta = checkpoint.load(Path(path), pieces)
        state.load(trainer.held, trainer.optimizer, pieces)
        state.set_settings(trainer.optimizer, trainer.blueprint.groups, meta["optimizer"])
    trainer.step, trainer.samples = meta["step"], meta["samples"]
    return {"step": trainer.step, "layout": meta["layout"]}


def switch(layout: dict) -> dict:
    """Go on under another layout, from the same state, bit for bit, moved from rank to rank.

    -> what the driver shows of it. When it raises, the training is what it was.
    """
    old, wanted = _trainer(), Layout(**layout)
    began_s = time.perf_counter()
    with _together():
        new = Trainer(old.blueprint, wanted, _world())
        built_s = time.perf_counter()
        moved = move_state(old, new)
    _here.trainer = new
    ended_s = time.perf_counter()
    return {
        **_spread_shown(new),
        "build_s": built_s - began_s,
        "move_s": ended_s - built_s,
        "sent_bytes": moved.sent_bytes,
    }


def export(about: dict, cell_text: str | None) -> str:
    """The training as a plain torchrun script."""
    blueprint, layout = _trainer().blueprint, _trainer().layout
    return script(blueprint, layout, about, cell=cell_text, namespace=_here.namespace)


def adopt(source_rank: int) -> int:
    """Take over the whole state of one rank, after ranks stopped at different steps."""
    trainer = _trainer()
    is_source = _here.rank == source_rank
    numbers = torch.tensor([trainer.step, trainer.samples], device=_world().device)
    torch.distributed.broadcast(numbers, source_rank)
    pieces = state.take(trainer.held, trainer.optimizer)
    move(pieces if is_source else {}, {} if is_source else pieces)
    state.put_numbers(trainer.held, trainer.optimizer, pieces)
    trainer.step, trainer.samples = (int(number) for number in numbers)
    return trainer.step


def _way_out() -> None:
    """Free the main thread from a collective on SIGUSR1, which only this thread takes.

    A signal handler would not do: Python runs it in the main thread, which waits in C++.
    """
    while True:
        signal.sigwait({signal.SIGUSR1})
        if _here.world is not None:
            _here.broken = True
            _here.world.free()


def _world() -> World:
    if _here.world is None or _here.broken or not torch.distributed.is_initialized():
        _here.broken = True
        raise WorldLostError("the process group is gone")
    return _here.world


def _trainer() -> Trainer:
    if _here.trainer is None:
        raise RunError("No training is built on the ranks. Start one with %dist_train.")
    return _here.trainer
