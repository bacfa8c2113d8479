"""disk-full: what the rank writes of checkpoints and journal meets a disk that is full."""

import errno
import os
from typing import Any

from workbench.engine.here import here
from workbench.spec.fault import Fault

HOWS = ("",)
LASTS = True

_write = os.write
_folder: list[str] = []


def strike(fault: Fault) -> None:
    """From now on, until it is cleared."""
    del fault
    if here.journal is not None:
        _folder[:] = [str(here.journal.directory.resolve())]
        os.write = _refusing  # type: ignore[assignment]


def undo() -> None:
    """There is room again."""
    os.write = _write
    _folder.clear()


def _refusing(file: int, data: Any, /) -> int:
    try:
        path = os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        path = ""
    if any(path.startswith(f"{folder}/") for folder in _folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return _write(file, data)
