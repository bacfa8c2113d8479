"""Engines: the live ranks of one cluster, one order of submits, rank = position in the list."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench import errors
from workbench.driver import current
from workbench.driver import session as sessions
from workbench.driver.cells import CellResult, run_cell
from workbench.driver.echo import Echo, named
from workbench.driver.gauges import Gauges
from workbench.driver.launchers import Launched, local
from workbench.driver.mail import Mail, then
from workbench.driver.session import LEASE_S, Session
from workbench.errors import (
    EnginesError,
    InputError,
    StartError,
    TrainingLostError,
    WorkbenchError,
    WorldLostError,
)
from workbench.spec.placement import Place, check_number, place
from workbench.spec.timeouts import Timeouts

if TYPE_CHECKING:
    from workbench.driver.run import Run

# Ending takes a tenth of a second; a fork server that takes longer is not asked again.
GAUGE_S = 1.0
STOP_S = 5.0


class Engines:
    """The ranks of a running cluster; made by `start`.

    Every call goes to the ranks in one order, which is what keeps their collectives in step.
    """

    def __init__(self, launched: Launched, places: Sequence[Place], timeouts: Timeouts) -> None:
        self.directory = launched.directory
        self.processes = launched.processes
        self.timeouts = timeouts
        self.places = places
        self.num_ranks = len(places)
        self.ranks: list[dict[str, Any]] = []
        self.echo = Echo(f"ipc://{launched.directory}/echo.sock")
        self.run: Run | None = None
        self._attempt = 0
        self._lock = threading.Lock()
        self._gauge_lock = threading.Lock()
        self._gauges: Gauges | None = None
        self._gauged: list[dict[str, Any]] = []
        self._gauged_s = -GAUGE_S
        self._pending: dict[int, set[Future]] = {rank: set() for rank in range(self.num_ranks)}
        self._gone: dict[int, str] = {}
        self._stuck: dict[int, tuple[Future, str]] = {}
        self._stopped = False
        self._mail: Mail | None = None
        self._ids: list[int] = []
        for rank in range(self.num_ranks):
            self.processes.on_exit(rank, lambda code, rank=rank: self._lost(rank, code))
        self.processes.on_controller_exit(self._lost_controller)

    def meet(self, connection_file: Path) -> None:
        """Connect, wait for exactly the ranks asked for, and have them finish a collective.

        Raises StartError that says which rank did not come, why, and where its log is.
        """
        deadline_s = time.monotonic() + self.timeouts.total_s
        self._mail = Mail(connection_file, self.timeouts.total_s)
        while len(self._mail.engines()) < self.num_ranks:
            if self._gone or time.monotonic() > deadline_s:
                raise StartError(self._missing())
            time.sleep(0.002)
        self._ids = self._mail.engines()
        logs = [str(self.processes.log(rank)) for rank in range(self.num_ranks)]
        everyone = range(self.num_ranks)
        args = (self.echo.address, logs, self._meeting())
        arrived = self._gathered(self._post(everyone, "arrive", args), everyone)
        # A rank is what its process was told to be, whatever id the hub gave the engine.
        order = sorted(everyone, key=lambda index: arrived[index]["rank"])
        self._ids = [self._ids[index] for index in order]
        self.ranks = [arrived[index] for index in order]

    def _missing(self) -> str:
        assert self._mail is not None
        # Those that ended are the cause; the others may be on their way.
        missing = sorted(self._gone or set(range(self.num_ranks)) - set(self._mail.engines()))
        first = missing[0]
        why = self._gone.get(first, f"not registered after {self.timeouts.total_s:g} s")
        who = f"{named(missing).capitalize()} of {self.num_ranks} did not come: {why}. "
        return who + local.tail(self.processes.log(first))

    def _meeting(self) -> dict[str, Any]:
        return {
            "size": self.num_ranks,
            "attempt": self._attempt,
            "store_path": str(self.directory / "store"),
            "timeout_s": self.timeouts.total_s,
            "rendezvous_s": self.timeouts.rendezvous_s,
        }

    def _lost(self, rank: int, code: int, how: str = "") -> None:
        """The process of a rank is gone: what waits for it will not be answered."""
        if self._stopped:
            return
        self._gone[rank] = how + local.exit_reason(code)
        for future in list(self._pending[rank]):
            with contextlib.suppress(InvalidStateError):  # it may just have been answered
                future.set_exception(EnginesError(self._says_gone(rank)))
        if self.run is not None:
            self.run.look()

    def _lost_controller(self, code: int) -> None:
        """Without the controller no message reaches a rank: all are lost to this kernel."""
        for rank in range(self.num_ranks):
            if rank not in self._gone:
                self._lost(rank, code, "out of reach: the controller was ")

    def _says_gone(self, rank: int) -> str:
        why = f"Rank {rank} is gone ({self._gone[rank]}). "
        return why + "%dist_stop, then %dist_start brings all ranks back."

    def submit(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> list[Future]:
        """Queue a function of the engine side on ranks; one future each, in rank order.

        A future raises the error of its rank as its own class. Raises EnginesError when the
        engines were stopped or one of the ranks is gone.
        """
        chosen = range(self.num_ranks) if ranks is None else list(ranks)
        with self._lock:
            if self._stopped:
                raise EnginesError("The engines were stopped. %dist_start starts new ones.")
            for rank in chosen:
                if rank in self._gone:
                    raise EnginesError(self._says_gone(rank))
                if rank in self._stuck:
                    self._check_stuck(rank)
            return self._post(chosen, name, args)

    def mark_stuck(self, waiting: dict[int, Future], doing: str) -> None:
        """These ranks do not answer; until they do, nothing more is queued behind them."""
        for rank, future in waiting.items():
            self._stuck[rank] = future, doing

    def _check_stuck(self, rank: int) -> None:
        future, doing = self._stuck[rank]
        if not future.done():
            raise EnginesError(f"Rank {rank} does not answer: {doing}. %dist_stop ends the ranks.")
        del self._stuck[rank]

    def _post(self, ranks: Sequence[int], name: str, args: tuple) -> list[Future]:
        assert self._mail is not None
        futures: list[Future] = []
        asked = self._mail.post([self._ids[rank] for rank in ranks], name, args)
        for rank, reply in zip(ranks, asked, strict=True):
            future: Future = Future()
            self._pending[rank].add(future)
            futures.append(future)
            then(reply, partial(self._answered, rank, future))
        return futures

    def _answered(self, rank: int, future: Future, reply: Any) -> None:
        self._pending[rank].discard(future)
        with contextlib.suppress(InvalidStateError):  # the rank's exit may have been told before
            if isinstance(reply, BaseException):
                future.set_exception(EnginesError(f"Rank {rank}: {reply}"))
            elif "error" in reply:
                future.set_exception(_raised(reply["error"]))
            else:
                future.set_result(reply["value"])

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
        if len(at) < self.num_ranks:
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
        self._attempt += 1
        told = self.call("join", self._meeting())
        if lost := [rank for rank, why in enumerate(told) if why]:
            raise TrainingLostError(
                f"{named(lost).capitalize()} could not keep the training when the ranks met again "
                f"({told[lost[0]]}). Begin it anew from a checkpoint: %dist_train with --restore."
            )

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """SIGINT to the processes of ranks: ends a cell, not the engine."""
        self.processes.signal(self._alive(ranks), signal.SIGINT)

    def free(self, ranks: Iterable[int] | None = None) -> None:
        """Make collectives that wait for a peer raise; the world must be rejoined after."""
        self.processes.signal(self._alive(ranks), signal.SIGUSR1)

    def _alive(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = range(self.num_ranks) if ranks is None else ranks
        return [rank for rank in chosen if rank not in self._gone]

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
        return not self._stopped and not self._gone

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def status(self) -> list[dict[str, Any]]:
        """One dict a rank: rank, pid, device, threads, host, log, state."""
        return [
            {
                **info,
                "device": self.places[info["rank"]].device,
                "state": self._gone.get(info["rank"], "alive"),
            }
            for info in self.ranks
        ]

    def gauges(self) -> list[dict[str, Any]]:
        """By rank what its process and GPU use, see gauges.py; read once a second at most."""
        now_s = time.monotonic()
        with self._gauge_lock:
            if self._gauges is None:
                devices = [self.places[info["rank"]].device for info in self.ranks]
                self._gauges = Gauges([info["pid"] for info in self.ranks], devices)
            if now_s - self._gauged_s >= GAUGE_S:
                self._gauged, self._gauged_s = self._gauges.read(), now_s
            return self._gauged

    def stop(self) -> None:
        """End engines and controller and remove what they left; again does nothing."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        if self.run is not None:
            self.run.end()
        ended = self.processes.end()
        for futures in self._pending.values():
            for future in list(futures):
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(EnginesError("The engines were stopped."))
        self.echo.stop()
        try:
            ended.result(STOP_S)
        except (TimeoutError, EnginesError):
            self.processes.kill()  # the fork server does not answer
        if self._mail is not None:
            self._mail.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "alive"
        if self._gone and not self._stopped:
            state = f"{named(self._gone)} gone"
        return f"<Engines: {self.num_ranks} on {self.places[0].device.split()[0]}, {state}>"

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _raised(told: dict[str, Any]) -> errors.WorkbenchError:
    error = errors.rebuilt(told["name"], told["text"])
    for line in told.get("lines", ()):
        error.add_note(f"  {line}")
    return error


def start(
    n: int | None = None,
    *,
    timeout: float = 60.0,
    lease: float | None = LEASE_S,
    cpu: bool = False,
    session: Session | None = None,
) -> Engines:
    """Start n ranks and return when a collective has run on all of them.

    n: default one a device, or one a core (at most 4). timeout: seconds, from which every other
    limit follows. lease: seconds the engines outlive this process, None for ever. cpu: leave
    accelerators alone.

    Raises InputError or StartError; nothing is left running then.
    """
    timeouts = Timeouts(timeout)
    if lease is not None and not lease > 0:
        raise InputError(f"lease={lease!r}: use seconds > 0.")
    if n is not None:
        check_number(n)  # before anything is waited for
    held = session or sessions.current()
    places = place(n, held.devices(), num_cores(), use_cpu=cpu)
    lease_s = 10.0**9 if lease is None else lease
    launched = local.launch(held, places, timeout_s=timeouts.total_s, lease_s=lease_s)
    engines = Engines(launched, places, timeouts)
    try:
        engines.meet(launched.connection_file)
    except BaseException as error:
        kept = _kept_logs(launched) if isinstance(error, StartError) else None
        engines.stop()
        if kept is not None and isinstance(error, StartError):
            raise StartError(str(error).replace(str(launched.directory), str(kept))) from None
        raise
    current.remember(engines)
    return engines


def _kept_logs(launched: Launched) -> Path:
    """Copy the logs of a start that failed to where they stay until the session ends."""
    kept = launched.directory.with_name(launched.directory.name + "-failed")
    kept.mkdir(mode=0o700)
    for log in launched.directory.glob("*.log"):
        shutil.copy(log, kept)
    return kept


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
