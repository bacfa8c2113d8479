"""The one door from the driver into an engine: a function of workbench.engine.remote by name.

This module imports nothing of either side, so that sending it loads no torch in the kernel.
Errors come back as data: rendering a traceback of a torch frame in the engine takes a second.
"""

from __future__ import annotations

import importlib
from typing import Any

REMOTE = "workbench.engine.remote"
# Metadata of a request whose sender does not listen to the engine's busy and idle messages.
QUIET = "workbench_quiet"


def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call `name` on this rank -> {"value": ...} or {"error": {"name", "text", ...}}."""
    remote = importlib.import_module(REMOTE)
    try:
        return {"value": getattr(remote, name)(*args, **kwargs)}
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
        # The driver raises it, as its own class.
        return {"error": remote.told(error)}
