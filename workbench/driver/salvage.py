"""Salvage: what is still to be had of the slices that were in flight when a rank was lost.

A rank's record of its steps outlives it (spec/pulse.py), so a step that all ranks had finished is
booked, whether its reply came or not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver import journals
from workbench.driver.member import Member
from workbench.spec import pulse
from workbench.spec.records import COLUMNS

if TYPE_CHECKING:
    from workbench.driver.run import Run

TAIL_BYTES = 1 << 20


def settle(run: Run) -> None:
    """Have the ranks that are left answer what was in flight, and book the steps all have taken.

    A rank that does not answer, although its collectives were broken off, is ended: it may hang
    in what the others have left, and would be missed at every meeting.
    """
    engines, feeder = run.engines, run.feeder
    slices = feeder.take_queued()
    members = list(engines.roster.members)
    waiting = [
        (members[rank], future)
        for one in slices
        for rank, future in zip(feeder.ranks, one.futures, strict=True)
    ]
    engines.free()
    end_s = time.monotonic() + engines.timeouts.freed_s
    for member, future in waiting:
        if not _answers(future, end_s) and not member.gone:
            engines.end_process(member)
    for member in members:
        if member.is_stuck() and not member.gone:
            engines.end_process(member)
    if not slices:
        # What is left over from a recovery that was broken off is so still. Where the run had
        # failed before, nobody has looked at what the lost ones tell.
        _read_late(run, members[: run.layout.world_size])
        return
    run.outages.leftover = [
        _told(run, rank, members[rank], [one.futures[place] for one in slices])
        for place, rank in enumerate(feeder.ranks)
    ]
    run.step_now += run.history.add(run.outages.leftover, run.layout)
    feeder.reset(run.step_now)


def leftover(run: Run, replies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `close_gap` needs of the replies of a slice."""
    logs = [row["log"] for row in run.engines.ranks]
    return [
        {key: told[key] for key in ("rank", "first", "columns")} | {"log": logs[told["rank"]]}
        for told in replies
    ]


def _answers(future: Future, end_s: float) -> bool:
    try:
        future.exception(max(0.0, end_s - time.monotonic()))
    except TimeoutError:
        return False
    return True


def _told(run: Run, rank: int, member: Member, futures: list[Future]) -> dict[str, Any]:
    """What a rank told of the slices, or what its pulse tells where a reply is missing."""
    first = run.step_now + 1
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    is_whole = True
    for future in futures:
        if future.done() and future.exception() is None:
            told = future.result()["columns"]
            for name in COLUMNS:
                columns[name] += told[name]
        else:
            is_whole = False
    if not is_whole and member.info["log"]:
        path = pulse.path_of(member.info["log"])
        rows = pulse.read_steps(path, first + len(columns["loss"]))
        for name in COLUMNS:
            columns[name] += [row[name] for row in rows]
        told = {"rank": rank, "world": run.layout.world_size, "first": first, "columns": columns}
        _journal(run.directory, told)
    return {"rank": rank, "first": first, "columns": columns, "log": member.info["log"]}


def complete(directory: Path, rank: int, world: int, log: str) -> None:
    """Write in the journal of a rank that was lost, some time ago, what its pulse still tells."""
    path = directory / "journal" / f"rank{rank}.jsonl"
    first = 1 + _last_step(path)
    rows = pulse.read_steps(pulse.path_of(log), first)
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    _journal(directory, {"rank": rank, "world": world, "first": first, "columns": columns})


def _journal(directory: Path, told: dict[str, Any]) -> None:
    """Write in a lost rank's journal what it did not come to write itself."""
    path = directory / "journal" / f"rank{told['rank']}.jsonl"
    count = len(told["columns"]["loss"])
    try:
        known = _last_step(path)
        skip = min(count, max(0, known - told["first"] + 1))
        if skip == count:
            return
        columns = {name: values[skip:] for name, values in told["columns"].items()}
        last = told["first"] + count - 1
        line = {
            "time_s": time.time(),
            "rank": told["rank"],
            "world": told["world"],
            "first": told["first"] + skip,
            "step": last,
            "columns": columns,
        }
        with path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    except OSError:
        return  # as for the ranks themselves, a full disk must not end the training


def _last_step(path: Path) -> int:
    """The step that the journal ends with; 0 where it has none, or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _read_late(run: Run, members: Sequence[Member]) -> None:
    """Have what the ranks wrote down since the last step that was booked, if nobody has yet."""
    world = len(members)
    for rank, member in enumerate(members):
        if member.gone and member.info.get("log"):
            complete(run.directory, rank, world, member.info["log"])
    if not run.outages.leftover:
        told = _written(run)
        logs = [member.info.get("log", "") for member in members]
        run.outages.leftover = [{**one, "log": logs[one["rank"]]} for one in told]


def _written(run: Run) -> list[dict[str, Any]]:
    """What the journals have of steps after the one the run is at."""
    # Before it went back, if it did, steps of these numbers were others.
    since = {} if run.origin is None else {"since_s": run.origin["since_s"]}
    return journals.rest(run.directory, run.layout.world_size, run.step_now + 1, **since)


def catch_up(run: Run, step: int) -> None:
    """Book the steps that all ranks have written down, and of which nobody has heard.

    A run that failed waits for no more replies, while its ranks may still take what was queued.
    """
    if step <= run.step_now:
        return
    told = _written(run)
    count = min(step - run.step_now, *(len(one["columns"]["loss"]) for one in told))
    if count:
        cut = [
            {**one, "columns": {name: of[:count] for name, of in one["columns"].items()}}
            for one in told
        ]
        run.step_now += run.history.add(cut, run.layout)


def close_gap(run: Run, step: int) -> None:
    """Book the one step that some of the ranks had finished and others had not.

    Replicas go on from the latest step that one of them has finished; what the others had of its
    loss is in their pulses.
    """
    leftover = run.outages.leftover
    if step != run.step_now + 1 or not leftover:
        return
    rows = [_row(told, step) for told in leftover]
    # What the step took a rank that did not come to its end is not known in parts.
    wall_s = max(row["wall_s"] for row in rows)
    told = [
        {
            "rank": one["rank"],
            "world": run.layout.world_size,
            "first": step,
            "columns": {key: [value] for key, value in {**row, "wall_s": wall_s}.items()},
        }
        for one, row in zip(leftover, rows, strict=True)
    ]
    run.step_now += run.history.add(told, run.layout)
    for one, row in zip(told, rows, strict=True):
        if not row["wall_s"]:
            _journal(run.directory, one)


def _row(told: dict[str, Any], step: int) -> dict[str, float]:
    place = step - told["first"]
    if place < len(told["columns"]["loss"]):
        return {name: told["columns"][name][place] for name in COLUMNS}
    loss = pulse.read_loss(pulse.path_of(told["log"]), step)
    return {**dict.fromkeys(COLUMNS, 0.0), "loss": float("nan") if loss is None else loss}
