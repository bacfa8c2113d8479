"""Launchers: one file a way to start engine processes, named as the user types it.

Each file has `launch(session, places, options) -> Launched`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Processes(Protocol):
    """The engine processes of one cluster, by rank."""

    def on_exit(self, rank: int, callback: Callable[[int], None]) -> None:
        """Call back with the exit code once the process of a rank is gone."""

    def on_controller_exit(self, callback: Callable[[int], None]) -> None:
        """The same for the controller."""

    def signal(self, ranks: list[int], number: int) -> None:
        """Send a signal to the processes of some ranks."""

    def end(self) -> Future:
        """End engines and controller; done when none of them is left."""
        ...

    def kill(self) -> None:
        """The same without whoever started them, who does not answer."""

    def log(self, rank: int) -> Path:
        """Where a rank's process writes."""
        ...


@dataclass(frozen=True)
class Launched:
    """A started cluster: its processes and how a client connects."""

    processes: Processes
    connection_file: Path
    directory: Path
