"""The workbench: a running distributed training, held in a notebook like a variable.

`%load_ext workbench` brings the magics; `workbench.start(n=4)` is the same from Python,
and `workbench.attach()` goes on with what another kernel has left.
Importing this is free: nothing heavier than the standard library is loaded before first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.driver.attach import attach as attach
    from workbench.driver.engines import Engines
    from workbench.driver.engines import start as start
    from workbench.driver.watching import watch as watch

__version__ = "0.1.0"
__all__ = [
    "Engines",
    "attach",
    "load_ipython_extension",
    "start",
    "unload_ipython_extension",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in ("start", "Engines"):
        from workbench.driver import engines

        return getattr(engines, name)
    if name == "attach":
        return importlib.import_module("workbench.driver.attach").attach
    if name == "watch":
        return importlib.import_module("workbench.driver.watching").watch
    if name == "errors":
        return importlib.import_module("workbench.errors")
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext workbench`."""
    from workbench.notebook import extension

    extension.load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext workbench`."""
    from workbench.notebook import extension

    extension.unload(ipython)
