"""Clock: what a rank does at any time of a step, so that the parts add up to the step.

The thread that trains is in one state at a time, and a mark is set where one ends and the next
begins. Sums by state and the timeline of a step are the same marks read in two ways, so the books
balance by construction. A mark costs half a microsecond on a CPU.

On an accelerator a mark is an event on the current stream: time that the stream waits for
communication counts as communication, and what the host does meanwhile does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workbench.engine import armed
from workbench.engine.pulse import Pulse
from workbench.spec.pulse import IDLE

FORWARD, BACKWARD, OPTIMIZER, DATA = "forward", "backward", "optimizer", "data"
COMM, OTHER = "comm", "other"
KINDS = (FORWARD, BACKWARD, OPTIMIZER, DATA, COMM, OTHER)


class Timer(Protocol):
    """Where a device is in time."""

    def stamp(self) -> Any:
        """Now, as the device has it."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """From one stamp to a later one."""
        ...

    def settle(self) -> None:
        """Wait until all stamps so far can be read."""
        ...


class HostTimer:
    """A CPU runs what it is told at once: stamps are seconds of perf_counter."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, begin: float, end: float) -> float:
        """From one stamp to a later one."""
        return end - begin

    def settle(self) -> None:
        """Nothing is behind."""


class StreamTimer:
    """An accelerator runs behind its host: stamps are events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stamp(self) -> torch.Event:
        """An event that the stream passes when it has done all before."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        """From one stamp to a later one."""
        return begin.elapsed_time(end) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize()


def timer_for(device: torch.device) -> Timer:
    """The timer of a device."""
    return HostTimer() if device.type == "cpu" else StreamTimer(device)


@dataclass(frozen=True)
class Span:
    """A rank was in one state from begin_s to end_s, counted from the begin of the step.

    detail: (stage, microbatch) of forward and backward, the operations waited for of
    communication, None elsewhere.
    """

    kind: str
    begin_s: float
    end_s: float
    detail: Any


@dataclass(frozen=True)
class Ticked:
    """The marks of one step, to be read once the device has passed them.

    began_s: the host's perf_counter at the begin.
    """

    marks: list[tuple[Any, str, Any]]
    end: Any
    began_s: float

    def spans(self, timer: Timer) -> list[Span]:
        """What the rank did, without gaps, in order; empty spans are left out."""
        origin, found, at_s = self.marks[0][0], [], 0.0
        stamps = [mark[0] for mark in self.marks[1:]] + [self.end]
        for (_, kind, detail), stamp in zip(self.marks, stamps, strict=True):
            end_s = timer.seconds(origin, stamp)
            if end_s > at_s:
                found.append(Span(kind, at_s, end_s, detail))
                at_s = end_s
        return found

    def sums(self, timer: Timer) -> dict[str, float]:
        """Seconds by kind; they add up to the step."""
        totals: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        before = self.marks[0]
        for mark in [*self.marks[1:], (self.end, "", None)]:
            totals[before[1]] += timer.seconds(before[0], mark[0])
            before = mark
        return totals


class Clock:
    """Sets the marks of one rank's steps, and tells them to its pulse as they are set."""

    def __init__(self, timer: Timer, pulse: Pulse | None = None) -> None:
        self.timer = timer
        self.pulse = pulse or Pulse()
        self._stamp = timer.stamp
        self._marks: list[tuple[Any, str, Any]] = []
        self._began_s = 0.0
        self._now: tuple[str, Any] = (IDLE, None)
        self._request = IDLE
        self._ended: Any = None
        self._is_on = False
        self._thread = threading.get_ident()

    def begin(self, *, follows: bool) -> None:
        """A step begins; follows: at the end of the one before, so that nothing lies between."""
        self._now = (OTHER, None)
        self._thread = threading.get_ident()
        stamp = self._ended if follows and self._ended is not None else self._stamp()
        self._began_s = stamp if isinstance(stamp, float) else time.perf_counter()
        self._marks = [(stamp, OTHER, None)]
        self._is_on = True
        self.pulse.at(OTHER)

    def end(self) -> Ticked:
        """The step is over; what follows is not marked."""
        self._is_on = False
        self._ended = self._stamp()
        return Ticked(self._marks, self._ended, self._began_s)

    def off(self) -> None:
        """No step is under way, not even a broken one."""
        self._is_on = False
        self._now = (self._request, None)
        self.pulse.at(self._request)

    def enter(self, kind: str, detail: Any = None) -> tuple[str, Any] | None:
        """Be in another state from now on -> the state before, for `back`.

        A thread that the user's code has started is in no state, whatever it does.
        """
        if threading.get_ident() != self._thread and _is_the_users():
            return None
        before = self._now
        self._now = (kind, detail)
        if self._is_on:
            self._marks.append((self._stamp(), kind, detail))
        self.pulse.at(kind, _told(kind, detail))
        if self._is_on and (armed.waiting or armed.lasting):
            armed.reached(kind, self.pulse.step)
        return before

    def back(self, before: tuple[str, Any] | None) -> None:
        """Be in an earlier state again."""
        if before is None:
            return
        self._now = before
        if self._is_on:
            self._marks.append((self._stamp(), *before))
        self.pulse.at(before[0], _told(*before))

    @contextmanager
    def during(self, kind: str, detail: Any = None) -> Iterator[None]:
        """In this state inside, in the one before afterwards."""
        before = self.enter(kind, detail)
        try:
            yield
        finally:
            self.back(before)

    @contextmanager
    def serving(self, request: str) -> Iterator[None]:
        """Inside, what is done in no step is done for this request of the driver."""
        if threading.get_ident() != self._thread:
            yield  # beside what the thread that trains does
            return
        before, self._request = self._request, request
        self._now = (request, None)
        try:
            with self.pulse.during(request):
                yield
        finally:
            self._request = before
            self._now = (before, None)

    def since_last_mark(self, kind: str, detail: Any = None) -> None:
        """What passed since the last mark was of another kind, as is known only now."""
        if not self._is_on:
            return
        stamp, *_ = self._marks[-1]
        self._marks[-1] = (stamp, kind, detail)
        self._marks.append((self._stamp(), *self._now))


def _told(kind: str, detail: Any) -> str:
    """The operation waited for, as the pulse has it."""
    return detail[0].told if kind == COMM and detail else ""


def _is_the_users() -> bool:
    """Whether Python has started this thread, and not autograd for the one that waits in it."""
    return not threading.current_thread().name.startswith("Dummy-")
