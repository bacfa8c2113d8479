"""History: what the ranks told of every step, once each, and what of it the panel draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from workbench.spec.records import COLUMNS

CURVE_POINTS = 600
# What is shown as "now" is the mean over the slices that ended in the last second or so.
RECENT_SLICES = 4


@dataclass(frozen=True)
class Slice:
    """Sums of one slice by rank: number of steps, and for each column but loss its sum."""

    num_steps: int
    sums: list[dict[str, float | None]]


@dataclass
class History:
    """Loss and rate by step, and the last slices by rank; grows by `add`, shrinks by `rewind`."""

    units_per_step: int = 1
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    recent: list[Slice] = field(default_factory=list)
    wall_s: float = 0.0
    comm_s: float = 0.0
    timed_steps: int = 0
    is_comm_known: bool = True

    def add(self, replies: list[dict[str, Any]]) -> int:
        """Take the replies of one slice from all ranks; returns how many steps all had finished."""
        num_steps = min(len(reply["columns"]["loss"]) for reply in replies)
        if not num_steps:
            return 0
        columns = [{k: v[:num_steps] for k, v in reply["columns"].items()} for reply in replies]
        sums = [{name: _sum(of[name]) for name in COLUMNS if name != "loss"} for of in columns]
        wall_s = sum(of["wall_s"] or 0.0 for of in sums) / len(sums)
        first = replies[0]["first"]
        self.steps.extend(range(first, first + num_steps))
        self.loss.extend(
            math.fsum(parts) for parts in zip(*(of["loss"] for of in columns), strict=True)
        )
        self.rate.extend([self.units_per_step * num_steps / wall_s] * num_steps)
        self.recent = [*self.recent[1 - RECENT_SLICES :], Slice(num_steps, sums)]
        comm = [of["comm_s"] for of in sums]
        self.is_comm_known = None not in comm
        self.wall_s += wall_s
        self.comm_s += sum(part or 0.0 for part in comm) / len(comm)
        self.timed_steps += num_steps
        return num_steps

    def rewind(self, step: int) -> None:
        """Forget what came after a step; the journal keeps it."""
        keep = sum(1 for known in self.steps if known <= step)
        for column in (self.steps, self.loss, self.rate):
            del column[keep:]
        self.recent = []

    def curve(self) -> dict[str, list]:
        """At most CURVE_POINTS points of each curve; the first and the last step are among them."""
        stride = math.ceil(len(self.steps) / CURVE_POINTS) or 1
        chosen = range((len(self.steps) - 1) % stride, len(self.steps), stride)
        return {
            "step": [self.steps[i] for i in chosen],
            "loss": [self.loss[i] for i in chosen],
            "rate": [self.rate[i] for i in chosen],
        }

    def now(self) -> dict[str, Any]:
        """Rate and share of communication over the last slices; None before the first."""
        num_steps = sum(part.num_steps for part in self.recent)
        wall_s = _mean([_total(self.recent, rank, "wall_s") for rank in self._ranks()])
        comm_s = _mean([_total(self.recent, rank, "comm_s") for rank in self._ranks()])
        return {
            "rate": self.units_per_step * num_steps / wall_s if wall_s else None,
            "comm": comm_s / wall_s if wall_s and comm_s is not None else None,
        }

    def by_rank(self) -> list[dict[str, Any]]:
        """Mean milliseconds of a step by rank over the last slices; the parts sum to the wall."""
        num_steps = sum(part.num_steps for part in self.recent)
        rows = []
        for rank in self._ranks():
            total = {k: _total(self.recent, rank, k) for k in COLUMNS if k != "loss"}
            known = {k: (total[k] or 0.0) for k in ("compute_s", "comm_s", "data_s")}
            row = {f"{k[:-2]}_ms": 1e3 * value / num_steps for k, value in known.items()}
            row["other_ms"] = max(
                0.0, 1e3 * (total["wall_s"] or 0.0) / num_steps - sum(row.values())
            )
            rows.append({"rank": rank, **row, "sent_bytes": (total["sent_bytes"] or 0) / num_steps})
        return rows

    def _ranks(self) -> range:
        return range(len(self.recent[-1].sums) if self.recent else 0)


def _sum(values: list[float | None]) -> float | None:
    return None if None in values else sum(value or 0.0 for value in values)


def _total(slices: list[Slice], rank: int, name: str) -> float | None:
    return _sum([part.sums[rank][name] for part in slices])


def _mean(values: list[float | None]) -> float | None:
    return None if not values or None in values else sum(v or 0.0 for v in values) / len(values)
