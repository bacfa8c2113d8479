"""Recovery: what a run does when ranks raised in a slice, and when it cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from workbench.driver import salvage
from workbench.errors import EnginesError, TrainingLostError, WorkbenchError, WorldLostError

if TYPE_CHECKING:
    from workbench.driver.run import Run


def recover(
    run: Run, errors: dict[int, dict[str, Any]], replies: Sequence[dict[str, Any]] = ()
) -> NoReturn:
    """Bring all ranks back to the last step that all have finished, and raise what they raised.

    errors: by rank, what it told. replies: of the slice, with the steps that each has finished.
    """
    error = run.feeder.first_cause(errors, run.step_now)

    def advance(num_steps: int) -> None:
        run.step_now += num_steps

    run.outages.leftover = salvage.leftover(run, replies)
    run.feeder.drain(run.history, run.layout, advance)
    try:
        run.engines.rejoin()
        positions = run.engines.call("position", ranks=run.feeder.ranks)
        if len(set(positions)) > 1:
            are_replicas = run.layout.dp_replicate == run.layout.world_size
            run.feeder.agree(positions, are_replicas=are_replicas)
        salvage.close_gap(run, max(positions))
        run.step_now = max(positions)
    except TrainingLostError as lost:
        raise lost from error
    except WorkbenchError as second:
        if not run.engines.alive:
            raise
        error.add_note(f"  and then: {second}")
    run.feeder.reset(run.step_now)
    raise error


def is_over(error: Exception, run: Run) -> TypeGuard[WorkbenchError]:
    """Whether a run ends with this error for ever: ranks are gone, or have lost their part."""
    if run.state == "waiting":
        return False
    is_of_ranks = isinstance(error, (EnginesError, WorldLostError)) and not run.engines.alive
    return is_of_ranks or isinstance(error, TrainingLostError)
