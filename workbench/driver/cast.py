"""Cast: who is who among the engine processes; how they come, take places, and are missed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver.echo import Echo
from workbench.driver.launchers import Processes
from workbench.driver.member import Member
from workbench.driver.roster import Roster
from workbench.errors import EnginesError, StartError
from workbench.spec import pulse
from workbench.spec.placement import Place
from workbench.spec.timeouts import Timeouts

if TYPE_CHECKING:
    from workbench.driver.run import Run

# A spare is made once the training goes on, of which nobody knows how long a step takes.
PATIENCE_S, POLL_S = 2.0, 0.01


class Cast:
    """The part of Engines that has processes come and go; see Engines for its calls."""

    directory: Path
    processes: Processes
    roster: Roster
    timeouts: Timeouts
    echo: Echo
    run: Run | None
    _lock: threading.Lock
    attempt: int
    _stopped: bool

    def _post(self, members: Sequence[Member], name: str, args: tuple) -> list[Future]:
        raise NotImplementedError

    def _gathered(self, futures: Sequence[Future], ranks: Sequence[int]) -> list[Any]:
        raise NotImplementedError

    @property
    def can_enlist(self) -> bool:
        """Whether new processes can be had, and reached."""
        return not self._stopped and self.roster.is_reachable and self.processes.can_start

    def ask(self, members: Sequence[Member], name: str, *args: Any) -> list[Future]:
        """`submit` to processes whatever rank they have, or none."""
        with self._lock:
            return self._post(members, name, args)

    def introduce(self, members: list[Member], *, meets: bool = False) -> None:
        """First words with processes that have just registered, any of whom may be any other.

        meets: whether those of ranks meet in a world at once.
        """
        logs = {member.key: str(self.processes.log(member.key)) for member in members}
        args = (self.echo.address, logs, self.meeting() if meets else None)
        told = self._gathered(self.ask(members, "arrive", *args), range(len(members)))
        # A process is what it was told to be, whatever id the hub gave the engine.
        ids = {info["key"]: member.id for member, info in zip(members, told, strict=True)}
        infos = {info["key"]: info for info in told}
        for member in members:
            member.id, member.info = ids[member.key], infos[member.key]

    def enlist(self, places: Sequence[Place | None]) -> list[Member]:
        """Fresh processes, for ranks with these places or as spares, that wait to be needed."""
        if not places:
            return []
        with self.roster.coming:
            fresh = self.roster.enlist(places, self.timeouts.total_s)
            try:
                self.introduce(fresh)
            except BaseException:
                self.roster.give_up(fresh)
                raise
        return fresh

    def meeting(self, *, rendezvous_s: float | None = None) -> dict[str, Any]:
        """What ranks must know to meet: who has which rank, and where."""
        members = self.roster.members
        return {
            "keys": [member.key for member in members],
            "environments": [member.place.environment for member in members if member.place],
            "attempt": self.attempt,
            "store_path": str(self.directory / "store"),
            "timeout_s": self.timeouts.total_s,
            "rendezvous_s": rendezvous_s or self.timeouts.rendezvous_s,
        }

    def next_meeting(self, *, rendezvous_s: float | None = None) -> dict[str, Any]:
        """The meeting of another attempt."""
        self.attempt += 1
        return self.meeting(rendezvous_s=rendezvous_s)

    def refill(
        self,
        introduced: Callable[[list[Member]], object],
        is_time: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have as many spares as were asked for, without waiting for them.

        introduced: called, in a thread, with those that have come. is_time: whether making them
        takes nothing from a recovery any more; waited for, but not long.
        """
        if self.roster.num_lacking() and self.can_enlist:

            def come() -> None:
                end_s = time.monotonic() + PATIENCE_S
                while not is_time() and time.monotonic() < end_s:
                    time.sleep(POLL_S)
                # It is only spares: the next loss is without them, and says so.
                with contextlib.suppress(EnginesError, StartError):
                    with self.roster.coming:
                        fresh = self.enlist([None] * self.roster.num_lacking())
                        self.roster.spares = [*self.roster.spares, *fresh]
                    introduced(fresh)

            threading.Thread(target=come, name="spares", daemon=True).start()

    def end_process(self, member: Member) -> None:
        """SIGKILL to one process; returns once it is gone."""
        self.processes.signal([member.key], signal.SIGKILL)
        member.ended.wait(self.timeouts.freed_s)

    def pulse_of(self, rank: int) -> pulse.Beat | None:
        """What the rank does right now."""
        info = self.roster.members[rank].info
        return pulse.read(pulse.path_of(info["log"])) if info.get("log") else None

    def _lost(self, member: Member, why: str) -> None:
        """A process is gone: what waits for it will not be answered."""
        if self._stopped:
            return
        left = [one.key for one in self.roster.members if one is not member and not one.gone]
        if member in self.roster.members and self.can_enlist and left:
            # Whatever they wait in for it. Before anyone knows, and makes them meet anew.
            with contextlib.suppress(EnginesError, StartError):
                self.processes.signal(left, signal.SIGUSR1, waits=False)
        member.lose(why)
        if member not in self.roster.members:
            member.refuse(EnginesError(f"A process that was spare is gone ({why})."))
            return
        member.refuse(EnginesError(self._says_gone(member)))
        if self.run is not None:
            self.run.look()

    def _taken_over(self, how: str, took_s: float) -> None:
        if self.run is not None:
            self.run.happened("controller_back", how=how, took_s=f"{took_s:.1f}")

    def _says_gone(self, member: Member) -> str:
        rank = self.roster.members.index(member)
        told = f"Rank {rank} is gone ({member.gone})"
        if not self.can_enlist:
            return f"{told}. %dist_stop, then %dist_start brings new ranks."
        run = self.run if self.run is not None and self.run.state != "gone" else None
        if run is not None and run.outages.policy == "wait" and self.roster.num_ready() == 0:
            return f"{told}. %dist_recover brings it back."
        when = " with the next cell" if run is None else ""
        return f"{told}; another process takes its place{when}."
