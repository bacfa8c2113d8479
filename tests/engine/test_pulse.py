"""The pulse: whole or not at all, whoever reads and whenever the writer dies."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.engine.clock import COMM, FORWARD, OTHER, Clock, HostTimer
from workbench.engine.metered_group import Op
from workbench.engine.pulse import BEAT_S, Pulse
from workbench.spec import pulse as file
from workbench.spec.records import COLUMNS


@pytest.fixture
def path(tmp_path) -> Path:
    return file.path_of(tmp_path / "rank0.log")


def row(step: int) -> list[float]:
    return [step + 0.25 * n for n in range(len(COLUMNS))]


def test_it_tells_what_the_main_thread_does_since_when(path):
    pulse = Pulse(path)
    clock = Clock(HostTimer(), pulse)
    assert file.read(path).phase == file.IDLE
    pulse.step = 7
    clock.begin(follows=False)
    assert file.read(path).phase == OTHER
    before_s = time.monotonic()
    before = clock.enter(FORWARD, (0, 3))
    beat = file.read(path)
    assert (beat.phase, beat.detail, beat.step) == (FORWARD, "", 7)
    assert before_s <= beat.since_s <= time.monotonic()
    clock.enter(COMM, (Op("recv", (0, 1), 1, 8, 0.0),))
    beat = file.read(path)
    assert (beat.phase, beat.detail) == (COMM, "recv from 1")
    clock.back(before)
    assert file.read(path).phase == OTHER
    with clock.serving("save"):
        clock.back(clock.enter(COMM, (Op("barrier", (0, 1), None, 0, 0.0),)))
        assert file.read(path).phase == "save"
    assert file.read(path).phase == file.IDLE
    assert file.read(path).pid == os.getpid()


class Work:
    done = False

    def is_completed(self) -> bool:
        return self.done


def test_an_operation_that_another_rank_has_not_joined_is_told_until_it_is_done(path):
    pulse, work = Pulse(path), Work()
    pulse.start()
    began_s = file.read(path).beat_s
    pulse.launched("all-reduce", time.perf_counter(), work)
    deadline_s = time.monotonic() + 20
    while not file.read(path).operation and time.monotonic() < deadline_s:
        time.sleep(BEAT_S / 5)
    beat = file.read(path)
    assert beat.operation == "all-reduce"
    assert beat.beat_s > began_s
    assert 0 <= time.monotonic() - beat.launched_s < 20
    work.done = True
    while file.read(path).operation and time.monotonic() < deadline_s:
        time.sleep(BEAT_S / 5)
    assert not file.read(path).operation
    assert pulse._open is None


def test_steps_are_kept_as_long_as_there_is_room(path):
    pulse = Pulse(path)
    assert file.read_steps(path, 1) == []
    last = file.NUM_ROWS + 100
    for step in range(1, last + 1):
        pulse.finished(step, row(step))
    assert file.read_steps(path, 1) == []
    found = file.read_steps(path, 101)
    assert [one["step"] for one in found] == list(range(101, last + 1))
    assert found[-1] == {"step": last, **dict(zip(COLUMNS, row(last), strict=True))}
    assert [one["step"] for one in file.read_steps(path, last)] == [last]
    assert file.read_steps(path, last + 1) == []
    pulse.at("forward")
    assert file.read(path).step == last + 1


def test_steps_of_before_a_restore_do_not_count(path):
    pulse = Pulse(path)
    for step in range(1, 51):
        pulse.finished(step, row(step))
    with pulse.during("restore"):
        assert file.read_steps(path, 11) == []
    pulse.finished(11, row(0))
    assert [one["loss"] for one in file.read_steps(path, 11)] == [0]
    assert file.read_steps(path, 10) == []
    pulse.finished(5, row(5))  # as after a jump that nobody has told
    assert [one["step"] for one in file.read_steps(path, 5)] == [5]


WRITER = """
import sys
from workbench.engine.pulse import Pulse
pulse = Pulse(sys.argv[1])
print("ready", flush=True)
step = 0
while True:
    step += 1
    # All of one record says the same number: a torn one would mix two.
    pulse.step = step
    pulse.at(f"p{step % 10}", f"d{step % 10}")
    pulse.finished(step, [float(step)] * COLUMNS)
""".replace("COLUMNS", str(len(COLUMNS)))


@pytest.fixture
def writer(path):
    """A process that writes without end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def check(rows: list[dict[str, float]]) -> None:
    for one in rows:
        assert set(one.values()) == {one["step"]}


def test_a_reader_gets_whole_records_while_they_are_written(path, writer):
    seen, end_s = set(), time.monotonic() + 1.5
    while time.monotonic() < end_s:
        beat = file.read(path)
        assert beat is not None
        if beat.phase.startswith("p"):
            assert beat.phase[1:] == beat.detail[1:]
            seen.add(beat.phase)
            if beat.step:
                rows = file.read_steps(path, max(1, beat.step - 50))
                check(rows)
    assert len(seen) > 3


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_has_told_all_it_finished(path, writer, kill):
    while file.read(path).step < 5_000 and writer.poll() is None:
        time.sleep(0.001)
    writer.send_signal(kill)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    last = file.read(path).step - 1
    # Between the two marks of a step the one knows of it and the other not yet.
    rows = file.read_steps(path, last - 1000)
    assert [one["step"] for one in rows[:1000]] == list(range(last - 1000, last))
    check(rows)


def test_the_file_is_the_users_alone_and_of_full_size(path):
    Pulse(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= file.SIZE_BYTES


@pytest.mark.parametrize("content", [None, b"", b"other", bytes(file.SIZE_BYTES)])
def test_what_is_no_pulse_is_none(path, content):
    if content is not None:
        path.write_bytes(content)
    assert file.read(path) is None
    assert file.read_steps(path, 1) == []


def test_without_room_on_the_disk_a_rank_lives_without(tmp_path):
    pulse = Pulse(tmp_path / "missing" / "rank0.pulse")
    pulse.at("save")
    pulse.finished(1, row(1))
    assert file.read(tmp_path / "missing" / "rank0.pulse") is None
