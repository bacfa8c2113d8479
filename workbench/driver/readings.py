"""Readings: what was recorded of a run, to be taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.driver import files, frame, trace
from workbench.driver.history import History
from workbench.driver.tensorboard import EventFile
from workbench.driver.told import Told
from workbench.errors import InputError, RunError


class Readings(Told):
    """The part of a Run that reads, and changes nothing."""

    history: History
    directory: Path
    name: str
    metrics: dict[str, float]
    metrics_step: int | None
    event_file: EventFile | None = None
    step_now: int

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
        """Write recorded steps as .json or .json.gz for ui.perfetto.dev -> the path.

        step: this one alone, or where it was not recorded the nearest, which is then told as an
        event. Raises InputError for one before the first recorded or after the last taken.
        """
        chosen = self.samples
        if not chosen:
            raise RunError("No step is recorded yet. %dist_step takes one.")
        if step is not None:
            chosen = [self._nearest(chosen, step)]
        target = trace.write(trace.chrome_trace(chosen), path, force=force)
        if step is not None and (found := chosen[0]["step"]) != step:
            self.happened("nearest", file=target.name, step=found, asked=int(step))
        return target

    def _nearest(self, samples: list[dict[str, Any]], step: int) -> dict[str, Any]:
        first, last = samples[0]["step"], max(self.step_now, samples[-1]["step"])
        is_whole = hasattr(step, "__index__") and not isinstance(step, bool)  # numpy's, too
        if not is_whole or not first <= step <= last:
            raise InputError(
                f"step={step!r:.40}: use a whole number from {first:,} to {last:,}; of these the "
                "nearest recorded is written."
            )
        return min(samples, key=lambda sample: abs(sample["step"] - int(step)))

    def to_frame(self, *, by_rank: bool = False) -> Any:
        """One row a step, or a step and rank, as a pandas DataFrame; see driver/frame.py."""
        return frame.to_frame(self.history, self.directory, by_rank=by_rank)

    def write(self, path: str | Path, *, by_rank: bool = False, force: bool = False) -> Path:
        """The same table as a file: .csv or .parquet -> its path."""
        files.ending(path, frame.ENDINGS)
        files.check(path, force=force)
        table = frame.table(self.history, self.directory, by_rank=by_rank)
        return frame.write(table, path, force=force)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The last steps that were recorded whole, the newest last; see driver/sample.py."""
        return list(self.history.samples)
