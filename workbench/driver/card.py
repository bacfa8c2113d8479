"""Card: what another kernel must know of a cluster, in a file of the cluster's directory."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from workbench.driver.files import replaced
from workbench.forkserver.processes import start_time
from workbench.spec.placement import Place

NAME = "cluster.json"


def this_kernel() -> tuple[int, float]:
    """Pid and start time of this process, which name it for ever."""
    return os.getpid(), start_time(os.getpid())


@dataclass(frozen=True)
class Card:
    """places: of all ranks. kernel: pid and start time of the one that controls the ranks.

    run: directory of their training. started_s: when they were started, since the epoch.
    """

    places: tuple[Place, ...]
    num_spares: int
    timeout_s: float
    run: str | None = None
    kernel: tuple[int, float] = field(default_factory=this_kernel)
    started_s: float = field(default_factory=time.time)

    def write(self, directory: Path) -> None:
        """Put it into a cluster's directory, in place of the one that is there."""
        replaced(directory / NAME, json.dumps(asdict(self)))

    @property
    def is_controlled(self) -> bool:
        """Whether the kernel that controls the ranks still lives."""
        pid, started = self.kernel
        return bool(started) and start_time(pid) == started


def write(directory: Path, places: Sequence[Place], num_spares: int, timeout_s: float) -> None:
    """Say in a cluster's directory that this kernel has started it."""
    Card(tuple(places), num_spares, timeout_s).write(directory)


def read(directory: Path) -> Card | None:
    """The card of a cluster's directory, None where there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads((directory / NAME).read_text(encoding="utf-8"))
        places: Sequence[dict] = told.pop("places")
        kernel = told.pop("kernel")
        return Card(
            places=tuple(Place(**place) for place in places),
            kernel=(int(kernel[0]), float(kernel[1])),
            **told,
        )
    return None


def name_run(directory: Path, run: Path) -> None:
    """Write on the card of a cluster which training its ranks hold."""
    card = read(directory)
    if card is not None:
        replace(card, run=str(run)).write(directory)
