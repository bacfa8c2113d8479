"""Launchers: one file a way to start engine processes, named as the user types it.

Each file has `launch(session, places, options) -> Launched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workbench.spec.placement import Place


class Processes(Protocol):
    """The engine processes of one cluster, by key: the number each was started under."""

    @property
    def can_start(self) -> bool:
        """Whether more processes can be started."""
        ...

    def start(self, key: int, place: Place) -> Future:
        """Start one more process with so many threads as a place has; done when it runs."""
        ...

    def on_exit(self, key: int, callback: Callable[[int], None]) -> None:
        """Call back with the exit code once the process is gone."""

    def on_controller_exit(self, callback: Callable[[int, bool], None]) -> None:
        """Call back with its exit code each time the controller is gone, and if another comes."""

    def check(self) -> None:
        """Raises EnginesError where whoever starts the processes and misses them is stopped."""

    def stopped_server(self) -> int:
        """Its pid then, else 0."""
        ...

    def stopped(self, keys: Iterable[int]) -> list[int]:
        """Those of the processes that are held by SIGSTOP."""
        ...

    def stopped_controller(self) -> int:
        """The pid of the controller where it is held by SIGSTOP, else 0."""
        ...

    def end_controller(self, pid: int) -> None:
        """SIGKILL to the controller, so that another takes its place."""

    def signal(self, keys: list[int], number: int, *, waits: bool = True) -> None:
        """Send a signal to some processes; waits: until it is sent, which is in order anyhow."""

    def end(self) -> Future:
        """End engines and controller; done when none of them is left."""
        ...

    def kill(self) -> None:
        """The same without whoever started them, who does not answer."""

    def log(self, key: int) -> Path:
        """Where a process writes."""
        ...


@dataclass(frozen=True)
class Launched:
    """A started cluster: its processes and how a client connects."""

    processes: Processes
    connection_file: Path
    directory: Path
