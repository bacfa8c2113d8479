"""Session: what one kernel holds before any engine: a private directory and a warm fork server."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil

from workbench.driver.files import replaced
from workbench.driver.forks import Forks
from workbench.forkserver.processes import start_time
from workbench.spec.placement import Devices

LEASE_S = 600.0
END_S = 5.0
PREFIX = "workbench-"
SERVER = "server.json"  # pid and start time, which name a process for ever


class Session:
    """A directory (0700) for sockets and logs, and the fork server that is started at once.

    The fork server removes the directory when it ends, so nothing stays after a killed kernel.
    """

    def __init__(self, joined: Path | None = None) -> None:
        """joined: the directory of a session that another kernel has left; None begins one."""
        self.owner_pid = os.getpid()
        self.joined = joined is not None
        self._devices: Future | None = None
        if joined is not None:
            self.directory = joined
            (pid, started), _owner = owners(joined)
            self.forks = Forks(joined, LEASE_S, (pid, started))
            return
        parent = parent_directory()
        sweep(parent)
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.forks = Forks(self.directory, LEASE_S)
        self.own()

    def own(self) -> None:
        """Write down that this kernel is the one that the fork server belongs to."""
        known = [[pid, start_time(pid)] for pid in (self.forks.pid, self.owner_pid)]
        replaced(self.directory / SERVER, json.dumps(known))

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


def sweep(parent: Path) -> list[int]:
    """Remove directories whose fork server was killed, which could not do it itself.

    -> pids of the fork servers that live, but whose kernel is gone: their lease is running.
    """
    abandoned = []
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            (pid, started), (owner, owner_started) = owners(directory)
        except (OSError, ValueError, TypeError):
            continue  # of another user, or being made right now
        if not started or start_time(pid) != started:
            shutil.rmtree(directory, ignore_errors=True)
        elif start_time(owner) != owner_started:
            abandoned.append(pid)
    return abandoned


def owners(directory: Path) -> tuple[tuple[int, float], tuple[int, float]]:
    """Pid and start time of a session's fork server and of the kernel that it belongs to.

    Raises OSError, ValueError or TypeError where none is told.
    """
    server, owner = json.loads((directory / SERVER).read_text())
    return (int(server[0]), float(server[1])), (int(owner[0]), float(owner[1]))


def abandoned() -> list[int]:
    """Pids of fork servers that wait for a kernel that is gone."""
    return sweep(parent_directory())


def num_left_over() -> int:
    """How many ranks and controllers wait for kernels that are gone."""
    count = 0
    for pid in abandoned():
        with contextlib.suppress(psutil.NoSuchProcess):
            count += len(psutil.Process(pid).children())
    return count


def end_abandoned() -> int:
    """End the ranks of kernels that are gone -> how many kernels that were."""
    servers = []
    for pid in abandoned():
        with contextlib.suppress(psutil.NoSuchProcess):
            servers.append(psutil.Process(pid))
            servers[-1].terminate()  # which ends its children and removes its directory
            servers[-1].resume()  # it may be stopped
    psutil.wait_procs(servers, timeout=END_S)
    return len(servers)


def parent_directory() -> Path:
    """Where sessions are made."""
    # A Unix socket's path may have 107 bytes, which a deep TMPDIR would use up.
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent if len(parent) <= 60 and os.access(parent, os.W_OK) else "/tmp")


_sessions: list[Session] = []


def current() -> Session:
    """This kernel's session, started if there is none or its fork server died."""
    found = next((held for held in _sessions if held.forks.alive), None)
    if found is None:
        found = Session()
        _sessions[:] = [found]
    return found


def join(directory: Path) -> Session:
    """Connect to a session that another kernel has left; of this kernel it is one more.

    Raises StartError when its fork server does not answer.
    """
    held = next((one for one in _sessions if one.directory == directory), None)
    if held is None:
        held = Session(directory)
        held.forks.connect()
        _sessions.append(held)
    return held


def drop(held: Session) -> None:
    """Let go of a session in which nothing is left; its fork server ends by itself."""
    if held in _sessions:
        _sessions.remove(held)
    held.forks.leave()


def held_by(forks: Forks) -> list[Session]:
    """This kernel's session with that fork server."""
    return [one for one in _sessions if one.forks is forks]


def keep(wanted: Callable[[Session], bool]) -> None:
    """End those of this kernel's sessions that are not wanted."""
    for held in list(_sessions):
        if not wanted(held):
            _sessions.remove(held)
            held.close()


def close() -> None:
    """End this kernel's sessions, if it has any."""
    while _sessions:
        _sessions.pop().close()


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel, as opposed to a script or a terminal."""
    application = sys.modules.get("ipykernel.kernelapp")
    return application is not None and application.IPKernelApp.initialized()


@atexit.register
def _leave() -> None:
    """A script takes its engines along; a kernel leaves them to the lease, and may come back."""
    for held in _sessions:
        if held.owner_pid == os.getpid() and not held.joined and not in_kernel():
            held.close()
