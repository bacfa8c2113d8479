"""Outages: the times a training stood still because of a fault, and what they cost it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.spec.layout import Layout


@dataclass
class Outage:
    """One fault, from the moment it was noticed to the first new step.

    step: the one that all ranks had finished. marks: (what was done, seconds since it was noticed)
    in their order; the last is the first new step. ranks: that were lost, each as often as it was.
    lost_steps: taken once more afterwards.
    source: where the state came from.
    """

    why: str
    step: int
    began_s: float
    time_s: float = field(default_factory=time.time)
    marks: list[tuple[str, float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    lost_steps: int = 0
    source: str = ""
    filled: str = ""
    is_over: bool = False

    def mark(self, what: str, *, ago_s: float = 0.0) -> None:
        """This much is done, or was so long ago."""
        before_s = self.marks[-1][1] if self.marks else 0.0
        self.marks.append((what, max(before_s, time.monotonic() - ago_s - self.began_s)))

    @property
    def took_s(self) -> float:
        """Seconds from the notice to the last mark."""
        return self.marks[-1][1] if self.marks else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "why": self.why,
            "step": self.step,
            "time_s": self.time_s,
            "marks": [[what, round(at_s, 4)] for what, at_s in self.marks],
            "lost_steps": self.lost_steps,
            "source": self.source,
            "filled": self.filled,
            "is_over": self.is_over,
        }


class Outages:
    """All of one run, and what is to be done about the next.

    policy: a name of spec.policies.ON_LOSS. leftover: what ranks told of the slices in which one
    was lost. reunion: of ranks that lost each other and have met again, if nothing came of it yet.
    are_apart: these stopped a step apart.
    is_broken_off: the step under way, by whoever asked for that.
    state_before: the state that the run goes back to. wide: the layout before it went on
    with fewer ranks. told_of: keys of the lost processes that are a part of one.
    """

    def __init__(self, policy: str) -> None:
        self.policy: str = policy
        self.all: list[Outage] = []
        self.leftover: list[dict[str, Any]] = []
        self.reunion: Outage | None = None
        self.are_apart = False
        self.is_broken_off = False
        self.state_before = "paused"
        self.wide: Layout | None = None
        self.told_of: set[int] = set()

    def told(self) -> dict[str, Any]:
        """What another kernel is to know, as plain values."""
        wide = None if self.wide is None else self.wide.to_dict()
        return {"policy": self.policy, "wide": wide, "all": [asdict(one) for one in self.all]}

    def recall(self, told: dict[str, Any]) -> None:
        """Have what another kernel knew; its clock was another, but what lasted lasted."""
        self.policy = told["policy"]
        self.wide = None if told["wide"] is None else Layout(**told["wide"])
        for one in told["all"]:
            marks = [(what, at_s) for what, at_s in one["marks"]]
            self.all.append(Outage(**{**one, "marks": marks, "is_over": True}))

    @property
    def last(self) -> Outage:
        """The newest."""
        return self.all[-1]

    def begin(self, why: str, ranks: list[int], step: int, began_s: float) -> Outage:
        """A fault was noticed; one that comes before the last is over is a part of it."""
        if self.all and not self.all[-1].is_over:
            self.all[-1].why += f"; {why}"
        else:
            self.all.append(Outage(why, step, began_s))
        self.all[-1].ranks += ranks
        return self.all[-1]

    def waited(self) -> None:
        """Until now it stood still because nobody had said that it should go on."""
        if self.all and not self.all[-1].is_over:
            self.all[-1].mark("asked")

    def take(self, outage: Outage) -> None:
        """One that is over but for the next step; it is a part of the last, if that is not over."""
        if self.all and not self.all[-1].is_over:
            self.all[-1].why += f"; {outage.why}"
        else:
            self.all.append(outage)

    def new_step(self) -> Outage | None:
        """A step was taken -> the outage that it ends, if one was open."""
        if not self.all or self.all[-1].is_over:
            return None
        self.all[-1].mark("first new step")
        self.all[-1].is_over = True
        return self.all[-1]

    def totals(self, wall_s: float, num_steps: int) -> dict[str, Any]:
        """Counts and sums -> faults, lost_steps, downtime_s, goodput (0 to 1, None without steps).

        wall_s, num_steps: of all steps taken, the lost ones among them. goodput: time of the steps
        that count, of all the time spent on steps and on standing still.
        """
        lost_steps = sum(outage.lost_steps for outage in self.all)
        downtime_s = sum(outage.took_s for outage in self.all)
        goodput = None
        if num_steps and wall_s:
            useful_s = wall_s * (1 - min(lost_steps, num_steps) / num_steps)
            goodput = useful_s / (wall_s + downtime_s)
        return {
            "faults": len(self.all),
            "lost_steps": lost_steps,
            "downtime_s": downtime_s,
            "goodput": goodput,
        }
