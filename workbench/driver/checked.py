"""Checked: what is wrong with a command as it was typed, told before its turn comes.

A command waits for the slice under way, which may last; a wrong word need not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.driver import commands, faults, files, trace
from workbench.errors import InputError, LayoutError, WorkbenchError
from workbench.spec import policies
from workbench.spec.limits import why_not

if TYPE_CHECKING:
    from workbench.driver.run import Run


def refusal(run: Run, verb: str, how: dict[str, Any]) -> WorkbenchError | None:
    """The error that a command would end with because of its arguments, if that is known by now."""
    check = CHECKS.get(verb)
    if check is None:
        return None
    try:
        check(run, **how)
    except WorkbenchError as error:
        return error
    except TypeError:
        return None  # of an argument that it does not have, the command itself tells
    return None


def _resume(_run: Run, steps: int | None = None) -> None:
    if steps is not None:
        commands.check_count("steps", steps)


def _step(_run: Run, n: int = 1) -> None:
    commands.check_count("n", n)


def _switch(run: Run, strategy: Any = None, *, ranks: int | None = None, **options: Any) -> None:
    if run.engines.roster.gone():
        return  # how many ranks there will be is open
    layout = commands.wanted(run, strategy, ranks, options)
    if why := why_not(layout, run.limits, run.engines.num_ranks):
        raise LayoutError(why)


def _recover(_run: Run, how: str | None = None) -> None:
    if how is not None and how not in ("replace", "shrink"):
        raise InputError(f"how={how!r}: use replace or shrink.")


def _policy(_run: Run, on_loss: str | None = None, on_stall: str | None = None) -> None:
    policies.check_all(on_loss=on_loss, on_stall=on_stall)


def _inject(
    run: Run, kind: str, *, rank: int | None = None, at_step: int | None = None, **how: Any
) -> None:
    faults.wanted(run, kind, rank, at_step, how)


def _profile(_run: Run, path: Any, *, force: bool = False) -> None:
    files.ending(path, trace.ENDINGS)
    files.check(path, force=force)


CHECKS: dict[str, Callable[..., None]] = {
    "resume": _resume, "step": _step, "switch": _switch, "recover": _recover, "policy": _policy,
    "inject": _inject, "profile": _profile,
}  # fmt: skip
