"""Agreed: what ranks do with the same outcome on all of them, told in one small collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from workbench.errors import CheckpointError

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This rank and how many there are; alone without a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def agreed_all(make: Callable[[], T]) -> list[T]:
    """What make() gives on each rank; where it raises CheckpointError, the first on all ranks."""
    try:
        mine = (make(), None)
    except CheckpointError as error:
        mine = (None, str(error))
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    for _, problem in everyone:
        if problem is not None:
            raise CheckpointError(problem)
    return [value for value, _ in everyone]


def agreed(make: Callable[[], T]) -> T:
    """What make() gives on this rank, once it has not raised on any."""
    kept = []
    agreed_all(lambda: kept.append(make()))
    return kept[0]
