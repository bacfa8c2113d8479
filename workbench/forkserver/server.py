"""A single-threaded server that forks engines and the controller on request.

Importing torch and ipykernel takes seconds and is the same for every engine; a fork of a process
that has done it takes milliseconds. The server imports and nothing else: a parallel region run
or an accelerator touched before the fork would hang or poison the children.

Protocol: JSON lines over a Unix socket of mode 0600 whose peer must be the same user. A client
that holds a connection keeps the lease; with none for `lease_s` seconds every child is ended and
the server with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.forkserver import children
from workbench.forkserver.processes import start_time
from workbench.spec.alone import Alone

PR_SET_CHILD_SUBREAPER = 36
IDLE_LEASE_S = 2.0
KEY = "WORKBENCH_KEY"  # in the environment of an engine: the number it was started under
# A kept child that ends sooner after its start may have come to nothing. After so many in a row it
# is given up; where it ended by itself, because a port is taken, say, each begins a little later.
BRIEF_S, MOST_KILLED, PAUSES_S = 1.0, 20, (0.0, 0.05, 0.1, 0.2, 0.4)


@dataclass
class Child:
    """A child: the tag of its cluster, how it was started, and how it is to be started again."""

    tag: str
    how: dict[str, Any] = field(default_factory=dict)
    again: list[str] | None = None
    born_s: float = field(default_factory=time.monotonic)
    num_brief: int = 0


class Server:
    """Serves spawn, devices, signal, lease and end requests until the lease is over."""

    def __init__(self, path: str, lease_s: float) -> None:
        self.path = path
        self.lease_s = lease_s
        self.selector = selectors.DefaultSelector()
        self.clients: dict[socket.socket, bytes] = {}
        self.children: dict[int, Child] = {}
        self.orphan_since: float | None = None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)
        self.listener.bind(path)
        os.umask(old)
        # Listen before the imports: a client may ask while they run, and is served after.
        self.listener.listen(16)
        # A child that reads end-of-file here knows that the server is gone.
        self.life_r, self.life_w = os.pipe()
        self.wake_r, self.wake_w = os.pipe()
        os.set_blocking(self.wake_w, False)
        os.set_blocking(self.wake_r, False)

    def run(self) -> None:
        """Import everything, then serve; returns when the lease is over or a client says end."""
        for name in children.PRELOAD:
            importlib.import_module(name)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of children come here
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.wake_r, selectors.EVENT_READ, self._woken)
        self.orphan_since = time.monotonic()  # the imports are not the client's absence
        try:
            while not self._lease_over():
                for key, _events in self.selector.select(timeout=0.25):
                    key.data(key.fileobj)
        finally:
            self.end_children()
            # The directory is this session's alone: with the server gone nobody needs it.
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)

    def _terminate(self, *_: object) -> None:
        raise SystemExit(0)

    def _lease_over(self) -> bool:
        if self.orphan_since is None:
            return False
        lease_s = self.lease_s if self.children else min(self.lease_s, IDLE_LEASE_S)
        return time.monotonic() - self.orphan_since > lease_s

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        if peer_uid(client) != os.getuid():
            client.close()
            return
        self.clients[client] = b""
        self.orphan_since = None
        self.selector.register(client, selectors.EVENT_READ, self._read)

    def _drop(self, client: socket.socket) -> None:
        if self.clients.pop(client, None) is None:
            return
        self.selector.unregister(client)
        client.close()
        if not self.clients:
            self.orphan_since = time.monotonic()
            for tag in {child.tag for child in self.children.values()}:
                with contextlib.suppress(OSError):  # most do not go on without a kernel
                    Alone(Path(self.path).parent / tag).orphaned = True

    def _send(self, client: socket.socket, message: dict) -> None:
        try:
            client.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(client)

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, self.clients[client] = (self.clients[client] + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                reply = getattr(self, "do_" + request.pop("op"))(**request.pop("args"))
            except Exception as error:  # noqa: BLE001 - the client raises it; the server lives on
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            self._send(client, {"id": request["id"], **(reply or {})})

    def _woken(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 4096)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self.children.pop(pid, None)
            if child is None:
                continue  # the orphan of a child
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it left behind, such as data loaders
            exit_code = os.waitstatus_to_exitcode(status)
            told = {"event": "exit", "pid": pid, "tag": child.tag, "code": exit_code}
            told["again"] = self._start_again(pid, child, exit_code)
            for client in list(self.clients):
                self._send(client, told)

    def _start_again(self, pid: int, child: Child, exit_code: int) -> int:
        """The pid of the child that takes the place of one that ended; 0 for none."""
        if child.again is None:
            return 0
        is_brief = time.monotonic() - child.born_s < BRIEF_S
        num_brief = child.num_brief + 1 if is_brief else 0
        if num_brief >= (MOST_KILLED if exit_code < 0 else len(PAUSES_S)):
            return 0
        if exit_code >= 0:
            time.sleep(PAUSES_S[num_brief])
        while group_exists(pid):  # it holds the same ports
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-pid, os.WNOHANG)
            time.sleep(0.001)
        how = {**child.how, "argv": child.again}
        new = self._fork(lambda: self._become(**how))
        self.children[new] = Child(child.tag, how, child.again, num_brief=num_brief)
        return new

    def do_spawn(self, *, tag: str, **how: Any) -> dict:
        """Fork a child of a kind; the reply carries its pid and start time."""
        pid = self._fork(lambda: self._become(**how))
        self.children[pid] = Child(tag, how)
        return {"pid": pid, "started": start_time(pid)}

    def do_children(self, *, tag: str) -> dict:
        """The children of a cluster that live: pid, kind, and the key of an engine."""
        told = [
            {"pid": pid, "kind": of.how["kind"], "key": of.how["env"].get(KEY)}
            for pid, of in self.children.items()
            if of.tag == tag
        ]
        return {"children": told}

    def do_keep(self, *, pid: int, argv: list[str]) -> dict:
        """From now on start this child again, with these arguments, whenever it ends."""
        child = self.children.get(pid)
        if child is not None:
            child.again = argv
        return {"is_kept": child is not None}

    def do_devices(self) -> dict:
        """What accelerators a child sees."""
        read_fd, write_fd = os.pipe()
        pid = self._fork(lambda: children.devices(write_fd))
        os.close(write_fd)
        self.children[pid] = Child("devices")
        with open(read_fd, "rb") as pipe:
            line = pipe.readline()
        return json.loads(line) if line else {"kind": None, "count": 0, "names": []}

    def do_signal(self, *, pids: list[int], number: int) -> None:
        """Signal those of the pids that are still children."""
        for pid in pids:
            if pid in self.children:
                os.kill(pid, number)

    def do_lease(self, *, lease_s: float) -> None:
        """Change how long children outlive the last client."""
        self.lease_s = lease_s

    def do_end(self, *, tags: list[str]) -> dict:
        """End the children with these tags and wait until they are gone."""
        self.end_children(set(tags))
        return {}

    def end_children(self, tags: set[str] | None = None) -> None:
        """Kill the children with these tags, or all; returns when none of them is left."""
        chosen = {pid for pid, of in self.children.items() if tags is None or of.tag in tags}
        # An engine has nothing to save at its end; the controller only its own files, which the
        # client removes with the session's directory. So there is nothing to wait for.
        # Each child leads a group of its own: what it forked itself goes with it.
        # A child just forked does not lead it yet, so the child itself is killed, too.
        for pid in chosen:
            self.children[pid].again = None
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        while chosen := {pid for pid in chosen if pid in self.children or group_exists(pid)}:
            self._reap()
            time.sleep(0.001)

    def _fork(self, become: Callable[[], None]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._shed(parent)
            become()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001 - a child never returns into the server's loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _shed(self, parent: int) -> None:
        """Drop all that belongs to the server, and end when it ends."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Threads inherit the mask: this signal is for the one that waits for it (arrival._way_out).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        self.selector.close()
        for item in (self.listener, *self.clients):
            item.close()
        for fd in (self.wake_r, self.wake_w, self.life_w):
            os.close(fd)
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(children.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        else:
            threading.Thread(target=_end_with, args=(self.life_r,), daemon=True).start()

    def _become(
        self, kind: str, *, argv: list[str], env: dict, cwd: str, output: str, threads: int = 1
    ) -> None:
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(env)
        children.count_refused(Path(output).parent / "refused")
        os.chdir(cwd)
        if kind == "engine":
            children.engine(argv, threads)
        else:
            children.controller(argv)


def _end_with(life_fd: int) -> None:
    os.read(life_fd, 1)
    os._exit(1)


def group_exists(group: int) -> bool:
    """Whether a process group has a member, be it one that waits to be reaped."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def peer_uid(client: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return struct.unpack("3i", credentials)[1]
    uid = ctypes.c_uint()
    gid = ctypes.c_uint()
    ctypes.CDLL(None).getpeereid(client.fileno(), ctypes.byref(uid), ctypes.byref(gid))
    return uid.value
