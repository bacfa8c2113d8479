"""Waits: what a rank waits for in gloo, in another thread, so that the rank can be freed from it.

gloo tells a broken connection to the operations that have not begun, and forgets the one that is
half read or half written: who waits for that one waits until the time-out. And a rank that connects
to another waits as long for one that is lost meanwhile. Such a wait is left behind; it ends by
itself with the time-out.

Source: Pair::signalException in gloo/transport/tcp/pair.cc, which passes over unbound buffers of
`tx_` and `rx_`; Context::connectFullMesh.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

FREED = "Connection closed by peer: this rank was freed from its wait."


class Waits:
    """Those of one world; of its main thread."""

    def __init__(self) -> None:
        self.is_freed = False
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = (
            queue.SimpleQueue()
        )
        self._now: Future | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What it gives. Raises RuntimeError once `free` was called, and what it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="waits", daemon=True)
            self._thread.start()
        self._now = done = Future()
        if self.is_freed:  # looked at last: whoever frees does it in the other order
            raise RuntimeError(FREED)
        self._asked.put((function, done))
        try:
            return done.result()
        finally:
            self._now = None  # it would keep what was found

    def free(self) -> None:
        """End the wait there is, and have every later one raise."""
        self.is_freed = True
        if (now := self._now) is not None:
            with contextlib.suppress(InvalidStateError):
                now.set_exception(RuntimeError(FREED))

    def close(self) -> None:
        """No more will come."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            function, done = asked
            with contextlib.suppress(InvalidStateError):
                try:
                    told = function()
                except Exception as error:  # noqa: BLE001 - raised where it is waited for
                    done.set_exception(error)
                else:
                    done.set_result(told)
                    del told
            del asked, function, done
