"""Policies: what a training does by itself when something goes wrong, by name."""

from __future__ import annotations

from workbench.errors import InputError

# A spare takes a lost rank's place in any case; these are for when there is none.
ON_LOSS = {
    "replace": "a fresh process takes its place",
    "shrink": "go on with the ranks that are left, where the strategy is data; else replace",
    "wait": "stop until the user says %dist_recover",
}


def check(name: str, value: str, known: dict[str, str]) -> str:
    """The value. Raises InputError for one that is not known."""
    if value not in known:
        raise InputError(f"{name}={value!r}: use one of {', '.join(known)}.")
    return value
