"""Faults as the panel shows them: the phases of each outage, a line of counts, a still picture."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from workbench.spec.formats import percent

SHOWN = 12
# What a mark of driver/outages.py ends, as the page calls it; in the order of a recovery.
MARKS = {
    "free": "free",
    "places filled": "filled",
    "met": "met",
    "state": "state",
    "first new step": "step",
}
COLOURS = {
    "free": "#b23a00",
    "filled": "#0072b2",
    "met": "#e69f00",
    "state": "#009e73",
    "step": "#cc79a7",
}
BAR = 240


def phases(outage: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by phase; together they are the time of the outage.

    `again`: from one attempt to the next, or until the user said what was to be done.
    """
    found: dict[str, float] = {}
    before_s = 0.0
    for what, at_s in outage["marks"]:
        name = MARKS.get(what, "again")
        if name == "free" and "free" in found:
            name = "again"
        found[name] = round(found.get(name, 0.0) + 1e3 * (at_s - before_s), 1)
        before_s = at_s
    return found


def shown(faults: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The last outages with their phases, in place of their marks."""
    return [
        {
            **{key: value for key, value in outage.items() if key != "marks"},
            "phases": phases(outage),
            "took_ms": round(1e3 * outage["marks"][-1][1], 1) if outage["marks"] else 0.0,
        }
        for outage in (faults or {}).get("outages", ())[-SHOWN:]
    ]


def counts(faults: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """Faults, lost steps, downtime and goodput as one line; "" before the first fault."""
    if not faults or not faults.get("faults"):
        return ""
    return texts["fault_counts"].format(
        faults=faults["faults"],
        lost=faults["lost_steps"],
        down=f"{faults['downtime_s']:.2f} s",
        goodput=percent(faults["goodput"]),
    )


def as_html(faults: Mapping[str, Any] | None, texts: Mapping[str, str]) -> str:
    """A bar for each outage, with what its phases took; "" before the first fault."""
    outages = shown(faults)
    if not outages:
        return ""
    longest = max(1e-9, *(sum(_at_work(one)) for one in outages))
    keys = "".join(
        f'<span style="margin-right:14px">{_block(10, colour)} '
        f"{escape(texts[f'phase_{name}'])}</span>"
        for name, colour in COLOURS.items()
    )
    rows = "".join(_row(one, BAR / longest, texts) for one in reversed(outages))
    return (
        f'<div style="font-weight:600">{escape(texts["faults_title"])}: '
        f"{escape(counts(faults or {}, texts))}</div><div>{keys}</div>{rows}"
    )


def _at_work(outage: Mapping[str, Any]) -> Sequence[float]:
    return [ms for name, ms in outage["phases"].items() if name in COLOURS]


def _row(outage: Mapping[str, Any], across: float, texts: Mapping[str, str]) -> str:
    bar = "".join(
        _block(outage["phases"].get(name, 0.0) * across, colour) for name, colour in COLOURS.items()
    )
    when = time.strftime("%H:%M:%S", time.localtime(outage["time_s"]))
    said = [f"{when} {outage['why']}", *told(outage, texts)]
    took = f"{outage['took_ms']:,.0f} ms" if outage["is_over"] else texts["not_over"]
    return (
        f'<div style="margin:2px 0">{bar} {took} '
        f'<span style="opacity:.8">{escape(", ".join(said))}</span></div>'
    )


def told(outage: Mapping[str, Any], texts: Mapping[str, str]) -> list[str]:
    """Who took the places, where the state came from, how many steps were taken once more."""
    source = texts["state_from"].format(source=outage["source"]) if outage["source"] else ""
    lost = texts["steps_lost"].format(lost=outage["lost_steps"])
    return [part for part in (outage["filled"], source, lost) if part] if outage["is_over"] else []


def _block(width: float, colour: str) -> str:
    return (
        f'<i style="display:inline-block;height:10px;width:{width:.1f}px;background:{colour}"></i>'
    )
