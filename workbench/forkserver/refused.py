"""Refused: what this process took from nobody of its cluster, counted.

Every user of a machine can reach a port on its loopback interface. With CURVE whoever has no key
gets no connection; without it every message carries a signature (HMAC-SHA256), and what has none, a
wrong one or one that was there before is dropped by jupyter_client's Session before it is read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session
from zmq.utils.monitor import recv_monitor_message

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
BELL = "inproc://workbench-refused"


class Doorman:
    """Counts what one process refuses in `folder/<pid>`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / str(os.getpid())
        self.count = 0
        self._lock = threading.Lock()
        self._coming: list[zmq.Socket] = []
        self._bell: zmq.Socket | None = None

    def add(self) -> None:
        """One more; a folder that is gone must not stop whoever refuses."""
        with self._lock, contextlib.suppress(OSError):
            self.count += 1
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(file, b"%d" % self.count, 0)
            os.close(file)

    def watch(self, socket: zmq.Socket) -> None:
        """Count connections to a socket, not bound yet, that do not come about."""
        with self._lock:
            # Whoever binds it may use it in a thread of its own, so events go to another.
            self._coming.append(socket.get_monitor_socket(FAILED))
            if self._bell is None:
                context = zmq.Context()
                heard, self._bell = context.socket(zmq.PULL), context.socket(zmq.PUSH)
                heard.bind(BELL)
                self._bell.connect(BELL)
                threading.Thread(target=self._listen, args=(heard,), daemon=True).start()
            self._bell.send(b"")

    def _listen(self, bell: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(bell, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is bell:
                    bell.recv()
                    with self._lock:
                        new, self._coming = self._coming, []
                    for one in new:
                        poller.register(one, zmq.POLLIN)
                else:
                    recv_monitor_message(socket)
                    self.add()


# By process: what is forked from this one begins with nothing.
_doormen: dict[int, Doorman] = {}


def count_in(folder: Path) -> None:
    """From now on `folder/<pid>` says how many messages and connections this process refused."""
    for name in ("feed_identities", "deserialize"):
        setattr(Session, name, _counting(getattr(Session, name), folder))
    zmq.Socket.bind = _watching(zmq.Socket.bind, folder)  # type: ignore[method-assign]


def counted(folder: Path) -> dict[int, int]:
    """How much each process has refused; those that refused nothing are not there."""
    found = {}
    for path in folder.glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it is just being made
            found[int(path.name)] = int(path.read_text())
    return found


def _doorman(folder: Path) -> Doorman:
    return _doormen.setdefault(os.getpid(), Doorman(folder))


def _counting(method: Callable, folder: Path) -> Callable:
    @functools.wraps(method)
    def counting(*args: Any, **how: Any) -> Any:
        try:
            return method(*args, **how)
        except Exception:
            _doorman(folder).add()
            raise

    return counting


def _watching(bind: Callable, folder: Path) -> Callable:
    @functools.wraps(bind)
    def watched(socket: zmq.Socket, address: str) -> Any:
        if address.startswith("tcp:"):
            _doorman(folder).watch(socket)
        return bind(socket, address)

    return watched
