"""Session: private, swept when its server was killed, and light for the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from workbench.driver import current, session
from workbench.driver.session import Session, sweep


def test_a_directory_whose_server_was_killed_is_swept_and_others_stay():
    killed, alive = Session(), Session()
    try:
        os.kill(killed.forks.pid, signal.SIGKILL)
        killed.forks._process.wait()
        sweep(killed.directory.parent)
        assert not killed.directory.exists()
        assert alive.directory.stat().st_mode & 0o077 == 0
    finally:
        alive.close()
    assert not alive.directory.exists()


def test_a_pid_that_was_given_anew_is_not_taken_for_the_server(tmp_path):
    stale = tmp_path / "workbench-old"
    stale.mkdir()
    (stale / "server.json").write_text(f"[[{os.getpid()}, 1.0], [1, 1.0]]")
    mine = tmp_path / "workbench-mine"
    mine.mkdir()
    started = psutil.Process().create_time()
    (mine / "server.json").write_text(f"[[{os.getpid()}, {started}], [1, 1.0]]")
    assert sweep(tmp_path) == [os.getpid()]  # its kernel is gone
    assert not stale.exists()
    assert mine.exists()


def test_a_kernel_that_is_gone_without_engines_leaves_nothing():
    code = (
        "from workbench.driver import session\n"
        "held = session.current(); held.devices()\n"
        "print(held.forks.pid, held.directory, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    pid, directory = done.stdout.split()
    if psutil.pid_exists(int(pid)):
        psutil.wait_procs([psutil.Process(int(pid))], timeout=15)
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie"
    assert not Path(directory).exists()


def test_the_kernel_side_loads_no_torch():
    code = (
        "import sys, workbench.driver.training, workbench.notebook.extension;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_only_processes_that_wait_are_told_of(monkeypatch):
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    parent = [sys.executable, "-c", f"import subprocess; subprocess.run({waits!r})"]
    with subprocess.Popen(parent) as server:
        try:
            monkeypatch.setattr(session, "abandoned", lambda: [server.pid])
            while not psutil.Process(server.pid).children():
                time.sleep(0.01)
            assert session.num_left_over() == 1
            assert current.left_over() == (
                " 1 process of a kernel that is gone waits for the lease to end: "
                "%dist_attach takes over, %dist_stop --all ends them now."
            )
        finally:
            for child in psutil.Process(server.pid).children():
                child.kill()
    monkeypatch.setattr(session, "abandoned", list)
    assert current.left_over() == ""
