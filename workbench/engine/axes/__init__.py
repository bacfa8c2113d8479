"""How one mesh axis spreads a model over its ranks: one file an axis, named as in Layout.

Each file has `spread(module, device, ranks) -> nn.Module` and `without_sync(module)`, a context in
which a backward pass leaves gradients on the rank (gradient accumulation).
"""

from __future__ import annotations

import importlib
from types import ModuleType

from workbench.spec.layout import Layout


def used(layout: Layout) -> list[ModuleType]:
    """The axes with more than one rank, outermost first."""
    return [
        importlib.import_module(f"{__name__}.{name}")
        for name, degree in layout.degrees().items()
        if degree > 1
    ]
