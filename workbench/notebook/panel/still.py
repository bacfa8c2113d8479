"""The panel without a browser's help: four lines of text, or one picture without a script.

The picture is what a saved notebook shows when its kernel is gone, on a site, or on paper. Its
colours hold on light and on dark; text takes the colour of the page.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from workbench.notebook.panel import many, outages
from workbench.notebook.panel.frame import PARTS, used
from workbench.notebook.panel.texts import en
from workbench.spec.formats import digits, percent, rate, size

POINTS = 240
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 420, 160, 52, 20, 22
WIDE, SEEN = 864, 0.7
WHEN = "%Y-%m-%d %H:%M"  # an age would not grow in a picture
BLUE, GREEN, GREY = "#2f86c4", "#009e73", "#8a8a8a"
# In JupyterLab a widget without its model leaves a line of error above the picture.
ALONE = (
    ".jp-OutputArea-child:not(:has(.wb-panel)):has(+ .jp-OutputArea-child .wb-still){display:none}"
)
COLOURS = {
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optimizer": "#cc79a7",
    "data": "#009e73",
    "wire": "#e69f00",
    "comm": "#e69f00",
    "idle": "#c8ccd1",
    "other": "#7d838b",
}
# Where nobody can tell the wire from waiting, both are one part.
PLAIN = ("forward", "backward", "optimizer", "data", "comm", "other")
HATCH = (
    '<pattern id="wb-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" fill="#e69f00"/>'
    '<path d="M0 0V5" stroke="#7a5200" stroke-width="2.4"/></pattern>'
)


def watches(snapshot: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """Who controls what another notebook only watches; "" where this one controls."""
    seen = snapshot.get("watching")
    return texts[f"watching_{seen['how']}"].format_map(seen) if seen else ""


def as_text(snapshot: Mapping[str, Any]) -> str:
    """Four lines: state and step, loss and metrics, speed, checkpoints; a fifth after a fault."""
    metrics = "".join(
        f", {name} {digits(value)}" for name, value in (snapshot["metrics"] or {}).items()
    )
    saved = snapshot["checkpoints"]
    last = f", last {saved[-1]['name']} ({size(saved[-1]['bytes'])})" if saved else ""
    count = f"{len(saved)} checkpoint{'' if len(saved) == 1 else 's'}"
    told = watches(snapshot, en.TEXTS) or snapshot["message"]
    message = f": {told}" if told else ""
    return "\n".join(
        (
            f"{snapshot['name']}: {snapshot['state']}, step {_steps(snapshot, ' of ')}, "
            f"{snapshot['layout']} on {used(snapshot)} of {snapshot['ranks']} ranks{message}",
            f"loss {digits(snapshot['loss'])}{metrics}",
            f"{rate(snapshot['rate'], snapshot['unit'])}, "
            f"{percent(snapshot['comm'])} of a step in communication, "
            f"{percent(snapshot.get('idle'))} idle",
            f"{count}{last}",
            *filter(None, [outages.counts(snapshot.get("faults") or {}, en.TEXTS)]),
        )
    )


def as_html(snapshot: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """One self-contained element: numbers, two curves, bars by rank, checkpoints."""
    curve = snapshot["curve"] or {}
    steps, losses, rates = (curve.get(key) or [] for key in ("step", "loss", "rate"))
    marks, none = snapshot.get("marks") or (), texts["no_steps"]
    parts = [
        _numbers(snapshot, texts),
        '<div style="display:flex;flex-wrap:wrap;gap:12px 24px">',
        _figure(texts["loss_title"], _line(steps, losses, BLUE, zero=False, marks=marks, why=none)),
        _figure(
            f"{texts['rate_title']} ({_unit(snapshot, texts)})",
            _line(steps, rates, GREEN, zero=True, marks=marks, why=none),
        ),
        _figure(texts["time_title"], _bars(snapshot["by_rank"] or [], texts)),
        "</div>",
        _timeline(snapshot.get("sample"), texts),
        outages.as_html(snapshot.get("faults"), texts),
        _checkpoints(snapshot["checkpoints"], texts),
        f'<div style="opacity:.7">{escape(texts["snapshot"])}</div>',
    ]
    return (
        f"<style>{ALONE}</style>"
        '<div class="wb-still" style="font-family:sans-serif;font-size:14px">'
        f"{''.join(parts)}</div>"
    )


def _steps(snapshot: Mapping[str, Any], between: str) -> str:
    goal = snapshot["goal"]
    return f"{snapshot['step']:,}" + (f"{between}{goal:,}" if goal else "")


def _unit(snapshot: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    return texts.get(snapshot["unit"], snapshot["unit"])


def _numbers(snapshot: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    is_over = snapshot["state"] == "gone"
    live = [
        texts["last_of"].format(name=texts[name]) if is_over else texts[name]
        for name in ("throughput", "communication", "idle")
    ]
    pairs = [
        (snapshot["name"], texts.get(snapshot["state"], snapshot["state"])),
        (texts["step"], _steps(snapshot, " / ")),
        (texts["loss"], digits(snapshot["loss"])),
        *((name, digits(value)) for name, value in (snapshot["metrics"] or {}).items()),
        (live[0], rate(snapshot["rate"], _unit(snapshot, texts))),
        (live[1], percent(snapshot["comm"])),
        (live[2], percent(snapshot.get("idle"))),
        (texts["ranks"], _ranks(snapshot, texts)),
        (texts["layout"], snapshot["layout"]),
    ]
    cells = "".join(
        f'<div style="margin:0 28px 8px 0"><div style="opacity:.7">{escape(str(label))}</div>'
        f'<div style="font-size:20px;font-weight:600">{escape(str(value))}</div></div>'
        for label, value in pairs
    )
    message = watches(snapshot, texts) or snapshot["message"]
    said = f'<div style="margin-bottom:8px">{escape(message)}</div>' if message else ""
    return f'<div style="display:flex;flex-wrap:wrap">{cells}</div>{said}'


def _ranks(snapshot: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """Those that train of those there are; as a fraction where all train, or some are lost."""
    some, ranks = used(snapshot), snapshot["ranks"]
    is_whole = snapshot["alive"] == ranks or snapshot["state"] == "gone"
    if some < ranks and is_whole:
        return texts["some_of"].format(some=some, all=ranks)
    spares = (snapshot.get("faults") or {}).get("spares", 0)
    return f"{snapshot['alive']} / {ranks}" + (f" +{spares} {texts['spare']}" if spares else "")


def _figure(title: str, drawing: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    return (
        f'<div><div style="font-weight:600">{escape(title)}</div>'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-size="11" fill="currentColor">{drawing}</svg></div>'
    )


def _line(
    steps: Sequence[int],
    values: Sequence[float | None],
    colour: str,
    *,
    zero: bool,
    marks: Sequence[Mapping[str, Any]],
    why: str,
) -> str:
    pairs = list(zip(steps, values, strict=False))
    every = max(1, -(-len(pairs) // POINTS))
    pairs = [*pairs[:-1:every], *pairs[-1:]]
    known = [(x, y) for x, y in pairs if y is not None]
    if not known:
        return _empty(why)
    first, last = known[0][0], max(known[-1][0], known[0][0] + 1)
    low = 0.0 if zero else min(y for _, y in known)
    high = max(y for _, y in known)
    high = high if high > low else low + (abs(low) or 1.0)
    across = (WIDTH - LEFT - 8) / (last - first)
    down = (HEIGHT - TOP - BOTTOM) / (high - low)
    points = " ".join(
        f"{LEFT + (x - first) * across:.1f},{TOP + (high - y) * down:.1f}" for x, y in known
    )
    return (
        _frame(_tick(high), _tick(low), f"{first:,}", f"{last:,}")
        + _marks([(LEFT + (m["step"] - first) * across, m["label"]) for m in marks], WIDTH - 8)
        + f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )


def _marks(marks: Sequence[tuple[float, str]], end: float) -> str:
    """Dotted lines; a label only where it does not run into a newer one."""
    out, free = [], end
    for x, label in reversed([one for one in marks if LEFT <= one[0] <= end]):
        out.append(
            f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GREY}" stroke-dasharray="2 3"/>'
        )
        half = 3.2 * len(label)
        middle = min(x, end - half)
        if middle + half <= free:
            out.append(
                f'<text x="{middle:.1f}" y="{TOP - 6}" text-anchor="middle">{escape(label)}</text>'
            )
            free = middle - half
    return "".join(out)


def _tick(value: float) -> str:
    if not value:
        return "0"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else digits(value, 3)


def _frame(high: str, low: str, first: str, last: str, top: int = TOP) -> str:
    bottom = HEIGHT - BOTTOM
    text = '<text x="{}" y="{}" text-anchor="{}">{}</text>'
    return (
        f'<path d="M{LEFT} {top}V{bottom}H{WIDTH - 8}" fill="none" stroke="{GREY}"/>'
        + text.format(LEFT - 6, top + 4, "end", high)
        + text.format(LEFT - 6, bottom, "end", low)
        + text.format(LEFT, bottom + 15, "start", first)
        + text.format(WIDTH - 8, bottom + 15, "end", last)
    )


def _bars(by_rank: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> str:
    if len(by_rank) > many.MOST:
        by_rank = [many.mean(group) for group in many.groups(by_rank)]
    parts = PLAIN if any(row.get("wire_ms") is None for row in by_rank) else PARTS
    totals = [sum(row[f"{part}_ms"] or 0 for part in parts) for row in by_rank]
    if not totals or max(totals) <= 0:
        return _empty(texts["no_times"])
    top = TOP + 18  # two lines of legend
    bottom, room = HEIGHT - BOTTOM, WIDTH - LEFT - 8
    down, pitch = (bottom - top - 4) / max(totals), room / len(by_rank)
    out = [f"<defs>{HATCH}</defs>", _frame("", "0", "", "", top + 4)]
    for place, row in enumerate(by_rank):
        x, y = LEFT + pitch * (place + 0.15), float(bottom)
        for part in parts:
            height = (row[f"{part}_ms"] or 0) * down
            y -= height
            out.append(_box(x, y, pitch * 0.7, height, part))
        if place % max(1, len(by_rank) // 16) == 0:
            middle = x + pitch * 0.35
            out.append(
                f'<text x="{middle:.1f}" y="{bottom + 15}" text-anchor="middle">'
                f"{row['rank']}</text>"
            )
    high = _tick(max(totals))
    out.append(f'<text x="{LEFT - 6}" y="{top + 12}" text-anchor="end">{high}</text>')
    return "".join(out) + _legend([(part, texts[f"part_{part}"]) for part in parts])


def _timeline(taken: Mapping[str, Any] | None, texts: Mapping[str, str]) -> str:
    """The last step that was recorded whole; nothing where there is none, or too many ranks."""
    if taken is None or len(taken["ranks"]) > many.MOST:
        return ""
    rows = taken["ranks"]
    pitch = max(5, min(18, 288 // len(rows)))
    bottom, across = TOP + pitch * len(rows), (WIDE - LEFT - 8) / taken["wall_ms"]
    out = [
        f"<defs>{HATCH}</defs>",
        _legend([(part, texts[f"part_{part}"]) for part in PARTS], WIDE),
    ]
    for place, row in enumerate(rows):
        y = TOP + pitch * place
        # What is narrower than the eye sees makes the file large and the picture no better.
        for kind, begin, end, *_ in row["spans"]:
            if (end - begin) * across >= SEEN:
                out.append(_box(LEFT + begin * across, y, (end - begin) * across, pitch - 2, kind))
        if place % -(-12 // pitch) == 0:
            out.append(
                f'<text x="{LEFT - 6}" y="{y + pitch / 2 + 3:.0f}" text-anchor="end">'
                f"{row['rank']}</text>"
            )
    out.append(f'<text x="{LEFT}" y="{bottom + 14}">0 ms</text>')
    end = f"{digits(taken['wall_ms'], 3)} ms"
    out.append(f'<text x="{WIDE - 8}" y="{bottom + 14}" text-anchor="end">{end}</text>')
    title = f"{texts['timeline_title']}: {texts['step']} {taken['step']:,}, {taken['layout']}"
    return _figure(title, "".join(out), WIDE, bottom + BOTTOM)


def _box(x: float, y: float, width: float, height: float, part: str) -> str:
    fill = "url(#wb-hatch)" if part in ("wire", "comm") else COLOURS[part]
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
    )


def _legend(parts: Sequence[tuple[str, str]], room: int = WIDTH) -> str:
    out, x, y = [], float(LEFT), 0
    for part, label in parts:
        # Letters of Chinese are twice as wide.
        width = 30 + 6.2 * sum(1 if char.isascii() else 2 for char in label)
        if x + width > room:
            x, y = float(LEFT), y + 15
        out.append(_box(x, y, 10, 10, part))
        out.append(f'<text x="{x + 14:.0f}" y="{y + 9}">{escape(label)}</text>')
        x += width
    return "".join(out)


def _empty(why: str) -> str:
    place = f'x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle"'
    return f'<text {place} opacity=".7">{escape(why)}</text>'


def _checkpoints(saved: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> str:
    if not saved:
        return ""
    lines = "".join(
        f"<li>{escape(str(one['name']))}, {texts['step']} {one['step']:,}, {size(one['bytes'])}, "
        f"{time.strftime(WHEN, time.localtime(one['time_s']))}</li>"
        for one in reversed(saved[-8:])
    )
    return (
        f'<div style="font-weight:600">{escape(texts["checkpoints_title"])}</div><ul>{lines}</ul>'
    )
