"""Pulses: what each rank does at this moment, and for how long, read without asking it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from workbench.driver import stacks
from workbench.spec import pulse
from workbench.spec.pulse import IDLE, Beat

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

# A heart beats 20 times a second. Of one that is silent so long it is asked whether the process
# is stopped; a process that merely gets no core is not.
SILENT_S = 0.5
STEP_PHASES = ("forward", "backward", "optimizer", "data", "other", "comm")
STEPS = 32  # of which the median is taken


@dataclass(frozen=True)
class Seen:
    """A rank as it was at one look.

    still_s: since when its main thread does nothing else. is_silent: its heart does not beat, so
    code holds the interpreter's lock. is_stopped: by SIGSTOP or a debugger.
    """

    rank: int
    beat: Beat
    still_s: float
    is_silent: bool = False
    is_stopped: bool = False

    @property
    def waits(self) -> bool:
        """Whether other ranks keep it waiting, in a call or for what it has handed over.

        The heart tells of the latter, so it must have beaten since.
        """
        beat = self.beat
        is_told = bool(beat.operation) and not self.is_silent and beat.beat_s > beat.since_s
        return not self.is_stopped and (beat.phase == "comm" or is_told)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked of it."""
        return self.beat.phase == IDLE and not self.is_stopped

    @property
    def operation(self) -> str:
        """What it waits for, "" where it does not wait."""
        beat = self.beat
        return (beat.detail if beat.phase == "comm" else beat.operation) if self.waits else ""

    @property
    def doing(self) -> str:
        """In words: `forward of step 12 for 3.1 s`."""
        beat = self.beat
        step = f" of step {beat.step:,}" if beat.step and beat.phase in STEP_PHASES else ""
        phase = f"in {self.operation}" if beat.phase == "comm" else beat.phase
        awaited = f", {self.operation} not done" if self.waits and beat.phase != "comm" else ""
        return f"{phase}{step} for {self.still_s:.1f} s{awaited}"


class Pulses:
    """Looks at the ranks, every `period_s` or so; for one thread.

    How long a rank stands is counted in looks as well as by the clock: on a machine so busy that
    the looks come late, nobody is blamed for what nobody could do in time.
    """

    def __init__(self, engines: Engines, period_s: float) -> None:
        self.engines = engines
        self.period_s = period_s
        self._looked_s = time.monotonic()
        self._stood: dict[int, tuple[float, float]] = {}  # since_s of its beat, seconds in looks

    def look(self) -> dict[int, Seen]:
        """All ranks that are alive and on this machine; takes 0.1 ms a rank."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, 2 * self.period_s)
        self._looked_s = now_s
        found, before, self._stood = {}, self._stood, {}
        for row in self.engines.status():
            beat = pulse.read(pulse.path_of(row["log"])) if row["state"] == "alive" else None
            # A rank on another machine has another clock, and its file is not this one's.
            if beat is None or beat.pid != row["pid"]:
                continue
            rank = row["rank"]
            # Of one that is seen for the first time, the clock alone tells.
            since_s, stood_s = before.get(rank, (beat.since_s, now_s - beat.since_s))
            stood_s = stood_s + passed_s if since_s == beat.since_s else 0.0
            self._stood[rank] = beat.since_s, stood_s
            is_silent = now_s - beat.beat_s > SILENT_S
            is_stopped = is_silent and stacks.is_stopped(row["pid"])
            still_s = min(now_s - beat.since_s, stood_s)
            if is_stopped:
                still_s = now_s - beat.beat_s
            found[rank] = Seen(rank, beat, max(0.0, still_s), is_silent, is_stopped)
        return found


def step_s(engines: Engines, rank: int, step: int) -> float | None:
    """The median wall time of the last steps before `step`; None where too few are known."""
    path = pulse.path_of(engines.ranks[rank]["log"])
    for first in (step - STEPS, step - 3):
        if rows := pulse.read_steps(path, max(1, first)):
            return median(row["wall_s"] for row in rows) if len(rows) >= 3 else None
    return None
