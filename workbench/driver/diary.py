"""Diary: what only the driver knows of a run, in a file that outlives the kernel.

Loss and times of every step are in the ranks' journals; the state and the data order are on the
ranks. What is left is little and changes seldom: the goal, marks, metrics, events.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver.files import replaced
from workbench.driver.needed import needed

if TYPE_CHECKING:
    from workbench.driver.run import Run

NAME = "run.json"
# Attributes of a Run that are kept as they are.
AS_IT_IS = (
    "about", "state", "message", "goal", "metrics", "metrics_step", "marks", "num_saves", "events",
    "stages", "held", "peaks", "origin",
)  # fmt: skip


class Diary:
    """The file of one run; written by the run's thread.

    logs: of the ranks, beside which their pulses lie. cells: what the recipe rests on.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._written = ""
        self._version = -1
        self._cells: list[tuple[int, str]] | None = None
        self._is_closed = False

    def keep(self, run: Run) -> None:
        """Write what has changed, if anything has."""
        if run.version == self._version or self._is_closed:
            return
        self._version = run.version
        told = {name: getattr(run, name) for name in AS_IT_IS}
        told |= {"options": run.options.to_dict(), "layout": run.layout.to_dict()}
        told["logs"] = [row["log"] for row in run.engines.ranks]
        if self._cells is None and run.about["cell"] is not None:
            self._cells = needed((run.about["number"], run.about["cell"]), run.engines.cells)
        told["cells"] = self._cells or []
        told |= {"branches": run.history.branches, "outages": run.outages.told()}
        told["faults"] = run.faults.told()
        file = run.event_file
        told["tensorboard"] = str(file.path.parent) if file is not None else None
        text = json.dumps(told)
        if text == self._written:
            return
        # A full disk must not end the training; what is not written is tried again.
        try:
            replaced(self.path, text)
            self._written = text
        except OSError:
            self._version = -1

    def close(self, run: Run) -> None:
        """Write for the last time: the file is another kernel's from now on."""
        self.keep(run)
        self._is_closed = True


def read(directory: str | Path) -> dict[str, Any] | None:
    """What the diary of a run has, None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(Path(directory, NAME).read_text(encoding="utf-8"))
        return told if isinstance(told, dict) else None
    return None


def written_s(directory: str | Path) -> float:
    """When it was last written, since the epoch; 0.0 where there is none."""
    with contextlib.suppress(OSError):
        return Path(directory, NAME).stat().st_mtime
    return 0.0
