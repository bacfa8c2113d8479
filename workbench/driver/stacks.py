"""Where ranks stand in their Python code: asked by a signal, so that a rank cannot fail to answer.

A process that is stopped answers when it goes on, and is not waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sysconfig
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from workbench.errors import InputError
from workbench.spec import pulse, stacks
from workbench.spec.stacks import Frame

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

LIMIT_S = 1.0
POLL_S = 0.005
PACKAGE = str(Path(__file__).parents[1]) + os.sep
RECIPES = PACKAGE + "recipes" + os.sep
DOOR = PACKAGE + "door.py"
_PATHS = sysconfig.get_paths()
LIBRARIES = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
ROOTS = (*LIBRARIES, PACKAGE.removesuffix("workbench" + os.sep))
_lock = threading.Lock()  # one asker at a time: the files are emptied before


@dataclass(frozen=True)
class Stack:
    """What a rank's main thread is in, the innermost call first; state: "running" or why none.

    is_idle: it waits for what is asked of it.
    """

    state: str
    frames: tuple[Frame, ...] = ()
    is_idle: bool = False

    @property
    def where(self) -> str:
        """The innermost call of the user's own code, "" where it is in none."""
        return next((str(frame) for frame in self.frames if is_users(frame)), "")

    @property
    def own(self) -> tuple[Frame, ...]:
        """The calls that a request of the driver led to; what lies beneath is the same always."""
        ends = (n for n, frame in enumerate(self.frames) if frame.file == DOOR)
        return self.frames[: next(ends, len(self.frames))]


def is_users(frame: Frame) -> bool:
    """Whether a call is in a cell or a file of the user's, no library's and not ours."""
    file = frame.file
    if file.startswith("<"):
        return file.startswith("<cell ")
    is_ours = file.startswith(PACKAGE) and not file.startswith(RECIPES)
    return not is_ours and not file.startswith(LIBRARIES)


def shown(frame: Frame) -> str:
    """A call as it is read: `torch/nn/modules/linear.py:125 in forward`, `cell 3, line 9`.

    Files of libraries and ours by their package, the user's from the folder of the notebook.
    """
    if frame.file.startswith("<"):
        return str(frame)
    under = [root for root in (*ROOTS, os.getcwd() + os.sep) if frame.file.startswith(root)]
    file = frame.file.removeprefix(max(under, key=len, default=""))
    return f"{file}:{frame.line} in {frame.name}"


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def chosen(engines: Engines, ranks: Iterable[int] | None) -> list[int]:
    """Ranks, all for None. Raises InputError for one that is not there."""
    if ranks is None:
        ranks = range(engines.num_ranks)
    found: list[Any] = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    for rank in found:
        is_number = isinstance(rank, int) and not isinstance(rank, bool)
        if not is_number or not 0 <= rank < engines.num_ranks:
            raise InputError(f"There is no rank {rank!r}: use 0 to {engines.num_ranks - 1}.")
    return found


def take(engines: Engines, ranks: Iterable[int] | None = None) -> dict[int, Stack]:
    """The stacks of ranks, all by default. Takes some milliseconds, at most LIMIT_S."""
    rows = engines.status()
    found: dict[int, Stack] = {}
    asked: dict[int, tuple[Path, pulse.Beat]] = {}
    keys = []
    with _lock:
        for rank in chosen(engines, ranks):
            row = rows[rank]
            beat = pulse.read(pulse.path_of(row["log"]))
            path = stacks.path_of(row["log"])
            if row["state"] != "alive":
                found[rank] = Stack(f"gone: {row['state']}")
            elif beat is None or not path.exists():
                found[rank] = Stack("out of sight")
            elif is_stopped(row["pid"]):
                found[rank] = Stack("stopped")
            else:
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
                asked[rank] = path, beat
                keys.append(row["key"])
        engines.processes.signal(keys, signal.SIGUSR2)
        found |= _written(asked)
    return dict(sorted(found.items()))


def _written(asked: dict[int, tuple[Path, pulse.Beat]]) -> dict[int, Stack]:
    found: dict[int, Stack] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(found) < len(asked):
        is_late = time.monotonic() > deadline_s
        for rank, (path, beat) in asked.items():
            if rank in found:
                continue
            frames, is_whole = stacks.parse(_text(path), beat.thread)
            if is_whole or is_late:
                state = "running" if frames else "no answer"
                # At which call of its loop an idle one waits says nothing, and differs.
                is_idle = beat.phase == pulse.IDLE
                found[rank] = Stack(state, () if is_idle else tuple(frames), is_idle)
        time.sleep(POLL_S)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def folded(taken: dict[int, Stack]) -> list[tuple[list[int], Stack]]:
    """Equal stacks with their ranks, in the order of their first."""
    by_stack: dict[Stack, list[int]] = {}
    for rank, stack in taken.items():
        by_stack.setdefault(stack, []).append(rank)
    return [(ranks, stack) for stack, ranks in by_stack.items()]
