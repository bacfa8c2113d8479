"""Revive: ranks that were lost while nothing was trained, replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.driver.engines import Engines


def revive(engines: Engines) -> dict[int, str]:
    """Ranks that are gone replaced where nothing is trained -> a sentence on each, by rank.

    Their variables are gone with them. A training sees to its ranks itself.
    """
    is_idle = engines.run is None or engines.run.state == "gone"
    if not is_idle or not engines.roster.gone() or not engines.can_enlist:
        return {}
    why = {rank: engines.roster.members[rank].gone for rank in engines.roster.gone()}
    filled = engines.roster.fill(engines.enlist)
    engines.rejoin()
    engines.refill(lambda _members: None)
    return {
        rank: f"Rank {rank} was gone ({why[rank]}): a {kind} process has its place, and its "
        "variables are gone."
        for rank, kind in filled.items()
    }
