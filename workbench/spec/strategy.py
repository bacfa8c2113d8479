"""Strategies: the names a user types for a region of Layouts."""

from __future__ import annotations

from workbench.errors import LayoutError
from workbench.spec.layout import Layout
from workbench.spec.near import unknown


def data(world_size: int, *, shard: bool = False) -> Layout:
    """Every rank trains on its share of each batch; replicated (DDP) or sharded (FSDP2)."""
    return Layout(dp_shard=world_size) if shard else Layout(dp_replicate=world_size)


STRATEGIES = {"data": data}


def layout_for(strategy: str, world_size: int, *, shard: bool = False) -> Layout:
    """The Layout that a strategy name means on so many ranks.

    Raises LayoutError for a name that is not known.
    """
    if strategy not in STRATEGIES:
        raise LayoutError(unknown("strategy", strategy, STRATEGIES))
    return STRATEGIES[strategy](world_size, shard=shard)
