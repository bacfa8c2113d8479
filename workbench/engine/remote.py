"""What the driver may call on a rank: every public function here, by name, through the door."""

from __future__ import annotations

import gc
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from workbench.engine import checkpoint, flops, state
from workbench.engine.armed import arm, disarm
from workbench.engine.arrival import (
    arrive,
    is_broken,
    join,
    leave,
    planned,
    reseed,
    run_cell,
)
from workbench.engine.carry import carry
from workbench.engine.export import script
from workbench.engine.here import break_off as _break_off
from workbench.engine.here import doing
from workbench.engine.here import here as _here
from workbench.engine.here import together as _together
from workbench.engine.here import trainer as _trainer
from workbench.engine.here import world as _world
from workbench.engine.journal import Journal
from workbench.engine.kept import Kept
from workbench.engine.moves import move
from workbench.engine.present import present
from workbench.engine.regroup import begin_anew, facts, prepare, regroup
from workbench.engine.told import told
from workbench.engine.trainer import Trainer, first_trainer
from workbench.engine.warm import warm
from workbench.errors import CheckpointError
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions
from workbench.spec.records import COLUMNS

# What is elsewhere.
__all__ = [
    "arm", "arrive", "begin_anew", "disarm", "doing", "facts", "is_broken", "join", "leave",
    "prepare", "present", "regroup", "reseed", "run_cell", "told", "warm",
]  # fmt: skip


def build(recipe: str | None, from_cell: bool, layout: dict, options: dict, directory: str) -> dict:
    """Make a training: a built-in recipe by name, or what the last cell defined.

    -> what the driver shows of the recipe. Raises RecipeError, LayoutError or InputError, and the
    training that was there is there still.
    """
    chosen, wanted = TrainOptions(**options), Layout(**layout)
    with _together():
        plan = planned(recipe, from_cell, chosen)
        trainer = first_trainer(plan, wanted, _world())
    found = plan.recipe
    _here.trainer, _here.kept, _here.torn = trainer, None, False
    _here.copies.drop()
    _here.journal = Journal(Path(directory))
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
        "facts": facts() if _here.rank == 0 else b"",
        **trainer.shown(),
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


def run_slice(num_steps: int, follows: bool) -> dict:
    """Take steps -> {"rank", "world", "first", "step", "columns", "error"}.

    world: how many ranks train. first: number of the first step; step: steps taken so far. error:
    None, or what `told` says, after which the rank has freed the others. A slice that was queued
    behind an error takes none.
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
            sample = _here.copies.run_steps(trainer, num_steps, columns, follows=follows)
            _here.interruptible = False
        except (Exception, KeyboardInterrupt, SystemExit) as raised:  # noqa: BLE001 - told
            _here.interruptible = False
            error = told(raised)
            _break_off(raised)
        finally:
            signal.signal(signal.SIGINT, before)
    _here.saver.left()
    where = {"rank": _here.rank, "world": trainer.layout.world_size}
    reply = {**where, "first": first, "step": trainer.step, "columns": columns}
    is_journaled = _here.journal is None or _here.journal.append(reply)
    _here.last = {"error": error, "sample": sample, "memory": trainer.memory()}
    if _here.copies.num_bytes:
        _here.last["memory"]["copies"] = _here.copies.num_bytes
    _here.last["copied"] = _here.copies.told()
    _here.last["skipped"] = trainer.finite.skipped()
    return {**reply, "is_journaled": is_journaled, **_here.last}


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


def position() -> int:
    """Steps taken."""
    return _trainer().step


def evaluate() -> dict[str, float]:
    """The recipe's metrics for the model as it is."""
    with _together():
        return _trainer().evaluate()


def begin_save(root: str, name: str, meta: dict, how: dict[str, bool]) -> dict:
    """Copy the state and write it beside the training -> see Saver.begin."""
    trainer = _trainer()
    with _together():
        return _here.saver.begin(trainer, Path(root), name, meta, **how)


def save_problem(directory: str) -> tuple[str, bool] | None:
    """Why a save that is over came to nothing on this rank, and whether it was the first."""
    return _here.saver.problem(directory)


def restore(path: str) -> dict:
    """Read a checkpoint into the training, at any number of ranks -> its meta."""
    trainer = _trainer()
    with _together():
        pieces = state.take(trainer.held, trainer.optimizer)
        # A rank that is lost from here on may leave some at the one step and some at the other.
        _here.torn = True
        try:
            meta = checkpoint.load(Path(path), pieces, partial(_check_meta, trainer))
        except CheckpointError:
            _here.torn = False  # nothing has changed
            raise
        state.load(trainer.held, trainer.optimizer, pieces)
        state.set_settings(trainer.optimizer, trainer.blueprint.groups, meta["optimizer"])
    trainer.step, trainer.samples = meta["step"], meta["samples"]
    _here.torn = False
    _here.copies.drop(trainer.step)  # they are of what came to be otherwise
    if meta.get("all_used"):
        trainer.know_all_used()
    return {"step": trainer.step, "layout": meta["layout"]}


def _check_meta(trainer: Trainer, meta: dict) -> None:
    """Raises CheckpointError for what a training cannot take over."""
    if missing := {"step", "samples", "layout", "optimizer"} - meta.keys():
        raise CheckpointError(f"It has no {min(missing)}: it is no checkpoint of a training.")
    state.check_settings(trainer.optimizer, trainer.blueprint.groups, meta["optimizer"])


def switch(layout: dict) -> dict:
    """Go on under another layout, from the same state, bit for bit, moved from rank to rank.

    -> what the driver shows of it. When it raises, the training is what it was.
    """
    old, wanted = _trainer(), Layout(**layout)
    began_s = time.perf_counter()
    with _together():
        new = Trainer(old.blueprint, wanted, _world())
        built_s = time.perf_counter()
        carried = carry(Kept.of(old, leaves=False), new)
        assert carried is not None
    _here.trainer = new
    ended_s = time.perf_counter()
    return {
        **new.shown(),
        "build_s": built_s - began_s,
        "move_s": ended_s - built_s,
        "sent_bytes": carried.moved.sent_bytes,
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
