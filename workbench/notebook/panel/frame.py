"""A snapshot as the bytes one frame of the panel carries.

A frame is whole: the newest replaces all before it, so a page that reloads or a second view needs
nothing but the last one. About 12 KB at 600 points of a curve.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

EVENTS_SHOWN = 60
CURVE_DIGITS = 5
# Kept in the kernel: the page has no use for them.
LEFT_OUT = ("engines", "sample", "memory", "derived")


def frame(snapshot: Mapping[str, Any]) -> bytes:
    """JSON of a snapshot, UTF-8; numbers that are not finite become null, long lists are cut."""
    kept = {key: value for key, value in snapshot.items() if key not in LEFT_OUT}
    # The page shows the options of the strategy that is on.
    kept["choices"] = [
        {**choice, "options": choice["options"] if choice["now"] else []}
        for choice in snapshot.get("choices") or ()
    ]
    kept["events"] = list(snapshot.get("events") or ())[-EVENTS_SHOWN:]
    kept["curve"] = {
        key: [_short(value) for value in values]
        for key, values in (snapshot.get("curve") or {}).items()
    }
    return json.dumps(_finite(kept), allow_nan=False, separators=(",", ":")).encode()


def _short(value: float | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{CURVE_DIGITS}g}") if math.isfinite(value) else None


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
