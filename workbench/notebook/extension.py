"""`%load_ext workbench`: magics, completion, and a fork server that is warm before it is needed."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from workbench.driver import session as sessions
from workbench.driver.session import Session
from workbench.errors import WorkbenchError
from workbench.notebook.completion import Completion
from workbench.notebook.magics import Commands, all_commands
from workbench.notebook.shown import Shown

HOW = "%dist_start -n 4 starts four ranks, %dist lists all magics."


class Extension:
    """What one shell has of the workbench."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.shown = Shown(shell)
        self.matcher = Completion(shell).match
        self.commands = [kind(shell, self.shown) for kind in all_commands()]

    def install(self) -> None:
        """Register everything; names that another module had are told."""
        for commands in self.commands:
            for name, module in _taken(self.shell, commands):
                print(  # noqa: T201 - a warning of Python's would name a line of ours
                    f"%{name} of {module} is workbench's now.",
                    file=sys.stderr,
                )
            self.shell.register_magics(commands)
        self.shown.install()
        self.shell.Completer.custom_matchers.append(self.matcher)

    def remove(self) -> None:
        """Undo `install`; engines stay as they are."""
        for commands in self.commands:
            manager = self.shell.magics_manager
            for kind in manager.magics.values():
                for name, function in list(kind.items()):
                    if getattr(function, "__self__", None) is commands:
                        del kind[name]
            manager.registry.pop(type(commands).__name__, None)
            with contextlib.suppress(ValueError):
                self.shell.configurables.remove(commands)
        self.shown.remove()
        with contextlib.suppress(ValueError):
            self.shell.Completer.custom_matchers.remove(self.matcher)


_loaded: list[Extension] = []


def load(shell: Any) -> None:
    """Register the magics, and start the fork server without waiting for it."""
    session = sessions.current()
    threading.Thread(target=_warm, args=(session,), name="workbench-warm", daemon=True).start()
    _loaded.append(Extension(shell))
    _loaded[-1].install()
    print(f"workbench: {HOW}")  # noqa: T201 - says how to begin


def unload(shell: Any) -> None:
    """Take the magics away; what they started goes on."""
    for extension in [one for one in _loaded if one.shell is shell]:
        extension.remove()
        _loaded.remove(extension)


def _warm(session: Session) -> None:
    # What goes wrong here comes again at %dist_start, where somebody reads it.
    with contextlib.suppress(WorkbenchError, OSError):
        session.warm_up()
    import workbench.driver.engines  # noqa: F401 - takes a while, and will be needed


def _taken(shell: Any, commands: Commands) -> list[tuple[str, str]]:
    """Names of magics that another package has registered, with that package."""
    found = []
    for kind, names in commands.magics.items():
        for name in names:
            other = shell.magics_manager.magics[kind].get(name)
            module = getattr(other, "__module__", "") if other else ""
            if module and not module.startswith("workbench."):
                found.append((name, module.partition(".")[0]))
    return sorted(set(found))
