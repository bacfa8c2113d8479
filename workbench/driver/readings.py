"""Readings: what was recorded of a run, to be taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver import frame, trace
from workbench.driver.history import History
from workbench.driver.tensorboard import EventFile
from workbench.errors import RunError


class Readings:
    """The part of a Run that reads, and changes nothing."""

    history: History
    directory: Path
    name: str
    metrics: dict[str, float]
    metrics_step: int | None
    event_file: EventFile | None = None

    if TYPE_CHECKING:

        def tell(self, kind: str, text: str) -> None:
            """Add to the list of events."""

    def write_events(self, folder: str | Path | None) -> None:
        """Write the numbers to an event file for TensorBoard from now on; None: do not."""
        if folder is not None:
            self.event_file = EventFile(Path(folder).expanduser() / self.name)

    def note_events(self) -> None:
        """Write what is new to the event file, if there is one."""
        file = self.event_file
        if file is None:
            return
        how = {"metrics": self.metrics, "metrics_step": self.metrics_step}
        file.follow(self.history, by_rank=self.history.by_rank(), **how)
        if file.trouble:
            self.tell("warning", f"The event file {file.path} gets no more: {file.trouble}")
            self.event_file = None

    def trace(self, path: str | Path, step: int | None = None, *, force: bool = False) -> Path:
        """Write recorded steps for ui.perfetto.dev -> the path; step: the one nearest, else all."""
        chosen = list(self.samples)
        if not chosen:
            raise RunError("No step is recorded yet. %dist_step takes one.")
        if step is not None:
            chosen = [min(chosen, key=lambda sample: abs(sample["step"] - step))]
        return trace.write(trace.chrome_trace(chosen), path, force=force)

    def to_frame(self, *, by_rank: bool = False) -> Any:
        """One row a step, or a step and rank, as a pandas DataFrame; see driver/frame.py."""
        return frame.to_frame(self.history, self.directory, by_rank=by_rank)

    def write(self, path: str | Path, *, by_rank: bool = False, force: bool = False) -> Path:
        """The same table as a file: .csv or .parquet -> its path."""
        table = frame.table(self.history, self.directory, by_rank=by_rank)
        return frame.write(table, path, force=force)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The last steps that were recorded whole, the newest last; see driver/sample.py."""
        return list(self.history.samples)
