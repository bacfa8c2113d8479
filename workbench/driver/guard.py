"""Guard: sees within a second that a process between kernel and ranks was stopped (SIGSTOP).

A controller that is stopped keeps every message, and would for ever; a spare that is stopped would
take a place and not move. Neither holds anything of its own, so both are killed, and others take
their places. The fork server alone is the user's to wake: all processes would end with it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

from workbench.driver.rescue import refill
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines
    from workbench.driver.member import Member

# Only who is stopped at two looks is: after the whole machine was, all go on at the same time.
PERIOD_S = 0.5


class Guard:
    """Of one cluster, whether it trains or not; from now on until `close`."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._controller = 0
        self._spares: set[int] = set()
        self._server = 0
        self._closed = threading.Event()
        threading.Thread(target=self._live, name="guard", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _live(self) -> None:
        while not self._closed.wait(PERIOD_S) and self._engines.roster.is_reachable:
            # The cluster may end at any moment, and with it the way to its processes.
            with contextlib.suppress(WorkbenchError, OSError):
                self._look()

    def _look(self) -> None:
        if not self._can_act():
            return
        processes = self._engines.processes
        pid, before = processes.stopped_controller(), self._controller
        self._controller = pid
        if pid and pid == before:
            self._controller = 0
            self._happened("controller_stopped", process=str(pid))
            processes.end_controller(pid)
        spares, known = self._engines.roster.stopped_spares(), self._spares
        self._spares = {one.key for one in spares}
        if stopped := [one for one in spares if one.key in known]:
            self._replace(stopped)

    def _can_act(self) -> bool:
        """Whether the fork server answers; that it is stopped is told once."""
        pid, before = self._engines.processes.stopped_server(), self._server
        self._server = pid
        if pid and not before:
            self._happened("forks_stopped", process=str(pid))
        return not pid

    def _replace(self, spares: list[Member]) -> None:
        for one in spares:
            self._happened("spare_stopped", process=str(one.info["pid"]))
        self._engines.processes.signal([one.key for one in spares], signal.SIGKILL)
        for one in spares:
            one.ended.wait(self._engines.timeouts.freed_s)
        run = self._engines.run
        if run is not None and run.state != "gone":
            refill(run)
        else:
            self._engines.refill(lambda _members: None)

    def _happened(self, name: str, **values: Any) -> None:
        if self._engines.run is not None and self._engines.run.state != "gone":
            self._engines.run.happened(name, **values)
