"""Engines: the live ranks of one cluster, one order of submits, rank = position in the list."""

from __future__ import annotations

import shutil
import signal
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench import errors
from workbench.driver import card, current
from workbench.driver import session as sessions
from workbench.driver.cast import Cast
from workbench.driver.cells import CellResult, run_cell
from workbench.driver.echo import Echo, named
from workbench.driver.gauges import Gauged
from workbench.driver.guard import Guard
from workbench.driver.launchers import Launched, local
from workbench.driver.mail import then
from workbench.driver.member import Member
from workbench.driver.needed import MOST_CELLS
from workbench.driver.roster import Roster
from workbench.driver.session import LEASE_S, Session
from workbench.driver.share import Share
from workbench.errors import (
    EnginesError,
    InputError,
    StartError,
    TrainingLostError,
    WorkbenchError,
    WorldLostError,
)
from workbench.spec import policies
from workbench.spec.placement import Place, check_number, check_spares, num_cores, place
from workbench.spec.timeouts import Timeouts

if TYPE_CHECKING:
    from workbench.driver.run import Run

# Ending takes a tenth of a second; a fork server that takes longer is not asked again.
STOP_S = 5.0


class Engines(Cast):
    """The ranks of a running cluster; made by `start`, or from known processes by `attach`.

    Every call goes to the ranks in one order, which is what keeps their collectives in step.
    """

    def __init__(
        self,
        launched: Launched,
        places: Sequence[Place],
        timeouts: Timeouts,
        num_spares: int = 0,
        known: Sequence[Member] = (),
    ) -> None:
        self.directory = launched.directory
        self.processes = launched.processes
        self.timeouts = timeouts
        self.echo = Echo(f"ipc://{launched.directory}/echo.sock")
        self.run: Run | None = None
        # What a training does about faults unless it is told otherwise.
        self.policies = dict(policies.DEFAULTS)
        self.attempt = 0
        self._lock = threading.Lock()
        self._gauges = Gauged()
        # Numbers and texts of cells that ran on all ranks: a process that takes a lost one's place
        # may need what they define.
        self.cells: deque[tuple[int, str]] = deque(maxlen=MOST_CELLS)
        self._stopped = False
        # What is said to whoever asks for them once they are stopped, or another kernel's.
        self.over = "The engines were stopped. %dist_start starts new ones."
        self.share: Share | None = None
        self.guard: Guard | None = None
        self.roster = Roster(launched, places, num_spares, self._lost, known)
        self.roster.taken_over = self._taken_over

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, those that are gone among them."""
        return len(self.roster.members)

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """What each rank's process said of itself when it came, by rank."""
        return [{**member.info, "rank": rank} for rank, member in enumerate(self.roster.members)]

    def meet(self, connection_file: Path) -> None:
        """Connect, wait for exactly what was asked for, and have the ranks finish a collective.

        Raises StartError that says which rank did not come, why, and where its log is.
        """
        self.introduce(self.roster.connect(connection_file, self.timeouts.total_s), meets=True)

    def submit(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> list[Future]:
        """Queue a function of the engine side on ranks; one future each, in rank order.

        A future raises the error of its rank as its own class. Raises EnginesError when the
        engines were stopped or one of the ranks is gone.
        """
        with self._lock:
            if self._stopped:
                raise EnginesError(self.over)
            chosen = range(self.num_ranks) if ranks is None else list(ranks)
            members = [self.roster.members[rank] for rank in chosen]
            for rank, member in zip(chosen, members, strict=True):
                if member.gone:
                    raise EnginesError(self._says_gone(member))
                if doing := member.is_stuck():
                    raise EnginesError(
                        f"Rank {rank} does not answer: {doing}. %dist_stop ends the ranks."
                    )
            return self._post(members, name, args)

    def mark_stuck(self, waiting: dict[int, Future], doing: str) -> None:
        """These ranks do not answer; until they do, nothing more is queued behind them."""
        for rank, future in waiting.items():
            self.roster.members[rank].mark_stuck(future, doing)

    def _post(self, members: Sequence[Member], name: str, args: tuple) -> list[Future]:
        assert self.roster.mail is not None
        futures = [member.ask() for member in members]
        asked = self.roster.mail.post([member.id for member in members], name, args)
        for member, future, reply in zip(members, futures, asked, strict=True):
            then(reply, partial(self._answered, member, future))
        return futures

    def _answered(self, member: Member, future: Future, reply: Any) -> None:
        if isinstance(reply, BaseException):
            reply = EnginesError(f"{self._who(member)}: {reply}")
        elif "error" in reply:
            reply = _raised(reply["error"])
        else:
            reply = reply["value"]
        member.answered(future, reply)

    def _who(self, member: Member) -> str:
        members = self.roster.members
        return f"Rank {members.index(member)}" if member in members else "A spare"

    def call(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Run a function of the engine side on ranks; the results in rank order.

        Raises the first cause of what the ranks raised, with the ranks in a note.
        """
        chosen = range(self.num_ranks) if ranks is None else list(ranks)
        return self._gathered(self.submit(name, *args, ranks=chosen), chosen)

    def _gathered(self, futures: Sequence[Future], ranks: Iterable[int]) -> list[Any]:
        raised: dict[str, tuple[BaseException, list[int]]] = {}
        results = []
        for rank, future in zip(ranks, futures, strict=True):
            error = future.exception()
            if error is None:
                results.append(future.result())
            else:
                raised.setdefault(f"{type(error).__name__}: {error}", (error, []))[1].append(rank)
        if not raised:
            return results
        # That a peer went away is never the first cause.
        error, at = min(raised.values(), key=lambda item: isinstance(item[0], WorldLostError))
        if len(at) < self.num_ranks and not isinstance(error, InputError):
            error.add_note(f"  on {named(at)}")
        raise error

    def together(self, name: str, *args: Any) -> list[Any]:
        """`call` on all ranks for what they do in collectives, which one may leave by raising.

        The process group is then made anew; what failed only because it was broken before is
        done again.
        """
        try:
            return self.call(name, *args)
        except WorkbenchError as error:
            is_mended = self._mend()
            if not (is_mended and isinstance(error, WorldLostError)):
                raise
        try:
            return self.call(name, *args)
        except WorldLostError as error:
            self._mend()
            raise EnginesError(
                f"The process group broke off twice in {name}. %dist_stop, then %dist_start "
                "brings new ranks."
            ) from error

    def _mend(self) -> bool:
        if not self.alive or not any(self.call("is_broken")):
            return False
        self.rejoin()
        return True

    def rejoin(self) -> None:
        """Have all ranks meet again in a new world, keeping a training's state.

        Raises TrainingLostError when a rank could not keep it; the ranks have met all the same.
        """
        told = self.call("join", self.next_meeting())
        if lost := [rank for rank, why in enumerate(told) if why]:
            raise TrainingLostError(
                f"{named(lost).capitalize()} could not keep the training when the ranks met again "
                f"({told[lost[0]]}). Begin it anew from a checkpoint: %dist_train with --restore."
            )

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """SIGINT to the processes of ranks: ends a cell, not the engine."""
        self.processes.signal(self._keys(ranks), signal.SIGINT)

    def free(self, ranks: Iterable[int] | None = None) -> None:
        """Make collectives that wait for a peer raise; the world must be rejoined after."""
        self.processes.signal(self._keys(ranks), signal.SIGUSR1)

    def _keys(self, ranks: Iterable[int] | None) -> list[int]:
        members = self.roster.members
        chosen = members if ranks is None else [members[rank] for rank in ranks]
        return [member.key for member in chosen if not member.gone]

    def run_cell(
        self, source: str, *, ranks: Iterable[int] | None = None, **how: Any
    ) -> CellResult:
        """Run a cell's text on ranks and show its output; see driver/cells.py."""
        return run_cell(self, source, ranks=ranks, **how)

    def train(self, recipe: str | None = None, **how: Any) -> Run:
        """Start a training; see driver/training.py for what it takes."""
        from workbench.driver.training import train

        return train(self, recipe, **how)

    @property
    def alive(self) -> bool:
        """Whether the cluster is up with all its ranks."""
        return not self._stopped and not self.roster.gone()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def status(self) -> list[dict[str, Any]]:
        """One dict a rank: rank, pid, device, threads, host, log, state."""
        return [
            {
                **row,
                "device": member.place.device if member.place else "",
                "state": member.gone or "alive",
            }
            for row, member in zip(self.ranks, self.roster.members, strict=True)
        ]

    def gauges(self) -> list[dict[str, Any]]:
        """By rank what its process and GPU use, see gauges.py; read once a second at most."""
        return self._gauges.of(self.status())

    def stop(self) -> None:
        """End engines and controller and remove what they left; again does nothing."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = self.roster.is_over = True
        if self.guard is not None:
            self.guard.close()
        if self.share is not None:
            self.share.close()
        if self.run is not None:
            self.run.end()
        ended = self.processes.end()
        for member in self.roster.everyone:
            member.refuse(EnginesError("The engines were stopped."))
        self.echo.stop()
        try:
            ended.result(STOP_S)
        except (TimeoutError, EnginesError):
            self.processes.kill()  # the fork server does not answer
        if self.roster.mail is not None:
            self.roster.mail.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def open(self) -> None:
        """Let other notebooks watch, and take over."""
        self.share = Share(self)
        self.guard = Guard(self)

    def part(self, why: str) -> None:
        """Let go of ranks that live on; why: what is said to whoever asks for them here."""
        self.over = why
        with self._lock:
            self._stopped = self.roster.is_over = True
        if self.guard is not None:
            self.guard.close()
        if self.share is not None:
            self.share.shut()
        if self.run is not None:
            self.run.end(why)
        for member in self.roster.everyone:
            member.refuse(EnginesError(why))
        self.echo.stop()
        if self.roster.mail is not None:
            self.roster.mail.close()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "alive"
        if (gone := self.roster.gone()) and not self._stopped:
            state = f"{named(gone)} gone"
        return f"<Engines: {self.num_ranks} on {self.status()[0]['device'].split()[0]}, {state}>"

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _raised(told: dict[str, Any]) -> errors.WorkbenchError:
    error = errors.rebuilt(told["name"], told["text"])
    for line in told.get("lines", ()):
        error.add_note(f"  {line}")
    return error


def start(  # noqa: PLR0913 - keyword-only
    n: int | None = None,
    *,
    timeout: float = 60.0,
    lease: float | None = LEASE_S,
    cpu: bool = False,
    spares: int = 0,
    curve: bool = True,
    session: Session | None = None,
) -> Engines:
    """Start n ranks and return when a collective has run on all of them.

    n: default one a device, or one a core (at most 4). timeout: seconds, from which every other
    limit follows. lease: seconds the engines outlive this process, None for ever. cpu: leave
    accelerators alone. spares: processes kept warm to take the place of a rank that is lost.
    curve: encrypt messages (curve.py); False: sign them alone.

    Raises InputError or StartError; nothing is left running then.
    """
    timeouts = Timeouts(timeout)
    if lease is not None and (not isinstance(lease, (int, float)) or not lease > 0):
        raise InputError(f"lease={lease!r}: use seconds > 0.")
    if n is not None:
        check_number(n)  # before anything is waited for
    held = session or sessions.current()
    places = place(n, held.devices(), num_cores(), use_cpu=cpu)
    check_spares(spares)
    how = {"lease_s": lease or local.FOREVER_S, "num_spares": spares, "curve": curve}
    try:
        launched = local.launch(held, places, timeout_s=timeouts.total_s, **how)
    except StartError:
        # Twice in some thousand starts on a very busy machine the controller ended at once, and
        # said nothing of why. What is really wrong is wrong the second time, too.
        launched = local.launch(held, places, timeout_s=timeouts.total_s, **how)
    engines = Engines(launched, places, timeouts, spares)
    try:
        engines.meet(launched.connection_file)
    except BaseException as error:
        kept = _kept_logs(launched) if isinstance(error, StartError) else None
        engines.stop()
        if kept is not None and isinstance(error, StartError):
            raise StartError(str(error).replace(str(launched.directory), str(kept))) from None
        raise
    card.write(launched.directory, places, spares, timeouts.total_s)
    engines.open()
    current.remember(engines)
    return engines


def _kept_logs(launched: Launched) -> Path:
    """Copy the logs of a start that failed to where they stay until the session ends."""
    kept = launched.directory.with_name(launched.directory.name + "-failed")
    kept.mkdir(mode=0o700)
    for log in launched.directory.glob("*.log"):
        shutil.copy(log, kept)
    return kept
