"""Told: the state a run is in and the list of what happened to it, for whoever waits or reads."""

from __future__ import annotations

import threading
import time
from typing import Any

from workbench.spec.events import happened

NUM_EVENTS = 200


class Told:
    """The part of a Run that says how it stands; any thread may add to it.

    version: grows with each change. pending: the command that it is about to do.
    """

    def __init__(self) -> None:
        self.state = "paused"
        self.message = ""
        self.pending = ""
        self.version = 0
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def set_state(self, state: str, message: str = "") -> None:
        """Enter a state; whoever waits for one is told."""
        self.state, self.message = state, message
        self._bump()

    def set_pending(self, word: str) -> None:
        """Say which command is pending; "": none."""
        self.pending = word
        self._bump()

    def tell(self, kind: str, text: str) -> None:
        """Add what somebody says to the list of events."""
        self._add({"time_s": time.time(), "kind": kind, "text": text})

    def happened(self, what: str, **values: Any) -> None:
        """Add one of spec.events to the list of events."""
        self._add(happened(what, values))

    def wait_for_end(self, timeout: float | None) -> None:
        """Wait until it does not run any more, or so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.state != "running", timeout)

    def _add(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.events = [*self.events[1 - NUM_EVENTS :], event]
            self._bump()

    def _bump(self) -> None:
        with self._changed:
            self.version += 1
            self._changed.notify_all()
