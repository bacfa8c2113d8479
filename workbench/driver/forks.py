"""The kernel's end of the fork server: start it ahead, ask it for children, hear of their exits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil

from workbench.errors import EnginesError, StartError
from workbench.forkserver.processes import is_stopped, start_time
from workbench.spec.events import EVENTS

CONNECT_S = 30.0


class Forks:
    """One fork server and the connection that keeps its lease.

    `directory` is private (0700) and holds the socket and the server's log. known: pid and start
    time of a server that another kernel has started; None starts one.
    """

    def __init__(
        self, directory: Path, lease_s: float, known: tuple[int, float] | None = None
    ) -> None:
        self.log = directory / "forkserver.log"
        self.directory = directory
        self._socket_path = directory / "fork.sock"
        self._ids = itertools.count()
        self._pending: dict[int, Future] = {}
        self._watchers: dict[int, list[Callable[[int], None]]] = {}
        self._exited: dict[int, int] = {}
        self._successors: dict[int, int] = {}
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_cut = False
        self._process = self._started(lease_s) if known is None else None
        self._known = known or (0, 0.0)

    def _started(self, lease_s: float) -> subprocess.Popen:
        # The server reads thread counts when it imports torch, and must stay single-threaded.
        # The NVML check counts CUDA devices without initialising CUDA, which would poison forks.
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        package_root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "workbench.forkserver", str(self._socket_path)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, str(lease_s)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid if self._process is not None else self._known[0]

    @property
    def alive(self) -> bool:
        """Whether the server still runs."""
        # The connection ends a little before the process does.
        return not self._is_cut and self._runs()

    def _runs(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return start_time(self._known[0]) == self._known[1]

    def connect(self) -> None:
        """Connect, once the server listens; it may still be importing, requests then queue.

        Raises StartError when it does not come up, with the end of its log.
        """
        with self._lock:
            if self._connection is not None:
                return
            deadline_s = time.monotonic() + CONNECT_S
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            while True:
                try:
                    connection.connect(str(self._socket_path))
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    if not self.alive or time.monotonic() > deadline_s:
                        connection.close()
                        raise StartError(
                            f"The fork server did not come up. {self._tail()}"
                        ) from None
                    time.sleep(0.005)
            self._connection = connection
        threading.Thread(target=self._read, name="workbench-forks", daemon=True).start()

    def _tail(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:  # its directory goes with it
            return "It has ended."
        return (
            f"Last line of its log {self.log}: {lines[-1]}" if lines else f"Its log is {self.log}."
        )

    def _read(self) -> None:
        connection = self._connection
        assert connection is not None
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                self._take(json.loads(line))
        self._is_cut = True
        with self._lock:
            self._connection = None
            pending, self._pending = self._pending, {}
            watchers, self._watchers = self._watchers, {}
        for future in pending.values():
            future.set_exception(EnginesError(f"The fork server is gone. {self._tail()}"))
        for callback in itertools.chain(*watchers.values()):
            callback(-signal.SIGKILL)  # children end with their server

    def _take(self, message: dict) -> None:
        if message.get("event") == "exit":
            with self._lock:
                self._exited[message["pid"]] = message["code"]
                self._successors[message["pid"]] = message["again"]
                callbacks = self._watchers.pop(message["pid"], ())
            for callback in callbacks:
                callback(message["code"])
            return
        future = self._pending.pop(message.pop("id"))
        if "error" in message:
            future.set_exception(StartError(f"The fork server says: {message['error']}."))
        else:
            future.set_result(message)

    def check(self) -> None:
        """Raises EnginesError while the server is stopped."""
        if is_stopped(self.pid):
            raise EnginesError(EVENTS["forks_stopped"][1].format(process=self.pid))

    def ask(self, op: str, **args: object) -> Future:
        """Send one request; the future holds the reply as a dict.

        Raises EnginesError while the server is stopped, or when it is gone.
        """
        self.check()
        self.connect()
        future: Future = Future()
        with self._lock:
            if self._connection is None:
                raise EnginesError(f"The fork server is gone. {self._tail()}")
            number = next(self._ids)
            self._pending[number] = future
            request = {"id": number, "op": op, "args": args}
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        return future

    def on_exit(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call back with the exit code once, as soon as the child is gone."""
        with self._lock:
            if pid not in self._exited:
                self._watchers.setdefault(pid, []).append(callback)
                return
        callback(self._exited[pid])

    def successor(self, pid: int) -> int:
        """The pid of the child that was started in place of one that is gone; 0 without one."""
        return self._successors.get(pid, 0)

    def close(self) -> None:
        """End the server and all its children now."""
        if self._runs():
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)  # it may be stopped
        if self._process is not None:
            self._process.wait()
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).wait(CONNECT_S)

    def leave(self) -> None:
        """Let go of the server, which lives on as long as it has children and a lease."""
        with self._lock:
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            # As a zombie it would seem to live to others.
            threading.Thread(target=self._process.wait, name="reap", daemon=True).start()
