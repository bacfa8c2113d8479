"""A storm: faults by a seed, one after another, over one training on real processes.

After each fault the curve must be that of one plain process, and the books right.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.recipe import HOW, WHERE, Yardstick, cell, kill, tell
from workbench.driver import frame
from workbench.driver.engines import Engines
from workbench.driver.run import Run
from workbench.errors import WorkbenchError
from workbench.spec.fault import PHASES

LAYOUTS = (
    "dp4", "fsdp4", "pp2 dp2, 1f1b x4", "none", "dp2 fsdp2", "pp4, gpipe x4", "dp2", "tp2 dp2",
    "fsdp2 tp2", "fsdp2", "pp2 tp2, zero-bubble x4", "pp2 fsdp2",
)  # fmt: skip
# What may hang would hang for ever: far more than anything takes on a busy machine.
LIMIT_S = 120.0
SAVE_EVERY = 10
POLL_S = 0.002


@dataclass(frozen=True)
class Fault:
    """What is done to the training, and under which layout."""

    number: int
    kind: str
    layout: str
    how: str
    where: str
    ranks: tuple[int, ...]
    delay_s: float
    second_s: float


def plan(seed: int, count: int, num_ranks: int = 4) -> list[Fault]:
    """So many faults, the same for the same seed; kinds and layouts by turns, in random order."""
    chance = random.Random(seed)
    kinds, layouts = _turns(chance, sorted(KINDS), count), _turns(chance, LAYOUTS, count)
    return [
        Fault(
            number, kinds[number], layouts[number], chance.choice(list(HOW)), chance.choice(WHERE),
            tuple(chance.sample(range(num_ranks), 2)), chance.uniform(0, 0.15),
            chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.6))),
        )
        for number in range(count)
    ]  # fmt: skip


def _turns(chance: random.Random, every, count: int) -> list:
    found: list = []
    while len(found) < count:
        found += chance.sample(list(every), len(every))
    return found[:count]


class Storm:
    """One training, and what is done to it; aim: see recipe.py."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self.engines = engines
        self.aim = folder / "aim"
        self.aim.mkdir()
        self.yardstick = Yardstick(self.aim)
        how = {"save_every": SAVE_EVERY, "directory": folder, "start": False}
        self.run: Run = engines.train(cell=cell(self.aim), steps=10**6, **how)
        self.pids: set[int] = set()

    def meet(self, fault: Fault) -> None:
        """One fault, and all that must be so after it."""
        run = self.run
        if str(run.layout) != fault.layout:
            asked(run.ask("switch", strategy=fault.layout))
        asked(run.ask("resume"))
        self.steps(2)
        time.sleep(fault.delay_s)
        KINDS[fault.kind](self, fault)
        self.whole()
        self.steps(2)
        assert run.state == "running"
        asked(run.ask("pause"))
        self.whole()
        self.check()

    def check(self) -> None:
        """The curve and the books, of a training that is paused."""
        run, step = self.run, self.run.step_now
        assert run.state == "paused", run.message
        assert run.history.steps == list(range(1, step + 1))
        assert run.history.loss == pytest.approx(self.yardstick(step), rel=1e-5)
        rows = frame.table(run.history, run.directory, by_rank=True)
        keys = list(zip(rows["step"].tolist(), rows["rank"].tolist(), strict=True))
        assert len(set(keys)) == len(keys)
        losses = np.bincount(rows["step"], rows["loss"], minlength=step + 1)[1:]
        assert losses == pytest.approx(run.history.loss, rel=1e-5)
        parts = sum(
            column for name, column in rows.items() if name.endswith("_ms") and name != "wall_ms"
        )
        assert parts == pytest.approx(rows["wall_ms"], rel=0.02, nan_ok=True)

    def steps(self, num_steps: int) -> None:
        """Wait for steps that count, from here on."""
        run = self.run
        # A recovery may go back some.
        least, run_steps = run.step_now, len(run.history.steps)
        until(
            lambda: run.state != "running" or run.step_now >= least + num_steps
            or len(run.history.steps) < run_steps,
            self,
        )  # fmt: skip
        if len(run.history.steps) < run_steps:
            self.steps(num_steps)

    def whole(self) -> None:
        """Wait until all ranks are there, and what was lost is made good."""
        run, engines = self.run, self.engines

        def is_whole() -> bool:
            over = not run.outages.all or run.outages.last.is_over or run.state != "running"
            return over and not engines.roster.gone() and not run.pending

        until(is_whole, self)

    def pid(self, rank: int) -> int:
        """Of the process that has the rank now."""
        return self.engines.ranks[rank % self.engines.num_ranks]["pid"]

    def lose(self, *ranks: int) -> None:
        """SIGKILL to ranks, and wait until that is known."""
        members = [self.engines.roster.members[rank] for rank in ranks]
        for member in members:
            kill(member.info["pid"])
        for member in members:
            assert member.ended.wait(LIMIT_S)


def asked(future: Future, *, may_fail: bool = False):
    """What was asked of a run, in time."""
    try:
        return future.result(LIMIT_S)
    except WorkbenchError:
        if not may_fail:
            raise
        return None


def until(is_so: Callable[[], object], storm: Storm) -> None:
    """Wait for something that must come."""
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        run = storm.run
        if run.state == "waiting" and not run.pending:
            # Chance has hit one step too often: the run asks, as it should.
            asked(run.ask("recover"))
        if time.monotonic() > end_s or run.state in ("gone", "failed"):
            outage = run.outages.all[-1] if run.outages.all else None
            raise AssertionError(f"{run!r} pending={run.pending!r}, {outage}")
        time.sleep(POLL_S)


# The kinds.


def _aimed(storm: Storm, fault: Fault) -> None:
    """In a step, at a place in the user's code."""
    rank = fault.ranks[0] % storm.run.layout.world_size
    member = storm.engines.roster.members[rank]
    path = tell(storm.aim, member.info["pid"], fault.where, fault.how)
    # Not every rank comes by every place: stages before the last have no loss, say.
    if not member.ended.wait(1.0):
        path.unlink(missing_ok=True)
        storm.lose(rank)


def _any_time(storm: Storm, fault: Fault) -> None:
    storm.lose(fault.ranks[0])


def _two(storm: Storm, fault: Fault) -> None:
    storm.lose(*fault.ranks)


def _all(storm: Storm, fault: Fault) -> None:
    storm.lose(*range(storm.engines.num_ranks))


def _spare(storm: Storm, fault: Fault) -> None:
    for spare in storm.engines.roster.spares:
        kill(spare.info["pid"])
    time.sleep(fault.second_s / 10)
    storm.lose(fault.ranks[0])


def _while(verb: str, **how: object) -> Callable[[Storm, Fault], None]:
    """A kill while something is done that was asked for."""

    def kind(storm: Storm, fault: Fault) -> None:
        future = storm.run.ask(verb, **how)
        time.sleep(fault.second_s / 4)
        storm.lose(fault.ranks[0])
        # Said of a save whose writer was lost, or of a switch that had nothing to start from.
        asked(future, may_fail=verb == "save")

    return kind


def _restore(storm: Storm, fault: Fault) -> None:
    if storm.run.checkpoints():
        _while("restore", what="last")(storm, fault)


def _evaluate(storm: Storm, fault: Fault) -> None:
    asked(storm.run.ask("pause"))
    _while("evaluate")(storm, fault)
    storm.whole()
    asked(storm.run.ask("resume"))


def _recovery(storm: Storm, fault: Fault) -> None:
    """A second loss while the first is made good."""
    storm.lose(fault.ranks[0])
    time.sleep(fault.second_s)
    storm.lose(fault.ranks[1])


def _newcomer(storm: Storm, fault: Fault) -> None:
    """The process that takes a lost one's place is lost as well."""
    first = storm.pid(fault.ranks[0])
    storm.lose(fault.ranks[0])
    until(lambda: storm.pid(fault.ranks[0]) != first, storm)
    time.sleep(fault.second_s / 4)
    storm.lose(fault.ranks[0])


def _paused(storm: Storm, fault: Fault) -> None:
    asked(storm.run.ask("pause"))
    storm.lose(fault.ranks[0])
    storm.whole()
    assert storm.run.state == "paused"
    asked(storm.run.ask("resume"))


def _stalled(storm: Storm, fault: Fault) -> None:
    os.kill(storm.pid(fault.ranks[0]), signal.SIGSTOP)
    time.sleep(0.1 + fault.second_s)
    storm.lose(fault.ranks[0])


def _stepping(storm: Storm, fault: Fault) -> None:
    future = storm.run.ask("step", n=6)
    time.sleep(fault.second_s / 4)
    storm.lose(fault.ranks[0])
    asked(future)
    assert storm.run.state == "paused"
    asked(storm.run.ask("resume"))


def _controller(storm: Storm, fault: Fault) -> None:
    processes: Any = storm.engines.processes
    before = processes.controller_pid
    kill(before)
    if fault.second_s:
        time.sleep(fault.second_s)
        storm.lose(fault.ranks[0])
    until(lambda: processes.controller_pid != before, storm)


def _cell(storm: Storm, fault: Fault) -> None:
    """In a cell of the user's beside the training."""
    told: list[object] = []

    def work() -> None:
        try:
            told.append(storm.engines.run_cell("import time; time.sleep(0.1); dist.barrier()"))
        except WorkbenchError as error:
            told.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(fault.second_s)
    storm.lose(fault.ranks[0])
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    storm.whole()
    found = storm.engines.run_cell("dist.barrier(); rank")
    assert found.values == {rank: str(rank) for rank in range(storm.engines.num_ranks)}


def _without_spares(policy: str) -> Callable[[Storm, Fault], None]:
    """A loss that the run meets as its policy says, while no spare is there."""

    def kind(storm: Storm, fault: Fault) -> None:
        run, engines = storm.run, storm.engines
        asked(run.ask("policy", on_loss=policy))
        for spare in engines.roster.spares:
            kill(spare.info["pid"])
        storm.lose(fault.ranks[0])
        storm.whole()
        if engines.num_ranks < len(engines.roster.places):
            asked(run.ask("recover"))  # it went on with fewer
        assert engines.num_ranks == len(engines.roster.places)
        asked(run.ask("policy", on_loss="replace"))

    return kind


def _replaced(storm: Storm, fault: Fault) -> None:
    """A rank that is stopped, which the watch kills."""
    rank = fault.ranks[0] % storm.run.layout.world_size
    member = storm.engines.roster.members[rank]
    storm.run.watch.policy = "replace"
    os.kill(member.info["pid"], signal.SIGSTOP)
    assert member.ended.wait(LIMIT_S)
    storm.run.watch.policy = "wait"


def _link(storm: Storm, fault: Fault) -> None:
    run = storm.run
    phase = PHASES[fault.number % len(PHASES)]
    rank = fault.ranks[0] % run.layout.world_size
    asked(run.ask("inject", kind="drop-link", rank=rank, phase=phase))
    storm.steps(2)
    asked(run.ask("clear_faults"))


def _full(storm: Storm, fault: Fault) -> None:
    """No room for what a rank writes, and then the rank is lost as well."""
    run = storm.run
    rank = fault.ranks[0] % run.layout.world_size
    asked(run.ask("inject", kind="disk-full", rank=rank))
    storm.steps(1)
    future = run.ask("save")
    time.sleep(fault.second_s / 4)
    storm.lose(fault.ranks[1])
    asked(future, may_fail=True)
    storm.whole()
    asked(run.ask("clear_faults"))


KINDS: dict[str, Callable[[Storm, Fault], None]] = {
    "aimed": _aimed,
    "aimed again": _aimed,
    "all": _all,
    "any time": _any_time,
    "cell": _cell,
    "controller": _controller,
    "disk full": _full,
    "evaluate": _evaluate,
    "link": _link,
    "newcomer": _newcomer,
    "paused": _paused,
    "recovery": _recovery,
    "replaced": _replaced,
    "restore": _restore,
    "save": _while("save"),
    "shrink": _without_spares("shrink"),
    "spare": _spare,
    "stalled": _stalled,
    "stepping": _stepping,
    "switch": _while("switch", strategy="dp4"),
    "switch to stages": _while("switch", strategy="pp2 dp2, 1f1b x4"),
    "two": _two,
    "wait": _without_spares("wait"),
}
