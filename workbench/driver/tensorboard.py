"""TensorBoard: a run's numbers in an event file, for who has a TensorBoard open.

The file is written here, in the formats it is made of, instead of by a library: torch's writer
would bring torch into the kernel, and the `tensorboard` package a server, gRPC and protobuf, which
whoever looks at the file has anyway. A file is a row of records (TFRecord), each an Event in the
wire format of protobuf between two checksums.

Sources: TFRecord, https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details;
Event, https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto;
protobuf, https://protobuf.dev/programming-guides/encoding/; CRC-32C, RFC 3720, appendix B.4
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import InputError

VERSION = b"brain.Event:2"  # from this one on, a session's begin takes back later steps
SESSION_BEGINS = 1
_numbers = itertools.count()


class Steps(Protocol):
    """What is read of a run's history."""

    steps: list[int]
    loss: list[float]
    rate: list[float]


class EventFile:
    """One event file of one run; for the run's thread alone.

    A disk that does not take it any more must not end a training: `trouble` then says why, and what
    follows is left out.

    Raises InputError when the file cannot be made.
    """

    def __init__(self, directory: str | Path) -> None:
        self.trouble = ""
        self._last = 0
        self._metrics: tuple[int | None, dict[str, float]] = (None, {})
        host, pid = socket.gethostname(), os.getpid()
        name = f"events.out.tfevents.{time.time():010.0f}.{host}.{pid}.{next(_numbers)}"
        try:
            folder = Path(directory).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / name
            self.path.touch(exist_ok=False)
        except (OSError, RuntimeError) as error:  # RuntimeError: ~somebody who is not known
            why = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"No event file can be made in {directory}: {why}.") from None
        self._write([_event(0, _bytes(3, VERSION))])

    def discard(self) -> None:
        """Take the file away, and its folder where nothing else is in it."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    def follow(
        self,
        history: Steps,
        *,
        by_rank: Sequence[Mapping[str, Any]] = (),
        metrics: Mapping[str, float] | None = None,
        metrics_step: int | None = None,
    ) -> None:
        """Write what is new: loss and rate of each step, and metrics each time they are measured.

        by_rank: rows as of `History.by_rank`, written at the last step, such as `forward_ms/rank0`.
        """
        first = bisect_right(history.steps, self._last)
        new = range(first, len(history.steps))
        events = [
            _scalars(history.steps[i], {"loss": history.loss[i], "rate": history.rate[i]})
            for i in new
        ]
        if new:
            self._last = history.steps[-1]
            parts = {
                f"{name}/rank{row['rank']}": value
                for row in by_rank
                for name, value in row.items()
                if name != "rank"
            }
            events.append(_scalars(self._last, dict(sorted(parts.items()))))
        measured = metrics_step, dict(metrics or {})
        if metrics_step is not None and measured != self._metrics:
            self._metrics = measured
            values = {f"metrics/{name}": value for name, value in measured[1].items()}
            events.append(_scalars(metrics_step, values))
        self._write(events)

    def rewind(self, step: int) -> None:
        """Steps after this one are taken again: what TensorBoard shows of them is to go."""
        self._last = step
        self._metrics = (None, {})
        self._write([_event(step + 1, _bytes(7, _number(1, SESSION_BEGINS)))])

    def _write(self, events: Iterable[bytes]) -> None:
        data = b"".join(_record(event) for event in events if event)
        if self.trouble or not data:
            return
        try:
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self.trouble = f"{self.path} cannot be written any more: {error.strerror or error}."


def _scalars(step: int, values: Mapping[str, float | None]) -> bytes:
    """One event with all values of a step that are known; b"" without any."""
    told = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", _single(value)))
        for name, value in values.items()
        if value is not None
    )
    return _event(step, _bytes(5, told)) if told else b""


def _single(value: float) -> float:
    """A number that fits 32 bits; one that is too large is infinite there."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


# Protobuf's wire format: fields are a key (number and type of wire) and a value.


def _event(step: int, what: bytes) -> bytes:
    return _key(1, 1) + struct.pack("<d", time.time()) + _number(2, step) + what


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


# TFRecord: length, its checksum, the data, its checksum; all little-endian.


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked: a checksum of data that has checksums in it would be weak."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC = [_crc_of(byte) for byte in range(256)]
