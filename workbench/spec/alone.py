"""Alone: how ranks without a kernel agree to go on by themselves, and to stop for the next one.

One file in the cluster's directory, mapped by all of them; each word is written whole by the
machine. No call and no collective: a rank looks between two slices, which all ranks cut alike.

The fork server says that no kernel is left (`orphaned`). Once every rank is idle or in a slice,
rank 0 says that they go on (`alone`); it holds the lock while it looks and says so, so that a
kernel that comes either finds them going on or finds that they do not. That kernel names a step
(`stop_at`): each rank waits at the first end of a slice that is not before it. Where one was past
it already, the kernel names a later one, and those that wait go on to that. When all wait at one
step, the kernel takes `alone` back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE, WILL = "alone", "will.json"
MOST_RANKS = 256
WORD = struct.Struct("q")
ORPHANED_AT, ALONE_AT, STOP_AT_AT, SAVE_AT_AT = 0, 8, 16, 24
SLOTS_AT, SLOT = 64, struct.Struct("qqqd")  # state, pid, step, time.monotonic
SIZE_BYTES = SLOTS_AT + MOST_RANKS * SLOT.size
NEVER = -1
# What a rank is at. BUSY: a request that is no slice. FOLLOWING: it has no work in the layout.
# STOPPED: at the goal, or after an error.
BUSY, IN_SLICE, QUIET, GOING, SAVING, WAITING, FOLLOWING, STOPPED = range(8)


@dataclass(frozen=True)
class Slot:
    """What one rank last said of itself."""

    state: int
    pid: int
    step: int
    told_s: float


@dataclass(frozen=True)
class Will:
    """What a training is to do without a kernel.

    slice_steps: slices end at its multiples. save_every_steps, save_every_s, keep, keep_every: as
    in TrainOptions. root, meta: of checkpoints.
    """

    running: bool
    goal: int
    slice_steps: int
    save_every_steps: int
    save_every_s: float | None
    keep: int
    keep_every: int
    root: str
    meta: dict[str, Any]

    def to_text(self) -> str:
        """As it lies in the file."""
        return json.dumps(asdict(self))

    def next_stop(self, step: int) -> int:
        """Where the slice that begins after this step ends, on every rank."""
        ends = [self.goal, (step // self.slice_steps + 1) * self.slice_steps]
        if self.save_every_steps:
            ends.append((step // self.save_every_steps + 1) * self.save_every_steps)
        return min(ends)


def read_will(directory: Path) -> Will | None:
    """What the last kernel wanted, None where it did not say."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Will(**json.loads((directory / WILL).read_text(encoding="utf-8")))
    return None


class Alone:
    """The file, mapped. Raises OSError where there is none."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        finally:
            os.close(descriptor)

    @staticmethod
    def make(directory: Path) -> None:
        """Put a file there in which nothing is said."""
        descriptor = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            data = bytearray(SIZE_BYTES)
            for at in (STOP_AT_AT, SAVE_AT_AT):
                WORD.pack_into(data, at, NEVER)
            file.write(data)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else decides anything meanwhile."""
        with self._path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _word(self, at: int) -> int:
        return WORD.unpack_from(self._memory, at)[0]

    @property
    def orphaned(self) -> bool:
        """Whether no kernel is left."""
        return bool(self._word(ORPHANED_AT))

    @orphaned.setter
    def orphaned(self, value: bool) -> None:
        WORD.pack_into(self._memory, ORPHANED_AT, value)

    @property
    def alone(self) -> bool:
        """Whether the ranks go on by themselves."""
        return bool(self._word(ALONE_AT))

    @alone.setter
    def alone(self, value: bool) -> None:
        WORD.pack_into(self._memory, ALONE_AT, value)

    @property
    def stop_at(self) -> int:
        """The step from which on they wait, NEVER without one."""
        return self._word(STOP_AT_AT)

    @stop_at.setter
    def stop_at(self, value: int) -> None:
        WORD.pack_into(self._memory, STOP_AT_AT, value)

    @property
    def save_at(self) -> int:
        """The step at which rank 0 wants a save that is due by the clock, NEVER without one."""
        return self._word(SAVE_AT_AT)

    @save_at.setter
    def save_at(self, value: int) -> None:
        WORD.pack_into(self._memory, SAVE_AT_AT, value)

    def tell(self, rank: int, state: int, step: int) -> None:
        """What this rank is at."""
        at = SLOTS_AT + rank * SLOT.size
        SLOT.pack_into(self._memory, at, state, os.getpid(), step, time.monotonic())

    def slot(self, rank: int) -> Slot:
        """What a rank last said."""
        return Slot(*SLOT.unpack_from(self._memory, SLOTS_AT + rank * SLOT.size))
