"""Kept: the state of a training as one rank holds it, apart from the layout it was built in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.engine import state
from workbench.engine.axes import dp_shard
from workbench.engine.blueprint import Blueprint
from workbench.engine.slots import make_slots, slots
from workbench.engine.state import Piece
from workbench.engine.trainer import Trainer
from workbench.engine.world import World
from workbench.spec.layout import Layout


@dataclass(frozen=True)
class Kept:
    """Everything a rank needs to go on in another world, or under another layout."""

    blueprint: Blueprint
    layout: Layout
    pieces: Mapping[str, Piece]
    slots: dict[str, dict[str, Any]]
    settings: list[dict[str, Any]]
    step: int
    samples: int

    @classmethod
    def of(cls, trainer: Trainer, *, leaves: bool = True) -> Kept:
        """Of a training, which takes no other step; leaves: its world is about to be left."""
        if leaves:
            for part in trainer.held.parts:
                dp_shard.let_go(part)
        return cls(
            trainer.blueprint,
            trainer.layout,
            # Nothing is made that is not there: the optimizer may be what raised.
            state.take(trainer.held, trainer.optimizer, create=False),
            slots(trainer.held, trainer.optimizer),
            state.settings(trainer.optimizer, trainer.blueprint.groups),
            trainer.step,
            trainer.samples,
        )

    def rebuilt(self, world: World) -> Trainer:
        """The training in a new world."""
        trainer = Trainer(self.blueprint, self.layout, world)
        make_slots(trainer.held, trainer.optimizer, self.slots)
        state.load(trainer.held, trainer.optimizer, self.pieces, create=False)
        state.set_settings(trainer.optimizer, self.blueprint.groups, self.settings)
        trainer.step, trainer.samples = self.step, self.samples
        return trainer
