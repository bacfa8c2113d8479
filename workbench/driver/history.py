"""History: what the ranks told of every step, once each, and what of it the panel draws."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from workbench.driver.sample import joined
from workbench.spec.layout import Layout
from workbench.spec.records import COLUMNS, PARTS

CURVE_POINTS = 600
SAMPLES_KEPT = 64
# What was left behind by going back: how many of them are kept, and points of each.
BRANCHES_KEPT, BRANCH_POINTS = 8, 120
# What is shown as "now" is the mean over the slices that ended in the last second or so.
RECENT_SLICES = 4


@dataclass(frozen=True)
class Slice:
    """Sums of one slice by rank: number of steps, and for each column but loss its sum.

    waiting: by rank, the share of comm_s that was waiting, as its last step showed.
    """

    num_steps: int
    sums: list[dict[str, float]]
    waiting: dict[int, float]


@dataclass
class History:
    """Loss and rate by step, and the last slices by rank; grows by `add`, shrinks by `rewind`.

    samples: the last steps that were recorded whole, the newest last. branches: curves that were
    left behind, each from the step that was gone back to, with the layout it had.
    """

    units_per_step: int = 1
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    recent: list[Slice] = field(default_factory=list)
    wall_s: float = 0.0
    comm_s: float = 0.0
    idle_s: float = 0.0
    timed_steps: int = 0
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    branches: list[dict[str, Any]] = field(default_factory=list)

    def add(self, replies: list[dict[str, Any]], layout: Layout) -> int:
        """Take the replies of one slice from all ranks; returns how many steps all had finished."""
        num_steps = min(len(reply["columns"]["loss"]) for reply in replies)
        if not num_steps:
            return 0
        columns = [{k: v[:num_steps] for k, v in reply["columns"].items()} for reply in replies]
        sums: list[dict[str, float]] = [{k: sum(of[k]) for k in COLUMNS[1:]} for of in columns]
        wall_s = sum(of["wall_s"] for of in sums) / len(sums)
        self._take_sample(replies, layout)
        last = self.samples[-1]["ranks"] if self.samples else []
        waiting = {row["rank"]: row["waiting"] for row in last}
        first = replies[0]["first"]
        self.steps.extend(range(first, first + num_steps))
        self.loss.extend(
            math.fsum(parts) for parts in zip(*(of["loss"] for of in columns), strict=True)
        )
        self.rate.extend([self.units_per_step * num_steps / wall_s] * num_steps)
        self.recent = [*self.recent[1 - RECENT_SLICES :], Slice(num_steps, sums, waiting)]
        self.wall_s += wall_s
        held_s = [of["comm_s"] for of in sums]
        idle_s = [held * waiting.get(rank, 0.0) for rank, held in enumerate(held_s)]
        self.idle_s += sum(idle_s) / len(sums)
        self.comm_s += (sum(held_s) - sum(idle_s)) / len(sums)
        self.timed_steps += num_steps
        return num_steps

    def _take_sample(self, replies: list[dict[str, Any]], layout: Layout) -> None:
        told = [reply["sample"] for reply in replies if reply.get("sample")]
        if len(told) == len(replies) and len({one["step"] for one in told}) == 1:
            self.samples.append(joined(told, layout))

    def rewind(self, step: int, left: str = "") -> None:
        """Forget what came after a step; the journal keeps it.

        left: the layout under which it was left on purpose, so that a thinned branch of it stays.
        """
        keep = sum(1 for known in self.steps if known <= step)
        if left and keep < len(self.steps):
            branch = {"layout": left, **self._thinned(max(0, keep - 1), BRANCH_POINTS)}
            self.branches = [*self.branches[1 - BRANCHES_KEPT :], branch]
        for column in (self.steps, self.loss, self.rate):
            del column[keep:]
        self.recent = []
        kept = [sample for sample in self.samples if sample["step"] <= step]
        self.samples = deque(kept, maxlen=SAMPLES_KEPT)

    def last_loss(self) -> float | None:
        """Of the last step of which it is known; None before."""
        return next((loss for loss in reversed(self.loss) if not math.isnan(loss)), None)

    def curve(self) -> dict[str, list]:
        """At most CURVE_POINTS points of each curve; the first and the last step are among them."""
        return self._thinned(0, CURVE_POINTS)

    def _thinned(self, first: int, most: int) -> dict[str, list]:
        """At most so many points from a place on; the last is among them."""
        count = len(self.steps) - first
        stride = math.ceil(count / most) or 1
        chosen = [first + i for i in range((count - 1) % stride, count, stride)]
        return {
            "step": [self.steps[i] for i in chosen],
            # Unknown of a step whose record died with a rank.
            "loss": [None if math.isnan(self.loss[i]) else self.loss[i] for i in chosen],
            "rate": [self.rate[i] for i in chosen],
        }

    def now(self) -> dict[str, Any]:
        """Rate, and shares of communication and of waiting over the last slices; None before."""
        num_steps = sum(part.num_steps for part in self.recent)
        rows = self.by_rank()
        wall_ms = _mean([row["wall_ms"] for row in rows])
        shares = {
            name: _mean([row[f"{part}_ms"] / wall_ms for row in rows]) if wall_ms else None
            for name, part in (("comm", "wire"), ("idle", "idle"))
        }
        rate = self.units_per_step * 1e3 / wall_ms if num_steps and wall_ms else None
        return {"rate": rate, **shares}

    def by_rank(self) -> list[dict[str, Any]]:
        """Mean milliseconds of a step by rank over the last slices; the parts sum to the wall."""
        num_steps = sum(part.num_steps for part in self.recent)
        rows = []
        for rank in self._ranks():
            total = {k: sum(part.sums[rank][k] for part in self.recent) for k in COLUMNS[1:]}
            idle_s = sum(of.sums[rank]["comm_s"] * of.waiting.get(rank, 0.0) for of in self.recent)
            ms = {f"{k[:-2]}_ms": 1e3 * total[k] / num_steps for k in PARTS if k != "comm_s"}
            ms["wire_ms"] = 1e3 * (total["comm_s"] - idle_s) / num_steps
            ms["idle_ms"] = 1e3 * idle_s / num_steps
            wall_ms = 1e3 * total["wall_s"] / num_steps
            ms["other_ms"] = max(0.0, wall_ms - sum(ms.values()))
            sent_bytes = total["sent_bytes"] / num_steps
            rows.append({"rank": rank, **ms, "wall_ms": wall_ms, "sent_bytes": sent_bytes})
        return rows

    def _ranks(self) -> range:
        return range(len(self.recent[-1].sums) if self.recent else 0)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
