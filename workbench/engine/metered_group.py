"""A process group that passes every collective on and notes what it was, how large, and how long.

The group is registered as a backend, so that DDP, FSDP2, DTensor and user code meet it without
knowing. Time counts as exposed only where the caller was held: inside a blocking call, or inside
Work.wait. DDP's reducer waits in C++ where no Python can look; its exposed time is the end of the
backward pass minus the launch of the last bucket, after which there is nothing left to compute.

Torch's names for the virtual methods of ProcessGroup are touched in this file alone; where a
version of torch lacks one, it is left out. Cost per collective: about 15 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "metered"

# Method of ProcessGroup -> (kind shown to the user, index of the argument that holds the payload).
METHODS = {
    "allreduce": ("all-reduce", 0),
    "allreduce_coalesced": ("all-reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all-gather", 1),
    "allgather_coalesced": ("all-gather", 1),
    "allgather_into_tensor_coalesced": ("all-gather", 1),
    "_allgather_base": ("all-gather", 1),
    "all_gather_single": ("all-gather", 1),
    "all_gather_single_coalesced": ("all-gather", 1),
    "reduce_scatter": ("reduce-scatter", 1),
    "_reduce_scatter_base": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 1),
    "alltoall": ("all-to-all", 1),
    "alltoall_base": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}


class Meter:
    """Sums over the collectives of one process since the last `take`."""

    def __init__(self) -> None:
        self.held_s = 0.0
        self.payload_bytes = 0
        self.count = 0
        self.last_launch_s = 0.0

    def note(self, nbytes: int, started_s: float, launched_s: float) -> None:
        """One collective was handed over."""
        self.held_s += launched_s - started_s
        self.payload_bytes += nbytes
        self.count += 1
        self.last_launch_s = launched_s

    def take(self) -> tuple[float, int, int]:
        """(seconds held, payload bytes, number of collectives) since the last take."""
        taken = (self.held_s, self.payload_bytes, self.count)
        self.held_s, self.payload_bytes, self.count = 0.0, 0, 0
        return taken


class MeteredWork(dist.Work):
    """A Work whose wait counts as held time."""

    def __init__(self, inner: dist.Work, meter: Meter) -> None:
        super().__init__()
        self._inner = inner
        self._meter = meter

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        started_s = time.perf_counter()
        try:
            return self._inner.wait(timeout) if timeout > timedelta(0) else self._inner.wait()
        finally:
            self._meter.held_s += time.perf_counter() - started_s

    def get_future(self) -> Any:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def synchronize(self) -> None:
        self._inner.synchronize()


class MeteredGroup(dist.ProcessGroup):
    """Delegates to a C++ group around the real backend; `meter` is shared by a rank's groups."""

    def __init__(
        self, inner: dist.ProcessGroup, backend: Any, device: torch.device, meter: Meter
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self.inner = inner
        self.backend = backend
        self.device = device
        self.meter = meter
        self._name = self._desc = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def _get_backend_name(self) -> str:
        return BACKEND

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self.inner.rank()

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self.inner.size()

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.device]

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.inner._set_group_name(name)  # pyright: ignore[reportArgumentType]

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        self.inner._set_group_desc(desc)

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._desc

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def abort(self) -> None:
        self.inner.abort()


def payload_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(payload_bytes(item) for item in value)


def _metered(name: str, payload: int | None) -> Callable:
    def method(self: MeteredGroup, *args: Any, **kwargs: Any) -> Any:
        # Torch calls some methods with an explicit None for the options that the inner refuses.
        while args and args[-1] is None:
            args = args[:-1]
        started_s = time.perf_counter()
        work = getattr(self.inner, name)(*args, **kwargs)
        nbytes = 0 if payload is None else payload_bytes(args[payload])
        self.meter.note(nbytes, started_s, time.perf_counter())
        return None if work is None else MeteredWork(work, self.meter)

    method.__name__ = name
    return method


for _name, (_kind, _payload) in METHODS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(MeteredGroup, _name, _metered(_name, _payload))


def register(device_type: str, meter: Meter) -> None:
    """Make BACKEND known to torch; every group made afterwards reports to `meter`."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> MeteredGroup:
        inner = dist.ProcessGroup(store, rank, size)
        kind, backend = _real_backend(device_type, store, rank, size, timeout)
        backend._set_sequence_number_for_group()
        device = torch.device(device_type)
        inner._register_backend(device, kind, backend)
        inner._set_default_backend(kind)
        return MeteredGroup(inner, backend, device, meter)

    if BACKEND.upper() in dist.Backend._plugins:
        del dist.Backend._plugins[BACKEND.upper()]
    if BACKEND in dist.Backend.backend_list:
        dist.Backend.backend_list.remove(BACKEND)
    dist.Backend.register_backend(BACKEND, create, devices=[device_type])


def _real_backend(
    device_type: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> tuple[Any, Any]:
    kinds = dist.ProcessGroup.BackendType
    if dist.get_default_backend_for_device(device_type) == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return kinds.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    return kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)
