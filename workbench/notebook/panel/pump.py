"""The one thread of a kernel that writes to panels.

ipywidgets has no lock of its own, and callbacks of the browser come in whatever thread the kernel
chose (main, or a subshell's): everything they ask for goes through a queue to this thread. It looks
at each panel five times a second, so training is never waited for and never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

PERIOD_S = 0.2
# How long the end of a cell may wait for the panels.
SETTLE_S = 1.0
log = logging.getLogger(__name__)


class Shown(Protocol):
    """Something that is brought up to date on the pump's thread."""

    def tick(self, *, keep: bool = False) -> None:
        """Write what has changed since the last call; keep: for a reader without a kernel too."""


class Pump:
    """Calls `tick` of everything added, from one thread that lives as long as something is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shown: list[Shown] = []
        self._urgent = self._keeps = False
        self._kept = 0  # how often what was to be kept was kept
        self._failing: set[int] = set()
        self._thread: threading.Thread | None = None

    def add(self, shown: Shown) -> None:
        """Bring `shown` up to date from now on."""
        with self._changed:
            self._shown.append(shown)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="panel-pump", daemon=True)
                self._thread.start()

    def remove(self, shown: Shown) -> None:
        """Leave `shown` alone; with the last one the thread ends."""
        with self._changed:
            if shown in self._shown:
                self._shown.remove(shown)
            last = not self._shown
            thread = self._thread
            self._wake()
        if last and thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def hurry(self) -> None:
        """Tick now: somebody pressed a button."""
        with self._changed:
            self._wake()

    def settle(self) -> None:
        """Bring everything up to date and keep it so; returns once it is, or SETTLE_S later.

        At the end of a cell: whoever runs a notebook may end the kernel right after the last one.
        """
        with self._changed:
            if self._thread is None or self._thread is threading.current_thread():
                return
            kept, self._keeps = self._kept, True
            self._wake()
            self._changed.wait_for(lambda: self._thread is None or self._kept > kept, SETTLE_S)

    def _wake(self) -> None:
        self._urgent = True
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._shown:
                    self._thread = None
                    return
                shown = list(self._shown)
                keep, self._urgent, self._keeps = self._keeps, False, False
            for one in shown:
                self._tick(one, keep=keep)
            due_s = time.monotonic() + PERIOD_S
            with self._changed:
                if keep:
                    self._kept += 1
                    self._changed.notify_all()
                while self._shown and not self._urgent and (left_s := due_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)

    def _tick(self, shown: Shown, *, keep: bool) -> None:
        try:
            shown.tick(keep=keep)
        except Exception:  # one panel's fault must not stop the others; it is tried again
            if id(shown) not in self._failing:
                log.warning("A panel could not be brought up to date.", exc_info=True)
            self._failing.add(id(shown))
        else:
            self._failing.discard(id(shown))


PUMP = Pump()
