"""Run: the handle of one training in the notebook; feeds slices, acts on commands between them.

A thread of its own keeps two slices queued on the ranks, so that the kernel is free and no rank
waits for it. A command stops the feeding, waits for the slices that are queued, and then acts,
with all ranks at the same step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver import checkpoints, commands, recovery, rescue
from workbench.driver.alone import Testament
from workbench.driver.asked import Asked
from workbench.driver.checked import refusal
from workbench.driver.copies import Copying
from workbench.driver.diary import Diary
from workbench.driver.faults import Faults
from workbench.driver.feeder import Feeder
from workbench.driver.health import Health
from workbench.driver.history import History
from workbench.driver.outages import Outages
from workbench.driver.readings import Readings
from workbench.driver.saving import Saving, follow
from workbench.driver.snapshot import ALLOWED, snapshot, totals
from workbench.driver.watch import Watch, outlast
from workbench.errors import (
    CheckpointError,
    InputError,
    LayoutError,
    RunError,
    WorkbenchError,
)
from workbench.spec.choices import choices
from workbench.spec.layout import Layout
from workbench.spec.limits import Limits
from workbench.spec.near import unknown
from workbench.spec.options import TrainOptions

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

DIARY_S = 1.0
SILENT = ("hold", "look")  # what no user asks for; in any state
REFUSED = (InputError, LayoutError, CheckpointError, RunError)
DONE_ALREADY = {("pause", "paused"), ("pause", "finished"), ("stop", "stopped")}


class Run(Asked, Readings):
    """One training on the engines; made by `Engines.train`.

    `ask` queues a command and returns a future; the methods of the same names wait for it. They
    raise RunError where the state does not allow the command.
    """

    def __init__(
        self,
        engines: Engines,
        about: dict[str, Any],
        options: TrainOptions,
        directory: Path,
        layout: Layout,
    ) -> None:
        super().__init__()
        self.engines = engines
        self.about = about
        self.limits = Limits(**about["limits"])
        self.layout = layout
        self.stages: list[dict[str, Any]] = []
        self.held: list[float] = []
        self.memory: list[dict[str, Any]] = []
        self.peaks: list[float] = []
        self.choices: list[dict[str, Any]] = []
        self.options = options
        self.directory = directory
        self.name = directory.name
        self.goal = options.steps
        self.step_now = 0
        self.metrics: dict[str, float] = {}
        self.metrics_step: int | None = None
        self.num_saves = 0
        self.history = History(about["batch"] * about["units_per_sample"])
        self.marks: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        # The checkpoint it was told to go on from: path, name, time_s of its making, since_s.
        self.origin: dict[str, Any] | None = None
        self.facts = b""
        self.outages = Outages(about.get("on_loss", "replace"))
        self._told_of_journal = False
        self._commands: queue.Queue = queue.Queue()
        self._putting = threading.Lock()
        self._is_closed = False
        # Set while a pause or stop is asked for and not yet done: steps under way give way to it.
        self.halt = threading.Event()
        self.feeder = Feeder(engines)
        self.saving = Saving(self)
        self.faults = Faults(self)
        self.health = Health()
        self.copying = Copying()
        self.diary = Diary(directory)
        self.watch = Watch(self, about.get("on_stall", "wait"))
        self.testament = Testament(engines.directory)
        self._thread = threading.Thread(target=self._serve, name=f"run-{self.name}", daemon=True)

    def begin(self, *, running: bool) -> None:
        """Start the thread that serves the run."""
        self.state = "running" if running and self.goal else "paused"
        for note in self.about["notes"]:
            self.tell("warning", note)
        parameters = self.about["parameters"]
        self.happened("built", run=self.name, parameters=parameters, layout=self.layout)
        self._thread.start()
        self.watch.start()

    def take_up(self) -> None:
        """Start the thread of a training that another kernel has begun."""
        self.happened("attached", step=self.step_now)
        self._thread.start()
        self.watch.start()
        self.look()

    def wake(self) -> None:
        """Let ranks that a fault has stopped go on, whatever the run does meanwhile."""
        self.faults.wake()

    def lay_out(self, layout: Layout, replies: list[dict[str, Any]]) -> None:
        """The ranks hold the training under this layout, and said how."""
        self.layout = layout
        self.stages = replies[0]["stages"]
        self.held = [reply["held"] for reply in replies]
        self.choices = choices(self.limits, self.engines.num_ranks, layout)
        self.feeder.ranks = range(layout.world_size)
        self.feeder.reset(self.step_now)
        self.history.recent = []
        rescue.warm(self)

    # What is asked of a run.

    def ask(self, verb: str, **how: Any) -> Future:
        """Queue a command; the future holds its result. Never blocks."""
        future: Future = Future()
        if verb not in commands.VERBS:
            future.set_exception(RunError(unknown("command", verb, commands.VERBS)))
        elif self.state == "gone":
            future.set_exception(
                RunError(f"{self.name} is over: {self.message or 'its engines are gone.'}")
            )
        elif (error := refusal(self, verb, how)) is not None:
            future.set_exception(error)
        else:
            if verb in ("pause", "stop"):
                self.halt.set()
            if self.state == "running" and verb not in SILENT:
                self.set_pending(verb)
            self._put(verb, how, future)
        return future

    def _put(self, verb: str, how: dict, future: Future) -> None:
        with self._putting:
            self._commands.put((verb, how, future))
            if self._is_closed:
                self._refuse_rest()

    def look(self) -> None:
        """A rank may be gone: see to it between two slices. Never blocks."""
        self._put("look", {}, Future())

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the training off the ranks while something else runs there.

        A slice queued behind a cell that raises on one rank only would meet the others' cell in
        its collectives.
        """
        begun: Future = Future()
        over = threading.Event()
        asked = self.ask("hold", begun=begun, over=over)
        wait({begun, asked}, return_when=FIRST_COMPLETED)  # asked alone: the run is over
        try:
            yield
        finally:
            over.set()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until it does not run any more -> the snapshot; an interrupt pauses the run.

        timeout: seconds, after which the snapshot of the running training is returned.
        """
        try:
            self.wait_for_end(timeout)
        except KeyboardInterrupt:
            step = self.pause()
            raise RunError(
                f"Interrupted: paused after step {step:,}. %dist_resume goes on."
            ) from None
        return self.snapshot()

    def checkpoints(self) -> list[dict[str, Any]]:
        """The run's checkpoints, the newest last."""
        return checkpoints.list_in(self.directory / "checkpoints")

    def give_up_ranks(self) -> str:
        """End for another training that takes the ranks -> what became of this one."""
        self.saving.finish(self.engines.timeouts.total_s)
        step = f"{self.name} is over at step {self.step_now:,}"
        kept = (
            f"its last checkpoint is {self.saved[-1]['name']}" if self.saved else "it was not saved"
        )
        self.end(f"Another training took the ranks at step {self.step_now:,}.")
        return f"{step}, and {kept}"

    def end(self, why: str = "Its engines were stopped.") -> None:
        """Leave the ranks, for ever."""
        if self.state != "gone":
            self.set_state("gone", self.message or why)
            self._put("end", {}, Future())
        if threading.current_thread() is not self._thread and self._thread.ident:
            outlast(self, self._thread, self.engines.timeouts.total_s)
        self.saving.finish(self.engines.timeouts.total_s)

    # What the panel and the notebook read.

    def snapshot(self) -> dict[str, Any]:
        """Everything shown of the run, as plain values; see driver/snapshot.py."""
        return snapshot(self)

    def totals(self) -> dict[str, Any]:
        """First and last loss, mean rate and share of communication over all steps, saves."""
        return totals(self)

    def __repr__(self) -> str:
        last = self.history.last_loss()
        loss = f", loss {last:.4g}" if last is not None else ""
        told = f" - {self.message}" if self.message else ""
        return (
            f"<Run {self.name}: {self.state}, step {self.step_now:,} of {self.goal:,}{loss}{told}>"
        )

    # The thread.

    def _serve(self) -> None:
        while self.state != "gone":
            try:
                self._turn()
            except WorkbenchError as error:
                self._meet(error)
            except Exception as error:  # noqa: BLE001 - the thread must live to say what happened
                self.fail(RunError(f"The run's thread met {type(error).__name__}: {error}"))
        self._note_down()
        with self._putting:
            self._is_closed = True
            self._refuse_rest()

    def _meet(self, error: WorkbenchError) -> None:
        """Ranks that are gone are brought back; everything else stops the training."""
        try:
            if rescue.is_due(self, error):
                rescue.rescue(self)
            elif not recovery.goes_on(self, error):
                raise error
        except WorkbenchError as worst:
            self.fail(worst)

    def _turn(self) -> None:
        """One event: a slice that ended, or a command; then feed."""
        feeder = self.feeder
        self._note_down()
        if self.state == "running" and self._commands.empty():
            feeder.feed(self.saving.next_stop())
        if not feeder.in_flight and (self.state != "running" or not self._commands.empty()):
            with contextlib.suppress(queue.Empty):  # of what others add, the diary is to have, too
                self._act(*self._commands.get(timeout=DIARY_S))
            return
        replies = feeder.next_slice()
        if replies is not None:
            self.book(replies)
        elif self.step_now >= self.goal:  # a rank was lost on the last few meters
            self._finish()

    def _finish(self) -> None:
        commands.measure(self)
        self.saving.finish()
        self.happened("finished", step=self.step_now)
        self.set_state("finished")

    def _note_down(self) -> None:
        self.diary.keep(self)
        self.testament.keep(self)

    def _act(self, verb: str, how: dict, future: Future) -> None:
        if verb == "end":
            return
        if verb in ("pause", "stop"):
            self.halt.clear()
        try:
            result = self._tried(verb, how)
        except Exception as error:  # noqa: BLE001 - of no matter to the training
            self.set_pending("")
            if recovery.is_over(error, self):
                self.fail(error)
            known = isinstance(error, WorkbenchError)
            told = str(error) if known else f"{verb}: {type(error).__name__}: {error}"
            # What was asked amiss is told to who asked, and is nothing that happened to the run.
            if self.message != told and not isinstance(error, REFUSED):
                self.tell("error", told)
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)  # whoever waits must not wait for ever
            raise
        else:
            self.set_pending("")
            self._note_down()  # what was done is to be known to the next kernel, too
            if isinstance(result, Future):  # it goes on beside the training
                follow(future, result)
            else:
                future.set_result(result)

    def _tried(self, verb: str, how: dict) -> Any:
        """`_done`, and once more after ranks were lost in it and brought back."""
        while True:
            try:
                return self._done(verb, how)
            except WorkbenchError as error:
                if verb == "look" and self.state == "waiting":
                    return None
                if self.state == "waiting" or not rescue.is_due(self, error):
                    raise
                rescue.rescue(self)
                if verb == "look":
                    return None
                if verb == "step":  # was taken; only the metrics after it were not
                    return self.step_now

    def _done(self, verb: str, how: dict) -> Any:
        """Do what was asked, where the state allows it -> what it gives."""
        allowed = ALLOWED.get(self.state, ())
        if (verb, self.state) in DONE_ALREADY:
            return self.step_now
        if verb not in (*allowed, *SILENT):
            takes = ", ".join(allowed) or "no command"
            if self.state == "waiting":
                raise RunError(
                    f"{self.name} waits for ranks that are gone: %dist_recover brings them back, "
                    f"then there can be a {verb}."
                )
            raise RunError(f"{self.name} is {self.state}: it takes {takes}, not {verb}.")
        if verb not in SILENT:
            self.set_pending(verb)
        return commands.VERBS[verb](self, **how)

    def book(self, replies: list[dict[str, Any]], *, ending: bool = True) -> None:
        """Book a slice that all ranks have answered, and what follows from it."""
        taken = self.history.add(replies, self.layout)
        self.step_now += taken
        if taken:
            self.outages.new_step()
        self.memory = [{"rank": reply["rank"], **reply["memory"]} for reply in replies]
        self.note_events()
        self.health.look(self, replies, taken)
        self.copying.look(self, replies)
        errors = {reply["rank"]: reply["error"] for reply in replies if reply["error"]}
        if errors:
            recovery.recover(self, errors, replies)
            return
        if not all(reply["is_journaled"] for reply in replies) and not self._told_of_journal:
            self._told_of_journal = True
            self.tell(
                "warning",
                f"the journal cannot be written to {self.directory}: its lines are kept in memory",
            )
        if self.saving.is_step() and not self.feeder.in_flight:
            self.saving.by_itself()
        if ending and self.step_now >= self.goal and not self.feeder.in_flight:
            self._finish()
        self._bump()

    def fail(self, error: WorkbenchError) -> None:
        """Stop with what went wrong as the message."""
        notes = getattr(error, "__notes__", [])
        if self.state == "gone":
            return
        is_over = recovery.is_over(error, self)
        self.feeder.reset(self.step_now)
        self.tell("error", "\n".join([str(error), *notes]))
        self.set_state("gone" if is_over else "failed", str(error))

    def _refuse_rest(self) -> None:
        """Answer what was asked too late."""
        self.set_pending("")
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._commands.get_nowait()
                if not item[2].done():
                    item[2].set_exception(RunError(f"{self.name} is over: {self.message}"))
