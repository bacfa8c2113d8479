"""Fault: what is to go wrong on one rank, at which step, and in what of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from workbench.errors import InputError
from workbench.spec.near import unknown
from workbench.spec.registry import names_in

MOST_S, MOST_STEP = 86_400, 10**12
# In what of a step it happens; kinds of engine/clock.py.
PHASES = ("forward", "backward", "comm", "optimizer", "data")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """kind: as `kinds` has them. step: the first in which it happens, once `phase` begins.

    how: what else the kind asks for, "" its usual way. for_s: how long it lasts, or how long the
    rank is slow in each step; None as the kind has it.

    Raises InputError for values that are none.
    """

    kind: str
    rank: int
    step: int
    phase: str = "forward"
    how: str = ""
    for_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in kinds():
            raise InputError(unknown("fault", str(self.kind), kinds()))
        if self.phase not in PHASES:
            raise InputError(f"phase={self.phase!r}: use one of {', '.join(PHASES)}.")
        is_number = isinstance(self.step, int) and not isinstance(self.step, bool)
        if not is_number or not 1 <= self.step <= MOST_STEP:
            raise InputError(
                f"at_step={self.step!r:.40}: use a whole number of a step >= 1, {MOST_STEP:,} at "
                "most."
            )
        if not isinstance(self.how, str):
            raise InputError(f"how={self.how!r}: use a word, as %dist_fault? lists them.")
        if self.for_s is not None and (
            isinstance(self.for_s, bool)
            or not isinstance(self.for_s, (int, float))
            or not 0 < self.for_s <= MOST_S
        ):
            raise InputError(f"for_s={self.for_s!r:.40}: use seconds > 0, {MOST_S:,} at most.")

    @property
    def module(self) -> str:
        """The file under engine/faults."""
        return self.kind.replace("-", "_")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the wire."""
        return asdict(self)

    def __str__(self) -> str:
        """`kill of rank 2 in forward of step 101`."""
        how = f" ({self.how})" if self.how else ""
        return f"{self.kind}{how} of rank {self.rank} in {self.phase} of step {self.step:,}"


def kinds() -> list[str]:
    """All that can go wrong, as it is typed."""
    return [name.replace("_", "-") for name in names_in("engine/faults")]
