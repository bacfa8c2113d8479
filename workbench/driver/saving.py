"""Saving: the checkpoints of a run, from a copy of the state to their place in the list.

The ranks write beside the training, and nobody asks them how far they are: the lock file in the
directory of checkpoints says whether a save is under way, so that a thread of the kernel sees its
end within a tenth of a second whatever the ranks are at.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import CheckpointError, WorkbenchError
from workbench.spec import aside
from workbench.spec.formats import size
from workbench.spec.retention import remove, superseded

if TYPE_CHECKING:
    from workbench.driver.run import Run

LOOK_S, LOOK_MOST_S = 0.005, 0.1


@dataclass(frozen=True)
class UnderWay:
    """A save that is being written in `directory`; done: its name, when it is whole."""

    name: str
    step: int
    directory: Path
    by_itself: bool
    exported: Path | None
    done: Future = field(default_factory=Future)


class Saving:
    """The saves of one run, one at a time; begun by the run's thread."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._now: UnderWay | None = None
        self._began_s = time.monotonic()

    @property
    def now(self) -> str | None:
        """Name of the checkpoint that is being written."""
        one = self._now
        return None if one is None or one.done.done() else one.name

    def begin(
        self, name: str | None = None, *, export: str | None = None, by_itself: bool = False
    ) -> Future:
        """Copy the state of all ranks, who then write it -> a future of the checkpoint's name.

        To be called with no slice in flight. A save that is still written is waited for. export:
        "hf" for Hugging Face's own files, too. by_itself: nobody asked for it, so it may go again.

        Raises CheckpointError, with the list as it was.
        """
        run = self.run
        self.finish()
        self._began_s = time.monotonic()
        meta = {
            "run": run.name, "metrics": run.metrics, "goal": run.goal, "by_itself": by_itself,
        }  # fmt: skip
        root, wanted = str(run.directory / "checkpoints"), name or f"step-{run.step_now}"
        how = {
            "unique": name is None, "is_training": run.state == "running", "exports": bool(export),
        }  # fmt: skip
        told = run.engines.together("begin_save", root, wanted, meta, how)[0]
        directory = Path(told["directory"])
        exported = hf_folder(run.directory, told["name"]) if export else None
        one = UnderWay(told["name"], run.step_now, directory, by_itself, exported)
        self._now = one
        threading.Thread(target=self._see_to, args=(one,), name="saving", daemon=True).start()
        return one.done

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for the save under way, if there is one, whatever becomes of it."""
        if self._now is not None:
            _settled(self._now.done, limit_s)

    def next_stop(self) -> int:
        """The step that slices may go to: the goal, or the next save by itself.

        One that is due by the clock is made here, once no slice is in flight.
        """
        run, every = self.run, self.run.options.save_every_steps
        if self._is_time():
            if run.feeder.in_flight:
                return run.step_now
            self.by_itself()
        return min(run.goal, (run.step_now // every + 1) * every) if every else run.goal

    def is_step(self) -> bool:
        """Whether a save by itself belongs to this step."""
        every = self.run.options.save_every_steps
        return bool(every) and self.run.step_now % every == 0

    def _is_time(self) -> bool:
        """Whether one is due by the clock; none is while the last is still written."""
        every_s = self.run.options.save_every_s
        if every_s is None or self.now is not None:
            return False
        return time.monotonic() - self._began_s >= every_s

    def by_itself(self) -> None:
        """A save that fails must not end the training it is there to keep."""
        try:
            self.begin(by_itself=True)
        except WorkbenchError as error:
            engines = self.run.engines
            if not (engines.roster.gone() and engines.can_enlist):  # else that is seen to
                self.run.tell("warning", str(error))

    # The thread that sees to a save's end.

    def _see_to(self, one: UnderWay) -> None:
        try:
            self._await(one)
            entry = self._listed(one)
        except Exception as error:  # noqa: BLE001 - whoever waits must not wait for ever
            self.run.tell("warning", str(error))
            known = isinstance(error, WorkbenchError)
            one.done.set_exception(error if known else CheckpointError(str(error)))
            return
        self.run.num_saves += 1
        self.run.happened(
            "saved", name=one.name, step=one.step, size=size(entry["bytes"]),
            stall_ms=round(entry["stall_ms"]), write_ms=round(entry["write_ms"]),
        )  # fmt: skip
        self.run.marks.append({"step": one.step, "label": "saved"})
        one.done.set_result(one.name)

    def _await(self, one: UnderWay) -> None:
        """Wait until nobody writes it any more."""
        lock, wait_s = aside.lock_of(one.directory), LOOK_S
        while lock.exists():
            if aside.is_free(lock):  # its writer is gone
                aside.sweep(one.directory.parent)
                return
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, LOOK_MOST_S)

    def _listed(self, one: UnderWay) -> dict[str, Any]:
        """The checkpoint in the run's list, from which old ones go. Raises CheckpointError."""
        run = self.run
        saved = run.checkpoints()
        entry = next((entry for entry in saved if entry["name"] == one.name), None)
        if entry is None:
            raise CheckpointError(
                f"{one.name} of step {one.step:,} was not saved: {self._why_not(one)}"
            )
        if one.exported is not None and not one.exported.is_dir():
            run.saved = saved
            raise CheckpointError(
                f"{one.name} was saved, and not exported to {one.exported}: {self._why_not(one)}"
            )
        if one.by_itself:
            try:
                old = superseded(saved, run.options.keep, run.options.keep_every)
                for other in old:
                    remove(Path(other["path"]))
                saved = run.checkpoints() if old else saved
            except OSError as error:
                run.tell("warning", f"An old checkpoint could not be removed: {error}.")
        run.saved = saved
        return entry

    def _why_not(self, one: UnderWay) -> str:
        """What the ranks say of a save that came to nothing: the first cause."""
        engines = self.run.engines
        found: list[tuple[int, str]] = []
        for rank in range(engines.num_ranks):
            try:
                (asked,) = engines.submit("save_problem", str(one.directory), ranks=[rank])
                told = asked.result(engines.timeouts.total_s)
            except (WorkbenchError, TimeoutError) as error:
                found.append((1, str(error) or f"Rank {rank} does not answer."))
            else:
                if told is not None:
                    found.append((0 if told[1] else 2, told[0]))
        return min(found)[1] if found else "Its writer is gone."


def hf_folder(directory: Path, name: str) -> Path:
    """Where a run's checkpoint of this name is exported to for Hugging Face."""
    return directory / "hf" / name


def follow(future: Future, other: Future) -> None:
    """Let a future end as another one does."""

    def ended(other: Future) -> None:
        error = other.exception()
        if error is None:
            future.set_result(other.result())
        else:
            future.set_exception(error)

    other.add_done_callback(ended)


def _settled(future: Future, limit_s: float | None) -> None:
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    over.wait(limit_s)
