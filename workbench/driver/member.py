"""Member: one engine process as the driver knows it, whatever rank it has, or none."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any

from workbench.errors import WorkbenchError
from workbench.spec.placement import Place


class Member:
    """A process by its key, the number the launcher started it under; a rank is a position.

    id: what messages to it are addressed to. info: what it said of itself when it came. gone: why
    it is gone, "" while it lives.
    """

    def __init__(self, key: int, place: Place | None) -> None:
        self.key = key
        self.place = place
        self.id = -1
        self.info: dict[str, Any] = {}
        self.gone = ""
        self.gone_s = 0.0
        self.ended = threading.Event()
        # The run it trains, or is getting ready for, and what came of that.
        self.prepared: tuple[str, Future] | None = None
        self.pending: set[Future] = set()
        self._stuck: tuple[Future, str] | None = None

    def ask(self) -> Future:
        """A future for one request that is on its way."""
        future: Future = Future()
        self.pending.add(future)
        return future

    def answered(self, future: Future, reply: Any) -> None:
        """Settle a request with what came, or the error that took its place."""
        self.pending.discard(future)
        with contextlib.suppress(InvalidStateError):  # its exit may have been told before
            if isinstance(reply, BaseException):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def lose(self, why: str) -> None:
        """The process is gone, for ever."""
        self.gone, self.gone_s = why, time.monotonic()
        self.ended.set()

    def refuse(self, error: WorkbenchError) -> None:
        """What it has not answered will not be answered."""
        for future in list(self.pending):
            with contextlib.suppress(InvalidStateError):  # it may just have been answered
                future.set_exception(error)

    def mark_stuck(self, future: Future, doing: str) -> None:
        """It does not answer this; until it does, nothing more is queued behind it."""
        self._stuck = future, doing

    def is_stuck(self) -> str:
        """What it is doing instead of answering, "" where it answers."""
        if self._stuck is not None and self._stuck[0].done():
            self._stuck = None
        return self._stuck[1] if self._stuck else ""
