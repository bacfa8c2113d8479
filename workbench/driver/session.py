"""Session: what one kernel holds before any engine: a private directory and a warm fork server."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from concurrent.futures import Future
from pathlib import Path

from workbench.driver.forks import Forks
from workbench.spec.placement import Devices

LEASE_S = 600.0


class Session:
    """A directory (0700) for sockets and logs, and the fork server that is started at once.

    The fork server removes the directory when it ends, so nothing stays after a killed kernel.
    """

    def __init__(self) -> None:
        # A Unix socket's path may have 107 bytes, which a deep TMPDIR would use up.
        parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        if len(parent) > 60 or not os.access(parent, os.W_OK):
            parent = "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="workbench-", dir=parent))
        self.forks = Forks(self.directory, LEASE_S)
        self._devices: Future | None = None
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True).atexit = False

    def warm_up(self) -> None:
        """Ask for the devices now, so that the answer is there when engines are started."""
        if self._devices is None:
            self._devices = self.forks.ask("devices")

    def devices(self) -> Devices:
        """The accelerators that engines may be bound to."""
        self.warm_up()
        assert self._devices is not None
        return Devices.seen(self._devices.result(), dict(os.environ))

    def close(self) -> None:
        """End the fork server and all it forked, and remove the directory."""
        self.forks.close()
        shutil.rmtree(self.directory, ignore_errors=True)


_sessions: list[Session] = []


def current() -> Session:
    """This kernel's session, started if there is none or its fork server died."""
    if _sessions and _sessions[0].forks.alive:
        return _sessions[0]
    _sessions[:] = [Session()]
    return _sessions[0]


def close() -> None:
    """End this kernel's session, if it has one."""
    while _sessions:
        _sessions.pop().close()
