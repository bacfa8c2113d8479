"""A snapshot as the bytes that the page gets.

Three of them, each whole: the newest replaces all before it, so a page that reloads or a second
view needs nothing but the last ones. `frame` has what moves with every step, about 12 KB at 600
points of a curve; `lists` what changes now and then; `sample` the last step that was recorded
whole. Only what differs from the last one is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from workbench.notebook.panel import many, outages

EVENTS_SHOWN = 60
DIGITS = 5
# In the order of the page's PARTS; a span names its part by its place here.
PARTS = ("forward", "backward", "optimizer", "data", "wire", "idle", "other")
LISTS = ("choices", "places", "stages", "checkpoints", "events", "marks", "memory", "branches")
# Sent by itself.
SAMPLE = "sample"


def frame(snapshot: Mapping[str, Any]) -> bytes:
    """Everything but the lists and the sample, as JSON."""
    kept = {k: v for k, v in snapshot.items() if k not in (*LISTS, SAMPLE)}
    rows, engines = snapshot.get("by_rank") or (), snapshot.get("engines") or ()
    if len(rows) > many.MOST:
        rows = [many.mean(group) for group in many.groups(rows)]
    if len(engines) > many.MOST:
        engines = many.troubled_first(engines)
    kept["used"] = used(snapshot)
    # Its outages are in the lists.
    kept["faults"] = {k: v for k, v in (kept.get("faults") or {}).items() if k != "outages"}
    kept["by_rank"] = [_rounded(row) for row in rows]
    kept["engines"] = [_rounded(row) for row in engines]
    kept["curve"] = {
        key: [_short(value) for value in values]
        for key, values in (snapshot.get("curve") or {}).items()
    }
    return encoded(kept)


def used(snapshot: Mapping[str, Any]) -> int:
    """How many ranks train: none once the run has ended, fewer than there are where some wait."""
    if snapshot["state"] == "gone":
        return 0
    waiting = sum(place["idle"] for place in snapshot.get("places") or ())
    return min(snapshot["alive"], snapshot["ranks"] - waiting)


def lists(snapshot: Mapping[str, Any]) -> bytes:
    """What there is to choose, where the ranks lie, checkpoints, events and marks, as JSON."""
    kept = {key: snapshot.get(key) or [] for key in LISTS}
    # The page shows the options of the strategy that is on.
    kept["choices"] = [
        {**choice, "options": choice["options"] if choice["now"] else []}
        for choice in kept["choices"]
    ]
    kept["events"] = list(kept["events"])[-EVENTS_SHOWN:]
    kept["outages"] = outages.shown(snapshot.get("faults"))
    if len(kept["memory"]) > many.MOST:
        kept["memory"] = [many.fullest(group) for group in many.groups(kept["memory"])]
    if len(kept["places"]) > many.MOST:
        kept["by_stage"], kept["places"] = many.by_stage(kept["places"]), []
    return encoded(kept)


def sample(snapshot: Mapping[str, Any]) -> bytes:
    """The last step that was recorded whole, as JSON; `null` before the first.

    Times of spans are whole microseconds, parts and whats are places in lists: a third less.
    """
    taken = snapshot.get(SAMPLE)
    if taken is None:
        return b"null"
    if len(taken["ranks"]) > many.MOST:
        rows = many.pictured(taken, snapshot.get("by_rank") or (), PARTS)
        return encoded({**taken, "ranks": rows, "bins": many.BINS})
    whats: dict[str, int] = {}
    rows = [
        {
            "rank": row["rank"],
            "wall_ms": _short(row["wall_ms"]),
            "spans": [
                [PARTS.index(kind), _us(begin), _us(end), stage, micro, _place(whats, what)]
                for kind, begin, end, stage, micro, what in row["spans"]
            ],
            "under": [
                [_place(whats, what), _us(begin), _us(end), num_bytes]
                for what, begin, end, num_bytes in row["under"]
            ],
        }
        for row in taken["ranks"]
    ]
    return encoded({**taken, "ranks": rows, "whats": list(whats)})


def _us(time_ms: float) -> int:
    return round(1000 * time_ms)


def _place(whats: dict[str, int], what: str) -> int:
    return whats.setdefault(what, len(whats))


def encoded(value: Any) -> bytes:
    """JSON, UTF-8; numbers that are not finite become null, unknown kinds their text."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError):  # looked for only then: it takes longer than all the rest
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _short(value: float | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _short(value) if isinstance(value, float) else value for key, value in row.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
