"""One number, from which every other time limit follows."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import InputError


@dataclass(frozen=True)
class Timeouts:
    """All limits in seconds, derived from `total_s`, the longest a rank may keep others waiting.

    total_s: a collective, and the start of all engines. rendezvous_s: ranks finding each other.
    freed_s: from one rank's exception until all ranks have answered.
    """

    total_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.total_s <= 86_400:
            raise InputError(f"timeout={self.total_s!r}: use seconds between 1 and 86400.")

    @property
    def rendezvous_s(self) -> float:
        """Ranks find each other in less, so that the start can still say who is missing."""
        return self.total_s * 0.75

    @property
    def stalled_s(self) -> float:
        """A rank that stands so long is dealt with where users said so, while the others wait."""
        return self.total_s / 2

    @property
    def freed_s(self) -> float:
        """A freed rank answers at once; one that does not still computes, or is stuck."""
        return max(5.0, self.total_s / 4)
