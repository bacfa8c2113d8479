"""What a forked child becomes: an ipyparallel engine, a controller, or a look at the devices.

Everything here runs in the child, after the fork. ipyparallel and ipykernel internals that the
workbench relies on are touched in this file alone (tests/forkserver holds them to their names).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

from workbench.door import QUIET

# The hub's heart beats fast so that engines register at once. Each beat wakes four threads of every
# rank, 1.5 % of a core: with no new engine for so long it is enough to beat now and then.
QUICK_BEATS_S, SLOW_BEAT_S = 5.0, 1.0
PR_SET_PDEATHSIG = 1  # of Linux: the signal a process gets when its parent ends
# All that an engine or controller imports on its way to the first step. The first optimizer
# imports torch._dynamo, ipykernel its debugger and completer: each costs a second if left out.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "safetensors.torch",
    "ipyparallel.engine.app",
    "ipyparallel.controller.app",
    "ipyparallel.serialize",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "ipykernel.debugger",
    "IPython.core.oinspect",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "tornado.platform.asyncio",
    "tornado.queues",
    "tornado.locks",
    "encodings.idna",
    "pydoc",
    "workbench.forkserver.refused",
    "workbench.engine.remote",
)


def count_refused(folder: Path) -> None:
    """Say in a file of this folder how many messages this process refuses."""
    importlib.import_module("workbench.forkserver.refused").count_in(folder)


def engine(argv: list[str], threads: int) -> None:
    """Become an ipyparallel engine with `threads` compute threads; returns when it ends."""
    app = importlib.import_module("ipyparallel.engine.app")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)  # OMP_NUM_THREADS was read when the server imported torch
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # a fork inherits the generator; ranks must not draw the same numbers
    _quiet_status()
    sys.argv = ["ipengine", *argv]
    app.IPEngine.launch_instance(argv)


def _quiet_status() -> None:
    """Send no busy and idle messages for requests that say nobody listens: half of all traffic."""
    kernel = importlib.import_module("ipyparallel.engine.kernel").IPythonParallelKernel
    publish = kernel._publish_status

    def publish_status(self: Any, status: str, channel: str, parent: dict | None = None) -> None:
        request = parent or self.get_parent(channel) or {}
        if not request.get("metadata", {}).get(QUIET):
            publish(self, status, channel, parent)

    kernel._publish_status = publish_status


def _calm_heart(directory: str) -> None:
    """Beat slowly once the engines are there; where one comes, the heart is quick again.

    directory: of the cluster, which changes when a new engine makes its log there.
    """
    monitor = importlib.import_module("ipyparallel.controller.heartmonitor").HeartMonitor
    beat = monitor.beat
    seen: dict[str, Any] = {"changed": 0, "since_s": 0.0, "beat_s": 0.0}

    def calm_beat(self: Any) -> None:
        now_s, changed = time.monotonic(), os.stat(directory).st_mtime_ns
        if changed != seen["changed"]:
            seen.update(changed=changed, since_s=now_s)
        is_quick = now_s - seen["since_s"] < QUICK_BEATS_S
        if is_quick or now_s - seen["beat_s"] >= SLOW_BEAT_S:
            seen["beat_s"] = now_s
            beat(self)

    monitor.beat = calm_beat


def _whole_state() -> None:
    """Write the list of engines whole or not at all, for a controller that takes over."""
    hub = importlib.import_module("ipyparallel.controller.hub").Hub
    save, load = hub._save_engine_state, hub._load_engine_state
    loading: set[int] = set()

    def save_whole(self: Any) -> None:
        path = self.engine_state_file
        if not path or id(self) in loading:
            return
        self.engine_state_file = f"{path}.new"
        try:
            save(self)
            os.replace(f"{path}.new", path)
        finally:
            self.engine_state_file = path

    def load_whole(self: Any) -> None:
        loading.add(id(self))  # it would be written again after each engine of it
        load(self)
        loading.clear()

    hub._save_engine_state, hub._load_engine_state = save_whole, load_whole


def controller(argv: list[str]) -> None:
    """Become an ipyparallel controller; returns when it ends."""
    app = importlib.import_module("ipyparallel.controller.app")
    # init_hub sleeps 0.25 s for schedulers that a fork has ready at once.
    quick = types.SimpleNamespace(**{**vars(app.time), "sleep": lambda _seconds: None})
    vars(app)["time"] = quick
    option = "--profile-dir="
    _calm_heart(next(a.removeprefix(option) for a in argv if a.startswith(option)))
    _whole_state()
    if sys.platform == "linux":
        # The heart is a process of its own and outlives a controller that is killed.
        prctl = ctypes.CDLL(None).prctl
        os.register_at_fork(after_in_child=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    sys.argv = ["ipcontroller", *argv]
    app.main(argv)


def devices(write_fd: int) -> None:
    """Write {"kind", "count", "names"} of the visible accelerators as one JSON line.

    In a child of its own, because asking initialises the accelerator, which no parent of an
    engine may have done.
    """
    torch = importlib.import_module("torch")
    found = {"kind": None, "count": 0, "names": []}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        module = getattr(torch, accelerator.type)
        name = getattr(module, "get_device_name", lambda _index: accelerator.type)
        found = {"kind": accelerator.type, "count": count, "names": [name(i) for i in range(count)]}
    os.write(write_fd, json.dumps(found).encode() + b"\n")
