"""The writing end of a rank's pulse; see spec/pulse.py.

A mark costs half a microsecond: one struct.pack_into, which holds the interpreter's lock and so is
never cut by another thread. A thread of its own beats 20 times a second; it needs the lock, too, so
a heart that stands still tells of a process that is stopped, or of code that does not let go of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from workbench.spec import pulse
from workbench.spec.pulse import IDLE

BEAT_S = 0.05
# Requests after which the steps of before tell nothing: the training stands elsewhere, or a step
# takes another time.
MOVING = ("build", "restore", "adopt", "switch", "join")


class Open(Protocol):
    """An operation that was handed over."""

    def is_completed(self) -> bool:
        """Whether it is done."""
        ...


class Pulse:
    """One rank's; without a path it is kept in memory, where nobody else sees it.

    step: the one under way.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.step = 0
        self._memory: Any = bytearray(pulse.SIZE_BYTES)
        if path is not None:
            # A disk without room for it must not end the rank: then nobody hears its heart.
            with contextlib.suppress(OSError):
                self._memory = _mapped(path)
        self._number = 0
        self._bytes: dict[str, bytes] = {"": b""}
        self._first = self._last = 0
        self._open: tuple[str, float, Open] | None = None
        thread = threading.main_thread().ident or 0
        pulse.HEAD.pack_into(self._memory, pulse.HEAD_AT, pulse.MAGIC, os.getpid(), thread)
        self.forget()
        self.at(IDLE)

    def start(self) -> None:
        """Beat from now on, for as long as the process lives."""
        self._beat()
        threading.Thread(target=self._live, name="pulse", daemon=True).start()

    def at(self, phase: str, detail: str = "") -> None:
        """The main thread does this from now on."""
        self._number = number = self._number + 1
        try:
            kind, what = self._bytes[phase], self._bytes[detail]
        except KeyError:
            kind, what = self._known(phase), self._known(detail)
        pulse.WORK.pack_into(
            self._memory, pulse.WORK_AT, number, self.step, time.monotonic(), kind, what, number
        )

    def _known(self, text: str) -> bytes:
        return self._bytes.setdefault(text, text.encode("ascii", "replace"))

    def finished(self, step: int, row: Sequence[float]) -> None:
        """A step is taken; row: a value for each of COLUMNS."""
        pulse.ROW.pack_into(self._memory, pulse.row_at(step), step, *row, step)
        if step != self._last + 1:
            self._first = step
        self._span(self._first, step)
        self.step = step + 1

    def loss(self, step: int, value: float) -> None:
        """The loss of the step under way so far: it counts if another rank finishes the step."""
        self._number = number = self._number + 1
        pulse.LOSS.pack_into(self._memory, pulse.LOSS_AT, number, step, value, number)

    def forget(self) -> None:
        """The training stands elsewhere: no step of before counts."""
        self.step = 0
        self._span(1, 0)

    def _span(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._number = number = self._number + 1
        pulse.SPAN.pack_into(self._memory, pulse.SPAN_AT, number, first, last, number)

    def launched(self, operation: str, launched_s: float, work: Open | None) -> None:
        """An operation was handed over; until it is done the beat tells of it.

        launched_s: of time.perf_counter.
        """
        self._open = None if work is None else (operation, launched_s, work)

    def let_go(self) -> None:
        """Hold no operation any more: it would keep its group."""
        self._open = None

    @contextlib.contextmanager
    def during(self, request: str) -> Iterator[None]:
        """A request of the driver is served in here."""
        if request in MOVING:
            self.forget()
        self.at(request)
        try:
            yield
        finally:
            self.at(IDLE)

    def _live(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._beat()

    def _beat(self) -> None:
        operation, launched_s = "", 0.0
        if (held := self._open) is not None:
            if _is_done(held[2]):
                if self._open is held:
                    self._open = None
            else:
                operation = held[0]
                launched_s = time.monotonic() - (time.perf_counter() - held[1])
        del held
        self._number = number = self._number + 1
        what = self._known(operation)
        pulse.OPEN.pack_into(self._memory, pulse.OPEN_AT, number, launched_s, what, number)
        pulse.BEAT.pack_into(self._memory, pulse.BEAT_AT, time.monotonic())


def _is_done(work: Open) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:  # its group is gone, or broke off
        return True


def _mapped(path: str | Path) -> mmap.mmap:
    """A new file of full size, the user's alone, in memory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # All of it now: to write to a hole when the disk is full would kill the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, pulse.SIZE_BYTES)
        else:
            os.write(fd, bytes(pulse.SIZE_BYTES))
        return mmap.mmap(fd, pulse.SIZE_BYTES)
    finally:
        os.close(fd)
