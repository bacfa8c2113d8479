"""Cost: what a piece of a forward takes, counted while it runs on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from workbench.engine.nest import tensors

# Time of writing an element, in floating-point operations of a matmul: 13 (add), 16 (embedding),
# 56 (layer norm), 92 (gelu) on one core of a server CPU.
FLOPS_PER_ELEMENT = 40


class DrawnError(Exception):
    """A random number was about to be drawn where none may be."""


class Meter(TorchDispatchMode):
    """Counts what runs below it, since `clear`.

    cost: floating-point operations of a forward. random: whether random numbers were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._may_draw = True
        self.clear()

    def clear(self) -> None:
        """Start from nothing."""
        self.cost, self.random = 0.0, False

    @contextmanager
    def nothing_drawn(self) -> Iterator[None]:
        """Raises DrawnError before a random number is drawn."""
        self._may_draw = False
        try:
            yield
        finally:
            self._may_draw = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and not self._may_draw:
            raise DrawnError
        out = func(*args, **(kwargs or {}))
        self.random |= draws
        if not func.is_view:
            written = sum(t.numel() for t in tensors(out))
            self.cost += FLOPS_PER_ELEMENT * written + _flops(func, args, kwargs or {}, out)
        return out


def _flops(func: Any, args: tuple, kwargs: dict, out: Any) -> float:
    packet = func.overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        *heads, queries, width = args[0].shape  # [n, heads, queries, width], not in the registry
        return 4 * heads[0] * heads[1] * queries * args[1].shape[-2] * width
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0
