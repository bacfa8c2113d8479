"""Session: what one kernel holds before any engine: a private directory and a warm fork server."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path

from workbench.driver.forks import Forks
from workbench.forkserver.processes import start_time
from workbench.spec.placement import Devices

LEASE_S = 600.0
PREFIX = "workbench-"
SERVER = "server.json"  # pid and start time, which name a process for ever


class Session:
    """A directory (0700) for sockets and logs, and the fork server that is started at once.

    The fork server removes the directory when it ends, so nothing stays after a killed kernel.
    """

    def __init__(self) -> None:
        # A Unix socket's path may have 107 bytes, which a deep TMPDIR would use up.
        parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        if len(parent) > 60 or not os.access(parent, os.W_OK):
            parent = "/tmp"
        sweep(Path(parent))
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.owner_pid = os.getpid()
        self.forks = Forks(self.directory, LEASE_S)
        server = [self.forks.pid, start_time(self.forks.pid)]
        (self.directory / SERVER).write_text(json.dumps(server))
        self._devices: Future | None = None

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


def sweep(parent: Path) -> None:
    """Remove directories whose fork server was killed, which could not do it itself."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            pid, started = json.loads((directory / SERVER).read_text())
        except (OSError, ValueError):
            continue  # of another user, or being made right now
        if not started or start_time(pid) != started:
            shutil.rmtree(directory, ignore_errors=True)


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


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel, as opposed to a script or a terminal."""
    application = sys.modules.get("ipykernel.kernelapp")
    return application is not None and application.IPKernelApp.initialized()


@atexit.register
def _leave() -> None:
    """A script takes its engines along; a kernel leaves them to the lease, and may come back."""
    if _sessions and _sessions[0].owner_pid == os.getpid() and not in_kernel():
        close()
