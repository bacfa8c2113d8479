"""Saves beside the training: what goes on meanwhile, and what a fault in the middle leaves."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time

import pytest

from workbench.errors import CheckpointError
from workbench.spec import aside

# Frozen, so that there is much to write and little to compute.
CELL = """
import torch
from torch import nn
batch = 8

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(4, 1)
        parts = torch.arange({numel}.).chunk(8)
        self.large = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in parts)

    def forward(self, x):
        return self.small(x)

def model():
    return Large()

def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""
LARGE = CELL.format(numel=16_000_000)
SMALL = CELL.format(numel=100_000)
LIMIT_S = 60.0


def until(holds, run):
    """Wait for what a thread of the run brings about."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s, run.snapshot()
        time.sleep(0.002)
    return found


def partials(run):
    return list((run.directory / "checkpoints").glob(f".*{aside.MARK}*"))


def writing(run):
    """The directory of the save under way, once the ranks are free of it."""
    return until(lambda: run.saving.now and partials(run), run)


def kinds(run):
    return [(event["kind"], event.get("name")) for event in run.events]


@pytest.fixture
def held_up(clusters, tmp_path):
    """A training that runs, and a save of it that cannot take its name until `release`."""
    run = clusters(2).train(cell=LARGE, steps=10**6, directory=tmp_path)
    until(lambda: run.step_now > 2, run)
    asked = run.ask("save", name="first")
    writing(run)
    lock = aside.lock(run.directory / "checkpoints" / ".lock")
    assert not asked.done()  # the name is taken at the end of the write of 64 MB
    released = threading.Event()

    def release():
        if not released.is_set():
            released.set()
            os.close(lock)

    yield run, asked, release
    release()
    if run.state == "running":
        run.stop()


def test_the_training_goes_on_while_a_checkpoint_is_written(held_up):
    run, asked, release = held_up
    before = run.step_now
    until(lambda: run.step_now > before + 5, run)
    assert run.snapshot()["saving"] == "first"
    assert (run.pending, run.checkpoints(), asked.done()) == ("", [], False)
    release()
    assert asked.result(LIMIT_S) == "first"
    (row,) = run.snapshot()["checkpoints"]
    assert row["step"] <= before
    assert row["bytes"] > 64e6
    assert row["stall_ms"] > 0
    assert row["write_ms"] > 0
    assert run.snapshot()["saving"] is None
    text = next(event["text"] for event in run.events if event.get("name") == "saved")
    assert text.startswith(f"saved first at step {row['step']:,}: 64 MB, the training stood ")


def test_a_pause_comes_after_the_save_and_a_second_save_after_the_first(held_up):
    run, asked, release = held_up
    second, pause = run.ask("save", name="second"), run.ask("pause")
    assert not second.done()
    assert not pause.done()
    release()
    assert pause.result(LIMIT_S) == run.step_now
    assert (asked.result(0), second.result(0)) == ("first", "second")
    assert [row["name"] for row in run.checkpoints()] == ["first", "second"]
    assert [name for _, name in kinds(run)][-3:] == ["saved", "saved", "paused"]


def test_engines_that_are_stopped_finish_the_save_first(held_up):
    run, asked, release = held_up
    stopping = threading.Thread(target=run.engines.stop)
    stopping.start()
    until(lambda: run.state == "gone", run)
    release()
    stopping.join(LIMIT_S)
    assert asked.result(0) == "first"
    assert [row["name"] for row in run.checkpoints()] == ["first"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_writes_leaves_a_list_that_is_right(clusters, tmp_path, rank):
    engines = clusters(2)
    run = engines.train(cell=LARGE, steps=10**6, directory=tmp_path)
    assert run.save("good") == "good"
    asked = run.ask("save", name="cut-off")
    writing(run)
    os.kill(engines.ranks[rank]["pid"], signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"cut-off of step .* was not saved"):
        asked.result(LIMIT_S)
    assert [row["name"] for row in run.checkpoints()] == ["good"]
    assert until(lambda: partials(run) == [], run)


def test_a_restore_that_follows_a_save_finds_it(clusters, tmp_path):
    run = clusters(2).train(cell=LARGE, steps=10**6, directory=tmp_path)
    saved, restored = run.ask("save"), run.ask("restore", what="last")
    step = restored.result(LIMIT_S)
    assert saved.result(0) == f"step-{step}"
    run.stop()


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
"""


def test_a_disk_that_is_full_on_one_rank_costs_the_save_alone(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=LARGE, steps=10**6, directory=tmp_path)
    run.save("before")
    # As a full disk: an error in the middle of a write.
    engines.run_cell(LIMITED.format(limit=2 << 20), ranks=[1], out=io.StringIO())
    with pytest.raises(CheckpointError, match="File too large") as caught:
        run.save("cut-off")
    assert str(caught.value).count("\n") == 0
    assert run.state == "running"
    assert ("warning", None) in kinds(run)
    assert partials(run) == []
    at = run.step_now
    until(lambda: run.step_now > at, run)
    engines.run_cell(LIMITED.format(limit="resource.RLIM_INFINITY"), out=io.StringIO())
    run.save("after")
    assert [row["name"] for row in run.checkpoints()] == ["before", "after"]
    run.stop()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, which only root may make: 16 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=16m", "workbench-test", str(place)]
    done = subprocess.run(mounted, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("only root may mount a file system of its own size")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_saves_by_themselves_go_on_once_there_is_room_again(clusters, small_disk):
    run = clusters(2).train(cell=SMALL, steps=10**6, save_every=400, directory=small_disk)
    fill = small_disk / "fill"
    until(lambda: run.saved, run)
    with pytest.raises(OSError, match="No space"):
        fill.write_bytes(b"\0" * (16 << 20))
    says = re.compile(r"step-\d+ of step .* was not saved: .*No space left|does not fit")
    until(lambda: any(says.search(event["text"]) for event in run.events), run)
    assert run.state == "running"
    fill.unlink()
    num = len(run.checkpoints())
    until(lambda: len(run.saved) > num, run)
    at = run.stop()
    assert partials(run) == []
    # The journal of a disk that was full has each step all the same.
    assert any("the journal cannot be written" in event["text"] for event in run.events)
    for rank in range(2):
        text = (run.directory / "journal" / f"rank{rank}.jsonl").read_text()
        slices = [json.loads(line) for line in text.splitlines()]
        firsts = [(one["first"], len(one["columns"]["loss"])) for one in slices]
        assert [n for first, num in firsts for n in range(first, first + num)] == list(
            range(1, at + 1)
        )


def test_saves_by_the_clock(clusters, tmp_path):
    run = clusters(2).train(cell=SMALL, steps=10**6, save_every="0.3s", directory=tmp_path)
    until(lambda: len(run.saved) >= 3, run)
    run.pause()
    times = [row["time_s"] for row in run.checkpoints()]
    assert all(row["by_itself"] for row in run.checkpoints())
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.2
    assert run.step(40)  # and steps taken one by one are not held up by the clock


def test_steps_asked_for_save_where_the_steps_are_due(clusters, tmp_path):
    run = clusters(2).train(cell=SMALL, steps=100, save_every=10, directory=tmp_path, start=False)
    run.step(35)
    assert [row["step"] for row in run.checkpoints()] == [10, 20, 30]
