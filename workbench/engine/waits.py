"""Waits: a rank's waits for messages, which another thread can end.

gloo tells a broken connection to the operations that have not begun, and forgets the one that is
half read or half written: who waits for that one waits until the time-out. So it is another thread
that waits for it, which can be left behind.

Source: Pair::signalException in gloo/transport/tcp/pair.cc, which passes over unbound buffers of
`tx_` and `rx_`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future, InvalidStateError

import torch.distributed as dist

FREED = "Connection closed by peer: this rank was freed from its wait."


class Waits:
    """Those of one world; of its main thread."""

    def __init__(self) -> None:
        self.is_freed = False
        self._asked: queue.SimpleQueue[tuple[dist.Work, Future] | None] = queue.SimpleQueue()
        self._now: Future | None = None
        self._thread: threading.Thread | None = None

    def until_done(self, work: dist.Work) -> bool:
        """As `work.wait()`. Raises RuntimeError once `free` was called."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="waits", daemon=True)
            self._thread.start()
        self._now = done = Future()
        if self.is_freed:  # looked at last: whoever frees does it in the other order
            raise RuntimeError(FREED)
        self._asked.put((work, done))
        return done.result()

    def free(self) -> None:
        """End the wait there is, and have every later one raise."""
        self.is_freed = True
        if (now := self._now) is not None:
            with contextlib.suppress(InvalidStateError):
                now.set_exception(RuntimeError(FREED))

    def close(self) -> None:
        """No more will come. A thread that gloo has forgotten ends with the time-out."""
        self._asked.put(None)

    def _wait(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, done = asked
            with contextlib.suppress(InvalidStateError):
                try:
                    told = work.wait()
                except Exception as error:  # noqa: BLE001 - raised where it is waited for
                    done.set_exception(error)
                else:
                    done.set_result(told)
            del asked, work, done
