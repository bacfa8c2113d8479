"""Journals: what each rank wrote down of its steps, read back."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from workbench.driver.history import History
from workbench.errors import RunError
from workbench.spec.layout import Layout
from workbench.spec.records import COLUMNS

Line = dict[str, Any]


def paths(directory: str | Path) -> dict[int, Path]:
    """The journals of a run's directory, by rank."""
    there = Path(directory, "journal").glob("rank*.jsonl")
    found = {int(path.stem[4:]): path for path in there if path.stem[4:].isdecimal()}
    return dict(sorted(found.items()))


def lines(path: Path) -> Iterator[Line]:
    """The slices of one journal; a line cut short, whose process was killed, is left out.

    Raises RunError for a file that cannot be opened.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from read(file)
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}. run.history has loss and rate of the steps."
        ) from None


def read(texts: Iterable[str]) -> Iterator[Line]:
    """The slices of lines of text, without those that are cut short."""
    for text in texts:
        with contextlib.suppress(ValueError):
            yield json.loads(text)


def kept(told: Iterable[Line]) -> list[Line]:
    """Lines of one rank without the steps that a later line takes again.

    Each has `since_s`: when the rank began to take its steps again, or -inf.
    """
    found: list[Line] = []
    since_s = -math.inf
    for line in told:
        first = line["first"]
        if found and first <= found[-1]["step"]:
            # Of these steps all ranks have written by now, and none has begun with them again.
            since_s = line["time_s"] - sum(line["columns"]["wall_s"])
            while found and found[-1]["first"] >= first:
                found.pop()
            if found and found[-1]["step"] >= first:
                found[-1] = _cut(found[-1], first)
        found.append({**line, "since_s": since_s})
    return found


def _cut(line: Line, end: int) -> Line:
    num_steps = end - line["first"]
    columns = {name: values[:num_steps] for name, values in line["columns"].items()}
    return {**line, "step": end - 1, "columns": columns}


def recall(
    history: History, directory: Path, step: int, layout: Layout, unwritten: Iterable[str] = ()
) -> None:
    """Fill an empty history with what the journals tell, up to a step.

    Rank 0 has work in every layout, so its lines are the slices, and say how many ranks took part.
    layout: any; it is of no matter to what a journal has. unwritten: what follows, of each rank.
    """
    told = {rank: list(lines(path)) for rank, path in paths(directory).items()}
    for line in read(text for part in unwritten for text in part.splitlines()):
        told.setdefault(line["rank"], []).append(line)
    of_ranks = {rank: kept(of_rank) for rank, of_rank in told.items()}
    others = {rank: _by_step(of_ranks[rank]) for rank in of_ranks if rank}
    for line in of_ranks.get(0, ()):
        replies = [line]
        for rank in range(1, line.get("world", 1)):
            replies.append(_part(others.get(rank, {}), line, rank))
        history.add(replies, layout)
    if history.steps and history.steps[-1] > step:
        history.rewind(step)


def rest(directory: Path, world: int, first: int, *, since_s: float = -math.inf) -> list[Line]:
    """What each of the first `world` ranks wrote, since a time, of the steps from `first` on."""
    there = paths(directory)
    found = []
    for rank in range(world):
        written = lines(there[rank]) if rank in there else ()
        told = kept(line for line in written if line["time_s"] >= since_s)
        columns: dict[str, list] = {name: [] for name in COLUMNS}
        by_step = _by_step(told)
        for step in itertools.count(first):
            if step not in by_step:
                break
            line, place = by_step[step]
            for name, values in columns.items():
                values.append(line["columns"][name][place])
        found.append({"rank": rank, "first": first, "columns": columns})
    return found


def _by_step(told: list[Line]) -> dict[int, tuple[Line, int]]:
    return {line["first"] + i: (line, i) for line in told for i in range(_num_steps(line))}


def _num_steps(line: Line) -> int:
    return len(line["columns"]["loss"])


def _part(by_step: dict[int, tuple[Line, int]], line: Line, rank: int) -> Line:
    """What another rank wrote of the steps of a line, as far as it did."""
    columns: dict[str, list] = {name: [] for name in line["columns"]}
    for step in range(line["first"], line["first"] + _num_steps(line)):
        own, place = by_step.get(step, (None, 0))
        if own is None or own["time_s"] < line["since_s"]:
            break  # never written, or before the steps were taken again
        for name, values in columns.items():
            values.append(own["columns"][name][place])
    return {"rank": rank, "first": line["first"], "columns": columns}
