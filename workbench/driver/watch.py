"""Watch: a thread of the kernel that sees within seconds when ranks of a run stand still.

It looks ten times a second at files that the ranks write anyway, so watching costs them nothing.
What is to be done about it is the user's to say: wait, which tells and leaves it there; interrupt,
which breaks the step off; replace, which kills the process so that another takes its place.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.driver import stacks, stall
from workbench.driver.echo import named
from workbench.driver.pulses import Pulses, Seen, step_s
from workbench.driver.stall import BUSY, DEADLOCK, STOPPED, Stall
from workbench.errors import EnginesError, WorkbenchError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines
    from workbench.driver.run import Run

PERIOD_S = 0.1
# What waits in a collective hears of an interrupt only once that is broken off.
FREE_S, POLL_S = 0.5, 0.01
NOBODY = 0  # no process has this pid
WAIT, INTERRUPT, REPLACE = "wait", "interrupt", "replace"


class Watch:
    """Of one run; `start` begins, and it ends with the run.

    policy: of spec.policies.ON_STALL; it may be set to another at any time.
    """

    def __init__(self, run: Run, policy: str = WAIT) -> None:
        self.run = run
        self.policy = policy
        self.pulses = Pulses(run.engines, PERIOD_S)
        self._told: Stall | None = None
        self._pids: list[int] = []
        self._acted = False
        self._thread = threading.Thread(target=self._live, name="watch", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def forget(self) -> None:
        """What stands still is ended by force: it does not go on by itself."""
        self._pids = [NOBODY]

    def _live(self) -> None:
        while self.run.state != "gone" and not self.run.engines.stopped:
            began_s = time.monotonic()
            # The cluster may end at any moment, and with it its files and the way to it.
            with contextlib.suppress(WorkbenchError, OSError):
                self._look()
            time.sleep(max(0.0, PERIOD_S - (time.monotonic() - began_s)))

    def _look(self) -> None:
        chosen = set(self.run.feeder.ranks)
        seen = {rank: one for rank, one in self.pulses.look().items() if rank in chosen}
        found = stall.judge(seen, _limit_s(self.run.engines, seen)) if seen else None
        if found is not None and found.kind != STOPPED and not self._is_asked():
            found = None  # a cell of the user's, which tells for itself
        told = self._told
        if found is None or told is None or (found.kind, found.ranks) != (told.kind, told.ranks):
            self._over(seen)
            self._told, self._acted = found, False
            if found is not None:
                self._pids = [seen[rank].beat.pid for rank in found.ranks]
                self._tell(found, seen)
        else:
            self._told = found
        if found is not None and not self._acted and self._is_due(found):
            self._acted = True
            self._act(found)

    def _is_asked(self) -> bool:
        """Whether the run has asked something of its ranks."""
        return bool(self.run.feeder.in_flight or self.run.pending)

    def _over(self, seen: Mapping[int, Seen]) -> None:
        """What was told of is over where the ranks are there still."""
        told = self._told
        if told is None or [seen[r].beat.pid for r in told.ranks if r in seen] != self._pids:
            return
        who = named(told.ranks)
        self.run.happened(
            "moves_again", who=who.capitalize(), ranks=_numbers(who), for_s=f"{told.for_s:.1f}"
        )

    def _tell(self, found: Stall, seen: Mapping[int, Seen]) -> None:
        taken = {}
        if found.kind != STOPPED:
            taken = stacks.take(self.run.engines, [*found.ranks, *found.waiting])
        who = named(found.ranks)
        values = {"who": who.capitalize(), "ranks": _numbers(who), "for_s": f"{found.for_s:.1f}"}
        if found.kind == DEADLOCK:
            self.run.happened("deadlock", standing=stall.standing(taken, seen), **values)
            return
        if found.kind == BUSY:
            place = stall.places({rank: taken[rank] for rank in found.ranks})
            if any(seen[rank].is_silent for rank in found.ranks):
                place = f"{place or 'in a call'}, which holds the interpreter's lock"
            values |= {"phase": found.phase, "place": f" ({place})" if place else ""}
        first = found.ranks[0]
        if found.waiting:
            values["waiting"] = stall.held_up(found.waiting, seen)
        name = f"{found.kind}_awaited" if found.waiting else found.kind
        self.run.happened(name, rank=first, **values)

    def _is_due(self, found: Stall) -> bool:
        """Whether the policy is to act now: at once on a process that is stopped.

        Nobody can tell an endless loop from an honest computation. So what computes gets half
        the time for which a rank may keep the others waiting, while their collectives still wait.
        """
        policy = self.policy
        if policy == WAIT or (policy == INTERRUPT and found.kind == STOPPED):
            return False
        limit_s = self.run.engines.timeouts.stalled_s
        return found.kind == STOPPED or found.for_s > limit_s

    def _act(self, found: Stall) -> None:
        engines, policy = self.run.engines, self.policy
        self.forget()
        who = named(found.ranks)
        self.run.happened(
            "stall_ends", who=who.capitalize(), ranks=_numbers(who), policy=policy,
            for_s=f"{found.for_s:.1f}",
        )  # fmt: skip
        if policy == REPLACE and found.kind != DEADLOCK:
            for rank in found.ranks:
                fence(engines, rank)
        else:
            break_off(engines)


def outlast(run: Run, thread: threading.Thread, limit_s: float) -> None:
    """Wait until the run's thread has ended, but for ranks that stand still no longer."""
    engines, end_s = run.engines, time.monotonic() + limit_s
    pulses = Pulses(engines, PERIOD_S)
    while thread.is_alive() and time.monotonic() < end_s:
        thread.join(PERIOD_S)
        chosen = {rank: one for rank, one in pulses.look().items() if rank in run.feeder.ranks}
        if chosen and stall.judge(chosen, _limit_s(engines, chosen)) is not None:
            for member in engines.roster.members:
                member.refuse(EnginesError("The training was ended while a rank stood still."))


def _limit_s(engines: Engines, seen: Mapping[int, Seen]) -> float:
    """How long a rank may stand, by the steps before."""
    if all(one.still_s < stall.LEAST_S for one in seen.values()):
        return stall.LEAST_S  # nobody comes near it: spare the look at the steps
    first = next(iter(seen.values()))
    return stall.limit_s(step_s(engines, first.rank, first.beat.step))


def break_off(engines: Engines, ranks: list[int] | None = None) -> list[int]:
    """End the step or cell that ranks are in, all by default; their state stays -> those ranks.

    What computes is interrupted, what waits for others is freed; the process group is made anew by
    whoever gets their replies.
    """
    if ranks is not None:
        stacks.chosen(engines, ranks)
    pulses = Pulses(engines, PERIOD_S)
    seen = pulses.look()
    chosen = [
        rank for rank, one in seen.items()
        if (ranks is None or rank in ranks) and not one.is_idle
    ]  # fmt: skip
    if not chosen:
        return []
    if engines.run is not None:
        engines.run.watch.forget()
        engines.run.outages.is_broken_off = bool(engines.run.feeder.in_flight)
    waiting = [rank for rank in chosen if seen[rank].waits]
    engines.interrupt([rank for rank in chosen if rank not in waiting])
    end_s = time.monotonic() + (FREE_S if len(waiting) < len(chosen) else 0.0)
    # Those that compute raise, and free the others by it; unless they do not hear.
    while waiting and time.monotonic() < end_s:
        time.sleep(POLL_S)
        now = pulses.look()
        waiting = [rank for rank in waiting if rank in now and now[rank].waits]
    if waiting:
        engines.free(waiting)
    return chosen


def fence(engines: Engines, rank: int) -> int:
    """Kill the process of a rank, whatever it does, as if it had been lost -> its pid.

    Returns once it is gone. Raises EnginesError for a rank that was gone before, InputError for one
    that is not there.
    """
    stacks.chosen(engines, [rank])
    row = engines.status()[rank]
    if row["state"] != "alive":
        raise EnginesError(f"Rank {rank} is gone already ({row['state']}).")
    engines.end_process(engines.roster.members[rank])
    return row["pid"]


def _numbers(who: str) -> str:
    return who.partition(" ")[2]
