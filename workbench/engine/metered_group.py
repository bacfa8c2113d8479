"""A process group that passes every collective on and notes what it was, how large, and how long.

The group is registered as a backend, so that DDP, FSDP2, DTensor and user code meet it without
knowing. Time counts as exposed only where the caller was held: inside a blocking call, or inside
Work.wait. DDP's reducer waits in C++ where no Python can look; its exposed time is the end of the
backward pass minus the launch of the last bucket, after which there is nothing left to compute.

Torch's names for the virtual methods of ProcessGroup are touched in this file alone; where a
version of torch lacks one, it is left out. Cost per collective: about 15 us.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.clock import COMM, Clock, HostTimer
from workbench.engine.pulse import Pulse
from workbench.engine.sockets import GroupSockets
from workbench.engine.waits import Waits
from workbench.errors import LayoutError

BACKEND = "metered"
MOST_OPS = 100_000
# A wait that takes this long had something to wait for.
BLOCKED_S = 100e-6

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


@dataclass(slots=True)
class Op:
    """One operation. ranks: of its group, peer: of a message; global numbers. Seconds of the host.

    done_s: None until it is done, or where nobody looks.
    """

    kind: str
    ranks: tuple[int, ...]
    peer: int | None
    num_bytes: int
    launched_s: float
    done_s: float | None = None

    @property
    def told(self) -> str:
        """The operation in a word or three."""
        if self.peer is None:
            return self.kind
        return f"{self.kind} {'to' if self.kind == 'send' else 'from'} {self.peer}"


class Meter:
    """The operations of one process since the last `take`, and its clock.

    watches: whether each operation's end is noted as well, which costs a callback. is_alone: other
    ranks would not come. is_dry: an all-reduce is done before it has begun. waits: gloo's, None for
    another backend. sockets: of the world, from when it is on the way.
    """

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.clock = Clock(HostTimer(), self.pulse)
        self.ops: list[Op] = []
        self.waits: Waits | None = None
        self.sockets: GroupSockets | None = None
        self.watches = False
        self.is_alone = False
        self.is_dry = False

    def beat(self, path: Path) -> None:
        """Tell in this file from now on what the rank does."""
        self.pulse = Pulse(path)
        self.pulse.start()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this rank tries the user's code without the others: it must not wait for them."""
        self.is_alone = True
        count = dist.distributed_c10d._world.group_count
        try:
            yield
        finally:
            self.is_alone = False
            # Groups are numbered: one that this rank alone has tried to make was none.
            dist.distributed_c10d._world.group_count = count

    @contextlib.contextmanager
    def dry(self) -> Iterator[None]:
        """Inside, an all-reduce leaves on this rank what it was given, and asks no other."""
        self.is_dry = True
        try:
            yield
        finally:
            self.is_dry = False

    def check_in_company(self) -> None:
        """Raises LayoutError in a trial."""
        if self.is_alone:
            raise LayoutError("The model communicates by itself, which a trial of it cannot.")

    def take(self) -> list[Op]:
        """What there was since the last take."""
        taken, self.ops = self.ops, []
        return taken

    def note(self, op: Op, work: dist.Work | None) -> None:
        """An operation was handed over."""
        self.pulse.launched(op.told, op.launched_s, work)
        if len(self.ops) < MOST_OPS:  # a cell of the user's may run for hours
            self.ops.append(op)
        if self.watches and work is not None:
            # Some of gloo's have no future: they are done when somebody has waited for them.
            with contextlib.suppress(RuntimeError):
                work.get_future().add_done_callback(lambda _: _finish(op))


def _finish(op: Op) -> None:
    if op.done_s is None:
        op.done_s = time.perf_counter()


class MeteredWork(dist.Work):
    """A Work whose wait counts as held by its operation."""

    def __init__(self, inner: dist.Work, op: Op, meter: Meter) -> None:
        super().__init__()
        self._inner = inner
        self._op = op
        self._clock = meter.clock
        self._waits = None if op.peer is None else meter.waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        before = self._clock.enter(COMM, (self._op,))
        began_s = time.perf_counter()
        try:
            if timeout > timedelta(0):
                return self._inner.wait(timeout)
            if self._waits is not None:
                return self._waits.call(self._inner.wait)
            return self._inner.wait()
        finally:
            self._clock.back(before)
            ended_s = time.perf_counter()
            # Of what was done before, nobody knows since when.
            if self._op.done_s is None and ended_s - began_s > BLOCKED_S:
                self._op.done_s = ended_s

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


class DryWork(dist.Work):
    """A Work that was done before it began."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return True


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
        self._ranks: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group; known to torch once the group is made."""
        if self._ranks is None:
            self._ranks = tuple(dist.get_process_group_ranks(self))
        return self._ranks

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
        if value.is_sparse:
            return value._values().nbytes + value._indices().nbytes
        return value.nbytes
    return sum(payload_bytes(item) for item in value)


def _metered(name: str, kind: str, payload: int | None) -> Callable:
    is_message = kind in ("send", "recv")

    def method(self: MeteredGroup, *args: Any, **kwargs: Any) -> Any:
        # Torch calls some methods with an explicit None for the options that the inner refuses.
        while args and args[-1] is None:
            args = args[:-1]
        if self.meter.is_dry and kind == "all-reduce":
            return DryWork(args[0])
        ranks = self.ranks
        nbytes = 0 if payload is None else payload_bytes(args[payload])
        peer = ranks[args[1]] if is_message and name != "recv_anysource" else None
        op = Op(kind, ranks, peer, nbytes, time.perf_counter())
        self.meter.check_in_company()
        clock = self.meter.clock
        # gloo moves bytes of messages in the call itself: a millisecond, not a moment.
        before = clock.enter(COMM, (op,))
        try:
            work = getattr(self.inner, name)(*args, **kwargs)
        finally:
            clock.back(before)
        self.meter.note(op, work)
        return None if work is None else MeteredWork(work, op, self.meter)

    method.__name__ = name
    return method


for _name, (_kind, _payload) in METHODS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(MeteredGroup, _name, _metered(_name, _kind, _payload))


def number_anew() -> None:
    """Groups are found by their numbers: one that was not made has left its number behind."""
    dist.distributed_c10d._world.group_count = 0


def register(device_type: str, meter: Meter) -> None:
    """Make BACKEND known to torch; every group made afterwards reports to `meter`."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> MeteredGroup:
        meter.check_in_company()
        inner = dist.ProcessGroup(store, rank, size)

        def connected() -> tuple[Any, Any]:
            return _real_backend(device_type, store, rank, size, timeout)

        kind, backend = connected() if meter.waits is None else meter.waits.call(connected)
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
    # The timeout that a group is made with is that of its receives, whatever is set later.
    return kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)
