"""Engines: started whole or not at all, known by pid, stopped without a trace."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from workbench.driver import session
from workbench.driver.engines import start
from workbench.errors import EnginesError, InputError, StartError

SUM = "t = torch.ones(1); dist.all_reduce(t); int(t)"


def children() -> list[psutil.Process]:
    return psutil.Process(session.current().forks.pid).children()


def test_start_returns_when_all_ranks_have_met(clusters):
    engines = clusters(3)
    assert [row["rank"] for row in engines.status()] == [0, 1, 2]
    assert engines.run_cell(SUM, out=io.StringIO()).values == dict.fromkeys(range(3), "3")


def test_threads_are_capped_to_cores_over_ranks(clusters):
    cores = len(os.sched_getaffinity(0))
    assert {row["threads"] for row in clusters(3).status()} == {max(1, cores // 3)}


def test_ten_stops_and_starts_leave_nothing(clusters):
    clusters.stop()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(10):
        engines = start(2)
        assert engines.run_cell(SUM, out=io.StringIO()).values[0] == "2"
        directory = engines.directory
        engines.stop()
        assert not children()
        assert not directory.exists()
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before) + 4


def test_two_clusters_live_side_by_side(clusters):
    one, two = start(2), start(2)
    try:
        assert len({row["pid"] for engines in (one, two) for row in engines.status()}) == 4
        for engines in (one, two):
            assert engines.run_cell(SUM, out=io.StringIO()).values[1] == "2"
    finally:
        one.stop()
        two.stop()


def test_a_call_after_stop_says_what_to_type(clusters):
    engines = start(1)
    engines.stop()
    engines.stop()
    with pytest.raises(EnginesError, match="%dist_start"):
        engines.call("position")


@pytest.mark.parametrize("n", [0, -1, 65, 1.5, True, "two"])
def test_a_number_of_ranks_that_is_none_is_refused_with_the_range(n):
    with pytest.raises(InputError, match="from 1 to 64"):
        start(n)


def test_a_killed_rank_is_named_and_its_calls_end(clusters):
    engines = start(2)
    try:
        pending = engines.submit("run_cell", "import time; time.sleep(30)", 1, ranks=[1])
        time.sleep(0.2)
        killed_s = time.monotonic()
        os.kill(engines.ranks[1]["pid"], signal.SIGKILL)
        with pytest.raises(EnginesError, match=r"Rank 1 is gone \(killed by SIGKILL\)"):
            pending[0].result(10)
        assert time.monotonic() - killed_s < 5
        assert [row["state"] for row in engines.status()] == ["alive", "killed by SIGKILL"]
        with pytest.raises(EnginesError, match="Rank 1"):
            engines.call("position")
    finally:
        engines.stop()
    assert not children()


def test_a_rank_that_does_not_come_is_named_with_its_log(clusters):
    clusters.stop()
    session.current().devices()

    def kill_second_engine() -> None:
        while True:
            for child in children():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{child.pid}/fd/1").endswith("rank1.log"):
                        os.kill(child.pid, signal.SIGKILL)
                        return

    killer = threading.Thread(target=kill_second_engine, daemon=True)
    killer.start()
    with pytest.raises(StartError, match="Rank 1 of 2 did not come: killed by SIGKILL") as caught:
        start(2, timeout=20)
    killer.join()
    log = str(caught.value).split("Log: ")[1].split()[0].rstrip(".")
    assert os.path.exists(log)
    assert not children()


def test_an_interrupted_start_leaves_nothing(clusters):
    clusters.stop()
    session.current().devices()

    def interrupt() -> None:
        while len(children()) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt, daemon=True)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        start(4)
    interrupter.join()
    assert not children()


def test_fifty_rebuilds_of_the_world_leave_nothing(clusters):
    engines = start(2)
    try:
        look = (
            "import gc, os, threading, psutil; gc.collect(); "
            "[len(os.listdir('/proc/self/fd')), psutil.Process().num_threads(), "
            "len(dist.distributed_c10d._world.pg_map), psutil.Process().memory_info().rss // 2**20]"
        )
        silent = {"out": io.StringIO()}
        for _ in range(5):
            engines.rejoin()
        before = eval(engines.run_cell(look, **silent).values[0])
        for _ in range(50):
            engines.rejoin()
        after = eval(engines.run_cell(look, **silent).values[0])
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert after[2] == 1
        assert after[3] <= before[3] + 8
    finally:
        engines.stop()


def test_answered_requests_leave_nothing_with_the_client(clusters):
    engines = clusters(n=2)
    for _ in range(20):
        engines.call("is_broken")
    client = engines.roster.mail._client
    client.metadata.pop("submitted", None)  # ipyparallel's own slip
    for name in ("results", "metadata", "history", "outstanding", "_futures", "_output_futures"):
        assert not getattr(client, name), name


def test_a_collective_that_hangs_is_freed_and_variables_stay(clusters):
    engines = clusters(2)
    silent = {"out": io.StringIO()}
    engines.run_cell("kept = 42", **silent)
    pending = engines.submit("run_cell", "dist.barrier()", 90, ranks=[0])
    time.sleep(0.3)
    freed_s = time.monotonic()
    engines.free()
    reply = pending[0].result(10)
    assert time.monotonic() - freed_s < 2
    assert not reply["ok"]
    engines.rejoin()
    assert engines.run_cell(f"{SUM}, kept", **silent).values[1] == "(2, 42)"


KERNEL = """
import os, sys, time
import workbench
engines = workbench.start(2, lease={lease})
print(*[row["pid"] for row in engines.status()], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("lease", "outlives_s"), [(1.0, 0.0), (600.0, 3.0)])
def test_engines_outlive_a_killed_kernel_by_the_lease(lease, outlives_s):
    code = KERNEL.format(lease=lease)
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    engines = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
    server = engines[0].parent()
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    try:
        if outlives_s:
            _, alive = psutil.wait_procs(engines, timeout=outlives_s)
            assert len(alive) == 2
        else:
            gone, _ = psutil.wait_procs([*engines, server], timeout=20)
            assert len(gone) == 3
    finally:
        if outlives_s:
            server.terminate()
            psutil.wait_procs([server, *engines], timeout=10)


def test_only_loopback_is_listened_on(clusters):
    engines = clusters(2)
    server = psutil.Process(session.current().forks.pid)
    listening = [
        connection.laddr.ip
        for process in (server, *server.children())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert engines.alive
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_files_with_keys_are_private(clusters):
    directory = clusters(2).directory
    assert directory.parent.stat().st_mode & 0o077 == 0
    keys = list((directory / "security").iterdir())
    assert keys
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)
