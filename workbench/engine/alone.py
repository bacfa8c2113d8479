"""Alone: a rank goes on with the training when no kernel is left, to the goal that was stated.

No process feeds the ranks then: each runs slices of its own, cut alike, so that their steps meet.
spec/alone.py says how they begin and stop together. Without the agreement of all nothing is begun,
and a rank that is lost, or raises, ends it for all: what is left waits for a kernel.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from workbench.engine.here import here
from workbench.engine.inbox import INBOX
from workbench.errors import WorkbenchError
from workbench.spec import manifest as manifests
from workbench.spec.alone import (
    BUSY,
    FILE,
    FOLLOWING,
    GOING,
    IN_SLICE,
    NEVER,
    QUIET,
    SAVING,
    STOPPED,
    WAITING,
    Alone,
    Will,
    read_will,
)
from workbench.spec.retention import remove, superseded

LOOK_S = 0.05
# So long nothing must have come: what the kernel had queued is done by then.
QUIET_S = 0.5
# A rank that has not told anything for so long is none that could agree.
STALE_S = 2.0
WAIT_S = 0.002
SLICE = "run_slice"


def watch(directory: Path) -> None:
    """From now on look whether a kernel is left, if the cluster is one that goes on without."""
    if (directory / FILE).exists():
        here.alone = Lone(directory, asyncio.get_running_loop())
        threading.Thread(target=here.alone.look, name="alone", daemon=True).start()


class Lone:
    """One rank, with an eye on the file that all share."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.directory = directory
        self.shared = Alone(directory)
        self._loop = loop
        self._taken = -1
        self._since_s = 0.0
        self._is_over = False
        self._asked: Future | None = None
        self._began_s = 0.0

    def look(self) -> None:
        """Of a thread: while no kernel is left, see whether the main thread has nothing to do."""
        while True:
            time.sleep(LOOK_S)
            if not self.shared.alone:
                self._is_over = False
            if self._is_over or not self.shared.orphaned or here.trainer is None:
                continue
            if serving := INBOX.serving:
                self.shared.tell(here.rank, IN_SLICE if serving == SLICE else BUSY, NEVER)
            elif self._asked is None or self._asked.done():
                self._asked = asyncio.run_coroutine_threadsafe(self._consider(), self._loop)

    async def _consider(self) -> None:
        """Of the main thread, between two requests: go on where all others are ready, too."""
        if INBOX.taken != self._taken:
            self._taken, self._since_s = INBOX.taken, time.monotonic()
        trainer = here.trainer
        if trainer is None or here.broken or time.monotonic() - self._since_s < QUIET_S:
            return
        self.shared.tell(here.rank, QUIET, trainer.step)
        will = read_will(self.directory)
        if will is None or not will.running:
            return
        if not self.shared.alone and trainer.step < will.goal:
            self._decide()
        if self.shared.alone:
            INBOX.shut()  # what comes late from the kernel that is gone is not executed any more
            self._is_over = True
            self._go_on(will)

    def _decide(self) -> None:
        """Say that all go on, if they can."""
        assert here.world is not None
        with self.shared.lock():
            slots = [self.shared.slot(rank) for rank in range(here.world.size)]
            since_s = time.monotonic() - STALE_S
            if self.shared.orphaned and all(
                slot.state in (QUIET, IN_SLICE) and slot.told_s > since_s for slot in slots
            ):
                self.shared.alone = True

    def _go_on(self, will: Will) -> None:
        assert here.trainer is not None
        self._began_s = time.monotonic()
        try:
            if here.rank < here.trainer.layout.world_size:
                self._train(will)
            else:
                self._follow(will)
        except Exception as error:  # noqa: BLE001 - said in the log; the rank waits for a kernel
            print(f"Going on without a kernel ended with {error!r}", flush=True)  # noqa: T201
        finally:
            self.shared.tell(here.rank, STOPPED, here.trainer.step)

    def _train(self, will: Will) -> None:
        from workbench.engine import remote

        assert here.trainer is not None
        follows = False
        while (step := here.trainer.step) < will.goal and self._may_go(step):
            self._plan_save(will, step)
            with remote.doing(SLICE):
                reply = remote.run_slice(will.next_stop(step) - step, follows)
            if reply["error"]:
                break
            follows = True
            step = here.trainer.step
            self.shared.tell(here.rank, GOING, step)
            if self._is_save(will, step):
                follows = False
                self.shared.tell(here.rank, SAVING, step)
                self._save(will, step)

    def _follow(self, will: Will) -> None:
        """A rank that has no work in the layout: a save is made by all ranks together."""
        saved = NEVER
        self.shared.tell(here.rank, FOLLOWING, NEVER)
        while self.shared.alone:
            first = self.shared.slot(0)
            if first.state == SAVING and first.step != saved:
                saved = first.step
                self._save(will, saved)
            time.sleep(LOOK_S)

    def _may_go(self, step: int) -> bool:
        """Wait while a kernel wants it; False where the ranks are to listen to it again."""
        while self.shared.alone:
            stop_at = self.shared.stop_at
            if stop_at == NEVER or step < stop_at:
                self.shared.tell(here.rank, GOING, step)
                return True
            self.shared.tell(here.rank, WAITING, step)
            if here.rank == 0 and self.shared.orphaned:  # that kernel is gone as well
                with self.shared.lock():
                    self.shared.stop_at = NEVER
            time.sleep(WAIT_S)
        return False

    def _plan_save(self, will: Will, step: int) -> None:
        """Rank 0 names the end of the next slice; nobody comes there before it has said so."""
        if here.rank or will.save_every_s is None:
            return
        if time.monotonic() - self._began_s >= will.save_every_s:
            self._began_s = time.monotonic()
            self.shared.save_at = will.next_stop(step)

    def _is_save(self, will: Will, step: int) -> bool:
        every = will.save_every_steps
        return bool(every and step % every == 0) or step == self.shared.save_at

    def _save(self, will: Will, step: int) -> None:
        from workbench.engine import remote

        try:
            if here.rank == 0:
                _remove_old(Path(will.root), will)
            with remote.doing("begin_save"):
                how = {"unique": True, "is_training": True, "exports": False}
                remote.begin_save(will.root, f"step-{step}", will.meta, how)
        except (WorkbenchError, OSError) as error:  # a disk that is full must not end the training
            print(f"Step {step} was not saved: {error}", flush=True)  # noqa: T201


def _remove_old(root: Path, will: Will) -> None:
    found = [
        {**manifests.read(path), "path": path}
        for path in root.iterdir()
        if manifests.is_checkpoint(path)
    ]
    saved = sorted(found, key=lambda one: one["time_s"])
    known = [{"by_itself": False, "step": 0, **one} for one in saved]
    for one in superseded(known, will.keep, will.keep_every):
        remove(one["path"])
