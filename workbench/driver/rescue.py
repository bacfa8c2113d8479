"""Rescue: a training whose ranks were lost, brought to life again.

The ranks that are left answer what was in flight, and what they had finished is booked; lost places
are filled; all meet in a new world and hand each other the state. Where the ranks that are left do
not hold the whole of it, the last checkpoint does; without one the training begins again.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from workbench.driver import commands, copies, salvage
from workbench.driver.echo import named
from workbench.driver.member import Member
from workbench.driver.needed import needed
from workbench.driver.outages import Outage
from workbench.errors import (
    EnginesError,
    InputError,
    RunError,
    StartError,
    TrainingLostError,
    WorkbenchError,
    WorldLostError,
)
from workbench.spec.layout import Layout
from workbench.spec.limits import why_not

if TYPE_CHECKING:
    from workbench.driver.run import Run

# How often a recovery is tried anew when it meets the next loss.
MOST_ATTEMPTS = 8
# A rank that is lost at the same step again and again is lost by what it does there.
MOST_AT_ONE_STEP = 3
# Ranks that wait for one that was lost on the way to the meeting give up after so long.
RENDEZVOUS_S = 5.0
TRY_AGAIN = (EnginesError, StartError, WorldLostError)


def is_due(run: Run, error: BaseException) -> bool:
    """Whether an error is that ranks of a run are gone, and something can be done about it."""
    engines = run.engines
    is_of_ranks = isinstance(error, (EnginesError, WorldLostError, RunError))
    return is_of_ranks and bool(engines.roster.gone()) and engines.can_enlist


def rescue(run: Run, how: str | None = None) -> None:
    """Bring a run to life again that has lost ranks, as its policy says or as asked.

    how: a name of spec.policies.ON_LOSS. Afterwards the run is in the state it was in before, or
    `waiting` where nothing was to be done yet.

    Raises EnginesError or RecipeError where it cannot be done.
    """
    engines = run.engines
    before, how = run.state, how or run.outages.policy
    run.outages.state_before = before if before != "waiting" else run.outages.state_before
    last: WorkbenchError | None = None
    for number in range(MOST_ATTEMPTS):
        salvage.settle(run)
        gone = engines.roster.gone()
        if not gone and last is None:
            return
        outage = _begin(run, gone)
        if _must_wait(run, how, outage):
            _wait(run, gone)
            return
        run.set_pending("recover")
        try:
            _go_on(run, how, outage, RENDEZVOUS_S * 2**number)
        except TRY_AGAIN as error:
            if engines.stopped or not engines.can_enlist:
                raise
            last = error
            continue
        finally:
            run.set_pending("")
        run.outages.leftover = []
        if before != run.state:
            run.set_state(before)
        refill(run)
        return
    raise EnginesError(f"The ranks could not be brought together again: {last}") from last


def _begin(run: Run, gone: list[int]) -> Outage:
    members, outages = run.engines.roster.members, run.outages
    # One that was waited for has been told of.
    is_open = bool(outages.all) and not outages.last.is_over
    gone = [rank for rank in gone if not is_open or members[rank].key not in outages.told_of]
    if gone:
        outages.told_of |= {members[rank].key for rank in gone}
        why = "; ".join(f"rank {rank}: {members[rank].gone}" for rank in gone)
        outages.begin(why, gone, run.step_now, min(members[rank].gone_s for rank in gone))
        told = members[gone[0]].gone if len(gone) == 1 else why
        run.happened("lost", ranks=named(gone).capitalize(), why=told, step=run.step_now)
        run.marks.append({"step": run.step_now, "label": "lost", "kind": "fault"})
    outages.last.mark("free")
    return outages.last


def _must_wait(run: Run, how: str, outage: Outage) -> bool:
    """Whether the user is to say what happens."""
    here = [one for one in run.outages.all[-MOST_AT_ONE_STEP:] if one.step == outage.step]
    lost = Counter(rank for one in here for rank in one.ranks)
    rank, times = max(lost.items(), key=lambda item: item[1], default=(0, 0))
    if times > MOST_AT_ONE_STEP and run.state != "waiting":
        run.tell(
            "error",
            f"Rank {rank} was lost {times} times at step {outage.step + 1:,}: what the recipe does "
            "there may be the cause.",
        )
        return True
    roster = run.engines.roster
    return how == "wait" and roster.num_ready() < len(roster.gone())


def _wait(run: Run, gone: list[int]) -> None:
    roster = run.engines.roster
    why = "; ".join(roster.members[rank].gone for rank in gone)
    choices = "%dist_recover brings a fresh process"
    if smaller(run) is not None:
        choices += ", %dist_recover shrink goes on with the ranks that are left"
    run.set_state("waiting", f"{named(gone).capitalize()} gone ({why}). {choices}.")


def smaller(run: Run) -> Layout | None:
    """The layout without the ranks that are gone, None where the strategy does not allow it."""
    engines, old = run.engines, run.layout
    left = engines.num_ranks - len(engines.roster.gone())
    num_idle = engines.num_ranks - old.world_size
    used = min(old.world_size, left) if num_idle else left
    if not left or old.world_size != max(old.dp_replicate, old.dp_shard):
        return None
    layout = Layout(dp_replicate=used) if old.dp_replicate > 1 else Layout(dp_shard=used)
    return None if why_not(layout, run.limits, left) else layout


def _go_on(run: Run, how: str, outage: Outage, rendezvous_s: float) -> None:
    """One attempt. Raises TRY_AGAIN when ranks are lost meanwhile."""
    engines, layout = run.engines, run.layout
    roster = engines.roster
    gone = roster.gone()
    fewer = smaller(run) if how == "shrink" and roster.num_ready() < len(gone) else None
    if fewer is not None:
        run.outages.wide = run.outages.wide or layout
        roster.shrink()
        layout, outage.filled = fewer, f"{engines.num_ranks} ranks are left"
    elif gone:
        filled = roster.fill(engines.enlist)
        outage.filled = ", ".join(f"a {kind} one is {named([r])}" for r, kind in filled.items())
    outage.mark("places filled")
    _meet(run, layout, outage, rendezvous_s)


def _grow(run: Run) -> None:
    """Have all ranks again after it went on with fewer, under the layout of before."""
    outage = Outage("ranks come back", run.step_now, time.monotonic())
    count = run.engines.roster.grow(run.engines.enlist)
    outage.filled = f"{count} more {'rank' if count == 1 else 'ranks'}"
    layout, run.outages.wide = run.outages.wide or run.layout, None
    _meet(run, layout, outage, run.engines.timeouts.rendezvous_s)


def bring_back(run: Run, why: str) -> None:
    """Have ranks hold the training again, all of which are there, and whose recovery broke off."""
    outage = run.outages.begin(why, [], run.step_now, time.monotonic())
    outage.mark("free")
    _meet(run, run.layout, outage, run.engines.timeouts.rendezvous_s)


def _meet(run: Run, layout: Layout, outage: Outage, rendezvous_s: float) -> None:
    """Have all ranks meet under a layout with what they hold, and go on from there."""
    engines = run.engines
    notes = ready(run, engines.roster.members)
    meeting = engines.next_meeting(rendezvous_s=rendezvous_s)
    replies = engines.call("regroup", meeting, layout.to_dict(), str(run.directory))
    outage.mark("met", ago_s=max(reply.get("state_s", 0.0) for reply in replies))
    outage.source = copies.SOURCE if replies[0].get("is_copy") else "the other ranks"
    if replies[0]["step"] is None:
        replies, outage.source = _from_file(run, layout)
    elif replies[0].get("is_copy"):
        replies, outage.source = copies.or_newer(run, replies)
    outage.mark("state")
    step = replies[0]["step"]
    salvage.catch_up(run, step)
    salvage.close_gap(run, step)
    if step > run.step_now:
        run.step_now, first = step, run.step_now + 1
        run.happened("unknown_steps", count=step - first + 1, first=first, last=step)
    outage.lost_steps += max(0, run.step_now - step)
    if step < run.step_now:
        commands.back_to(run, step)
    if layout != run.layout:
        run.marks.append({"step": step, "label": str(layout), "layout": str(layout)})
    run.lay_out(layout, replies)
    for note in notes:
        run.tell("warning", note)
    run.happened(
        "recovered", filled=outage.filled or "all ranks", source=outage.source, step=step,
        lost=outage.lost_steps, took_ms=round(1e3 * outage.took_s),
    )  # fmt: skip


def _from_file(run: Run, layout: Layout) -> tuple[list[dict[str, Any]], str]:
    """The training from its last whole checkpoint, or its beginning -> replies, from where.

    Raises TrainingLostError where it began from a checkpoint that is not whole any more.
    """
    replies = run.engines.call("begin_anew", layout.to_dict())
    found = copies.first_whole(run, copies.of_this_branch(run), replies)
    if found is None and run.origin is not None:
        raise TrainingLostError(
            f"The ranks that are left do not hold the whole training, and {run.origin['path']}, "
            "from which it began, is not whole any more. %dist_train begins another one."
        )
    return found or (replies, "the beginning")


def ready(run: Run, members: list[Member]) -> list[str]:
    """Have processes that know nothing of the training get ready for it -> what to be told.

    Raises RecipeError where the recipe cannot be built there, EnginesError where one is gone.
    """
    prepare(run, members)
    notes = [one.prepared[1].result() for one in members if one.prepared is not None]
    return sorted(set(filter(None, notes)))


def prepare(run: Run, members: list[Member]) -> None:
    """Ask processes that take no part in the training to get ready; does not wait for them."""
    asked = [one for one in members if not one.gone and not _knows(one, run)]
    futures = run.engines.ask(asked, "prepare", *_recipe(run)) if asked else []
    for one, future in zip(asked, futures, strict=True):
        one.prepared = run.name, future


def trained_by(run: Run, members: list[Member], facts: bytes) -> None:
    """These have built the training, and spares get ready for it; facts: see engine/regroup.py."""
    run.facts = facts
    done: Future = Future()
    done.set_result("")
    for member in members:
        member.prepared = run.name, done
    prepare(run, run.engines.roster.spares)
    warm(run)


def warm(run: Run, members: list[Member] | None = None) -> None:
    """Have spares get used to the training as it lies on the ranks now; does not wait for them."""
    spares = run.engines.roster.spares if members is None else members
    ready = [one for one in spares if not one.gone and _knows(one, run)]
    if ready:
        run.engines.ask(ready, "warm", run.layout.to_dict())


def _knows(member: Member, run: Run) -> bool:
    """Whether it trains this run, or is getting ready for it."""
    return member.prepared is not None and member.prepared[0] == run.name


def _recipe(run: Run) -> tuple:
    cell = run.about["cell"]
    cells = [] if cell is None else needed((run.about["number"], cell), run.engines.cells)
    return run.about["asked"], cells, run.options.to_dict(), run.facts


def refill(run: Run) -> None:
    """Have as many spares as were asked for, without waiting for them.

    To start one takes a core for half a second, which the first new step is to have.
    """
    engines, outages = run.engines, run.outages

    def introduced(members: list[Member]) -> None:
        prepare(run, members)
        warm(run, members)

    def is_time() -> bool:
        return run.state != "running" or not outages.all or outages.last.is_over

    engines.refill(introduced, is_time)


def recover(run: Run, how: str | None = None) -> int:
    """What `%dist_recover` asks for -> the step the training stands at."""
    if not run.engines.roster.gone():
        if how != "shrink" and len(run.engines.roster.members) < len(run.engines.roster.places):
            _grow(run)
        return run.step_now
    if how == "shrink" and smaller(run) is None:
        raise InputError(
            f"{run.layout} cannot go on with fewer ranks: only data parallelism can. "
            "%dist_recover replaces what is lost."
        )
    state = run.outages.state_before if run.state == "waiting" else run.state
    rescue(run, how or "replace")
    run.set_state(state)
    return run.step_now
