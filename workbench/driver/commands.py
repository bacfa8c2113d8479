"""What may be asked of a run: one function a verb, called by the run's thread between slices.

Each takes the run with no slice in flight and all ranks at one step, and gives what the caller
of `Run.ask` gets.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver import checkpoints, exports, faults, files, recovery, rescue, runs, trace
from workbench.errors import CheckpointError, InputError, LayoutError, WorkbenchError
from workbench.spec import manifest as manifests
from workbench.spec import policies
from workbench.spec.formats import size
from workbench.spec.layout import Layout, parse_layout
from workbench.spec.limits import Limits, why_not
from workbench.spec.strategy import (
    STRATEGIES,
    check_options,
    layout_for,
    short_name,
    strategy_of,
)

if TYPE_CHECKING:
    from workbench.driver.run import Run

MORE_STEPS = 100
LONGEST = 80  # characters of a layout's text


def hold(run: Run, begun: Future, over: threading.Event) -> None:
    """Keep the training off the ranks until `over`; `begun` tells that it is.

    Raises EnginesError where a rank is gone: it is brought back before others may use the ranks.
    """
    if run.state != "waiting" and run.engines.roster.gone():
        look(run)
    begun.set_result(None)
    over.wait()


def look(run: Run) -> None:
    """Raises EnginesError where a rank is gone."""
    run.engines.call("position")


def pause(run: Run) -> int:
    """Stop feeding -> the step."""
    run.set_state("paused")
    run.saving.finish()
    run.happened("paused", step=run.step_now)
    return run.step_now


def resume(run: Run, steps: int | None = None) -> int:
    """Go on to the goal, or `steps` further -> the step it goes on from."""
    if steps is not None:
        check_count("steps", steps)
    if steps is not None or run.step_now >= run.goal:
        run.goal = run.step_now + (steps or MORE_STEPS)
    run.outages.waited()
    run.set_state("running")
    run.happened("resumed", step=run.step_now, goal=run.goal)
    return run.step_now


def step(run: Run, n: int = 1) -> int:
    """Take exactly n steps, then pause -> the step reached."""
    check_count("n", n)
    target = run.step_now + n
    run.goal = max(run.goal, target)
    run.outages.waited()
    run.set_state("running")
    while run.step_now < target and not (run.halt.is_set() and not run.feeder.in_flight):
        try:
            if not run.halt.is_set():
                run.feeder.feed(min(target, run.saving.next_stop()))
            if (replies := run.feeder.next_slice()) is not None:
                run.book(replies, ending=False)
        except WorkbenchError as error:
            if rescue.is_due(run, error):
                rescue.rescue(run)
                if run.state == "running":
                    continue
            elif recovery.goes_on(run, error):
                continue
            else:
                run.fail(error)
            raise
    _rest(run)
    return run.step_now


def _rest(run: Run) -> None:
    """Be paused, or finished with the metrics at the goal."""
    if run.step_now < run.goal:
        run.set_state("paused")
        run.saving.finish()
        return
    try:
        measure(run)
        run.saving.finish()
    except WorkbenchError as error:
        _fail(run, error)
        raise
    run.set_state("finished")


def _fail(run: Run, error: WorkbenchError) -> None:
    """Stop with the error, unless it is of ranks that can be brought back."""
    if not rescue.is_due(run, error):
        run.fail(error)


def profile(run: Run, path: str | Path, *, force: bool = False) -> Path:
    """Take one step under torch.profiler on all ranks -> the trace of it, beside ours.

    A training that runs goes on; else it is then as after `step`.
    """
    files.ending(path, trace.ENDINGS)
    files.check(path, force=force)
    try:
        replies = run.feeder.answers(run.engines.submit("profile_step", ranks=run.feeder.ranks))
        run.book(replies, ending=False)
    except WorkbenchError as error:
        _fail(run, error)
        raise
    run.feeder.reset(run.step_now)
    run.goal = max(run.goal, run.step_now)
    run.happened("profiled", step=run.step_now)
    profiles = {reply["rank"]: json.loads(reply["profile"]) for reply in replies}
    try:
        return trace.write(trace.merged(run.history.samples[-1], profiles), path, force=force)
    finally:
        if run.state != "running" or run.step_now >= run.goal:
            _rest(run)


def stop(run: Run) -> int:
    """End the training, keeping its state -> the step."""
    if run.state != "waiting":  # without ranks that are gone there is nothing to measure
        measure(run)
    run.saving.finish()
    run.set_state("stopped")
    run.happened("stopped", step=run.step_now)
    return run.step_now


def save(run: Run, name: str | None = None, *, export: str | None = None) -> Future:
    """Begin a checkpoint -> a future of its name, which comes when it is whole."""
    if export not in (None, "hf"):
        raise InputError(f"export={export!r}: use hf, for Hugging Face's from_pretrained.")
    if name is not None and (not isinstance(name, str) or name.isdigit() or name in ("", "last")):
        raise InputError(
            f"name={name!r}: use letters, digits, '-' and '_', such as before-lunch; a number "
            "or 'last' would be read as a step."
        )
    return run.saving.begin(name, export=export)


def restore(run: Run, what: str | int = "last") -> int:
    """Go back to a checkpoint -> its step."""
    run.saving.finish()  # it may be the one that is meant
    own = run.directory / "checkpoints"
    path = own / str(what)
    try:
        path = runs.find(run.directory.parent, what, run=run.name).resolve()
        meta = run.engines.together("restore", str(path))[0]
    except CheckpointError as error:
        raise checkpoints.with_another(error, path, own) from error
    run.origin = {
        "path": str(path), "name": path.name if path.parent == own else str(path),
        "step": meta["step"], "time_s": manifests.read(path)["time_s"], "since_s": time.time(),
    }  # fmt: skip
    back_to(run, meta["step"], left=str(run.layout))
    run.marks.append({"step": run.step_now, "label": "restored"})
    if run.state in ("failed", "finished", "stopped"):
        run.set_state("paused")
    run.happened("restored", name=path.name, step=run.step_now, layout=meta["layout"])
    return run.step_now


def back_to(run: Run, step: int, *, left: str = "") -> None:
    """The training stands at a step it has been at before; left: see History.rewind."""
    run.step_now = step
    run.history.rewind(step, left)
    run.marks = [mark for mark in run.marks if mark["step"] <= step]
    run.feeder.reset(step)
    if run.event_file is not None:
        run.event_file.rewind(step)


def recover(run: Run, how: str | None = None) -> int:
    """Bring back ranks that are gone, as `waiting` asks for; see rescue.recover -> the step."""
    return rescue.recover(run, how)


def policy(run: Run, on_loss: str | None = None, on_stall: str | None = None) -> str:
    """Choose what happens when a rank is lost, and when one stands still -> the former."""
    policies.check_all(on_loss=on_loss, on_stall=on_stall)
    run.outages.policy = on_loss or run.outages.policy
    run.watch.policy = run.about["on_stall"] = on_stall or run.watch.policy
    return run.outages.policy


def inject(
    run: Run, kind: str, *, rank: int | None = None, at_step: int | None = None, **how: Any
) -> dict[str, Any]:
    """Let a fault wait for its step -> what there is to say of it."""
    return run.faults.arm(faults.wanted(run, kind, rank, at_step, how))


def clear_faults(run: Run) -> int:
    """No fault waits any more, and none lasts."""
    return run.faults.clear()


def switch(
    run: Run, strategy: str | None = None, *, ranks: int | None = None, **options: Any
) -> int:
    """Go on under another layout -> the step.

    strategy: a name, or a layout's text such as `pp2 dp2, 1f1b x8`; None: the one there is, with
    other options.
    """
    layout = wanted(run, strategy, ranks, options)
    if layout == run.layout:
        run.happened("already", strategy=strategy_of(layout), layout=layout)
        return run.step_now
    if why := why_not(layout, run.limits, run.engines.num_ranks):
        raise LayoutError(why)
    ranks_before = run.layout.world_size
    began_s = time.perf_counter()
    replies = run.engines.together("switch", layout.to_dict())
    took_s = time.perf_counter() - began_s
    run.lay_out(layout, replies)
    moved_bytes = sum(reply["sent_bytes"] for reply in replies)
    run.marks.append(
        {
            "step": run.step_now,
            "label": short_name(layout),
            "layout": str(layout),
            "took_s": took_s,
            "moved_bytes": moved_bytes,
        }
    )
    for note in replies[0]["notes"]:
        if note not in run.about["notes"]:
            run.about["notes"].append(note)
            run.tell("warning", note)
    run.happened(
        "switched", strategy=strategy_of(layout), layout=layout, step=run.step_now,
        took_ms=round(1e3 * took_s), moved=size(moved_bytes),
    )  # fmt: skip
    if layout.world_size != ranks_before:
        run.peaks = run.engines.together("peak")
    return run.step_now


def wanted(run: Run, strategy: str | None, ranks: int | None, options: dict[str, Any]) -> Layout:
    """The layout that is asked for. Raises InputError or LayoutError for one that is none."""
    if strategy is None and not any(value is not None for value in (ranks, *options.values())):
        raise InputError(f"Say to what: one of {', '.join(STRATEGIES)}, or a layout such as dp2.")
    name = strategy_of(run.layout) if strategy is None else strategy
    return layout_of(name, ranks, options, run.engines.num_ranks, run.limits)


def layout_of(
    strategy: str | Layout,
    ranks: int | None,
    options: dict[str, Any],
    there_are: int,
    limits: Limits | None = None,
) -> Layout:
    """What a strategy's name with its options, or the text of a layout, means on so many ranks.

    limits: of the model, where they are known: what a refusal proposes is then accepted by it.

    Raises InputError or LayoutError.
    """
    if isinstance(strategy, Layout):  # as run.layout is
        strategy = str(strategy)
    if not isinstance(strategy, str) or len(strategy) > LONGEST:
        raise InputError(f"{strategy!r:.40} is no strategy. Use one of {', '.join(STRATEGIES)}.")
    if strategy not in STRATEGIES and any(map(str.isdigit, strategy)):
        check_options(options)
        given = {"ranks": ranks, **options}
        if beside := [key for key, value in given.items() if value not in (None, False)]:
            raise InputError(f"{beside[0]} has no place beside the whole layout {strategy!r}.")
        return parse_layout(strategy)
    return layout_for(strategy, counted(ranks, there_are), limits=limits, **options)


def export(run: Run, path: str | Path, *, force: bool = False) -> Path:
    """Write recipe and layout as a plain torchrun script -> its path."""
    return exports.write(run, path, force=force)


def evaluate(run: Run) -> dict[str, float]:
    """The recipe's metrics now."""
    measure(run)
    return dict(run.metrics)


def measure(run: Run) -> None:
    """Have the metrics of the step the run is at."""
    if run.about["evaluates"] and run.metrics_step != run.step_now:
        run.metrics = run.engines.together("evaluate")[0]
        run.metrics_step = run.step_now
        run.note_events()
        text = ", ".join(f"{key} {value:.4g}" for key, value in run.metrics.items())
        run.happened("measured", step=run.step_now, metrics=text)


def counted(ranks: int | None, there_are: int) -> int:
    """How many ranks train. Raises InputError for more than there are, or none."""
    if ranks is None:
        return there_are
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= there_are:
        raise InputError(f"ranks={ranks!r}: there are {there_are}. Use 1 to {there_are}.")
    return ranks


def check_count(name: str, value: object) -> None:
    """Raises InputError unless value is a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r}: use a whole number of steps >= 1.")


_VERBS = (
    hold, look, pause, resume, step, profile, stop, save, restore, switch, export, evaluate,
    recover, policy, inject, clear_faults,
)  # fmt: skip
VERBS = {verb.__name__: verb for verb in _VERBS}
