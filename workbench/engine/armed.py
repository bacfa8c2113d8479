"""Armed: the faults that wait on this rank for their step.

The clock says which part of a step begins. Just before a fault strikes it is written down in a file
of the cluster, since a rank that is gone cannot tell; and it is taken from the list, so that a step
that is done again does not meet it a second time.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from typing import Any

from workbench.errors import InputError
from workbench.spec.fault import Fault

# What a process holds; the driver keeps what each rank has.
waiting: list[Fault] = []
lasting: list[Fault] = []
_file: list[str] = []
_last: dict[Fault, int] = {}


def arm(fault: dict[str, Any], file: str) -> None:
    """Let a fault wait for its step. Raises InputError for a way its kind does not have."""
    one = Fault(**fault)
    hows = _kind(one).HOWS
    if one.how and one.how not in hows:
        ways = ", ".join(how for how in hows if how) or "no other way than the usual"
        raise InputError(f"how={one.how!r}: {one.kind} knows {ways}.")
    waiting.append(one)
    _file[:] = [file]


def disarm() -> list[str]:
    """Forget what waits and end what lasts -> what that was."""
    found = [str(fault) for fault in (*waiting, *lasting)]
    for fault in lasting:
        _kind(fault).undo()
    for one in (waiting, lasting):
        one.clear()
    _last.clear()
    return found


def reached(phase: str, step: int) -> None:
    """A part of a step begins; called by the clock where something waits."""
    for fault in [*waiting, *lasting]:
        if fault.phase != phase or step < fault.step or _last.get(fault) == step:
            continue
        kind = _kind(fault)
        if fault in waiting:
            waiting.remove(fault)
            _write_down(fault, step)
            if getattr(kind, "LASTS", False):
                lasting.append(fault)
        if fault in lasting:
            _last[fault] = step  # once a step
        kind.strike(fault)


def _write_down(fault: Fault, step: int) -> None:
    told = {**fault.to_dict(), "struck": step, "time_s": time.time(), "pid": os.getpid()}
    file = os.open(_file[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, json.dumps(told).encode() + b"\n")
    os.close(file)


def _kind(fault: Fault) -> Any:
    return importlib.import_module(f"workbench.engine.faults.{fault.module}")
