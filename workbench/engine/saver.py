"""Saver: the save that this rank is writing, one at a time, and what it cost the training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.engine import checkpoint, hf, state
from workbench.engine.staging import Staging
from workbench.engine.trainer import Trainer
from workbench.engine.writing import Stall, Writing

# From a save being given up in the directory to its thread having said why.
LAST_S = 1.0


class Saver:
    """Begins the saves of this rank, whatever training they are of."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._writing: Writing | None = None
        self._left_s = time.perf_counter()

    def begin(
        self, trainer: Trainer, root: Path, name: str, meta: Mapping[str, Any], **how: bool
    ) -> dict[str, Any]:
        """Copy this rank's share and write it beside the training; collective.

        how: `unique`, see checkpoint.begin; `is_training`: steps follow and went before;
        `exports`: to Hugging Face's files, too. -> {"directory": where it is written, "name",
        "bytes"}, known to rank 0 alone.
        """
        bones = trainer.blueprint.bones
        if how["exports"]:
            hf.pretrained(bones)  # refused alike on all ranks
        if self._writing is not None:
            self._writing.over.wait()  # its memory is written from
        began_s = self._left_s if how["is_training"] else time.perf_counter()
        stall = Stall(began_s, is_training=how["is_training"])
        pieces = state.take(trainer.held, trainer.optimizer)
        whole = {**meta, **about(trainer)}
        writing = checkpoint.begin(
            pieces, whole, root, name, unique=how["unique"], staging=self._staging
        )
        writing.stall = stall
        if how["exports"] and writing.finish is not None:
            folder = root.parent / "hf"
            writing.finish.also = lambda path: hf.export(bones, path, folder / path.name)
        self._writing = writing
        writing.start()
        stall.staged()
        return {
            "directory": str(writing.directory),
            "name": writing.name,
            "bytes": writing.share.total_bytes,
        }

    def problem(self, directory: str) -> tuple[str, bool] | None:
        """Why the save in this directory came to nothing here, and whether it was the first."""
        writing = self._writing
        if writing is None or str(writing.directory) != directory:
            return None
        writing.over.wait(LAST_S)
        return None if writing.problem is None else (writing.problem, writing.is_first)

    def over(self) -> None:
        """Something else begins on this rank: here ends what a save cost the training."""
        if self._writing is not None:
            self._writing.stall.over()

    def left(self) -> None:
        """The last step of a slice ends."""
        self._left_s = time.perf_counter()


def about(trainer: Trainer) -> dict[str, Any]:
    """What a manifest says of a training."""
    recipe = trainer.plan.recipe
    return {
        "step": trainer.step,
        "samples": trainer.samples,
        "seed": recipe.seed,
        "batch": recipe.batch,
        "recipe": recipe.name,
        "size": recipe.size,
        "layout": str(trainer.layout),
        "all_used": trainer.blueprint.all_used,
        "tied": state.tied(trainer.blueprint.bones),
        "optimizer": state.settings(trainer.optimizer, trainer.blueprint.groups),
    }
