"""Policies: what a training does by itself when something goes wrong, by name."""

from __future__ import annotations

from workbench.errors import InputError

# They differ where no spare is there.
ON_LOSS = {
    "replace": "a spare takes its place, else a fresh process",
    "shrink": "a spare takes its place, else those that are left go on, under data; else replace",
    "wait": "a spare takes its place, else stop until the user says %dist_recover",
}
# A process that is stopped is dealt with at once, a rank that computes or waits in vain after half
# of the time for which a rank may keep others waiting (spec/timeouts.py).
ON_STALL = {
    "wait": "tell, and leave it there",
    "interrupt": "break the step off; the state stays",
    "replace": "kill the process, as if it had been lost",
}
# For a loss or gradient that is not finite.
ON_NAN = {
    "stop": "the run stops with the state before the step",
    "skip": "the step's update is left out, on all ranks",
}


KNOWN = {"on_loss": ON_LOSS, "on_stall": ON_STALL, "on_nan": ON_NAN}
# Of a training that is not told otherwise.
DEFAULTS = {"on_loss": "replace", "on_stall": "wait"}


def check_all(**chosen: str | None) -> None:
    """Raises InputError for one that is not known; None stands for none."""
    for name, value in chosen.items():
        if value is not None:
            check(name, value, KNOWN[name])


def said(on_loss: str, on_stall: str) -> str:
    """One sentence on both."""
    return (
        f"when a rank is lost, {on_loss} ({ON_LOSS[on_loss]}); when one stands still, {on_stall} "
        f"({ON_STALL[on_stall]})."
    )


def check(name: str, value: str, known: dict[str, str]) -> str:
    """The value. Raises InputError for one that is not known."""
    if value not in known:
        raise InputError(f"{name}={value!r}: use one of {', '.join(known)}.")
    return value
