"""The engines and the run that commands without a handle mean: those started last, and alive.

A magic names neither; what was started from Python is found by it all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.driver import session
from workbench.driver.revive import revive
from workbench.errors import EnginesError, InputError, RunError
from workbench.spec.placement import check_number

if TYPE_CHECKING:
    from workbench.driver.engines import Engines
    from workbench.driver.run import Run
    from workbench.driver.watching import Watching

_started: list[Engines] = []
_watched: list[Watching] = []
# Why what this kernel controlled last is not there any more.
_parted: list[str] = []


def remember(engines: Engines) -> None:
    """Make these the engines that are meant, until they are stopped."""
    _started[:] = [*all_engines(), engines]
    _parted.clear()
    for one in _watched:
        if one.directory == engines.directory:
            one.became(engines)
    _watched[:] = watched()


def all_engines() -> list[Engines]:
    """All that were started in this process and not stopped, the newest last."""
    return [engines for engines in _started if not engines.stopped]


def watch(one: Watching) -> None:
    """Remember what this kernel watches."""
    _parted.clear()
    _watched[:] = [*watched(), one]


def watched() -> list[Watching]:
    """Trainings of other kernels that this one watches, the newest last."""
    return [one for one in _watched if not one.is_over]


def forget(why: str) -> None:
    """Another kernel controls now what this one controlled: that is said when it is meant."""
    _parted[:] = [why]


def engines() -> Engines:
    """The engines started last. Raises EnginesError when there are none."""
    found = all_engines()
    if not found:
        if (others := watched()) or _parted:
            raise EnginesError(others[-1].sentence() if others else _parted[-1])
        raise EnginesError(f"No engines are running. %dist_start -n 4 starts four.{left_over()}")
    return found[-1]


def why_none() -> str:
    """What there is to say where this kernel controls no engines, and that is no error."""
    if (others := watched()) or _parted:
        return others[-1].sentence() if others else _parted[-1]
    return f"No engines were running.{left_over()}"


def left_over() -> str:
    """A sentence on ranks of kernels that are gone, or nothing."""
    count = session.num_left_over()
    if not count:
        return ""
    what = (
        "process of a kernel that is gone waits"
        if count == 1
        else ("processes of kernels that are gone wait")
    )
    return (
        f" {count} {what} for the lease to end: %dist_attach takes over, %dist_stop --all ends "
        "them now."
    )


def run() -> Run:
    """Their training. Raises EnginesError or RunError when there is none."""
    found = engines().run
    if found is None:
        raise RunError("Nothing has been trained yet. %dist_train digits starts a training.")
    return found


def fitting(n: int | None) -> Engines | None:
    """The engines that are up, if they are what a start of n ranks would give; None without any.

    Ranks that are gone are brought back; engines where that cannot be are stopped. Raises
    InputError when another number is up.
    """
    if n is not None:
        check_number(n)
    found = all_engines()
    if not found:
        return None
    up = found[-1]
    if up.roster.gone() and up.can_enlist:
        revive(up)
        if up.run is not None and up.run.state != "gone":
            up.run.recover()
    if up.alive:
        if n in (None, up.num_ranks):
            return up
        raise InputError(
            f"{up.num_ranks} rank{'s are' if up.num_ranks > 1 else ' is'} running. "
            f"%dist_stop, then %dist_start -n {n} starts with {n}."
        )
    up.stop()
    return None
