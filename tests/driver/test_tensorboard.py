"""TensorBoard: what its own reader finds in an event file, and each byte by the formats' rules."""

from __future__ import annotations

import importlib
import struct
from pathlib import Path

import pytest

from workbench.driver import tensorboard
from workbench.driver.history import History
from workbench.driver.tensorboard import EventFile
from workbench.errors import InputError

BY_RANK = [
    {"rank": 0, "forward_ms": 1.5, "wire_ms": None},
    {"rank": 1, "forward_ms": 2.5, "wire_ms": 0.25},
]


def history(steps):
    return History(1, list(steps), [1 / step for step in steps], [10.0 * step for step in steps])


def crc32c(data):
    """Bit by bit, as its definition has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            low = (crc ^ byte >> bit) & 1
            crc = crc >> 1 ^ (0x82F63B78 if low else 0)
    return crc ^ 0xFFFFFFFF


def unmasked(stored):
    rotated = (struct.unpack("<I", stored)[0] - 0xA282EAD8) % 2**32
    return (rotated << 15 | rotated >> 17) % 2**32


def fields(data):
    """(number, value) of each field of a protobuf message."""

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    at, found = 0, []
    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def events(path):
    """Each event as a dict of its fields, its checksums looked at."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        length = struct.unpack("<Q", data[at : at + 8])[0]
        assert unmasked(data[at + 8 : at + 12]) == crc32c(data[at : at + 8])
        body = data[at + 12 : at + 12 + length]
        assert unmasked(data[at + 12 + length : at + 16 + length]) == crc32c(body)
        found.append(dict(fields(body)))
        at += 16 + length
    return found


def scalars(event):
    values = [dict(fields(value)) for _, value in fields(event[5])]
    return {value[1].decode(): struct.unpack("<f", value[2])[0] for value in values}


def test_the_checksum_is_that_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert unmasked(tensorboard._checksum(b"123456789")) == 0xE3069283
    assert unmasked(tensorboard._checksum(bytes(32))) == 0x8A9136AA  # RFC 3720, B.4


def test_each_step_is_one_event_with_its_loss_and_rate(tmp_path):
    file = EventFile(tmp_path / "new" / "folder")
    file.follow(history([1, 2]), by_rank=BY_RANK)
    file.follow(history([1, 2, 300]))
    head, *told = events(file.path)
    assert head[3] == b"brain.Event:2"
    assert [event[2] for event in told] == [1, 2, 2, 300]
    assert scalars(told[0]) == {"loss": 1.0, "rate": 10.0}
    assert scalars(told[2]) == {
        "forward_ms/rank0": 1.5, "forward_ms/rank1": 2.5, "wire_ms/rank1": 0.25,
    }  # fmt: skip
    assert scalars(told[3]) == pytest.approx({"loss": 1 / 300, "rate": 3000.0})


def test_metrics_are_written_once_each_time_they_are_measured(tmp_path):
    file = EventFile(tmp_path)
    for step, accuracy in ((None, 0.0), (2, 0.5), (2, 0.5), (2, 0.75), (4, 0.75)):
        file.follow(History(), metrics={"accuracy": accuracy}, metrics_step=step)
    told = [(event[2], scalars(event)["metrics/accuracy"]) for event in events(file.path)[1:]]
    assert told == [(2, 0.5), (2, 0.75), (4, 0.75)]


def test_a_restore_begins_a_session_after_its_step(tmp_path):
    file = EventFile(tmp_path)
    file.follow(history([1, 2, 3]))
    file.rewind(1)
    file.follow(history([1, 2]))
    told = events(file.path)[1:]
    assert [event[2] for event in told] == [1, 2, 3, 2, 2]
    assert dict(fields(told[3][7])) == {1: 1}


def test_numbers_beyond_32_bits_are_infinite(tmp_path):
    file = EventFile(tmp_path)
    file.follow(History(1, [1, 2**40], [1e300, -1e300], [float("nan"), float("inf")]))
    first, second = (scalars(event) for event in events(file.path)[1:])
    assert first["loss"] == float("inf")
    assert second == {"loss": -float("inf"), "rate": float("inf")}
    assert first["rate"] != first["rate"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_disk_that_is_full_ends_the_file_and_nothing_else(tmp_path):
    file = EventFile(tmp_path)
    file.path = Path("/dev/full")
    file.follow(history([1]))
    assert file.trouble == "/dev/full cannot be written any more: No space left on device."
    file.path = tmp_path / "other"
    file.follow(history([1, 2]))
    file.rewind(1)
    assert not file.path.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"No event file can be made in .*file/x: Not a directory"):
        EventFile(tmp_path / "file" / "x")
    with pytest.raises(InputError, match="Could not determine home directory"):
        EventFile("~nobody-of-that-name/x")


@pytest.mark.filterwarnings("ignore")  # of what tensorboard imports
def test_tensorboard_reads_each_step_once(tmp_path):
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path)
    file.follow(history(range(1, 201)), by_rank=BY_RANK, metrics={"accuracy": 0.5}, metrics_step=9)
    file.rewind(150)
    file.follow(history([*range(1, 151), *range(151, 170)]))
    found = reader.EventAccumulator(str(tmp_path), size_guidance={reader.SCALARS: 0})
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        "loss", "rate", "metrics/accuracy", "forward_ms/rank0", "forward_ms/rank1", "wire_ms/rank1",
    }  # fmt: skip
    told = found.Scalars("loss")
    assert [one.step for one in told] == list(range(1, 170))
    assert [one.value for one in told] == pytest.approx([1 / step for step in range(1, 170)])
    assert [(one.step, one.value) for one in found.Scalars("metrics/accuracy")] == [(9, 0.5)]
