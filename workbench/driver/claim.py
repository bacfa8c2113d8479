"""Claim: of several notebooks that attach to one cluster at the same moment, one does.

It holds a lock (flock) on a file of the cluster's directory meanwhile, of which a process that ends
lets go by itself. Once it has attached, the card of the cluster names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator

from workbench.driver import card
from workbench.driver.clusters import Cluster
from workbench.errors import EnginesError

NAME = "claim"
# Between taking the lock and writing down who has it.
NAMED_S, POLL_S = 2.0, 0.005


@contextlib.contextmanager
def claimed(cluster: Cluster, *, take_over: bool) -> Iterator[Cluster]:
    """Nobody else attaches to the cluster meanwhile -> the cluster as it is now.

    take_over: also from the living kernel that controlled it when it was chosen.

    Raises EnginesError at once where another notebook attaches, or controls it.
    """
    with _locked(cluster):
        told = card.read(cluster.directory)
        if told is None:
            raise _stopped(cluster)
        now = dataclasses.replace(cluster, card=told)
        if told.is_controlled and not (take_over and told.kernel == cluster.card.kernel):
            raise EnginesError(
                f"{now.name} is controlled by the notebook of process {told.kernel[0]}, "
                "which lives: attach(take_over=True) takes it over, watch() watches."
            )
        yield now


@contextlib.contextmanager
def _locked(cluster: Cluster) -> Iterator[None]:
    try:
        lock = os.open(cluster.directory / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        raise _stopped(cluster) from None
    try:
        end_s = time.monotonic() + NAMED_S
        while not _is_ours(lock):
            who = os.pread(lock, 32, 0).decode()
            if who or time.monotonic() > end_s:
                raise EnginesError(
                    f"The notebook of process {who or 'unknown'} is just attaching to "
                    f"{cluster.name}: %dist_attach watches it then."
                )
            time.sleep(POLL_S)
        os.ftruncate(lock, 0)  # who was killed while it had the lock is named there still
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
        os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _is_ours(lock: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _stopped(cluster: Cluster) -> EnginesError:
    return EnginesError(f"The ranks of {cluster.name} were stopped.")
