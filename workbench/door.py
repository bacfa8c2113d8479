"""The one door from the driver into an engine: a function of workbench.engine.remote by name.

This module imports nothing of either side, so that sending it loads no torch in the kernel.
Errors come back as data: rendering a traceback of a torch frame in the engine takes a second.

A request of the mail carries a slip: {"sender", "number", "received"}. Each sender counts its
requests to a rank from 1 on, and tells with each up to which number it has had all replies.
"""

from __future__ import annotations

import importlib
from typing import Any

REMOTE = "workbench.engine.remote"
INBOX = "workbench.engine.inbox"
# Metadata of a request whose sender does not listen to the engine's busy and idle messages.
QUIET = "workbench_quiet"


def enter(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], slip: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Call `name` on this rank -> {"value": ...} or {"error": {"name", "text", ...}}.

    With a slip it is called once however often the request comes, and in order; -> {"again": n}
    where requests from number n on did not come.
    """
    remote = importlib.import_module(REMOTE)

    def call() -> dict[str, Any]:
        try:
            with remote.doing(name):
                return {"value": getattr(remote, name)(*args, **kwargs)}
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
            # The driver raises it, as its own class.
            return {"error": remote.told(error)}

    if slip is None:
        return call()
    return importlib.import_module(INBOX).INBOX.take(name, call, **slip)
