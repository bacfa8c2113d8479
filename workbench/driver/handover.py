"""Hand over: a kernel that lives lets another one control its ranks, between two steps."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from workbench.driver import card, current, session
from workbench.errors import EnginesError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

# How long what runs on the ranks may take to end before the other kernel is told to try again.
WAIT_S, POLL_S = 15.0, 0.02


def hand_over(engines: Engines, kernel: tuple[int, float], who: str) -> None:
    """Let go of the ranks after the slice under way; their training goes on with `kernel`.

    kernel: pid and start time of the one that takes them. who: how the user knows it.

    Raises EnginesError, and nothing has changed, while a cell or long steps run on the ranks.
    """
    run = engines.run if engines.run is not None and engines.run.state != "gone" else None
    name = run.name if run is not None else engines.directory.name
    at = time.strftime("%H:%M")
    why = (
        f"{name} was taken over by {who} at {at}: %dist_attach watches it, "
        "%dist_attach --take-over takes it back."
    )
    with _nothing_under_way(engines):
        found = card.read(engines.directory)
        if engines.stopped or found is None:
            raise EnginesError(engines.over)
        if engines.share is not None:
            engines.share.shut()  # what is seen from now on is the other kernel's to tell
        if run is not None:
            run.saving.finish(engines.timeouts.total_s)
            # What is to be known is that it runs, not that it is over here.
            run.diary.close(run)
            run.testament.close()
            run.happened("handed_over", who=who, step=run.step_now)
            run.set_state("gone", why)
        # Before the ranks are free, so that no third one takes them.
        dataclasses.replace(found, kernel=kernel).write(engines.directory)
    engines.part(why)
    current.forget(why)
    _leave(engines)


@contextlib.contextmanager
def _nothing_under_way(engines: Engines) -> Iterator[None]:
    """No step, and no cell, runs on the ranks. Raises EnginesError when one does not end."""
    end_s = time.monotonic() + WAIT_S
    begun: Future = Future()
    over = threading.Event()
    run = engines.run
    try:
        if run is not None:
            asked = run.ask("hold", begun=begun, over=over)
            if not wait({begun, asked}, WAIT_S, FIRST_COMPLETED).done:
                raise _busy()
        while engines.echo.watches:
            if time.monotonic() > end_s:
                raise _busy()
            time.sleep(POLL_S)
        yield
    finally:
        over.set()


def _busy() -> EnginesError:
    return EnginesError(
        f"A cell or a step that runs on the ranks did not end within {WAIT_S:g} s. "
        "%dist_attach --take-over tries again."
    )


def _leave(engines: Engines) -> None:
    """Let go of the fork server, unless other engines of this kernel are its children."""
    forks = engines.processes.forks  # type: ignore[attr-defined]
    if any(one.processes.forks is forks for one in current.all_engines()):  # type: ignore[attr-defined]
        return
    for held in session.held_by(forks):
        session.drop(held)
