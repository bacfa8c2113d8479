"""What the driver may call on a rank: every public function here, by name, through the door.

An engine is a process, so what it holds is the one object `_here`.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import json
import linecache
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.engine import cell, checkpoint, output, source, state
from workbench.engine import recipe as recipes
from workbench.engine.metered_group import Meter
from workbench.engine.trainer import Plan, Trainer, is_peer_gone
from workbench.engine.world import Meeting, World
from workbench.errors import RunError, WorkbenchError, WorldLostError
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions
from workbench.spec.records import COLUMNS


@dataclass
class Here:
    """All that this rank holds."""

    rank: int = -1
    namespace: dict[str, Any] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    world: World | None = None
    trainer: Trainer | None = None
    directory: Path | None = None
    broken: bool = False
    cell: str = ""
    ended_s: float | None = None


_here = Here()


def arrive(address: str, logs: list[str], meeting: dict) -> dict:
    """First call: capture output, listen for the way out, meet the others.

    address: where the notebook pulls output. logs: where each rank keeps its output whole.
    -> what the driver shows of this rank.
    """
    _here.rank = int(os.environ["WORKBENCH_RANK"])
    log_path = logs[_here.rank]
    _here.namespace = _user_namespace()
    output.start(_here.rank, address, log_path)
    threading.Thread(target=_way_out, name="way-out", daemon=True).start()
    join(meeting)
    assert _here.world is not None
    return {
        "rank": _here.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "device": str(_here.world.device),
        "threads": torch.get_num_threads(),
        "log": log_path,
    }


def join(meeting: dict) -> None:
    """Meet the other ranks of an attempt, leaving the world before it, and keep the training."""
    kept = _kept_state()
    leave()
    world = World(Meeting(rank=_here.rank, **meeting), _here.meter)
    _here.world = world
    _here.broken = False
    _here.namespace |= {
        "rank": _here.rank,
        "world_size": world.size,
        "device": world.device,
        "dist": torch.distributed,
        "torch": torch,
    }
    if kept is not None:
        plan, layout, pieces, groups, step, samples = kept
        _here.trainer = trainer = Trainer(plan, layout, world)
        state.load(trainer.model, trainer.optimizer, pieces)
        state.set_settings(trainer.model, trainer.optimizer, groups)
        trainer.step, trainer.samples = step, samples


def _kept_state() -> tuple | None:
    """The training's state as this rank holds it, independent of its world."""
    trainer = _here.trainer
    if trainer is None:
        return None
    pieces = state.take(trainer.model, trainer.optimizer)
    groups = state.settings(trainer.model, trainer.optimizer)
    return trainer.plan, trainer.layout, pieces, groups, trainer.step, trainer.samples


def leave() -> None:
    """Close the world, and free the ranks that wait for this one."""
    _here.trainer = None
    if _here.world is not None:
        _here.world.close()
        _here.world = None
    gc.collect()


def run_cell(text: str, number: int) -> dict:
    """Execute a user's cell; see engine/cell.py."""
    reply = cell.run(text, number, _here.namespace)
    _here.cell = source.file_name(number)
    return reply


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

    -> what the driver shows of the recipe. Raises RecipeError or InputError.
    """
    end_training()
    chosen = TrainOptions(**options)
    if from_cell:
        found = recipes.from_namespace(_defined_by_cell(), recipe, chosen.size)
    else:
        found = recipes.builtin(str(recipe), chosen.size)
    found = found.changed(batch=chosen.batch, seed=chosen.seed)
    world = _world()
    trainer = Trainer(Plan(found, chosen), Layout(**layout), world)
    _here.trainer = trainer
    _here.directory = Path(directory)
    _here.ended_s = None
    return {
        "recipe": found.name,
        "batch": found.batch,
        "seed": found.seed,
        "unit": found.unit,
        "units_per_sample": found.units_per_sample,
        "size": found.size,
        "parameters": trainer.num_parameters(),
        "evaluates": found.evaluate is not None,
    }


def end_training() -> None:
    """Drop the model, optimizer and data."""
    _here.trainer = None
    _here.directory = None
    gc.collect()


def run_slice(num_steps: int, follows: bool) -> dict:
    """Take steps -> {"rank", "first", "step", "columns", "error"}.

    first: number of the first step; step: steps taken so far. error: None, or what `told` says,
    after which the rank has freed the others. A slice that was queued behind an error takes none.
    """
    trainer = _trainer()
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    first = trainer.step + 1
    error = None
    if _here.broken:
        error = {"name": "WorldLostError", "text": "queued behind an error", "lines": []}
    else:
        try:
            since_s = _here.ended_s if follows else None
            _here.ended_s = trainer.run_steps(num_steps, columns, since_s=since_s)
        except Exception as raised:  # noqa: BLE001 - whatever the user's code raises ends the slice
            error = told(raised)
            _break_off(raised)
    reply = {"rank": _here.rank, "first": first, "step": trainer.step, "columns": columns}
    _journal(reply)
    return {**reply, "error": error}


def _break_off(raised: Exception) -> None:
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


def _journal(reply: dict) -> None:
    if _here.directory is None or not reply["columns"]["loss"]:
        return
    path = _here.directory / "journal" / f"rank{_here.rank}.jsonl"
    line = json.dumps({"time_s": time.time(), **reply}, separators=(",", ":"))
    # The journal is a copy of what the driver gets; a full disk must not end the training.
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(line + "\n")


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
    except Exception as raised:
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
        "tied": state.tied(trainer.model),
        "optimizer": state.settings(trainer.model, trainer.optimizer),
    }
    pieces = state.take(trainer.model, trainer.optimizer)
    return checkpoint.save(pieces, whole, Path(root), name, unique=unique)["name"]


def restore(path: str) -> dict:
    """Read a checkpoint into the training, at any number of ranks -> its meta."""
    trainer = _trainer()
    pieces = state.take(trainer.model, trainer.optimizer)
    meta = checkpoint.load(Path(path), pieces)
    state.load(trainer.model, trainer.optimizer, pieces)
    state.set_settings(trainer.model, trainer.optimizer, meta["optimizer"])
    trainer.step, trainer.samples = meta["step"], meta["samples"]
    return {"step": trainer.step, "layout": meta["layout"]}


def switch(layout: dict) -> None:
    """Go on under another layout of as many ranks, from the same state, bit for bit."""
    old = _trainer()
    with _together():
        new = Trainer(old.plan, Layout(**layout), _world())
        tensors = state.gather(state.take(old.model, old.optimizer))
        state.put(new.model, new.optimizer, tensors)
    state.set_settings(new.model, new.optimizer, state.settings(old.model, old.optimizer))
    new.step, new.samples = old.step, old.samples
    _here.trainer = new


def adopt(source_rank: int) -> int:
    """Take over the whole state of one rank, after ranks stopped at different steps."""
    trainer = _trainer()
    numbers = torch.tensor([trainer.step, trainer.samples], device=_world().device)
    torch.distributed.broadcast(numbers, source_rank)
    for piece in state.take(trainer.model, trainer.optimizer).values():
        tensor = piece.local.to(_world().device).contiguous()
        torch.distributed.broadcast(tensor, source_rank)
        piece.local.copy_(tensor)
    trainer.step, trainer.samples = (int(number) for number in numbers)
    return trainer.step


def told(error: BaseException) -> dict:
    """An exception as plain data: class, sentence, and the user's lines that led to it."""
    if is_peer_gone(error):
        return {"name": WorldLostError.__name__, "text": str(error).splitlines()[0], "lines": []}
    if isinstance(error, WorkbenchError):
        report = source.report(error.__cause__, "") if error.__cause__ else None
        return {
            "name": type(error).__name__,
            "text": str(error),
            "lines": report["traceback"] if report else [],
        }
    report = source.report(error, "")
    return {"name": report["name"], "text": report["text"], "lines": report["traceback"]}


def _way_out() -> None:
    """Free the main thread from a collective on SIGUSR1, which only this thread takes.

    A signal handler would not do: Python runs it in the main thread, which waits in C++.
    """
    while True:
        signal.sigwait({signal.SIGUSR1})
        if _here.world is not None:
            _here.broken = True
            _here.world.free()


def _user_namespace() -> dict[str, Any]:
    """The namespace cells run in: the shell's where the rank has one."""
    # ipykernel makes the shell's namespace that of `__main__`.
    return vars(sys.modules["__main__"])


def _world() -> World:
    if _here.world is None:
        raise RunError("The ranks have no process group. %dist_start makes one.")
    return _here.world


def _trainer() -> Trainer:
    if _here.trainer is None:
        raise RunError("No training is built on the ranks. Start one with %dist_train.")
    return _here.trainer
