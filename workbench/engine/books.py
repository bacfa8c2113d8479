"""Books: what the marks of a step say, as numbers for the driver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.clock import COMM, OTHER, HostTimer, Ticked, Timer
from workbench.engine.metered_group import Op
from workbench.engine.offset import Offset
from workbench.spec.records import COLUMNS, PARTS

ROUND_S = 7  # digits after the point


@dataclass
class Page:
    """One step. ops: kept of a step that is recorded whole, else None."""

    step: int
    loss: float
    sent_bytes: int
    ticked: Ticked
    ops: list[Op] | None = None
    _row: dict[str, float] | None = None

    def row(self, timer: Timer) -> dict[str, float]:
        """A value for each of COLUMNS."""
        if self._row is not None:
            return self._row
        sums = self.ticked.sums(timer)
        parts = {name: sums[name.removesuffix("_s")] for name in PARTS}
        wall_s = sum(sums.values())
        return {"loss": self.loss, "wall_s": wall_s, **parts, "sent_bytes": self.sent_bytes}

    def at_once(self, timer: Timer) -> list[float]:
        """The row as it is known when the step ends: an accelerator's parts count as other."""
        if isinstance(timer, HostTimer):
            self._row = self.row(timer)
            return list(self._row.values())
        wall_s = time.perf_counter() - self.ticked.began_s
        return [self.loss, wall_s, *[0.0] * len(PARTS), self.sent_bytes]

    def sample(self, timer: Timer, offset: Offset) -> dict[str, Any]:
        """Spans and operations, as plain values; seconds from the begin of the step."""
        assert self.ops is not None
        began_s, numbers = self.ticked.began_s, {id(op): i for i, op in enumerate(self.ops)}
        spans = []
        for span in self.ticked.spans(timer):
            detail = span.detail
            if span.kind == COMM:
                detail = [numbers[id(op)] for op in detail if id(op) in numbers]
            times = (round(span.begin_s, ROUND_S), round(span.end_s, ROUND_S))
            # Of what was launched in the step before nothing is told.
            is_unknown = span.kind == COMM and not detail
            spans.append([OTHER, *times, None] if is_unknown else [span.kind, *times, detail])
        return {
            "step": self.step,
            "began_s": began_s,
            "offset_s": offset.seconds,
            "error_s": offset.error_s,
            "spans": spans,
            "ops": [_told(op, began_s) for op in self.ops],
        }


def enter(pages: Sequence[Page], timer: Timer, columns: dict[str, list]) -> None:
    """Append the rows of steps to columns."""
    timer.settle()
    for page in pages:
        row = page.row(timer)
        for name in COLUMNS:
            columns[name].append(row[name])


def _told(op: Op, began_s: float) -> tuple:
    """As OP_FIELDS."""
    done_s = None if op.done_s is None else round(op.done_s - began_s, ROUND_S)
    launched_s = round(op.launched_s - began_s, ROUND_S)
    return (op.kind, op.ranks, op.peer, op.num_bytes, launched_s, done_s)
