"""Health: a loss that runs away, and updates that were left out, as a training goes on."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.driver.run import Run

# A loss that lies so far above the median of those before, for so many steps, does not come back.
FACTOR, STEPS, WINDOW = 10.0, 20, 100


class Health:
    """Looks at the losses of one run as they are booked."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._last_step = 0
        self._high = 0

    def look(self, run: Run, replies: Sequence[dict[str, Any]], taken: int) -> None:
        """The last `taken` steps of the history are new; replies: those of the ranks."""
        steps = set(run.history.steps[-taken:]) if taken else set()
        for skipped in replies[0].get("skipped", ()):
            if skipped["step"] in steps:
                run.happened("skipped", **skipped)
                run.marks.append({"step": skipped["step"], "label": "skipped"})
        if not taken:
            return
        for step, loss in zip(run.history.steps[-taken:], run.history.loss[-taken:], strict=True):
            if (values := self.sees(step, loss)) is not None:
                run.happened("diverging", **values)

    def sees(self, step: int, loss: float) -> dict[str, Any] | None:
        """One more step -> what there is to say of a loss that runs away, once."""
        if step <= self._last_step:  # it went back
            self._window.clear()
            self._high = 0
        self._last_step = step
        if math.isnan(loss):
            return None
        usual = statistics.median(self._window) if len(self._window) >= STEPS else math.inf
        if not loss > FACTOR * usual > 0:
            # High ones are no measure of what is usual.
            self._high = 0
            self._window.append(loss)
            return None
        self._high += 1
        if self._high != STEPS:
            return None
        values = {"step": step, "loss": f"{loss:.4g}", "usual": f"{usual:.4g}"}
        return {**values, "factor": f"{FACTOR:g}", "steps": STEPS}
