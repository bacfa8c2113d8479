"""Trace: recorded steps as a file for ui.perfetto.dev and chrome://tracing.

Each rank is a process. Its first thread is what the rank did, span after span within the step; on
the threads below is communication, from launch to done. Operations that overlap each other lie on
threads of their own: events of one thread must nest, and few readers draw asynchronous ones.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.driver import files
from workbench.errors import InputError
from workbench.spec.records import MARKER

Event = dict[str, Any]
PLAIN, PACKED = ENDINGS = ".json", ".json.gz"
COMPUTING, COMMUNICATION = "computing", "communication"
# Perfetto takes a thread for the same as another of its number, and one of its process's number, or
# 0, for the first of the process. So threads are numbered through all ranks, beyond the ranks.
THREADS = 10_000
# Between two steps in one file, which in truth are further apart.
GAP_NS = 1_000_000


def chrome_trace(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `run.samples` has as Chrome's trace format; several steps one after the other.

    Times are microseconds from the begin of the first step. The gap between two steps is not that
    of the training: `args` of the event around a step say which one it is.
    """
    events: list[Event] = []
    at_ns = 0
    for sample in samples:
        end_ns = at_ns
        for row in sample["ranks"]:
            for event in _of_rank(sample, row, at_ns):
                events.append(event)
                end_ns = max(end_ns, _ns(event["ts"], 1e3) + _ns(event.get("dur", 0), 1e3))
        at_ns = end_ns + GAP_NS
    return _file(events, samples)


def merged(sample: Mapping[str, Any], profiles: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A recorded step, and below it what torch.profiler saw of the same step on the same clock.

    profiles: by rank what its `export_chrome_trace` wrote. In each, an event `workbench_step`
    (`record_function`) began together with the rank's step. What the profiler saw before and after
    the step stays, so times may begin long before it.

    Raises InputError for a profile without that event, or of a rank that the sample has not.
    """
    events = [event for row in sample["ranks"] for event in _of_rank(sample, row, 0)]
    rows = {row["rank"]: row for row in sample["ranks"]}
    for number, (rank, profile) in enumerate(sorted(profiles.items())):
        if rank not in rows:
            known = ", ".join(map(str, sorted(rows)))
            raise InputError(f"A profile of rank {rank}, and the step has ranks {known}.")
        begin_ns = _ns(min((span[1] for span in rows[rank]["spans"]), default=0.0))
        threads = 1 + max(thread for thread, _ in [(0, None), *_lanes(rows[rank]["under"])])
        # Arrows from one event to another have numbers, which must differ between ranks.
        arrows = (number, len(profiles))
        events.extend(_of_profile(rank, profile["traceEvents"], begin_ns, threads, arrows))
    return _file(events, [sample])


def write(trace: Mapping[str, Any], path: str | Path, *, force: bool = False) -> Path:
    """Write what `chrome_trace` or `merged` gave as .json or, packed, as .json.gz -> its path.

    Raises InputError where the file cannot be written.
    """
    kind = files.ending(path, ENDINGS)
    data = json.dumps(trace, separators=(",", ":")).encode()
    if kind == PACKED:
        data = gzip.compress(data, mtime=0)
    return files.written(path, lambda partial: partial.write_bytes(data), force=force)


def _ns(value: float, unit_ns: float = 1e6) -> int:
    """Milliseconds as whole nanoseconds: what readers count in, so that ends meet begins."""
    return round(value * unit_ns)


def _span(name: str, kind: str, rank: int, thread: int, ends_ns: tuple[int, int]) -> Event:
    """A complete event without arguments."""
    begin_ns, end_ns = ends_ns
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    where = {"pid": rank, "tid": _tid(rank, thread)}
    return {"ph": "X", "name": name, "cat": kind, **where, **times}


def _tid(rank: int, thread: int) -> int:
    return THREADS * (rank + 1) + thread


def _of_rank(sample: Mapping[str, Any], row: Mapping[str, Any], at_ns: int) -> Iterator[Event]:
    """What one rank did in one step that begins at at_ns."""
    rank, spans = row["rank"], row["spans"]
    if spans:
        ends = at_ns + _ns(spans[0][1]), at_ns + _ns(spans[-1][2])
        about = {"layout": sample["layout"], "step_ms": sample["wall_ms"]}
        yield {**_span(f"step {sample['step']}", "step", rank, 0, ends), "args": about}
    for kind, begin_ms, end_ms, stage, micro, what in spans:
        name = " ".join(str(part) for part in (kind, what, micro) if part not in ("", None))
        told = {"stage": stage, "microbatch": micro, "operation": what or None}
        args = {key: value for key, value in told.items() if value is not None}
        ends = at_ns + _ns(begin_ms), at_ns + _ns(end_ms)
        yield {**_span(name, kind, rank, 0, ends), "args": args}
    changes: list[tuple[int, int]] = []
    for thread, (what, begin_ms, end_ms, num_bytes) in _lanes(row["under"]):
        ends = at_ns + _ns(begin_ms), at_ns + _ns(end_ms)
        yield {**_span(what, COMMUNICATION, rank, thread, ends), "args": {"bytes": num_bytes}}
        changes += [(ends[0], num_bytes), (ends[1], -num_bytes)]
    yield from _counter(rank, changes)


def _lanes(under: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Each operation with a thread, from 1, where none is under way at the same time."""
    free_ms: list[float] = []
    for one in sorted(under, key=lambda one: (one[1], one[2])):
        lane = next((i for i, end_ms in enumerate(free_ms) if end_ms <= one[1]), len(free_ms))
        free_ms[lane : lane + 1] = [one[2]]
        yield lane + 1, one


def _counter(rank: int, changes: Sequence[tuple[int, int]]) -> Iterator[Event]:
    """How many bytes are under way, each time that changes."""
    total = 0
    after: dict[int, int] = {}
    for at_ns, change in sorted(changes):
        total += change
        after[at_ns] = total
    for at_ns, num_bytes in after.items():
        counted = {"ph": "C", "name": "under way", "cat": COMMUNICATION, "pid": rank}
        yield {**counted, "ts": at_ns / 1e3, "args": {"bytes": num_bytes}}


def _of_profile(
    rank: int,
    found: Sequence[Mapping[str, Any]],
    begin_ns: int,
    first_thread: int,
    arrows: tuple[int, int],
) -> Iterator[Event]:
    """A profile's events, moved so that the marker begins at begin_ns, on threads of the rank."""
    shift_us = begin_ns / 1e3 - _marker_us(rank, found)
    threads: dict[tuple[Any, Any], int] = {}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for event in found:
        # The profiler's own spans are in processes that have names instead of numbers.
        if event["ph"] == "M" or not isinstance(event["pid"], int):
            continue
        key = event["pid"], event["tid"]
        if key not in threads:
            threads[key] = first_thread + len(threads)
            yield from _named(rank, threads[key], str(names.get(key, f"thread {key[1]}")))
        where = {"pid": rank, "tid": _tid(rank, threads[key])}
        moved = {**event, **where, "ts": round(event["ts"] + shift_us, 3)}
        if "id" in event:
            moved["id"] = int(event["id"]) * arrows[1] + arrows[0]
        yield moved


def _marker_us(rank: int, found: Sequence[Mapping[str, Any]]) -> float:
    """When the step begins on the clock of a profile: the host's marker, not a device's."""
    begins = [
        event["ts"]
        for event in found
        if event.get("name") == MARKER and not str(event.get("cat", "")).startswith("gpu")
    ]
    if not begins:
        raise InputError(f"The profile of rank {rank} has no event {MARKER} to align it by.")
    return min(begins)


def _named(rank: int, thread: int, name: str) -> Iterator[Event]:
    """What a thread is called, and where it lies among those of its rank."""
    where = {"ph": "M", "pid": rank, "tid": _tid(rank, thread)}
    yield {**where, "name": "thread_name", "args": {"name": name}}
    yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _file(events: list[Event], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The events with names for ranks and threads in front, and what they are about."""
    # Readers take no time before zero.
    early_us = -min(0.0, min((event["ts"] for event in events if "ts" in event), default=0.0))
    if early_us:
        for event in events:
            if "ts" in event:
                event["ts"] = round(event["ts"] + early_us, 3)
    named = {event["tid"] for event in events if event["ph"] == "M"}
    threads = {(event["pid"], event["tid"]) for event in events if "tid" in event}
    head: list[Event] = []
    for rank in sorted({rank for rank, _ in threads}):
        where = {"ph": "M", "pid": rank}
        head.append({**where, "name": "process_name", "args": {"name": f"rank {rank}"}})
        head.append({**where, "name": "process_sort_index", "args": {"sort_index": rank}})
    for rank, tid in sorted(threads):
        if tid not in named:
            thread = tid - _tid(rank, 0)
            more = f" {thread}" if thread > 1 else ""
            head.extend(_named(rank, thread, f"{COMMUNICATION}{more}" if thread else COMPUTING))
    told = ("step", "layout", "wall_ms", "comms", "straggler", "clock_error_ms")
    return {
        "traceEvents": head + events,
        "displayTimeUnit": "ms",
        "otherData": {"steps": [{key: sample[key] for key in told} for sample in samples]},
    }
