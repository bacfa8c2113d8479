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

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

SLICE_S = 0.4
DEPTH = 2
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
        self._queued: deque[InFlight] = deque()
        self._submitted = 0
        self._num_steps = 1
        self._follows = False

    @property
    def in_flight(self) -> int:
        """How many slices the ranks have not answered."""
        return len(self._queued)

    def reset(self, step: int) -> None:
        """Nothing is queued and the ranks stand at this step."""
        self._queued.clear()
        self._submitted = step
        self._num_steps = 1
        self._follows = False

    def feed(self, goal: int) -> None:
        """Queue slices up to the depth, none beyond the goal."""
        while len(self._queued) < DEPTH and self._submitted < goal:
            num_steps = min(self._num_steps, goal - self._submitted)
            futures = self.engines.submit("run_slice", num_steps, self._follows)
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
        replies = _answers(oldest.futures, self.engines.timeouts.freed_s)
        self._queued.popleft()
        if not self._queued:
            self._follows = False
        self._adapt(oldest.num_steps, replies)
        return replies

    def _adapt(self, num_steps: int, replies: list[dict[str, Any]]) -> None:
        taken_s = sum(replies[0]["columns"]["wall_s"])
        if taken_s > 0 and len(replies[0]["columns"]["wall_s"]) == num_steps:
            fitting = round(SLICE_S * num_steps / taken_s)
            self._num_steps = max(1, min(fitting, GROWTH * num_steps))

    def drain(self, history: History, advance: Callable[[int], None]) -> None:
        """Book the slices still queued; what they say of errors is of the one before."""
        while self._queued:
            if (replies := self.next_slice()) is not None:
                advance(history.add(replies))

    def first_cause(self, told: dict[int, dict[str, Any]]) -> WorkbenchError:
        """One error for what the ranks raised in a slice: the first cause, with its ranks."""
        causes = {rank: error for rank, error in told.items() if error["name"] != "WorldLostError"}
        chosen = causes or told
        first = min(chosen)
        same = [
            r
            for r, e in chosen.items()
            if (e["name"], e["text"]) == (chosen[first]["name"], chosen[first]["text"])
        ]
        name, text = chosen[first]["name"], chosen[first]["text"]
        known = name in kinds.all_errors()
        where = (
            f"{named(same).capitalize()}: "
            if len(same) < self.engines.num_ranks or not known
            else ""
        )
        error = kinds.rebuilt(name, text) if known else kinds.RankError(f"{where}{name}: {text}")
        if known and where:
            error = type(error)(f"{where}{text}")
        for line in chosen[first]["lines"]:
            error.add_note(f"  {line}")
        return error

    def agree(self, positions: list[int], *, sharded: bool) -> None:
        """Make ranks that stopped a step apart stand at the same step, the later one."""
        if sharded:
            raise RunError(
                f"The ranks stopped at steps {min(positions)} and {max(positions)}, and a sharded "
                "state is whole at one step only. %dist_restore goes back to a checkpoint."
            )
        self.engines.call("adopt", positions.index(max(positions)))


def _answers(futures: list[Future], freed_s: float) -> list[dict[str, Any]]:
    """Results of all; once one has failed the rest must follow within `freed_s`."""
    limit_s: float | None = None
    failure: BaseException | None = None
    pending = set(futures)
    while pending:
        done = [future for future in pending if future.done()]
        if not done:
            _wait_any(pending, limit_s)
            if limit_s is not None and time.monotonic() > limit_s:
                missing = [rank for rank, future in enumerate(futures) if future in pending]
                raise RunError(
                    f"{named(missing).capitalize()} did not answer. %dist_stop ends the ranks."
                )
            continue
        pending -= set(done)
        for future in done:
            error = future.exception()
            if error is not None:
                failure = failure or error
            if (error is not None or future.result()["error"]) and limit_s is None:
                limit_s = time.monotonic() + freed_s
    if failure is not None:
        raise failure if isinstance(failure, WorkbenchError) else EnginesError(str(failure))
    return [future.result() for future in futures]


def _wait_any(futures: set[Future], limit_s: float | None) -> None:
    left_s = None if limit_s is None else max(0.0, limit_s - time.monotonic()) + 0.001
    wait(futures, left_s, return_when=FIRST_COMPLETED)
