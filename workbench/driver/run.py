"""Run: the handle of one training in the notebook; feeds slices, acts on commands between them.

A thread of its own keeps two slices queued on the ranks, so that the kernel is free and no rank
waits for it. A command stops the feeding, waits for the slices that are queued, and then acts,
with all ranks at the same step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver import checkpoints, runs
from workbench.driver.feeder import Feeder
from workbench.driver.history import History
from workbench.errors import RunError, WorkbenchError
from workbench.spec.near import unknown
from workbench.spec.options import TrainOptions
from workbench.spec.strategy import layout_for

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

# What may be asked of a run in which state.
ALLOWED = {
    "running": ("pause", "step", "save", "restore", "switch", "stop"),
    "paused": ("resume", "step", "save", "restore", "switch", "stop", "evaluate"),
    "finished": ("resume", "step", "save", "restore", "switch", "evaluate"),
    "stopped": ("resume", "step", "save", "restore", "switch", "evaluate"),
    "failed": ("resume", "step", "save", "restore", "switch", "stop", "evaluate"),
}
NUM_EVENTS = 200
MORE_STEPS = 100


class Run:
    """One training on the engines; made by `Engines.train`.

    `ask` queues a command and returns a future; the methods of the same names wait for it. They
    raise RunError where the state does not allow the command.
    """

    def __init__(self, engines: Engines, about: dict[str, Any], options: TrainOptions, directory: Path) -> None:
        self.engines = engines
        self.about = about
        self.options = options
        self.directory = directory
        self.name = directory.name
        self.state = "paused"
        self.message = ""
        self.pending = ""
        self.goal = options.steps
        self.step_now = 0
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.metrics_step: int | None = None
        self.num_saves = 0
        self.history = History(about["batch"] * about["units_per_sample"])
        self.marks: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._saved: list[dict[str, Any]] = []
        self._commands: queue.Queue = queue.Queue()
        self._changed = threading.Condition()
        self._feeder = Feeder(engines)
        self._thread = threading.Thread(target=self._serve, name=f"run-{self.name}", daemon=True)

    def begin(self, *, running: bool) -> None:
        """Start the thread that serves the run."""
        self.state = "running" if running and self.goal else "paused"
        self._tell("info", f"{self.name}: {self.about['parameters']:,} parameters, {self.layout_text}")
        self._thread.start()

    # What is asked of a run.

    def ask(self, verb: str, **how: Any) -> Future:
        """Queue a command; the future holds its result. Never blocks."""
        future: Future = Future()
        if not hasattr(self, f"_do_{verb}"):
            known = sorted(name[4:] for name in dir(self) if name.startswith("_do_"))
            future.set_exception(RunError(unknown("command", verb, known)))
        elif self.state == "gone":
            future.set_exception(RunError(f"{self.name} is over: {self.message or 'its engines are gone.'}"))
        else:
            self._commands.put((verb, how, future))
            if self.state == "running":
                self._wait_word(verb)
        return future

    def pause(self) -> int:
        """Stop between two steps -> the step; the state stays on the ranks."""
        return self.ask("pause").result()

    def resume(self, steps: int | None = None) -> int:
        """Go on, to the goal or `steps` further -> the step it goes on from."""
        return self.ask("resume", steps=steps).result()

    def step(self, n: int = 1) -> int:
        """Take exactly n steps, then pause -> the step reached."""
        return self.ask("step", n=n).result()

    def stop(self) -> int:
        """End the training after the step under way, keeping its state -> the step."""
        return self.ask("stop").result()

    def save(self, name: str | None = None) -> str:
        """Write a checkpoint -> its name, `step-<n>` unless given."""
        return self.ask("save", name=name).result()

    def restore(self, what: str | int = "last") -> int:
        """Go back to a checkpoint (name, step, path or 'last') -> its step."""
        return self.ask("restore", what=what).result()

    def switch(self, *, shard: bool) -> int:
        """Go on replicated or sharded, from the same step -> that step."""
        return self.ask("switch", shard=shard).result()

    def evaluate(self) -> dict[str, float]:
        """The recipe's metrics now."""
        return self.ask("evaluate").result()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until it does not run any more -> the snapshot; an interrupt pauses the run.

        timeout: seconds, after which the snapshot of the running training is returned.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: self.state != "running", timeout)
        except KeyboardInterrupt:
            step = self.pause()
            raise RunError(f"Interrupted: paused after step {step:,}. %dist_resume goes on.") from None
        return self.snapshot()

    def checkpoints(self) -> list[dict[str, Any]]:
        """The run's checkpoints, the newest last."""
        return checkpoints.list_in(self.directory / "checkpoints")

    def end(self) -> None:
        """Leave the ranks: the engines stop, or another training takes its place."""
        if self.state != "gone":
            self._set("gone", self.message or "Its engines were stopped or given to another training.")
            self._commands.put(("end", {}, Future()))
        if threading.current_thread() is not self._thread and self._thread.ident:
            self._thread.join(self.engines.timeouts.total_s)

    # What the panel and the notebook read.

    @property
    def layout_text(self) -> str:
        """`dp4` or `fsdp4`."""
        return str(layout_for("data", self.engines.num_ranks, shard=self.about["shard"]))

    def snapshot(self) -> dict[str, Any]:
        """Everything shown of the run, as plain values."""
        history = self.history
        alive = sum(row["state"] == "alive" for row in self.engines.status())
        return {
            "name": self.name,
            "recipe": self.about["recipe"],
            "state": self.state,
            "message": self.message,
            "step": self.step_now,
            "goal": self.goal,
            "loss": history.loss[-1] if history.loss else None,
            **history.now(),
            "unit": f"{self.about['unit']}/s",
            "ranks": self.engines.num_ranks,
            "alive": 0 if self.engines.stopped else alive,
            "strategy": "data",
            "shard": self.about["shard"],
            "layout": self.layout_text,
            "precision": self.options.precision,
            "batch": self.about["batch"],
            "lossy": "bf16 autocast" if self.options.precision == "bf16" else "",
            "curve": history.curve(),
            "by_rank": history.by_rank(),
            "marks": list(self.marks),
            "metrics": dict(self.metrics),
            "metrics_step": self.metrics_step,
            "checkpoints": list(self._saved),
            "events": list(self.events),
            "engines": self.engines.status(),
            "pending": self.pending,
            "allowed": [] if self.pending else list(ALLOWED.get(self.state, ())),
        }

    def totals(self) -> dict[str, Any]:
        """First and last loss, mean rate and share of communication over all steps, saves."""
        history = self.history
        steps_per_s = history.timed_steps / history.wall_s if history.wall_s else None
        return {
            "loss_first": history.loss[0] if history.loss else None,
            "loss_last": history.loss[-1] if history.loss else None,
            "rate": steps_per_s and steps_per_s * history.units_per_step,
            "comm": history.comm_s / history.wall_s if history.wall_s and history.is_comm_known else None,
            "saves": self.num_saves,
        }

    def __repr__(self) -> str:
        loss = f", loss {self.history.loss[-1]:.4g}" if self.history.loss else ""
        told = f" - {self.message}" if self.message else ""
        return f"<Run {self.name}: {self.state}, step {self.step_now:,} of {self.goal:,}{loss}{told}>"

    # The thread.

    def _serve(self) -> None:
        while self.state != "gone":
            try:
                self._turn()
            except WorkbenchError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - the thread must live to say what happened
                self._fail(RunError(f"The run's thread met {type(error).__name__}: {error}"))
        self._refuse_rest()

    def _turn(self) -> None:
        """One event: a slice that ended, or a command; then feed."""
        feeder = self._feeder
        if self.state == "running" and self._commands.empty():
            feeder.feed(self.goal)
        if not feeder.in_flight and (self.state != "running" or not self._commands.empty()):
            self._act(*self._commands.get())
            return
        replies = feeder.next_slice()
        if replies is not None:
            self._take(replies)

    def _act(self, verb: str, how: dict, future: Future) -> None:
        if verb == "end":
            return
        try:
            allowed = ALLOWED.get(self.state, ())
            if verb not in allowed:
                if (verb, self.state) in (("pause", "paused"), ("pause", "finished"), ("stop", "stopped")):
                    future.set_result(self.step_now)
                    return
                raise RunError(f"{self.name} is {self.state}: it takes {', '.join(allowed) or 'no command'}, not {verb}.")
            self._wait_word(verb)
            result = getattr(self, f"_do_{verb}")(**how)
        except WorkbenchError as error:
            self._mend(error)
            self._wait_word("")
            self._tell("error", str(error))
            future.set_exception(error)
        else:
            self._wait_word("")
            future.set_result(result)

    def _do_pause(self) -> int:
        self._set("paused")
        return self.step_now

    def _do_resume(self, steps: int | None = None) -> int:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise RunError(f"steps={steps!r}: use a whole number >= 1.")
        if steps is not None or self.step_now >= self.goal:
            self.goal = self.step_now + (steps or MORE_STEPS)
        self._set("running")
        return self.step_now

    def _do_step(self, n: int = 1) -> int:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise RunError(f"n={n!r}: use a whole number of steps >= 1.")
        target = self.step_now + n
        self.goal = max(self.goal, target)
        self._set("running")
        while self.step_now < target and self.state == "running":
            self._feeder.feed(target)
            if (replies := self._feeder.next_slice()) is not None:
                self._take(replies, ending=False)
        if self.state == "running":
            self._set("paused")
        if self.step_now < target:
            raise RunError(self.message)
        return self.step_now

    def _do_stop(self) -> int:
        self._evaluate()
        self._set("stopped")
        self._tell("info", f"stopped after step {self.step_now:,}")
        return self.step_now

    def _do_save(self, name: str | None = None) -> str:
        root = str(self.directory / "checkpoints")
        meta = {"run": self.name, "metrics": self.metrics, "goal": self.goal}
        wanted = name or f"step-{self.step_now}"
        saved = self.engines.call("save", root, wanted, name is None, meta)[0]
        self.num_saves += 1
        self._saved = self.checkpoints()
        self._tell("save", f"saved {saved} at step {self.step_now:,}")
        self.marks.append({"step": self.step_now, "label": "saved"})
        return saved

    def _do_restore(self, what: str | int = "last") -> int:
        path = runs.find(self.directory.parent, what, run=self.name)
        meta = self.engines.call("restore", str(path.resolve()))[0]
        self.step_now = meta["step"]
        self.history.rewind(self.step_now)
        self.marks = [mark for mark in self.marks if mark["step"] <= self.step_now]
        self.marks.append({"step": self.step_now, "label": "restored"})
        self._feeder.reset(self.step_now)
        if self.state in ("failed", "finished", "stopped"):
            self._set("paused")
        self._tell("save", f"restored {path.name} (step {self.step_now:,}, written as {meta['layout']})")
        return self.step_now

    def _do_switch(self, shard: bool) -> int:
        if shard == self.about["shard"]:
            return self.step_now
        layout = layout_for("data", self.engines.num_ranks, shard=shard)
        began_s = time.perf_counter()
        self.engines.call("switch", layout.degrees())
        self.about["shard"] = shard
        self._feeder.reset(self.step_now)
        self.marks.append({"step": self.step_now, "label": "sharded" if shard else "replicated"})
        took_ms = 1e3 * (time.perf_counter() - began_s)
        self._tell("switch", f"{layout} from step {self.step_now:,} on, in {took_ms:.0f} ms")
        return self.step_now

    def _do_evaluate(self) -> dict[str, float]:
        self._evaluate()
        return dict(self.metrics)

    def _evaluate(self) -> None:
        if self.about["evaluates"] and self.metrics_step != self.step_now:
            self.metrics = self.engines.call("evaluate")[0]
            self.metrics_step = self.step_now
            text = ", ".join(f"{key} {value:.4g}" for key, value in self.metrics.items())
            self._tell("info", f"step {self.step_now:,}: {text}")

    def _take(self, replies: list[dict[str, Any]], *, ending: bool = True) -> None:
        """Book a slice that all ranks have answered, and what follows from it."""
        before = self.step_now
        self.step_now += self.history.add(replies)
        errors = {reply["rank"]: reply["error"] for reply in replies if reply["error"]}
        if errors:
            self._recover(errors)
            return
        every = self.options.save_every
        if every and self.step_now // every > before // every:
            self._save_by_itself()
        if ending and self.step_now >= self.goal and not self._feeder.in_flight:
            self._evaluate()
            self._set("finished")
        self._bump()

    def _save_by_itself(self) -> None:
        """A save that fails must not end the training it is there to keep."""
        self._feeder.drain(self.history, self._advance)
        try:
            self._do_save()
        except WorkbenchError as error:
            self._tell("error", str(error))

    def _advance(self, num_steps: int) -> None:
        self.step_now += num_steps

    def _recover(self, errors: dict[int, dict[str, Any]]) -> None:
        """Ranks raised: bring all back to the last step that all have finished."""
        error = self._feeder.first_cause(errors)
        self._feeder.drain(self.history, self._advance)
        self.engines.rejoin()
        positions = self.engines.call("position")
        if len(set(positions)) > 1:
            self._feeder.agree(positions, sharded=self.about["shard"])
        self.step_now = max(positions)
        self._feeder.reset(self.step_now)
        raise error

    def _mend(self, error: WorkbenchError) -> None:
        """A command that failed on one rank alone has freed the others: bring them together."""
        try:
            if self.engines.alive and any(self.engines.call("is_broken")):
                self.engines.rejoin()
                self._feeder.reset(self.step_now)
        except WorkbenchError as second:
            error.add_note(f"  and then: {second}")

    def _fail(self, error: WorkbenchError) -> None:
        notes = getattr(error, "__notes__", [])
        if self.state == "gone":
            return
        alive = self.engines.alive
        self._feeder.reset(self.step_now)
        self._tell("error", "\n".join([str(error), *notes]))
        self._set("failed" if alive else "gone", str(error))

    def _refuse_rest(self) -> None:
        """Answer what was asked too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._commands.get_nowait()
                if not item[2].done():
                    item[2].set_exception(RunError(f"{self.name} is over: {self.message}"))

    def _set(self, state: str, message: str = "") -> None:
        self.state = state
        self.message = message
        self._bump()

    def _wait_word(self, word: str) -> None:
        self.pending = word
        self._bump()

    def _tell(self, kind: str, text: str) -> None:
        self.events = [*self.events[1 - NUM_EVENTS :], {"time_s": time.time(), "kind": kind, "text": text}]
        self._bump()

    def _bump(self) -> None:
        with self._changed:
            self.version += 1
            self._changed.notify_all()
