"""Engines and controller on this machine, forked from a process that has imported torch once.

Messages between kernel, controller and engines are signed (HMAC-SHA256) and stay on 127.0.0.1;
connection files with the key are 0600 in a 0700 directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import psutil

from workbench.driver import curve as curves
from workbench.driver.forks import Forks
from workbench.driver.launchers import Launched
from workbench.driver.session import Session
from workbench.errors import EnginesError, StartError
from workbench.forkserver.processes import is_stopped
from workbench.spec.alone import Alone
from workbench.spec.placement import Place

IP = "127.0.0.1"
# A registration is finished at the next beat of the hub's heart, and by default it beats every
# 3 s. Whether an engine lives is told by its process, never by missed beats.
HEARTBEAT_MS = 50
MISSES = 100_000
# A lease that never ends: these ranks go on to their goal without a kernel.
FOREVER_S = 10.0**9


class LocalProcesses:
    """Children of the fork server; see launchers.Processes."""

    def __init__(self, forks: Forks, directory: Path, num_ranks: int) -> None:
        self.forks = forks
        self.directory = directory
        self.num_ranks = num_ranks
        self.pids: dict[int, int] = {}
        self.controller_pid = 0
        self.tag = directory.name

    @classmethod
    def found(cls, forks: Forks, directory: Path, num_ranks: int) -> LocalProcesses:
        """Those of a cluster that another kernel has started, as far as they live."""
        processes = cls(forks, directory, num_ranks)
        for child in forks.ask("children", tag=processes.tag).result()["children"]:
            if child["kind"] == "engine":
                processes.pids[int(child["key"])] = child["pid"]
            else:
                processes.controller_pid = child["pid"]
        return processes

    @property
    def can_start(self) -> bool:
        return self.forks.alive

    def start(self, key: int, place: Place) -> Future:
        future = self.spawn(
            "engine",
            self.log(key).stem,
            [*self.common(), f"--IPEngine.id={key}", "--IPEngine.enable_nanny=False"],
            {**self.environment(), **place.environment, "WORKBENCH_KEY": str(key)},
            place.threads,
        )
        started: Future = Future()

        def spawned(reply: Future) -> None:
            if (error := reply.exception()) is not None:
                started.set_exception(error)
                return
            self.pids[key] = reply.result()["pid"]
            started.set_result(None)

        future.add_done_callback(spawned)
        return started

    def common(self) -> list[str]:
        """Options of controller and engines."""
        return [f"--profile-dir={self.directory}", "--cluster-id=", "--log-level=WARN"]

    def environment(self) -> dict[str, str]:
        """What all processes get."""
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback())
        return {**os.environ, **interfaces}

    def spawn(self, kind: str, name: str, argv: list[str], env: dict, threads: int) -> Future:
        """Ask for one child whose output goes to `<name>.log`."""
        return self.forks.ask(
            "spawn",
            kind=kind,
            tag=self.tag,
            argv=argv,
            env=env,
            cwd=os.getcwd(),
            output=str(self.directory / f"{name}.log"),
            threads=threads,
        )

    def on_exit(self, key: int, callback: Callable[[int], None]) -> None:
        self.forks.on_exit(self.pids[key], callback)

    def on_controller_exit(self, callback: Callable[[int, bool], None]) -> None:
        pid = self.controller_pid

        def gone(code: int) -> None:
            if successor := self.forks.successor(pid):
                self.controller_pid = successor
                self.on_controller_exit(callback)
            callback(code, bool(successor))

        self.forks.on_exit(pid, gone)

    def check(self) -> None:
        self.forks.check()

    def stopped_server(self) -> int:
        return self.forks.pid if is_stopped(self.forks.pid) else 0

    def stopped(self, keys: Iterable[int]) -> list[int]:
        return [key for key in keys if key in self.pids and is_stopped(self.pids[key])]

    def stopped_controller(self) -> int:
        pid = self.controller_pid
        return pid if pid and is_stopped(pid) else 0

    def end_controller(self, pid: int) -> None:
        self.forks.ask("signal", pids=[pid], number=signal.SIGKILL)

    def renew_controller(self, limit_s: float) -> bool:
        """Have another controller in the place of one that is stopped -> whether there was one."""
        pid, gone = self.stopped_controller(), threading.Event()
        if not pid:
            return False
        self.forks.on_exit(pid, lambda _code: gone.set())
        self.end_controller(pid)
        gone.wait(limit_s)
        self.controller_pid = self.forks.successor(pid)
        return True

    def signal(self, keys: list[int], number: int, *, waits: bool = True) -> None:
        pids = [self.pids[key] for key in keys]
        if number != signal.SIGKILL and self.stopped_server():
            _signal_directly(pids, number, self.forks.pid)
            return
        sent = self.forks.ask("signal", pids=pids, number=number)
        if waits:
            sent.result()

    def end(self) -> Future:
        if not self.forks.alive:  # and neither are its children
            gone: Future = Future()
            gone.set_result({})
            return gone
        try:
            return self.forks.ask("end", tags=[self.tag])
        except EnginesError as error:
            refused: Future = Future()
            refused.set_exception(error)
            return refused

    def kill(self) -> None:
        for pid in (self.controller_pid, *self.pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def log(self, key: int) -> Path:
        # The first ones have the rank that is their key; those that come later may get any.
        return self.directory / f"{'rank' if key < self.num_ranks else 'engine'}{key}.log"


def launch(
    session: Session,
    places: list[Place],
    *,
    timeout_s: float,
    lease_s: float,
    num_spares: int = 0,
    curve: bool = False,
) -> Launched:
    """Start a controller, one engine a place and spare ones; returns when the controller is up.

    curve: encrypt what they say, see driver/curve.py.

    Raises StartError when the controller does not come.
    """
    names = (f"cluster{number}" for number in itertools.count(1))
    directory = next(path for name in names if not (path := session.directory / name).exists())
    for name in (".", "security", "log", "pid", "refused"):
        (directory / name).mkdir(mode=0o700)
    if lease_s >= FOREVER_S:
        Alone.make(directory)
    processes = LocalProcesses(session.forks, directory, len(places))
    try:
        session.forks.ask("lease", lease_s=lease_s)
        # The controller is no part of the user's program.
        args = [*processes.common(), *controller_args()]
        keys = curves.environment() if curve or curves.is_needed(IP) else {}
        environment = {**processes.environment(), **keys}
        hub = processes.spawn("controller", "controller", args, environment, 1)
        # Engines are forked while the controller starts; they read its file when it is there.
        connection = {
            kind: directory / "security" / f"ipcontroller-{kind}.json"
            for kind in ("client", "engine")
        }
        processes.controller_pid = hub.result()["pid"]
        _await_files(processes, connection, timeout_s)
        # One that is killed is followed by another with the same ports and key.
        session.forks.ask(
            "keep", pid=processes.controller_pid, argv=[*args, "--reuse", "--restore"]
        )
        started = [
            processes.start(key, place)
            for key, place in enumerate([*places, *[places[0]] * num_spares])
        ]
        for future in started:
            future.result()
    except BaseException:
        # An interrupt included: nothing of a start that was given up may stay.
        processes.end().result()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Launched(processes, connection["client"], directory)


def controller_args() -> list[str]:
    """Options of the controller: loopback, quick registration, no record of every task."""
    return [
        f"--ip={IP}",
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={MISSES}",
        "--IPController.db_class=NoDB",
        # Schedulers as threads of one process rather than eight more of them.
        "--IPController.use_threads=True",
    ]


def loopback() -> str:
    """Name of the loopback interface: gloo would otherwise ask what the host name resolves to."""
    return "lo" if Path("/sys/class/net/lo").exists() else "lo0"


def _await_files(processes: LocalProcesses, files: dict[str, Path], timeout_s: float) -> None:
    exited: list[int] = []
    processes.forks.on_exit(processes.controller_pid, exited.append)
    deadline_s = time.monotonic() + timeout_s
    while not all(path.exists() and path.stat().st_size for path in files.values()):
        if exited or time.monotonic() > deadline_s:
            log = processes.directory / "controller.log"
            how = exit_reason(exited[0]) if exited else f"not up after {timeout_s:g} s"
            raise StartError(f"The controller did not come: {how}. {tail(log)}")
        time.sleep(0.003)


def _signal_directly(pids: list[int], number: int, parent: int) -> None:
    """Without the fork server, which is stopped: until it goes on, none of its children's pids
    becomes another process's."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(pid).ppid() == parent:
                os.kill(pid, number)


def exit_reason(code: int) -> str:
    """`killed by SIGKILL` or `exit code 3`."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def tail(log: Path) -> str:
    """The last line of a log, and where it is."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = f" Its last line: {lines[-1][:300]}" if lines else ""
    return f"Log: {log}.{last}"
