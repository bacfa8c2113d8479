"""Feeder: keeps two slices queued on every rank, and gives their replies back in order.

With one slice queued a rank idles 10 ms between slices, with two about 3 ms. A slice is a number
of steps, the same on all ranks, that lasts about SLICE_S.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench import errors as kinds
from workbench.driver.echo import named
from workbench.driver.history import History
from workbench.errors import EnginesError, RunError, WorkbenchError
from workbench.spec.layout import Layout

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

SLICE_S = 0.4
DEPTH = 2
# A rank's pulse holds the records of two slices: those of a rank that dies are not lost.
MOST_STEPS = 1_000
LONG_STEP_S = 1.0
# A slice may grow only so fast: the first steps of a training are slower than the rest.
GROWTH = 4


@dataclass
class InFlight:
    """A slice on its way: how many steps, and one future a rank."""

    num_steps: int
    futures: list[Future]


class Feeder:
    """The slices of one run; used by the run's thread alone."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        # The others wait: a layout may need fewer ranks than there are.
        self.ranks = range(engines.num_ranks)
        self._queued: deque[InFlight] = deque()
        self._submitted = 0
        self._num_steps = 1
        self._step_s = 0.0
        self._follows = False

    @property
    def in_flight(self) -> int:
        """How many slices the ranks have not answered."""
        return len(self._queued)

    @property
    def slice_steps(self) -> int:
        """Steps that a slice is to have, as fast as the last ones were."""
        return max(1, round(SLICE_S / self._step_s)) if self._step_s else 1

    def reset(self, step: int) -> None:
        """Nothing is queued and the ranks stand at this step."""
        self._queued.clear()
        self._submitted = step
        self._num_steps = 1
        self._follows = False

    def take_queued(self) -> list[InFlight]:
        """The slices that were not answered by all, which nobody waits for any more."""
        queued = list(self._queued)
        self._queued.clear()
        return queued

    def feed(self, goal: int) -> None:
        """Queue slices up to the depth, none beyond the goal."""
        # With long steps a second slice gains nothing, and a pause would have to wait for it.
        depth = DEPTH if self._step_s < LONG_STEP_S else 1
        while len(self._queued) < depth and self._submitted < goal:
            num_steps = min(self._num_steps, goal - self._submitted)
            futures = self.engines.submit("run_slice", num_steps, self._follows, ranks=self.ranks)
            self._follows = True
            self._submitted += num_steps
            self._queued.append(InFlight(num_steps, futures))

    def next_slice(self) -> list[dict[str, Any]] | None:
        """The replies of the oldest slice by rank, once all ranks have answered; None without one.

        Raises EnginesError when a rank is gone, RunError when one does not answer.
        """
        if not self._queued:
            return None
        oldest = self._queued[0]
        replies = self.answers(oldest.futures)
        self._queued.popleft()
        if not self._queued:
            self._follows = False
        self._adapt(oldest.num_steps, replies)
        return replies

    def _adapt(self, num_steps: int, replies: list[dict[str, Any]]) -> None:
        taken_s = sum(replies[0]["columns"]["wall_s"])
        if taken_s > 0 and len(replies[0]["columns"]["wall_s"]) == num_steps:
            self._step_s = taken_s / num_steps
            fitting = round(SLICE_S * num_steps / taken_s)
            self._num_steps = max(1, min(fitting, GROWTH * num_steps, MOST_STEPS))

    def drain(self, history: History, layout: Layout, advance: Callable[[int], None]) -> None:
        """Book the slices still queued; what they say of errors is of the one before."""
        while self._queued:
            if (replies := self.next_slice()) is not None:
                advance(history.add(replies, layout))

    def first_cause(self, told: dict[int, dict[str, Any]], step: int) -> WorkbenchError:
        """One error for what the ranks raised in a slice: the first cause, with its ranks.

        step: the last one that all have finished.
        """
        causes = {rank: error for rank, error in told.items() if error["name"] != "WorldLostError"}
        chosen = causes or told
        first = min(chosen)
        name, text = chosen[first]["name"], chosen[first]["text"]
        same = [rank for rank, e in chosen.items() if (e["name"], e["text"]) == (name, text)]
        error = kinds.rebuilt(name, text)
        lines = chosen[first]["lines"]
        if name == KeyboardInterrupt.__name__:
            where = f" ({lines[-1]})" if lines else ""
            error = RunError(
                f"{named(same).capitalize()}: interrupted at step {step + 1:,}{where}. The state "
                f"is that of step {step:,}: %dist_resume goes on from it."
            )
        elif name not in kinds.all_errors():
            who = f"{named(same).capitalize()} at step {step + 1:,}"
            last = f" ({lines[-1]})" if lines else ""
            error = kinds.RankError(f"{who}: {name}: {text}{last}")
        elif len(same) < len(self.ranks):
            error = type(error)(f"{named(same).capitalize()}: {text}")
        for line in lines:
            error.add_note(f"  {line}")
        return error

    def answers(self, futures: list[Future]) -> list[dict[str, Any]]:
        """Results of all; once one has failed the rest must follow soon."""
        waiting = _unanswered(futures, self.engines.timeouts.freed_s, self.engines.free)
        if waiting:
            self.engines.mark_stuck(waiting, "it is still in a step that the others left")
            self.engines.processes.check()  # it may be gone, and nobody has told
            raise RunError(
                f"{named(waiting).capitalize()} did not come back from a step that the others "
                "left. %dist_stop ends the ranks."
            )
        for future in futures:
            if (error := future.exception()) is not None:
                raise error if isinstance(error, WorkbenchError) else EnginesError(str(error))
        return [future.result() for future in futures]


def _unanswered(
    futures: list[Future], freed_s: float, lost: Callable[[], None]
) -> dict[int, Future]:
    """Ranks that do not answer within `freed_s` after one has failed.

    lost: called once one is gone, so that none of the others waits for it.
    """
    limit_s: float | None = None
    waiting = dict(enumerate(futures))
    while waiting:
        left_s = None if limit_s is None else max(0.0, limit_s - time.monotonic())
        wait(waiting.values(), left_s, return_when=FIRST_COMPLETED)
        for rank, future in list(waiting.items()):
            if future.done():
                del waiting[rank]
                if limit_s is None and (future.exception() or future.result()["error"]):
                    limit_s = time.monotonic() + freed_s
                    if future.exception() is not None:
                        lost()
        if limit_s is not None and time.monotonic() >= limit_s:
            break
    return waiting
