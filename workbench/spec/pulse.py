"""Pulse: what a rank tells while it works, in a file that both sides map into their memory.

It holds the last beat of the rank's heart, what its main thread does since when, and the records of
the last steps it has finished. The file outlives its process, so after a SIGKILL it still tells
how far the rank had come. No call, no message and no lock: the writer is never held up.

A record is written front to back between two equal numbers, and read until two readings agree, so
that a reader has it whole or not at all. The layout is that of one machine; nothing is sent.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from workbench.spec.records import COLUMNS

MAGIC = b"wbpulse1"
SUFFIX = ".pulse"
# Where each part begins, in bytes, and what it is made of. Times are of time.monotonic.
HEAD_AT, HEAD = 0, struct.Struct("8sQQ")  # magic, pid, identity of the main thread
BEAT_AT, BEAT = 64, struct.Struct("d")  # written whole by the machine: eight bytes, aligned
WORK_AT, WORK = 128, struct.Struct("Qqd24s56sQ")  # number, step, since_s, phase, detail, number
OPEN_AT, OPEN = 256, struct.Struct("Qd24sQ")  # number, launched_s, operation, number
SPAN_AT, SPAN = 320, struct.Struct("QqqQ")  # number, first and last finished step, number
LOSS_AT, LOSS = 384, struct.Struct("QqdQ")  # number, step, loss so far, number
HEADER_BYTES = 512
RING_AT, ROW = 4096, struct.Struct(f"q{len(COLUMNS)}dq")  # step, columns, step
NUM_ROWS = 2048
SIZE_BYTES = RING_AT + NUM_ROWS * ROW.size
IDLE = "idle"
TRIES = 8


@dataclass(frozen=True)
class Beat:
    """A rank at one moment; times are seconds of time.monotonic on its machine.

    beat_s: when its heart beat last. step: the one under way, 0 where unknown. phase: a kind of
    engine/clock.py within a step, else the name of the request or `idle`; "" where the rank was
    stopped while it wrote it. detail: the operation that is waited for in `comm`. since_s: since
    when it is in this phase. operation: the last one it handed over, as long as it is not done, ""
    without one; launched_s: when that was. thread: identity of the main thread.
    """

    pid: int
    thread: int
    beat_s: float
    step: int
    phase: str
    detail: str
    since_s: float
    operation: str
    launched_s: float


def path_of(log: str | Path) -> Path:
    """Where the pulse of the rank with this log lies."""
    return Path(log).with_suffix(SUFFIX)


def row_at(step: int) -> int:
    """Where the record of a step lies, in bytes."""
    return RING_AT + step % NUM_ROWS * ROW.size


def read(path: str | Path) -> Beat | None:
    """What the rank does; None where there is no pulse yet. Takes about 20 us."""
    try:
        with open(path, "rb", buffering=0) as file:
            raw = _settled(file.fileno(), HEADER_BYTES)
    except OSError:
        return None
    if len(raw) < HEADER_BYTES:
        return None
    magic, pid, thread = HEAD.unpack_from(raw, HEAD_AT)
    if magic != MAGIC:
        return None
    (beat_s,) = BEAT.unpack_from(raw, BEAT_AT)
    number, step, since_s, phase, detail, end = WORK.unpack_from(raw, WORK_AT)
    if number != end:
        step, since_s, phase, detail = 0, beat_s, b"", b""
    number, launched_s, operation, end = OPEN.unpack_from(raw, OPEN_AT)
    if number != end:
        launched_s, operation = 0.0, b""
    texts = (_text(part) for part in (phase, detail, operation))
    phase, detail, operation = texts
    return Beat(pid, thread, beat_s, step, phase, detail, since_s, operation, launched_s)


def read_loss(path: str | Path, step: int) -> float | None:
    """The rank's part of the loss of the step it was in, as far as it had come; None of another."""
    try:
        with open(path, "rb", buffering=0) as file:
            raw = _settled(file.fileno(), HEADER_BYTES)
    except OSError:
        return None
    if len(raw) < HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        return None
    number, of, loss, end = LOSS.unpack_from(raw, LOSS_AT)
    return loss if number == end and of == step else None


def read_steps(path: str | Path, first: int) -> list[dict[str, float]]:
    """Records of the steps from `first` on that the rank has finished, in order, without a gap.

    A record has `step` and a value for each of COLUMNS. On an accelerator loss, wall_s and
    sent_bytes are known at once; the parts are 0 then, so that all of the wall counts as other. []
    where `first` is not finished or no longer held. Of a rank that was killed it has all that it
    had finished.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as seen:
            return _rows(seen, first)
    except (OSError, ValueError):  # none, or not yet of its size
        return []


def _rows(seen: mmap.mmap, first: int) -> list[dict[str, float]]:
    if len(seen) < SIZE_BYTES or seen[: len(MAGIC)] != MAGIC:
        return []
    for _ in range(TRIES):
        number, begin, last, end = SPAN.unpack_from(seen, SPAN_AT)
        if number == end:
            break
    else:
        return []  # it died within these few nanoseconds
    rows: list[dict[str, float]] = []
    if first < max(begin, last - NUM_ROWS + 1):
        return rows
    for step in range(first, last + 1):
        front, *values, back = ROW.unpack_from(seen, row_at(step))
        if front != step or back != step:  # a living rank has gone on meanwhile
            return []
        rows.append({"step": step, **dict(zip(COLUMNS, values, strict=True))})
    return rows


def _settled(fd: int, num_bytes: int) -> bytes:
    """The bytes once two readings agree, else the last one; what is torn shows by its numbers."""
    seen = os.pread(fd, num_bytes, 0)
    for _ in range(TRIES):
        again = os.pread(fd, num_bytes, 0)
        if again == seen:
            break
        seen = again
    return seen


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
