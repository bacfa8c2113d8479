"""Regroup: ranks that are left and processes that take the places of lost ones, in a new world.

Nothing that a rank has kept of the training is given up before it is held again, so that a loss in
the middle of a recovery is one more recovery.
"""

from __future__ import annotations

import gc
import hashlib
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.engine.arrival import leave, meet, planned, reseed, run_cell
from workbench.engine.blueprint import Blueprint
from workbench.engine.carry import carry
from workbench.engine.here import here, together
from workbench.engine.journal import Journal
from workbench.engine.kept import Kept
from workbench.engine.recipe import Recipe
from workbench.engine.told import MOST_CHARS
from workbench.engine.trainer import Trainer, first_trainer, seeded
from workbench.engine.warm import warm_up
from workbench.errors import CheckpointError, RecipeError
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions

# Samples whose values tell that two processes draw the same data.
NUM_LOOKED_AT = 4


def facts() -> bytes:
    """What `prepare` needs of the training that is built here; for another process of ours.

    b"": nothing is known of one.
    """
    blueprint = _blueprint()
    if blueprint is None:
        return b""
    told = {**blueprint.facts, "trains_on": blueprint.device.type}
    return pickle.dumps((told, _looks(blueprint.plan.recipe)))


def prepare(recipe: str | None, cells: list[tuple[int, str]], options: dict, found: bytes) -> str:
    """Get ready to take part in a training: build its recipe, and warm up.

    cells: numbers and texts of cells to run first, the last of which defines the recipe; none for
    a built-in one.
    found: what `facts` gave on a rank. Not collective: the others may train meanwhile.

    -> "", or a sentence on what may differ here. Raises RecipeError where the cells do not run.
    """
    chosen = TrainOptions(**options)
    known, looks = pickle.loads(found)
    reseed(chosen.seed or 0)
    # A cell before the last may matter or not; what fails first is why the last one does.
    told = [run_cell(text, number) for number, text in cells]
    if told and not told[-1]["ok"]:
        first = next(one["error"] for one in told if not one["ok"])
        raise RecipeError(
            "The cell that defines the recipe cannot be run again in a new process: "
            f"{first['name']}: {first['text']}"
        )
    plan = planned(recipe, bool(cells), chosen)
    with seeded(plan.recipe.seed):
        # Not on the device, to which a spare is bound only once it is needed.
        here.prepared = Blueprint(plan, plan.recipe.model(), torch.device("cpu"))
    here.prepared.learn(known)
    warm_up()
    if _looks(plan.recipe) == looks:
        return ""
    return (
        "A new process draws other data than the ranks did, so the curve may differ from here on: "
        "seed what the recipe draws."
    )


def _looks(recipe: Recipe) -> str:
    count = NUM_LOOKED_AT
    if recipe.samples.length is not None:
        count = min(count, recipe.samples.length)
    digest = hashlib.sha256()
    _digest(recipe.samples.fetch(0, count), digest.update)
    return digest.hexdigest()


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor):
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            _digest(value[key], update)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _digest(one, update)
    else:
        update(repr(value).encode())


def regroup(meeting: dict, layout: dict, directory: str) -> dict:
    """Meet in a new world and have the training there, from what the ranks together still hold.

    -> {"step", "why", ...}: the step it stands at, None where too little is left of it and it must
    begin from a checkpoint (why says what is missing), and what the driver shows of it. state_s:
    what that took since all had met.
    """
    why = ""
    if here.trainer is not None:
        try:
            here.kept = None if here.torn else Kept.of(here.trainer)
        except Exception as error:  # noqa: BLE001 - the user's optimizer, say; the ranks still meet
            here.kept, why = None, f"{type(error).__name__}: {error}"[:MOST_CHARS]
    blueprint = here.prepared = _blueprint()  # also of a meeting that comes to nothing
    leave()
    world = meet(meeting)
    met_s = time.monotonic()
    if here.journal is None:
        here.journal = Journal(Path(directory))
    if blueprint is None:
        raise RecipeError("this process knows nothing of the training.")
    blueprint.device = world.device
    try:
        with together():
            trainer = Trainer(blueprint, Layout(**layout), world)
            carried = carry(here.kept, trainer, here.copies.versions)
    except CheckpointError as error:
        return {"step": None, "why": str(error)}
    if carried is None:
        return {"step": None, "why": why or "no rank holds anything of it"}
    _hold(trainer)
    here.copies.back_to(trainer.step)
    told = {"sent_bytes": carried.moved.sent_bytes, "is_copy": carried.is_copy}
    told["state_s"] = time.monotonic() - met_s
    return {"step": trainer.step, "why": why, **told, **trainer.shown()}


def begin_anew(layout: dict) -> dict:
    """The training as it was before its first step, in the world there is -> as `regroup`."""
    blueprint, world = _blueprint(), here.world
    assert blueprint is not None
    assert world is not None
    with together():
        trainer = first_trainer(blueprint.plan, Layout(**layout), world)
    _hold(trainer)
    here.copies.drop()
    return {"step": 0, "why": "", "sent_bytes": 0, **trainer.shown()}


def _hold(trainer: Trainer) -> None:
    here.trainer, here.kept, here.torn = trainer, None, False
    gc.collect()


def _blueprint() -> Blueprint | None:
    if here.trainer is not None:
        return here.trainer.blueprint
    return here.kept.blueprint if here.kept is not None else here.prepared
