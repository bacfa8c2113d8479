"""More ranks than a page can tell apart: each group of neighbours stands as one.

What leaves the kernel is bounded: at most MOST rows of each kind, however many ranks there are.
Every row says in `ranks` how many it stands for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 64
ENGINES_SHOWN = 32
# Columns of the picture of a step; a part shorter than one of them may not be seen.
BINS = 240

Row = Mapping[str, Any]


def groups(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Neighbours by rank, at most MOST groups of equal size (the last may be smaller)."""
    size = -(-len(rows) // MOST)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def mean(group: Sequence[Row]) -> dict[str, Any]:
    """One row in place of a group: its mean, under its first rank; None where one is unknown."""
    names = [name for name in group[0] if name != "rank"]
    columns = {name: [row[name] for row in group] for name in names}
    means = {
        name: None if None in values else sum(values) / len(group)
        for name, values in columns.items()
    }
    return {"rank": group[0]["rank"], "ranks": len(group), **means}


def fullest(group: Sequence[Row]) -> dict[str, Any]:
    """The row of a group that takes the most memory: it is the one that runs out."""
    most = max(group, key=lambda row: row["resident"] or 0)
    return {**most, "ranks": len(group)}


def troubled_first(engines: Sequence[Row]) -> list[Row]:
    """Some engines, those that are not alive before the others."""
    return sorted(engines, key=lambda row: row["state"] == "alive")[:ENGINES_SHOWN]


def by_stage(places: Sequence[Row]) -> list[dict[str, Any]]:
    """For each pipeline rank of the layout one row: which ranks, and how they share the work."""
    stages: dict[int, list[Row]] = defaultdict(list)
    for place in places:
        if not place["idle"]:
            stages[place["pp"]].append(place)
    return [
        {
            "rank": held[0]["rank"],
            "last": held[-1]["rank"],
            "ranks": len(held),
            "shares": 1 + max(place["dp"] for place in held),
            "slices": 1 + max(place["tp"] for place in held),
            "stages": held[0]["stages"],
            "held": held[0]["held"],
        }
        for _, held in sorted(stages.items())
    ]


def pictured(sample: Row, by_rank: Sequence[Row], parts: Sequence[str]) -> list[dict[str, Any]]:
    """For each group its busiest rank, its step as BINS digits: places of parts.

    A space stands for before its first and after its last span.
    """
    idle_ms = {row["rank"]: row["idle_ms"] or 0.0 for row in by_rank}
    digits = {part: str(place) for place, part in enumerate(parts)}
    bins_a_ms = BINS / sample["wall_ms"]
    rows = []
    for group in groups(sample["ranks"]):
        row = min(group, key=lambda row: idle_ms.get(row["rank"], 0.0))
        text, at = "", 0
        for kind, begin, end, *_ in row["spans"]:
            # Each bin has what is done in its middle.
            last = int(end * bins_a_ms + 0.5)
            if last > at:
                first = max(at, int(begin * bins_a_ms + 0.5))
                text += " " * (first - at) + digits[kind] * (last - first)
                at = last
        rows.append({"rank": row["rank"], "ranks": len(group), "bins": text[:BINS]})
    return rows
