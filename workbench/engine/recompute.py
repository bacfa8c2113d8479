"""Activation checkpointing: a block keeps its inputs, and runs again when the way back needs more.

With B blocks of equal size, memory for activations falls to the B inputs and one block's inside,
for one more forward a step. The block keeps its name. It runs again as it ran: at its own position
of dropout, though other microbatches may have passed since, and with the buffers it found, without
moving them (running statistics) a second time.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.engine.dropout import draws_in, here


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Replace the forward of each block, on the instance, by one that forgets its inside.

    After what replaces the block's own forward, before fully_shard.
    """
    for block in blocks:
        block.forward = Forgetful(block, block.forward)


def know_users() -> None:
    """Have what a model checkpoints by itself drop again what it dropped.

    torch's function is replaced, before a recipe gets hold of it: it restores torch's generator,
    which dropout here does not draw from.
    """
    torch.utils.checkpoint.checkpoint = _at_its_position  # pyright: ignore


@functools.wraps(checkpoint)
def _at_its_position(function: Callable, *args: Any, **kwargs: Any) -> Any:
    draw = here()
    if draw is None:
        return checkpoint(function, *args, **kwargs)
    position, runs = draw.taken(), itertools.count()

    def run(*a: Any, **k: Any) -> Any:
        with draw.back_at(position) if next(runs) else contextlib.nullcontext():
            return function(*a, **k)

    return checkpoint(run, *args, **kwargs)


@dataclass
class Forgetful:
    """The forward of one block."""

    block: nn.Module
    inside: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives."""
        if not torch.is_grad_enabled():
            return self.inside(*args, **kwargs)
        then = Then(self.block)
        contexts = contextlib.nullcontext(), then
        output = checkpoint(
            self.inside, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs
        )
        then.forget_unchanged()
        return output


class Then:
    """What a forward found and may have changed, to be found again; entered any number of times.

    Schedules that split the way back run the block again for each half.
    """

    def __init__(self, block: nn.Module) -> None:
        self._positions = [(draw, draw.taken()) for draw in draws_in(block)]
        self._found = {
            module: {name: (buffer, _version(buffer), buffer.clone()) for name, buffer in own}
            for module in block.modules()
            if module.training and (own := list(module.named_buffers(recurse=False)))
        }
        self._left = contextlib.ExitStack()

    def forget_unchanged(self) -> None:
        """Drop the copies of buffers that the forward left as they were.

        By module: torch's BatchNorm tells of a change to its count alone.
        """
        for module, found in list(self._found.items()):
            now = dict(module.named_buffers(recurse=False))
            if all(
                now.get(name) is buffer and _version(buffer) == version
                for name, (buffer, version, _) in found.items()
            ):
                del self._found[module]

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for draw, position in self._positions:
                stack.enter_context(draw.back_at(position))
            for module, found in self._found.items():
                for name, (_, _, copy) in found.items():
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, copy.clone())
            self._left = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._left.close()


def _version(buffer: Tensor) -> int:
    return buffer._version
