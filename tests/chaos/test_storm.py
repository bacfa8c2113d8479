"""Faults of all kinds at random moments: nothing hangs, nothing is lost, nothing is left."""

from __future__ import annotations

import faulthandler
import os

import psutil
import pytest

from tests.chaos.storm import Storm, plan

# WORKBENCH_STORM_SEED replays a storm.
SEED = int(os.environ.get("WORKBENCH_STORM_SEED", "1"))


def ride_out(clusters, folder, seed, count, *, replayed_by):
    clusters.stop()
    engines = clusters(4, spares=1)
    storm = Storm(engines, folder)
    pids: set[int] = set()
    for fault in plan(seed, count):
        try:
            storm.meet(fault)
        except BaseException as error:
            faulthandler.dump_traceback(all_threads=True)
            error.add_note(
                f"{fault}\nevents: {[event['text'] for event in storm.run.events][-12:]}\n"
                f"WORKBENCH_STORM_SEED={seed} {replayed_by}"
            )
            raise
        pids |= {one.info["pid"] for one in engines.roster.everyone if "pid" in one.info}
    for saved in reversed(storm.run.checkpoints()):
        storm.run.restore(saved["path"])
        storm.check()
    directory = engines.directory
    clusters.stop()
    assert not directory.exists()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(3))
def test_thirty_faults_leave_the_curve(clusters, tmp_path, number):
    replayed_by = "python -m pytest tests/chaos -k thirty_faults_leave_the_curve[0]"
    ride_out(clusters, tmp_path, SEED + number, 10, replayed_by=replayed_by)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(10))
def test_three_hundred_faults_leave_the_curve(clusters, tmp_path, number):
    replayed_by = "python -m pytest -m soak tests/chaos -k [0]"
    ride_out(clusters, tmp_path, SEED + number, 30, replayed_by=replayed_by)
