"""Stall: which rank keeps the others waiting, told apart from those that wait and those that work.

A rank that waits for others is never the one to blame; who is missing is. A rank that computes is
told with how long it does, and nobody can know from outside whether it will ever end. A process
that is stopped is known for what it is. Slow ranks move, and are the business of the meters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.driver.echo import named
from workbench.driver.pulses import STEP_PHASES, Seen
from workbench.driver.stacks import Stack

STOPPED, BUSY, DEADLOCK = "halted", "busy", "deadlock"
# A rank may be in one state for so long, or so many times the median step.
LEAST_S, TIMES = 2.0, 10.0
# The same where no step is known yet: the first ones of a layout are slow.
UNKNOWN_S = 10.0


@dataclass(frozen=True)
class Stall:
    """What stands still. ranks: of whom this is told; waiting: those that wait for them."""

    kind: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    for_s: float
    phase: str


def limit_s(step_s: float | None) -> float:
    """How long a rank may be in one state when a step takes so long."""
    return UNKNOWN_S if step_s is None else max(LEAST_S, TIMES * step_s)


def judge(seen: Mapping[int, Seen], limit_s: float) -> Stall | None:
    """What keeps these ranks, which train together, from going on; None where they move.

    limit_s: how long a rank may be in one state.
    """
    if stopped := [one for one in seen.values() if one.is_stopped]:
        return _stall(STOPPED, stopped, seen)
    waiting = [one for one in seen.values() if one.waits and one.still_s > limit_s]
    working = [one for one in seen.values() if not one.waits and not one.is_idle]
    # What is asked of all at once, such as a save, takes its time: of interest once one waits.
    in_step = [one for one in working if one.beat.phase in STEP_PHASES]
    busy = [
        one for one in working
        if (one in in_step or waiting) and one.still_s > (limit_s if one in in_step else UNKNOWN_S)
    ]  # fmt: skip
    if busy:
        return _stall(BUSY, busy, seen)
    if waiting and not working and all(one.still_s > limit_s for one in seen.values()):
        return _stall(DEADLOCK, waiting, seen)
    return None


def _stall(kind: str, of: list[Seen], seen: Mapping[int, Seen]) -> Stall:
    ranks = tuple(one.rank for one in of)
    waiting = tuple(rank for rank, one in seen.items() if one.waits and rank not in ranks)
    longest = max(of, key=lambda one: one.still_s)
    return Stall(kind, ranks, waiting, longest.still_s, longest.beat.phase)


def held_up(ranks: tuple[int, ...], seen: Mapping[int, Seen]) -> str:
    """`ranks 0-1,3 in all-reduce`: who waits, and in what."""
    by_operation: dict[str, list[int]] = {}
    for rank in ranks:
        by_operation.setdefault(seen[rank].operation, []).append(rank)
    return ", ".join(f"{named(of)} in {operation}" for operation, of in by_operation.items())


def places(stacks: Mapping[int, Stack]) -> str:
    """The user's lines that ranks are in: `net.py:12 in forward`; with ranks where they differ."""
    by_place: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        if stack.where:
            by_place.setdefault(stack.where, []).append(rank)
    if len(by_place) == 1:
        return next(iter(by_place))
    return "; ".join(f"{named(ranks)}: {place}" for place, ranks in by_place.items())


def standing(stacks: Mapping[int, Stack], seen: Mapping[int, Seen]) -> str:
    """Each rank with what it is in and where: `rank 0 in barrier (cell 2, line 9); rank 1 idle`."""
    told: dict[str, list[int]] = {}
    for rank, one in seen.items():
        where = stacks[rank].where if rank in stacks else ""
        what = "idle" if one.is_idle else f"in {one.operation or one.beat.phase}"
        told.setdefault(f"{what} ({where})" if where and not one.is_idle else what, []).append(rank)
    return "; ".join(f"{named(ranks)} {what}" for what, ranks in told.items())


def in_cell(found: Stall, taken: Mapping[int, Stack], seen: Mapping[int, Seen]) -> str:
    """A sentence on ranks that stand still in a cell."""
    if found.kind == DEADLOCK:
        return f"The ranks wait for each other: {standing(taken, seen)}."
    what = "the process is stopped"
    if found.kind == BUSY:
        place = places({rank: taken[rank] for rank in found.ranks if rank in taken})
        what = f"still in the cell after {found.for_s:.0f} s{f' ({place})' if place else ''}"
    held = f"; held up: {held_up(found.waiting, seen)}" if found.waiting else ""
    return f"{named(found.ranks).capitalize()}: {what}{held}."
