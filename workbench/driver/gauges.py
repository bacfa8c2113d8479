"""Gauges: what the processes of ranks and their GPUs use, read once a second or so.

A process on this machine is read from here, so a rank that computes is not asked. What cannot be
read is None: a gauge never ends what it watches.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

NVML = "pynvml"  # the module of the package nvidia-ml-py
MW_PER_W = 1000
GAUGE_S = 1.0


class Gauges:
    """Gauges of one process a rank; `read` from one thread.

    pids: None for a process that is not on this machine. devices: by rank, as `Place.device` has
    them, such as `cuda 0` or `cuda GPU-8f6e...`.
    """

    def __init__(self, pids: Sequence[int | None], devices: Sequence[str] = ()) -> None:
        self._processes = [_Process(pid) for pid in pids]
        self._nvml = _nvml() if any(device.startswith("cuda") for device in devices) else None
        shown = [*devices, *[""] * len(pids)][: len(pids)]
        self._gpus = [_handle(self._nvml, device) for device in shown]

    def read(self) -> list[dict[str, Any]]:
        """By rank: cpu (cores used since the read before, 1.0 is one), resident (bytes), gpu.

        cpu and resident are None for a process that is gone. gpu is None without one that NVML can
        read, else name, utilisation (0 to 1), memory (bytes in use on the device, by whoever),
        temperature_c and power_w, each None where this GPU does not tell.

        Takes 0.3 ms a process.
        """
        return [
            {**process.read(), "gpu": None if gpu is None else _gpu(self._nvml, gpu)}
            for process, gpu in zip(self._processes, self._gpus, strict=True)
        ]


class Gauged:
    """Gauges of whatever processes the ranks have now, read once in GAUGE_S at most; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: list[int] = []
        self._gauges = Gauges([])
        self._values: list[dict[str, Any]] = []
        self._read_s = -GAUGE_S

    def of(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As Gauges.read; rows: by rank, with `pid` and `device`."""
        now_s = time.monotonic()
        with self._lock:
            pids = [row["pid"] for row in rows]
            if is_new := pids != self._pids:
                self._pids = pids
                self._gauges = Gauges(pids, [row["device"] for row in rows])
            if is_new or now_s - self._read_s >= GAUGE_S:
                self._values, self._read_s = self._gauges.read(), now_s
            return self._values


class _Process:
    """One process, known by its pid and when it began: a number used again is another."""

    def __init__(self, pid: int | None) -> None:
        self._process: psutil.Process | None = None
        if pid is not None:
            self._process = _known(lambda: psutil.Process(pid))
        self._before = self._used()

    def read(self) -> dict[str, Any]:
        before, now = self._before, self._used()
        self._before = now
        if before is None or now is None:
            return {"cpu": None, "resident": now and now[2]}
        passed_s = now[0] - before[0]
        cpu = (now[1] - before[1]) / passed_s if passed_s > 0 else None
        return {"cpu": cpu, "resident": now[2]}

    def _used(self) -> tuple[float, float, int] | None:
        """(now in s, CPU time in s, resident bytes); None once the process is gone."""
        process = self._process
        if process is None or not _known(process.is_running):
            return None
        with process.oneshot():
            times, memory = _known(process.cpu_times), _known(process.memory_info)
            is_over = _known(process.status) in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        if times is None or memory is None or is_over:
            return None
        return time.monotonic(), times.user + times.system, memory.rss


def _known(read: Callable[[], Any]) -> Any:
    """What is read, None where it cannot be."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - psutil, NVML and the driver below it have errors of many kinds
        return None


def _nvml() -> Any:
    """The NVML module once it works here, else None."""
    nvml = _known(lambda: importlib.import_module(NVML))
    if nvml is None or not _known(lambda: nvml.nvmlInit() or True):
        return None
    return nvml


def _handle(nvml: Any, device: str) -> Any:
    """NVML's handle of a rank's device, by its index or UUID; None without one."""
    kind, _, name = device.partition(" ")
    if nvml is None or kind != "cuda" or not name:
        return None
    if name.isdecimal():
        return _known(lambda: nvml.nvmlDeviceGetHandleByIndex(int(name)))
    return _known(lambda: nvml.nvmlDeviceGetHandleByUUID(name))


def _gpu(nvml: Any, gpu: Any) -> dict[str, Any]:
    name = _known(lambda: nvml.nvmlDeviceGetName(gpu))
    percent = _known(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
    power_mw = _known(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "utilisation": None if percent is None else percent / 100,
        "memory": _known(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "temperature_c": _known(
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        ),
        "power_w": None if power_mw is None else power_mw / MW_PER_W,
    }
