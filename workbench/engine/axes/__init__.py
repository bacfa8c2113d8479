"""How one mesh axis spreads a model over its ranks: one file an axis, named as in Layout.

Each file has `spread(module, world, *, seeks_unused) -> nn.Module` and `without_sync(module)`, a
context in which a backward pass leaves gradients on the rank (gradient accumulation).
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType

from torch import nn

from workbench.spec.layout import Layout


class Uses:
    """Which parameters got a gradient since this was made."""

    def __init__(self, module: nn.Module) -> None:
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._missing = set(params)
        self._hooks = [p.register_hook(partial(self._got, name)) for name, p in params.items()]

    def _got(self, name: str, _gradient: object) -> None:
        self._missing.discard(name)

    def unused(self) -> list[str]:
        """Names of those that got none on this rank."""
        return sorted(self._missing)

    def close(self) -> None:
        """Stop looking."""
        for hook in self._hooks:
            hook.remove()


def used(layout: Layout) -> list[ModuleType]:
    """The axes with more than one rank, outermost first."""
    return [
        importlib.import_module(f"{__name__}.{name}")
        for name, degree in layout.degrees().items()
        if degree > 1
    ]
