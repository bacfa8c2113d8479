"""Gauges: cores and bytes of real processes; NVML by its documented calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest

from workbench.driver.gauges import NVML, Gauges

BUSY = "print(flush=True)\nwhile True: pass"
WAITING = "b = bytearray(64_000_000); print(flush=True); import time; time.sleep(60)"


@pytest.fixture
def started():
    """Starts a Python program and waits for its first line; ends it after the test."""
    processes = []

    def start(code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_cores_and_bytes_are_those_of_the_process(started):
    busy, waiting = started(BUSY), started(WAITING)
    gauges = Gauges([busy.pid, waiting.pid])
    seen = psutil.Process(busy.pid)
    before, since_s = seen.cpu_times(), time.monotonic()
    time.sleep(0.5)
    working, idle = gauges.read()
    after, passed_s = seen.cpu_times(), time.monotonic() - since_s
    # A core that others want, too, is not all its own.
    assert working["cpu"] == pytest.approx((after.user - before.user) / passed_s, abs=0.1)
    assert 0.05 < working["cpu"] < 1.1
    assert idle["cpu"] < 0.05
    assert 64e6 < idle["resident"] < 200e6
    assert idle["gpu"] is None
    assert idle["resident"] - working["resident"] > 50e6


def test_the_cores_are_those_since_the_read_before(started):
    busy = started(BUSY)
    gauges = Gauges([busy.pid])
    time.sleep(0.2)
    assert gauges.read()[0]["cpu"] > 0.05
    os.kill(busy.pid, signal.SIGSTOP)
    time.sleep(0.05)
    gauges.read()
    time.sleep(0.2)
    assert gauges.read()[0]["cpu"] == 0


def test_a_process_that_is_gone_gives_none(started):
    gone, there = started(BUSY), started(WAITING)
    gauges = Gauges([gone.pid, there.pid, None, -1, 2**22 + 1])
    gone.kill()
    while psutil.Process(gone.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    nothing = {"cpu": None, "resident": None, "gpu": None}
    for _ in range(2):  # a zombie, then nothing
        first, second, *rest = gauges.read()
        assert first == nothing
        assert second["resident"] > 0
        assert rest == [nothing] * 3
        gone.wait()


def test_a_pid_that_is_used_again_is_another_process(started, monkeypatch):
    gauges = Gauges([started(WAITING).pid])
    # As when the number has gone to a process that began later.
    monkeypatch.setattr(psutil.Process, "is_running", lambda _: False)
    assert gauges.read()[0]["cpu"] is None


class LostError(Exception):
    pass


def nvml(**changes):
    """NVML with two GPUs, the second of which tells little; by nvidia-ml-py's names."""

    def second_fails(value):
        def read(handle, *_):
            if handle == "second":
                raise LostError
            return value

        return read

    def handle(index):
        return ["first", "second"][index]

    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetHandleByUUID": {"GPU-8f": "first"}.__getitem__,
        "nvmlDeviceGetName": {"first": "NVIDIA H200", "second": b"Tesla K80"}.__getitem__,
        "nvmlDeviceGetUtilizationRates": second_fails(types.SimpleNamespace(gpu=87, memory=5)),
        "nvmlDeviceGetMemoryInfo": second_fails(types.SimpleNamespace(used=3_000_000_000)),
        "nvmlDeviceGetTemperature": second_fails(61),
        "nvmlDeviceGetPowerUsage": second_fails(512_300),
        "NVML_TEMPERATURE_GPU": 0,
    }
    module = types.ModuleType(NVML)
    vars(module).update(calls | changes)
    return module


FIRST = {
    "name": "NVIDIA H200",
    "utilisation": 0.87,
    "memory": 3_000_000_000,
    "temperature_c": 61,
    "power_w": 512.3,
}
SECOND = dict.fromkeys(FIRST) | {"name": "Tesla K80"}


def test_a_gpu_is_read_by_index_or_uuid_and_tells_what_it_can(monkeypatch):
    monkeypatch.setitem(sys.modules, NVML, nvml())
    pids = [os.getpid()] * 6
    devices = ["cuda 0", "cuda GPU-8f", "cuda 1", "cuda 7", "cpu"]
    told = [row["gpu"] for row in Gauges(pids, devices).read()]
    assert told == [FIRST, FIRST, SECOND, None, None, None]


@pytest.mark.parametrize("module", [None, nvml(nvmlInit=lambda: 1 / 0)], ids=["none", "no driver"])
def test_without_nvml_the_processes_are_read_all_the_same(monkeypatch, module):
    monkeypatch.setitem(sys.modules, NVML, module)
    row = Gauges([os.getpid()], ["cuda 0"]).read()[0]
    assert row["gpu"] is None
    assert row["resident"] > 0


def test_ranks_without_a_gpu_load_no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, NVML, nvml(nvmlInit=lambda: pytest.fail("asked for")))
    assert Gauges([os.getpid()], ["cpu"]).read()[0]["gpu"] is None
