"""Present: what a rank tells a kernel that takes over ranks and training from another one."""

from __future__ import annotations

from typing import Any

from workbench.engine.arrival import introduced
from workbench.engine.here import here
from workbench.engine.trainer import Trainer


def present() -> dict[str, Any]:
    """Who this is and what it holds, once all that was queued before is done.

    attempt: of the world it is in, -1 without one. cells: the number of the last cell. training:
    None without one. unwritten: lines of its journal that the disk does not take.
    """
    return {
        **introduced(),
        "attempt": here.world.attempt if here.world is not None else -1,
        "size": here.world.size if here.world is not None else 0,
        "broken": here.broken,
        "cells": here.cells,
        "unwritten": here.journal.unwritten() if here.journal is not None else "",
        "training": _held(here.trainer) if here.trainer is not None else None,
    }


def _held(trainer: Trainer) -> dict[str, Any]:
    """Where the training stands, how it lies, and what the last slice told besides its steps."""
    return {
        "directory": str(here.journal.directory) if here.journal is not None else "",
        "step": trainer.step,
        "layout": trainer.layout.to_dict(),
        **trainer.shown(),
        "sample": here.last.get("sample"),
        "memory": here.last.get("memory"),
        "error": here.last.get("error"),
    }
