"""What the kernel reads of live ranks without asking them."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from tests.driver.test_run import GOOD
from workbench.spec import pulse
from workbench.spec.records import COLUMNS


def paths(engines) -> list[Path]:
    return [pulse.path_of(row["log"]) for row in engines.status()]


def test_the_pulse_has_the_records_that_the_replies_have(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=30, directory=tmp_path)
    run.wait(60)
    found = [pulse.read_steps(path, 1) for path in paths(engines)]
    assert [[row["step"] for row in rows] for rows in found] == [list(range(1, 31))] * 2
    losses = [
        sum(pair) for pair in zip(*([r["loss"] for r in rows] for rows in found), strict=True)
    ]
    assert losses == run.history.loss
    for rank, rows in enumerate(found):
        for name in COLUMNS[1:]:
            last = run.history.recent[-1]
            told = sum(row[name] for row in rows[-last.num_steps :])
            assert told == pytest.approx(last.sums[rank][name])
    beats = [pulse.read(path) for path in paths(engines)]
    assert [beat.pid for beat in beats] == [row["pid"] for row in engines.status()]
    assert all(beat.phase == pulse.IDLE for beat in beats)
    assert all(time.monotonic() - beat.beat_s < 20 for beat in beats)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths(engines)} == {0o600}


def test_a_restore_begins_the_records_anew(clusters, tmp_path):
    engines = clusters(2)
    run = engines.train(cell=GOOD, steps=20, directory=tmp_path, start=False)
    run.step(5)
    run.save("five")
    run.step(10)
    run.restore("five")
    assert pulse.read_steps(paths(engines)[0], 6) == []
    run.step(2)
    assert [row["step"] for row in pulse.read_steps(paths(engines)[0], 6)] == [6, 7]


def test_a_killed_rank_has_told_the_steps_it_had_finished(clusters, tmp_path):
    engines = clusters(2)
    cell = GOOD.replace(
        "    pass\n", "    if rank == 1 and calls == 8: import os; os.kill(os.getpid(), 9)\n"
    )
    run = engines.train(cell=cell, steps=100, directory=tmp_path, start=False)
    run.step(2)
    told = paths(engines)
    run.resume()
    while engines.alive:
        time.sleep(0.01)
    # Its reply, if there was any slice with them, is lost; what it had finished is not.
    assert [row["step"] for row in pulse.read_steps(told[1], 1)] == list(range(1, 8))
    clusters.stop()


def test_a_rank_that_waits_in_a_backward_pass_tells_what_for(clusters, tmp_path):
    engines = clusters(2)
    cell = GOOD.replace(
        "    pass\n", "    import time\n    while rank == 1 and calls == 3: time.sleep(0.01)\n"
    )
    run = engines.train(cell=cell, steps=100, directory=tmp_path)
    first, second = paths(engines)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        beats = pulse.read(first), pulse.read(second)
        # The heart tells of what is handed over, so twenty times a second.
        told = [(beat.phase, beat.operation) for beat in beats]
        if told == [("backward", "all-reduce"), ("forward", "")]:
            break
        time.sleep(0.02)
    assert told == [("backward", "all-reduce"), ("forward", "")]
    assert [beat.step for beat in beats] == [3, 3]
    os.kill(engines.status()[1]["pid"], signal.SIGINT)
    run.wait(30)
    assert run.step_now == 2
