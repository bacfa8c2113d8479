"""Recovery: what a run does when ranks raised in a slice, and when it cannot go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from workbench.driver import rescue, salvage
from workbench.driver.outages import Outage
from workbench.errors import EnginesError, TrainingLostError, WorkbenchError, WorldLostError

if TYPE_CHECKING:
    from workbench.driver.run import Run

LOST_EACH_OTHER = "the ranks lost each other"


def recover(
    run: Run, errors: dict[int, dict[str, Any]], replies: Sequence[dict[str, Any]] = ()
) -> NoReturn:
    """Bring all ranks back to the last step that all have finished, and raise what they raised.

    errors: by rank, what it told. replies: of the slice, with the steps that each has finished.
    """
    error = run.feeder.first_cause(errors, run.step_now)
    outage = Outage(LOST_EACH_OTHER, run.step_now, time.monotonic())
    run.outages.reunion, run.outages.are_apart = None, False

    def advance(num_steps: int) -> None:
        run.step_now += num_steps

    run.outages.leftover = salvage.leftover(run, replies)
    run.feeder.drain(run.history, run.layout, advance)
    outage.mark("free")
    try:
        run.engines.rejoin()
        outage.mark("met")
        first, last = level(run)
        if first == last:
            salvage.close_gap(run, last)
            run.step_now = last
        else:
            run.outages.are_apart = True
            error.add_note(
                f"  and then: The ranks stopped at steps {first} and {last}, and a state that is "
                "spread over ranks is whole at one step only. %dist_restore goes back to a "
                "checkpoint."
            )
        outage.step = run.step_now
        outage.mark("state")
        run.outages.reunion = outage
    except TrainingLostError as lost:
        raise lost from error
    except WorkbenchError as second:
        if not run.engines.alive:
            raise
        error.add_note(f"  and then: {second}")
    run.feeder.reset(run.step_now)
    raise error


def level(run: Run) -> tuple[int, int]:
    """Have ranks that have met again stand at the same step, the latest -> the first and the last.

    They differ where a state that is spread over ranks has to be put together anew.
    """
    positions = run.engines.call("position", ranks=run.feeder.ranks)
    last = max(positions)
    if min(positions) < last and run.layout.dp_replicate == run.layout.world_size:
        run.engines.call("adopt", positions.index(last))
        return last, last
    return min(positions), last


def goes_on(run: Run, error: BaseException) -> bool:
    """Whether a training simply goes on whose ranks lost each other: all are there, and have met.

    Where they stopped a step apart, what they together hold of one step is put together, or the
    last checkpoint is. Once at a step: by what they lose each other twice is what they do there.
    """
    outage, run.outages.reunion = run.outages.reunion, None
    was_asked, run.outages.is_broken_off = run.outages.is_broken_off, False
    if was_asked or outage is None or run.state != "running":
        return False
    if not isinstance(error, WorldLostError):
        return False
    if any(one.step == outage.step and not one.ranks for one in run.outages.all):
        return False
    run.marks.append({"step": outage.step, "label": "lost", "kind": "fault"})
    run.happened("reunited", step=outage.step, took_ms=round(1e3 * outage.took_s))
    if run.outages.are_apart:
        rescue.bring_back(run, LOST_EACH_OTHER)
    else:
        run.outages.take(outage)
    return True


def is_over(error: Exception, run: Run) -> TypeGuard[WorkbenchError]:
    """Whether a run ends with this error for ever: ranks are gone, or have lost their part."""
    if run.state == "waiting":
        return False
    is_of_ranks = isinstance(error, (EnginesError, WorldLostError)) and not run.engines.alive
    return is_of_ranks or isinstance(error, TrainingLostError)
