"""World: the process group of one attempt, from the meeting of its ranks to its first loss.

A world is never repaired. When a rank is lost or raises, every rank closes its world and the
driver has them join the next attempt: the same store under a fresh prefix.
"""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine import metered_group
from workbench.engine.breakable import Breakable
from workbench.engine.clock import Clock, timer_for
from workbench.engine.offset import measure
from workbench.engine.sockets import GroupSockets, open_sockets
from workbench.engine.waits import Waits
from workbench.errors import StartError
from workbench.spec.layout import Layout


@dataclass(frozen=True)
class Meeting:
    """Where and as whom a rank joins. store_path: a file that no rank owns, in a private folder."""

    rank: int
    size: int
    attempt: int
    store_path: str
    timeout_s: float
    rendezvous_s: float


class World:
    """A joined world; `close` leaves no group, thread, socket or memory behind."""

    def __init__(
        self, meeting: Meeting, meter: metered_group.Meter, store: Breakable | None = None
    ) -> None:
        # Whoever gives it can break off the meeting, before there is a world to free.
        self.store = store or Breakable(meeting.store_path, meeting.rendezvous_s)
        self.rank = meeting.rank
        self.size = meeting.size
        self.attempt = meeting.attempt
        self.meter = meter
        self.device = own_device()
        # NCCL connects when it is first used, and its messages are waited for by their stream.
        self.waits = meter.waits = Waits() if self.device.type == "cpu" else None
        meter.clock = Clock(timer_for(self.device), meter.pulse)
        metered_group.register(self.device.type, meter)
        before = open_sockets()
        self.sockets = meter.sockets = GroupSockets(before)
        try:
            dist.init_process_group(
                metered_group.BACKEND,
                store=dist.PrefixStore(f"attempt{meeting.attempt}", self.store),
                rank=meeting.rank,
                world_size=meeting.size,
                timeout=timedelta(seconds=meeting.timeout_s),
            )
            self.sockets.add(before)  # and cut off what another user has opened
            # Proof that the world works, not only that it was made.
            ones = torch.ones(1, device=self.device)
            dist.all_reduce(ones)
        except RuntimeError as error:
            self.close()
            raise StartError(
                f"Rank {meeting.rank} did not meet all {meeting.size} ranks within "
                f"{meeting.rendezvous_s:g} s: {str(error).splitlines()[0]}"
            ) from error
        if int(ones) != meeting.size:
            raise StartError(f"{meeting.size} ranks summed their ones to {int(ones)}.")
        # From here on ranks wait for each other as long as in any operation.
        self.store.wait_s = meeting.timeout_s
        self.offset = measure(meeting.rank, meeting.size, self.device)
        self.sockets.add(before)  # those that are made when they are needed
        self._num_groups = dist.get_pg_count()
        self._meshes: dict[tuple, DeviceMesh] = {}

    def mesh(self, layout: Layout) -> DeviceMesh:
        """The mesh of the layout's axes that have more than one rank; collective over all ranks.

        The first ranks of the world make it up. Kept, so that going back and forth between two
        layouts makes no group twice.
        """
        used = layout.used()
        key = tuple(used.items())
        if key not in self._meshes:
            self._look()
            before = open_sockets()
            ranks = torch.arange(layout.world_size).reshape(tuple(used.values()))
            self._meshes[key] = DeviceMesh(self.device.type, ranks, mesh_dim_names=tuple(used))
            self.sockets.add(before)
            self._num_groups = dist.get_pg_count()
        return self._meshes[key]

    def bytes_sent(self) -> int | None:
        """Bytes sent over the groups' own connections so far; None where nobody counts them."""
        self._look()
        return self.sockets.bytes_sent() if len(self.sockets) or self.size == 1 else None

    def _look(self) -> None:
        """Find the connections of groups that the user's code has made."""
        if (num_groups := dist.get_pg_count()) != self._num_groups:
            self._num_groups = num_groups
            self.sockets.look()

    def free(self) -> None:
        """Make every operation that waits for a peer raise, here and at the peers."""
        self.store.break_off()
        with contextlib.suppress(OSError):  # without descriptors left, those that are known
            self._look()
        self.sockets.shut_down()
        if self.waits is not None:
            self.waits.free()

    def close(self) -> None:
        """Leave; the ranks that still wait for this one are freed by it."""
        self.sockets.shut_down()
        if self.waits is not None:
            self.waits.close()
            self.meter.waits = None
        self.meter.pulse.let_go()
        self._destroy()
        self.sockets.close()

    @staticmethod
    def _destroy() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        metered_group.number_anew()
        # DDP's reducer and its hooks hold the group in cycles.
        gc.collect()


def own_device() -> torch.device:
    """The rank's device: the one accelerator it was bound to, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or os.environ.get("WORKBENCH_DEVICE") == "cpu":
        return torch.device("cpu")
    # The launcher shows each rank one device, whose index is therefore 0.
    torch.accelerator.set_device_index(0)
    return torch.device(accelerator.type, 0)
