"""Nearest: the layouts that fit, next to one that does not; what a refusal proposes.

Near is what keeps the kind of what was asked for: its axes, its schedule, its microbatches. Fewer
ranks are proposed before another strategy, and then what uses all ranks beside them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from workbench.spec.layout import Layout
from workbench.spec.schedules import SCHEDULES

# The schedule that takes any number of microbatches.
ANY_NUMBER = "gpipe"
# Enough for a bubble of a third or less, and for every schedule.
CHUNKS_PER_RANK = 2
# What is as far as so many doublings of a degree: an axis that comes or goes; replicas or shards.
AXIS, COPIES = 1.5, 0.5
# Larger degrees are proposed where they divide the ranks, or were asked for.
SMALL = 8

# In the order of layout.AXES.
Degrees = tuple[int, int, int, int]
Fits = Callable[[Layout], bool]


def instead(wanted: Layout, ranks: int, most_pieces: int, fits: Fits) -> str:
    """`Use the layout "tp3" (3 of 4 ranks) or "dp4".`; "" where nothing fits.

    most_pieces: into how many shares x microbatches the batch can be cut. Each layout that is named
    fits.
    """
    named = [_quoted(layout, ranks) for layout in nearest(wanted, ranks, most_pieces, fits)]
    return f"Use the layout {' or '.join(named)}." if named else ""


def nearest(wanted: Layout, ranks: int, most_pieces: int, fits: Fits) -> list[Layout]:
    """The nearest that fits; where it leaves ranks idle, one on all ranks, too; [] for none.

    Where only the order of a pipeline has to change, one that keeps the number of microbatches.
    """
    found: list[Layout] = []
    asked = (wanted.pp, wanted.dp_replicate, wanted.dp_shard, wanted.tp)
    for degrees in _degrees(asked, ranks):
        size = math.prod(degrees)
        if found and size < ranks:
            continue
        fit = [one for one in _ordered(Layout(*degrees), wanted, most_pieces) if fits(one)]
        if fit and degrees == asked:
            kept = [one for one in fit if one.microbatches == wanted.microbatches]
            return list(dict.fromkeys((fit[0], *kept[:1])))
        found += fit[:1]
        if fit and size == ranks:
            break
    return found


def text(layout: Layout) -> str:
    """The layout as text, without an order that nobody typed."""
    whole = str(layout)
    plain = (layout.schedule, layout.microbatches) == (ANY_NUMBER, 1)
    return whole.partition(",")[0] if plain else whole


def _quoted(layout: Layout, ranks: int) -> str:
    size = layout.world_size
    return f'"{text(layout)}"' + (f" ({size} of {ranks} ranks)" if size < ranks else "")


@functools.lru_cache(maxsize=256)
def _degrees(wanted: Degrees, ranks: int) -> tuple[Degrees, ...]:
    """All degrees with a product of at most `ranks`, nearest first; what trains alone is last."""
    kept = {*_by_kind(wanted)}
    sizes = [n for n in range(1, ranks + 1) if n <= SMALL or ranks % n == 0 or n in kept]
    found = [
        (pp, *copies, tp)
        for pp in sizes
        for tp in sizes
        for dp in sizes
        if pp * tp * dp <= ranks
        for copies in _copies(dp, wanted)
    ]
    most = min(math.prod(wanted), ranks)

    def precedence(one: Degrees) -> tuple[bool, float, int]:
        size = math.prod(one)
        far = _distance(one, wanted) + abs(math.log2(size / most))
        return size == 1 < most, far, -size

    return tuple(sorted(found, key=precedence))


def _copies(dp: int, wanted: Degrees) -> Iterator[tuple[int, int]]:
    """(dp_replicate, dp_shard) with this product: replicas, shards, both where both were wanted."""
    yield dp, 1
    if dp > 1:
        yield 1, dp
    if wanted[1] > 1 and wanted[2] > 1:
        yield from ((n, dp // n) for n in range(2, dp // 2 + 1) if dp % n == 0)


def _distance(one: Degrees, wanted: Degrees) -> float:
    far = 0.0
    for new, old in zip(_by_kind(one), _by_kind(wanted), strict=True):
        far += abs(math.log2(new / old)) + AXIS * ((new > 1) != (old > 1))
    if max(one[1:3]) > 1 < max(wanted[1:3]):
        far += COPIES * sum((one[n] > 1) != (wanted[n] > 1) for n in (1, 2))
    return far


def _by_kind(degrees: Degrees) -> tuple[int, int, int]:
    pp, copies, shards, tp = degrees
    return pp, copies * shards, tp


def _ordered(degrees: Layout, wanted: Layout, most_pieces: int) -> Iterator[Layout]:
    """The degrees with the order that was wanted as far as it can be, then with simpler ones."""
    pp, most = degrees.pp, most_pieces // degrees.dp
    if pp == 1 or most < 1:
        yield degrees
        return
    usual = CHUNKS_PER_RANK * pp
    schedule, number = ("1f1b", usual) if wanted.pp == 1 else (wanted.schedule, wanted.microbatches)
    if number == CHUNKS_PER_RANK * wanted.pp:
        number = usual
    for name in dict.fromkeys((schedule, "1f1b", ANY_NUMBER)):
        if (found := _number(name, pp, number, most)) is not None:
            yield replace(degrees, schedule=name, microbatches=found)


def _number(schedule: str, pp: int, number: int, most: int) -> int | None:
    """The number of microbatches nearest to `number` that the schedule takes; None for none."""
    order = SCHEDULES[schedule]
    start = min(max(number, order.least_microbatches(pp)), most)
    tries = (n for offset in range(pp + 1) for n in (start - offset, start + offset))
    return next((n for n in tries if 1 <= n <= most and not order.why_not(pp, n)), None)
