"""Watching: the training of another kernel, seen from this one, which may take it over."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from workbench.driver import card, clusters, current, share
from workbench.driver.asked import Asked
from workbench.driver.card import this_kernel
from workbench.driver.clusters import Cluster
from workbench.driver.here import this_notebook
from workbench.errors import EnginesError, RunError, WorkbenchError
from workbench.forkserver.processes import is_stopped

if TYPE_CHECKING:
    from workbench.driver.engines import Engines
    from workbench.driver.run import Run

PERIOD_S = 0.25
# A kernel that lives answers in milliseconds, be its cell ever so busy.
ANSWER_S = 5.0
# Beside what a cell may take to end, see handover.WAIT_S.
TAKE_S = 60.0
CONTROLS, SILENT, GONE, OVER = "controls", "silent", "gone", "over"


class Line:
    """A connection to the kernel that controls a cluster.

    Raises OSError where nobody listens, as the methods do.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        try:
            self._socket.connect(str(share.at(cluster.directory)))
        except OSError:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rwb")

    def ask(self, request: dict[str, Any], limit_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer, TimeoutError without one. Raises EnginesError for what is refused."""
        self._socket.settimeout(limit_s)
        self._lines.write(json.dumps(request).encode() + b"\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("closed")
        reply = json.loads(line)
        if "error" in reply:
            raise EnginesError(reply["error"])
        return reply

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()


class Watching(Asked):
    """What a panel shows of the training of another kernel; made by `watch`.

    Commands raise RunError that says who controls, but for `take_over`. run: the training itself,
    once it was taken over, which is what is shown from then on.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        self.run: Run | None = None
        self._cluster = cluster
        self._how = CONTROLS
        self._who = f"process {cluster.card.kernel[0]}"
        self._seen: dict[str, Any] = {}
        self._key = ""
        self._version = 0
        self._line: Line | None = None
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._follow, name="watching", daemon=True)

    def start(self) -> None:
        """Follow from now on."""
        self._thread.start()

    @property
    def name(self) -> str:
        """That of the training."""
        return self.run.name if self.run is not None else self._seen.get("name", "")

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to watch or to take over."""
        return self._how == OVER or self._closed.is_set()

    @property
    def version(self) -> int:
        """Grows with each change."""
        return self._version + (self.run.version if self.run is not None else 0)

    def sentence(self) -> str:
        """Who controls, and what to type."""
        how = f"which {self._who} controls"
        if self._how == GONE:
            how = f"whose kernel ({self._who}) is gone"
        return f"This notebook watches {self.name}, {how}. %dist_attach --take-over takes it over."

    def snapshot(self) -> dict[str, Any]:
        """That of the controlling kernel, with who it is in place of what may be asked."""
        if self.run is not None:
            return self.run.snapshot()
        over = {"state": "gone", "alive": 0} if self._how == OVER else {}
        return {
            **self._seen,
            **over,
            "pending": "",
            "allowed": [] if self._how == OVER else ["take_over"],
            "watching": {"who": self._who, "how": self._how},
        }

    def ask(self, verb: str, **how: Any) -> Future:
        """Pass a command on once the training was taken over; until then `take_over` alone."""
        if self.run is not None:
            return self.run.ask(verb, **how)
        future: Future = Future()
        if verb != "take_over":
            future.set_exception(RunError(self.sentence()))
            return future
        threading.Thread(target=self._take, args=(future,), name="take-over", daemon=True).start()
        return future

    def take_over(self) -> Engines:
        """Control the ranks from here; the other notebook watches -> their engines."""
        return self._result("take_over")

    def wake(self) -> None:
        """Nothing that this kernel may do."""
        if self.run is not None:
            self.run.wake()

    def became(self, engines: Engines) -> None:
        """This kernel controls it now."""
        self.run = engines.run
        self.close()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._version += 1

    def _take(self, future: Future) -> None:
        from workbench.driver.attach import attach_to

        try:
            found = card.read(self.directory)
            if found is None:
                raise EnginesError(f"The ranks of {self.name} were stopped.")
            future.set_result(attach_to(Cluster(self.directory, found), take_over=True))
        except Exception as error:  # noqa: BLE001 - whoever asked is to hear of it
            future.set_exception(error)

    def _follow(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._look()
            if self._how == OVER:
                break
        if self._line is not None:
            self._line.close()

    def _look(self) -> None:
        try:
            if self._line is None:
                self._line = Line(self._cluster)
            told = self._line.ask({"op": "look", "version": self._key})
        except (OSError, ValueError, WorkbenchError) as error:
            if self._line is not None:
                self._line.close()
            self._line = None
            self._lost(error)
            return
        self._who = told["who"]
        if told["snapshot"] is not None:
            self._key, self._seen = told["version"], told["snapshot"]
            self._version += 1
        self._becomes(CONTROLS)

    def _lost(self, error: Exception) -> None:
        """Find out why nobody answers; another notebook may have taken over."""
        found = card.read(self.directory)
        if found is None:
            self._becomes(OVER)
            return
        if found.kernel != self._cluster.card.kernel:
            self._who = f"process {found.kernel[0]}"
        self._cluster = Cluster(self.directory, found)
        if not found.is_controlled:
            self._becomes(GONE)
        elif isinstance(error, TimeoutError):
            self._becomes(SILENT)

    def _becomes(self, how: str) -> None:
        if how != self._how:
            self._how = how
            self._version += 1


def watch(which: str | None = None) -> Watching:
    """See the training of another kernel, which goes on controlling it.

    which: as `attach` takes it. Raises EnginesError where there is none, or nothing was trained;
    InputError where it is not clear which is meant.
    """
    return watch_at(clusters.chosen(which))


def watch_at(cluster: Cluster) -> Watching:
    """`watch`, of this cluster."""
    for one in current.watched():
        if one.directory == cluster.directory:
            return one
    watching = Watching(cluster)
    if not watching.name:
        who = f"process {cluster.card.kernel[0]}"
        does = "nothing was trained" if watching._key == "" and _answers(cluster) else "no answer"
        raise EnginesError(
            f"There is nothing to watch of {cluster.name}, which {who} controls: {does}. "
            "%dist_attach --take-over takes it over."
        )
    current.watch(watching)
    watching.start()
    return watching


def _answers(cluster: Cluster) -> bool:
    with contextlib.suppress(OSError):
        Line(cluster).close()
        return True
    return False


def take_from(cluster: Cluster) -> None:
    """Have the kernel that controls a cluster let go of it.

    Raises EnginesError with what it says, or that it does not answer.
    """
    pid = cluster.card.kernel[0]
    try:
        line = Line(cluster)
        try:
            line.ask({"op": "look", "version": ""})  # whether it is there at all
            line.ask({"op": "take", "kernel": this_kernel(), "who": this_notebook()}, TAKE_S)
        finally:
            line.close()
    except (OSError, ValueError) as error:
        found = card.read(cluster.directory)
        if found is not None and (not found.is_controlled or found.kernel == this_kernel()):
            return  # it let go, or ended, meanwhile
        how = "is stopped" if is_stopped(pid) else "does not answer"
        raise EnginesError(
            f"Process {pid}, which controls {cluster.name}, {how}: `kill -CONT {pid}` wakes it, or "
            f"`kill -9 {pid}` ends it and leaves its ranks; then %dist_attach --take-over."
        ) from error
