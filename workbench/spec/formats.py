"""Numbers as a reader likes them: the same in the still picture and in plain text."""

from __future__ import annotations

UNKNOWN = "-"
KB = 1000
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def digits(value: float | None, count: int = 4) -> str:
    """A number with `count` significant digits: 0.3100, 2.354, 1.200e-07."""
    if value is None:
        return UNKNOWN
    text = f"{value:#.{count}g}"
    return text.rstrip(".")


def rate(value: float | None, unit: str) -> str:
    """`2,616 samples/s`; slow ones keep three digits: `3.25 samples/s`."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} {unit}" if value >= 100 else f"{digits(value, 3)} {unit}"


def percent(share: float | None) -> str:
    """`12 %` of a share in 0..1; below one percent with a decimal."""
    if share is None:
        return UNKNOWN
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def size(num_bytes: int | None) -> str:
    """`123 KB`, `1.2 MB`, `3.4 GB` (powers of 1000)."""
    if num_bytes is None:
        return UNKNOWN
    if num_bytes < KB:
        return f"{num_bytes} B"
    value, unit = num_bytes / KB, "KB"
    for larger in ("MB", "GB", "TB"):
        if value < KB:
            break
        value, unit = value / KB, larger
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def age(seconds: float, texts: dict[str, str]) -> str:
    """`12 s ago`, `3 min ago`, in the words of a language file."""
    for limit_s, unit_s, key in (
        (MINUTE_S, 1, "ago_s"),
        (HOUR_S, MINUTE_S, "ago_min"),
        (DAY_S, HOUR_S, "ago_h"),
    ):
        if seconds < limit_s:
            return texts[key].format(max(0, int(seconds // unit_s)))
    return texts["ago_d"].format(int(seconds // DAY_S))
