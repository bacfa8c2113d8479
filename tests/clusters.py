"""Real engines for tests: one cluster at a time, kept as long as the next test wants as many."""

from __future__ import annotations

import os

from workbench.driver import session
from workbench.driver.engines import Engines, start


class Clusters:
    """`clusters(n)` gives n live ranks, the ones of the test before where they fit."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self.engines: Engines | None = None

    def __call__(self, n: int, spares: int = 0) -> Engines:
        engines = self.engines
        if engines is not None and engines.alive and engines.num_ranks == n:
            roster = engines.roster
            if roster.num_spares == spares and roster.num_lacking() <= 0:
                return engines
        self.stop()
        self.engines = start(n, spares=spares)
        return self.engines

    def stop(self) -> None:
        """End the cluster that is up."""
        if self.engines is not None:
            self.engines.stop()
            self.engines = None

    def close(self) -> None:
        """End the cluster and the fork server."""
        self.stop()
        session.close()
