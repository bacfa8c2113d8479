"""Faults: what was asked to go wrong in a training, and when it did.

A rank writes down what is about to strike it, in a file of the cluster that outlives it; a thread
reads that file while something waits, so that the event of a fault comes before what follows of it.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import InputError
from workbench.spec.fault import Fault
from workbench.spec.near import unknown

if TYPE_CHECKING:
    from workbench.driver.run import Run

LOOK_S = 0.01
ARMED, STRUCK, CLEARED, LOST = "armed", "struck", "cleared", "gone with its process"
LASTS = "lasts until it is cleared"
NAMES = tuple(Fault.__dataclass_fields__)
LASTING = ("slow", "disk-full")
CONTINUED = ("stop", "")  # ways to stall that end with a signal


class Faults:
    """The faults of one run, in the order they were asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._rows: list[dict[str, Any]] = []
        # Of this run alone: another may have its name, in another folder.
        self._file = run.engines.directory / f"{uuid.uuid4().hex}.faults"
        self._read_bytes = 0
        self._thread: threading.Thread | None = None
        # When a rank that was stopped goes on, by its key.
        self._continue_s: dict[int, float] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Each a dict: kind, rank, step, phase, how, for_s, state, struck (the step, or None)."""
        pids = [info["pid"] for info in self.run.engines.ranks]
        found = []
        for row in list(self._rows):
            shown = {key: value for key, value in row.items() if key not in ("pid", "key")}
            if row["state"] == ARMED and row["pid"] not in pids:
                shown["state"] = LOST
            elif _lasts(row):
                shown["state"] = LASTS
            found.append(shown)
        return found

    def told(self) -> dict[str, Any]:
        """What another kernel is to know, as plain values."""
        return {"rows": self._rows, "file": str(self._file), "read_bytes": self._read_bytes}

    def recall(self, told: dict[str, Any]) -> None:
        """Have what another kernel knew, and see what has struck since."""
        self._rows, self._read_bytes = told["rows"], told["read_bytes"]
        self._file = Path(told["file"])
        self._start()

    def under_way(self) -> list[str]:
        """What waits for its step, and what lasts until `clear`, as it is said."""
        rows = [row for row in self.rows() if row["state"] in (ARMED, LASTS)]
        return [str(Fault(**{name: row[name] for name in NAMES})) for row in rows]

    def arm(self, fault: Fault) -> dict[str, Any]:
        """Let a rank wait for it -> its row; to be called with no slice in flight."""
        engines = self.run.engines
        engines.call("arm", fault.to_dict(), str(self._file), ranks=[fault.rank])
        row = {
            **fault.to_dict(), "state": ARMED, "struck": None,
            "pid": engines.ranks[fault.rank]["pid"],
            "key": engines.roster.members[fault.rank].key,
        }  # fmt: skip
        self._rows.append(row)
        self._start()
        return row

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="faults", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Let ranks that a fault has stopped go on."""
        keys = {row["key"] for row in self._rows if _is_stopped(row)}
        for member in self.run.engines.roster.members:
            if member.key in keys and not member.gone:
                self.run.engines.processes.signal([member.key], signal.SIGCONT)
        self._continue_s.clear()

    def clear(self) -> int:
        """Forget what waits and end what lasts, on all ranks -> how many that were."""
        told = self.run.engines.call("disarm")
        for row in self._rows:
            if row["state"] == ARMED or _lasts(row):
                row["state"] = CLEARED
        return sum(map(len, told))

    def _look(self) -> None:
        while self.run.state != "gone" and (
            self._continue_s or any(row["state"] == ARMED for row in self._rows)
        ):
            for struck in self._new():
                self._tell(struck)
            now_s = time.monotonic()
            for key in [key for key, at_s in self._continue_s.items() if at_s <= now_s]:
                del self._continue_s[key]
                self.run.engines.processes.signal([key], signal.SIGCONT)
            time.sleep(LOOK_S)

    def _new(self) -> Iterator[dict[str, Any]]:
        """What has been written since the last look, whole lines of it."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        yield from map(json.loads, whole.splitlines())

    def _tell(self, struck: dict[str, Any]) -> None:
        for row in self._rows:
            if row["state"] == ARMED and all(row[name] == struck[name] for name in NAMES):
                row.update(state=STRUCK, struck=struck["struck"])
                if _is_stopped(row) and row["for_s"] is not None:
                    self._continue_s[row["key"]] = time.monotonic() + row["for_s"]
                break
        fault = Fault(**{name: struck[name] for name in NAMES} | {"step": struck["struck"]})
        self.run.happened("fault", fault=str(fault), step=struck["struck"])
        # In the curves where the step before ends, as what follows from it.
        self.run.marks.append({"step": struck["struck"] - 1, "label": "fault"})


def wanted(run: Run, kind: str, rank: int | None, at_step: int | None, how: dict) -> Fault:
    """The fault that is asked for. Raises InputError for one that cannot be."""
    last = run.layout.world_size - 1
    if rank is None:
        rank = last
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= last:
        raise InputError(f"rank={rank!r}: ranks 0 to {last} train. Use one of them.")
    if wrong := sorted(how.keys() - {"phase", "how", "for_s"}):
        raise InputError(unknown("option", wrong[0], ["phase", "how", "for_s"]))
    step = run.step_now + 1 if at_step is None else at_step
    fault = Fault(kind=kind, rank=rank, step=step, **how)
    if step <= run.step_now:
        raise InputError(
            f"at_step={step}: step {run.step_now:,} is taken. Use {run.step_now + 1} or later."
        )
    return fault


def _lasts(row: dict[str, Any]) -> bool:
    return row["kind"] in LASTING and row["state"] == STRUCK


def _is_stopped(row: dict[str, Any]) -> bool:
    return row["kind"] == "stall" and row["how"] in CONTINUED and row["state"] == STRUCK
