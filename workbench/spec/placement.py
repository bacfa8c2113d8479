"""Which rank gets which device and how many threads, decided before a process is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from workbench.errors import InputError, StartError

MAX_RANKS = 64
# What restricts a process to one device, by accelerator type as torch.accelerator names it.
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True)
class Devices:
    """Accelerators this machine shows: type, and for each the id that makes only it visible."""

    kind: str | None = None
    ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def seen(cls, found: dict, environment: dict[str, str]) -> Devices:
        """From what a probe counted and the environment restricts; types not bindable are none."""
        kind, count = found["kind"], found["count"]
        if kind not in VISIBLE or not count:
            return cls()
        listed = [part.strip() for part in environment.get(VISIBLE[kind], "").split(",")]
        ids = [part for part in listed if part][:count] or [str(index) for index in range(count)]
        return cls(kind, tuple(ids), tuple(found["names"]))


@dataclass(frozen=True)
class Place:
    """Where one rank runs: a device to show, threads, and the environment that binds it."""

    rank: int
    device: str
    threads: int
    environment: dict[str, str]


def check_number(num_ranks: object) -> None:
    """Raise InputError for a number of ranks that is none, whatever the devices."""
    is_flag = isinstance(num_ranks, bool)
    if is_flag or not isinstance(num_ranks, int) or not 1 <= num_ranks <= MAX_RANKS:
        raise InputError(f"n={num_ranks!r}: use a number of ranks from 1 to {MAX_RANKS}.")


def check_spares(spares: object) -> None:
    """Raise InputError for a number of spare processes that is none."""
    if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares <= MAX_RANKS:
        raise InputError(f"spares={spares!r}: use a number of processes from 0 to {MAX_RANKS}.")


def place(
    num_ranks: int | None, devices: Devices, cores: int, *, use_cpu: bool = False
) -> list[Place]:
    """One place a rank; num_ranks None means one a device, or one a core up to 4.

    Raises InputError for a number that is none, StartError for more ranks than devices.
    """
    on_cpu = use_cpu or not devices.ids
    if num_ranks is None:
        num_ranks = min(cores, 4) if on_cpu else len(devices.ids)
    check_number(num_ranks)
    if not on_cpu and num_ranks > len(devices.ids):
        shown = ", ".join(f"rank {r} -> {devices.kind} {d}" for r, d in enumerate(devices.ids))
        raise StartError(
            f"{num_ranks} ranks need as many devices, and {len(devices.ids)} are visible: {shown}. "
            f"Use -n {len(devices.ids)}, or --cpu."
        )
    threads = max(1, cores // num_ranks)
    places = []
    for rank in range(num_ranks):
        environment = {
            "WORKBENCH_RANK": str(rank),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": str(threads),
        }
        if on_cpu:
            device = "cpu"
            environment["WORKBENCH_DEVICE"] = "cpu"
        else:
            device = f"{devices.kind} {devices.ids[rank]}"
            environment[VISIBLE[str(devices.kind)]] = devices.ids[rank]
        places.append(Place(rank, device, threads, environment))
    return places


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
