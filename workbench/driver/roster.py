"""Roster: the engine processes of one cluster: who has which rank, who is spare, who is gone."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from workbench.driver.echo import named
from workbench.driver.launchers import Launched, local
from workbench.driver.mail import Mail
from workbench.driver.member import Member
from workbench.errors import EnginesError, StartError
from workbench.spec.placement import Place

POLL_S = 0.002


class Roster:
    """Members by rank, and spares, which have none.

    lost: called, in any thread, with a member whose process is gone and the reason. known: those
    that another kernel has started, ranks in their order and then spares.
    """

    def __init__(
        self,
        launched: Launched,
        places: Sequence[Place],
        num_spares: int,
        lost: Callable[[Member, str], None],
        known: Sequence[Member] = (),
    ) -> None:
        self.processes = launched.processes
        self.mail: Mail | None = None
        if known:
            self.members = [member for member in known if member.place is not None]
            self.spares = [member for member in known if member.place is None]
        else:
            self.members = [Member(key, place) for key, place in enumerate(places)]
            self.spares = [Member(len(places) + n, None) for n in range(num_spares)]
        # What was asked for: places of all ranks, and how many spares there should be.
        self.places = list(places)
        self.num_spares = num_spares
        self.is_reachable = True
        self.is_over = False  # nobody is awaited any more
        # Those that register are told apart by who was there before: one group at a time.
        self.coming = threading.RLock()
        self._keys = itertools.count(1 + max(member.key for member in self.everyone))
        self._ids: set[int] = set()
        # Keys of all processes that were ever started.
        self._begun = {member.key for member in self.everyone}
        self._lost = lost
        self._timeout_s = 0.0
        # Called when another controller answers, with why the one before is gone.
        self.taken_over: Callable[[str, float], None] = lambda _how, _took_s: None
        for member in self.everyone:
            if not member.gone:
                self._watch(member)
        self.processes.on_controller_exit(self._lost_controller)

    @property
    def everyone(self) -> list[Member]:
        """All processes, those of ranks first."""
        return [*self.members, *self.spares]

    def gone(self) -> list[int]:
        """The ranks whose process is gone."""
        return [rank for rank, member in enumerate(self.members) if member.gone]

    def connect(self, connection_file: Path, timeout_s: float) -> list[Member]:
        """Wait until all have registered -> all, any of whom may have any of the ids they got.

        Raises StartError that says who did not come, why, and where its log is.
        """
        deadline_s = time.monotonic() + timeout_s
        self.mail, self._timeout_s = Mail(connection_file, timeout_s), timeout_s
        return self._registered(self.everyone, timeout_s, deadline_s)

    def rejoin(self, mail: Mail, ids: Sequence[int], timeout_s: float) -> None:
        """Go on with processes that have registered with these ids."""
        self.mail, self._ids, self._timeout_s = mail, set(ids), timeout_s

    def enlist(self, places: Sequence[Place | None], timeout_s: float) -> list[Member]:
        """Start fresh processes, for ranks or as spares, and wait as `connect` does."""
        deadline_s = time.monotonic() + timeout_s
        fresh = [Member(next(self._keys), place) for place in places]
        self._begun |= {one.key for one in fresh}
        started = [self.processes.start(one.key, one.place or self.places[0]) for one in fresh]
        for one, future in zip(fresh, started, strict=True):
            future.result(timeout_s)
            self._watch(one)
        try:
            return self._registered(fresh, timeout_s, deadline_s)
        except StartError:
            self.give_up(fresh)
            raise

    def give_up(self, members: Sequence[Member]) -> None:
        """End processes that nobody needs."""
        left = [one.key for one in members if not one.gone]
        self.processes.signal(left, signal.SIGKILL, waits=False)

    def fill(self, enlist: Callable[[list[Place]], list[Member]]) -> dict[int, str]:
        """Put spares, and where there are none fresh processes, in the places of lost ranks.

        enlist: has fresh processes come and be introduced. -> by rank, `spare` or `fresh`.
        """
        filled = {}
        gone = self.gone()
        if stopped := [spare.key for spare in self.stopped_spares()]:
            self.processes.signal(stopped, signal.SIGKILL, waits=False)
        spares = self.ready()
        fresh = enlist([self.places[rank] for rank in gone[len(spares) :]])
        for rank, member in zip(gone, [*spares, *fresh], strict=False):
            filled[rank] = "spare" if member in spares else "fresh"
            self._seat(rank, member)
        return filled

    def ready(self) -> list[Member]:
        """The spares that could take a place; one that is stopped is none."""
        stopped = self.stopped_spares()
        return [spare for spare in self.spares if not spare.gone and spare not in stopped]

    def num_ready(self) -> int:
        """How many spares there are."""
        return len(self.ready())

    def stopped_spares(self) -> list[Member]:
        """Spares that are held by SIGSTOP."""
        keys = self.processes.stopped(spare.key for spare in self.spares if not spare.gone)
        return [spare for spare in self.spares if spare.key in keys]

    def num_lacking(self) -> int:
        """How many spares there are too few."""
        return self.num_spares - self.num_ready()

    def grow(self, enlist: Callable[[list[Place]], list[Member]]) -> int:
        """Have as many ranks as were started, after it went on with fewer -> how many came."""
        places = self.places[len(self.members) :]
        fresh = enlist(places)
        for place, member in zip(places, fresh, strict=True):
            member.place = place
        self.members = [*self.members, *fresh]
        return len(fresh)

    def _seat(self, rank: int, member: Member) -> None:
        member.place = self.places[rank]
        self.spares = [spare for spare in self.spares if spare is not member and not spare.gone]
        self.members = [member if n == rank else old for n, old in enumerate(self.members)]

    def shrink(self) -> None:
        """Go on with the ranks that are left, which move up."""
        left = [member for member in self.members if not member.gone]
        for place, member in zip(self.places, left, strict=False):
            # The device stays: a process that has touched one cannot change to another.
            member.place = replace(member.place or place, rank=place.rank)
        self.members = left

    def _registered(
        self, awaited: list[Member], timeout_s: float, deadline_s: float
    ) -> list[Member]:
        assert self.mail is not None
        while len(ids := self._new_ids({one.key for one in awaited})) < len(awaited):
            if any(one.gone for one in awaited) or time.monotonic() > deadline_s:
                raise StartError(self._missing(awaited, set(ids), timeout_s))
            if self.is_over:
                raise EnginesError("The engines were stopped.")
            time.sleep(POLL_S)
        self._ids |= set(ids)
        for member, engine_id in zip(awaited, ids, strict=False):
            member.id = engine_id
        return awaited

    def _new_ids(self, keys: set[int]) -> list[int]:
        """Ids that have come, of processes with these keys.

        An engine asks for its key as its id, and gets another one where that is taken. A process
        that was given up may come late, and is none of these.
        """
        assert self.mail is not None
        new = set(self.mail.engines()) - self._ids
        own = sorted(new & keys)
        return own if len(own) == len(keys) else own + sorted(new - keys - self._begun)

    def _missing(self, awaited: list[Member], came: set[int], timeout_s: float) -> str:
        # Those that ended are the cause; the others may be on their way. An engine asks for its
        # key as its id.
        ended = [one for one in awaited if one.gone]
        missing = ended or [one for one in awaited if one.key not in came] or awaited
        first = missing[0]
        why = first.gone or f"not registered after {timeout_s:g} s"
        ranks = [self.members.index(one) for one in missing if one in self.members]
        who = f"{named(ranks).capitalize()} of {len(self.members)}" if ranks else "A new process"
        return f"{who} did not come: {why}. {local.tail(self.processes.log(first.key))}"

    def _watch(self, member: Member) -> None:
        self.processes.on_exit(member.key, partial(self._ended, member))

    def _ended(self, member: Member, code: int, how: str = "") -> None:
        if not member.gone:
            self._lost(member, how + local.exit_reason(code))

    def _lost_controller(self, code: int, comes_again: bool) -> None:
        if comes_again and self.mail is not None:
            mail = self.mail
            threading.Thread(target=self._follow, args=(mail, code), daemon=True).start()
        else:
            self._out_of_reach(code)

    def _follow(self, mail: Mail, code: int) -> None:
        """The fork server has started another controller: go on with it."""
        try:
            took_s = mail.controller_came_back(self._timeout_s)
        except EnginesError:
            self._out_of_reach(code)
            return
        if took_s is not None:  # else it was killed as well, of which another notice comes
            self.taken_over(local.exit_reason(code), took_s)

    def _out_of_reach(self, code: int) -> None:
        """Without a controller no message reaches a rank: all are lost to this kernel."""
        self.is_reachable = False
        for member in self.everyone:
            self._ended(member, code, "out of reach, controller: ")
        if self.mail is not None:
            self.mail.close()  # it would knock at the controller's ports for ever
