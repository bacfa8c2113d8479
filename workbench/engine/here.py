"""Here: what this process holds as a rank, and how it works together with the others."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.engine.blueprint import Blueprint
from workbench.engine.breakable import Breakable
from workbench.engine.copies import Copies
from workbench.engine.journal import Journal
from workbench.engine.kept import Kept
from workbench.engine.metered_group import Meter
from workbench.engine.saver import Saver
from workbench.engine.trainer import Trainer
from workbench.engine.world import World
from workbench.errors import CheckpointError, RunError, WorldLostError


@dataclass
class Here:
    """All that this rank holds."""

    key: int = -1
    rank: int = -1
    log: str = ""
    namespace: dict[str, Any] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    world: World | None = None
    # Of the world, and of the meeting before there is one.
    store: Breakable | None = None
    trainer: Trainer | None = None
    journal: Journal | None = None
    # State of a world that was lost, until a training holds it again.
    kept: Kept | None = None
    # What a process that took part in no training yet knows of the one it may join.
    prepared: Blueprint | None = None
    # Whether the training's state is half of one step and half of another.
    torn: bool = False
    broken: bool = False
    interruptible: bool = False
    cell: str = ""
    cells: int = 0
    # What the last slice told besides its steps.
    last: dict[str, Any] = field(default_factory=dict)
    peaks: dict[tuple[torch.dtype, int], float] = field(default_factory=dict)
    saver: Saver = field(default_factory=Saver)
    copies: Copies = field(default_factory=Copies)
    alone: Any = None


# An engine is a process, so what it holds is one object.
here = Here()


def break_off(raised: BaseException) -> None:
    """Free the ranks that wait for this one; nothing of the failed step stays."""
    here.broken = True
    if here.world is not None:
        here.world.free()
    # The frames hold the graph and through it the group.
    for link in (raised, raised.__cause__, raised.__context__):
        if link is not None:
            traceback.clear_frames(link.__traceback__)
    if here.trainer is not None:
        here.trainer.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Collective work: a rank that raises frees those that wait for it."""
    try:
        yield
    except CheckpointError:
        raise  # the ranks have agreed on it, and are together
    except (Exception, KeyboardInterrupt, SystemExit) as raised:
        break_off(raised)
        raise


def doing(request: str) -> contextlib.AbstractContextManager[None]:
    """Tell, while it is served, what the driver has asked for."""
    here.saver.over()
    return here.meter.clock.serving(request)


def world() -> World:
    """The world this rank is in. Raises WorldLostError when it must be joined anew."""
    if here.world is None or here.broken or not torch.distributed.is_initialized():
        here.broken = True
        raise WorldLostError("the process group is gone")
    return here.world


def trainer() -> Trainer:
    """The training this rank holds a part of. Raises RunError when there is none."""
    if here.trainer is None:
        raise RunError("No training is built on the ranks. Start one with %dist_train.")
    return here.trainer
