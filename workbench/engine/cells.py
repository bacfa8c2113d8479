"""Cells: the parts of a tensor that lie whole in what some ranks hold, and which ranks those are.

What is moved, saved and restored is cut here, so that each element has one source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from workbench.engine.shards import Box


@dataclass(frozen=True)
class Cell:
    """A part of a wanted box that lies whole in the box of each of its sources, lowest first."""

    box: Box
    numel: int
    sources: tuple[int, ...]


@lru_cache(maxsize=4096)
def cells(wanted: Box, held: tuple[Box | None, ...], first: int | None = None) -> tuple[Cell, ...]:
    """The wanted box, cut so that each part lies whole in a box that a rank holds.

    held: the box of each rank. first: the rank whose box is used as far as it goes; then come
    the smaller ones, which leave more ranks to choose from. A part held by none has no sources.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(held):
        if box is not None and box.numel:
            holders.setdefault(box, []).append(rank)
    own = None if first is None else held[first]
    found, left = [], [wanted] if wanted.numel else []
    for box in sorted(holders, key=lambda box: (box != own, box.numel)):
        rest = []
        for part in left:
            common = part.common(box)
            if common is None:
                rest.append(part)
                continue
            able = [r for b, ranks in holders.items() if b.common(common) == common for r in ranks]
            found.append(Cell(common, common.numel, tuple(sorted(able))))
            rest += _without(part, common)
        left = rest
    return tuple(found + [Cell(part, part.numel, ()) for part in left])


@lru_cache(maxsize=4096)
def cells_of_buffer(wanted: Box, held: tuple[Box | None, ...]) -> tuple[Cell, ...]:
    """As cells, each part with one source: the first of all ranks that hold any of it."""
    found: list[Cell] = []
    left = [wanted]
    for rank, box in enumerate(held):
        if box is not None and left:
            cut = [cell for part in left for cell in cells(part, (box,))]
            found += [Cell(cell.box, cell.numel, (rank,)) for cell in cut if cell.sources]
            left = [cell.box for cell in cut if not cell.sources]
    return tuple(found + [Cell(part, part.numel, ()) for part in left if part.numel])


def _without(box: Box, hole: Box) -> list[Box]:
    """The box less a box inside it, as boxes that do not overlap."""
    offset, shape = list(box.offset), list(box.shape)
    found = []
    for dim, (begin, size) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        end = offset[dim] + shape[dim]
        for first, last in ((offset[dim], begin), (begin + size, end)):
            if first < last:
                found.append(
                    Box(
                        (*offset[:dim], first, *offset[dim + 1 :]),
                        (*shape[:dim], last - first, *shape[dim + 1 :]),
                    )
                )
        offset[dim], shape[dim] = begin, size
    return found


@lru_cache(maxsize=4096)
def cells_wanted(
    haves: tuple[Box | None, ...], wants: tuple[Box | None, ...], buffer: bool
) -> tuple[tuple[int, Cell], ...]:
    """(wanting rank, part) for all that is wanted of one key; what a rank has comes from it."""
    found: list[tuple[int, Cell]] = []
    for rank, wanted in enumerate(wants):
        if wanted is None:
            continue
        if buffer:
            found += [(rank, cell) for cell in cells_of_buffer(wanted, haves)]
            continue
        for cell in cells(wanted, haves, rank):
            own = (rank,) if rank in cell.sources else cell.sources
            found.append((rank, Cell(cell.box, cell.numel, own)))
    return tuple(found)
