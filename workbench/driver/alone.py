"""Alone, the driver's side: what the ranks are to do without a kernel, and how one stops them.

See spec/alone.py. Only clusters that were started with a lease for ever go on without a kernel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.driver.files import replaced
from workbench.errors import EnginesError
from workbench.spec.alone import FILE, FOLLOWING, NEVER, STOPPED, WAITING, WILL, Alone, Slot, Will

if TYPE_CHECKING:
    from workbench.driver.run import Run

POLL_S = 0.005


class Testament:
    """Keeps the will of a run written down while the kernel lives; of the run's thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / WILL
        self._is_wanted = (directory / FILE).exists()
        self._written: Will | None = None

    def keep(self, run: Run) -> None:
        """Write what has changed, if anything has."""
        if not self._is_wanted:
            return
        options, before = run.options, self._written
        slice_steps = run.feeder.slice_steps
        # So that it is not written with each slice.
        if before is not None and 0.5 < before.slice_steps / slice_steps < 2:
            slice_steps = before.slice_steps
        will = Will(
            running=run.state == "running",
            goal=run.goal,
            slice_steps=slice_steps,
            save_every_steps=options.save_every_steps,
            save_every_s=options.save_every_s,
            keep=options.keep,
            keep_every=options.keep_every,
            root=str(run.directory / "checkpoints"),
            meta={"run": run.name, "metrics": run.metrics, "goal": run.goal, "by_itself": True},
        )
        if will != before:
            with contextlib.suppress(OSError):  # a full disk: tried again with the next slice
                replaced(self._path, will.to_text())
                self._written = will

    def close(self) -> None:
        """Write no more: it is another kernel's."""
        self._is_wanted = False


def stop(directory: Path, pids: Collection[int], limit_s: float) -> None:
    """Have ranks that go on by themselves listen again, all at one step.

    pids: of all processes that live. Raises EnginesError when one does not come to the end of its
    slice within the limit.
    """
    if not (directory / FILE).exists():
        return
    shared, deadline_s = Alone(directory), time.monotonic() + limit_s
    with shared.lock():
        shared.orphaned = False
        if not shared.alone:
            return
        shared.stop_at = NEVER
    while not _are_together(shared, [slot for slot in _slots(shared) if slot.pid in pids]):
        if time.monotonic() > deadline_s:
            raise EnginesError(
                f"The ranks did not end their step within {limit_s:g} s. %dist_attach tries again; "
                "%dist_stop --all ends all ranks."
            )
        time.sleep(POLL_S)
    shared.stop_at = NEVER
    shared.alone = False


def _slots(shared: Alone) -> list[Slot]:
    slots = []
    while (slot := shared.slot(len(slots))).pid:
        slots.append(slot)
    return slots


def _are_together(shared: Alone, slots: list[Slot]) -> bool:
    """Whether all wait, or have stopped; else name a step that none of them is past."""
    going = [slot for slot in slots if slot.state not in (STOPPED, FOLLOWING)]
    if all(slot.state == WAITING for slot in going) and len({slot.step for slot in going}) <= 1:
        return True
    if any(slot.state == STOPPED for slot in slots):
        return False  # the others have only to end the same step, or to hear that one is lost
    furthest = max(slot.step for slot in going)
    if shared.stop_at == NEVER or furthest > shared.stop_at:
        with shared.lock():
            shared.stop_at = furthest + 1
    return False
